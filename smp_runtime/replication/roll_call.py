"""Calls that every rank has to make: who is missing is named, and an error of one is one of all.

Ranks exchange small objects through the store at which torch.distributed met. Unlike a collective
this can say who did not come, works beside whatever collectives are under way, and works from a
thread in the background. A rank whose work fails tells the others in place of its result, so that
every rank raises an error of the same kind.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from .. import errors
from ..errors import CheckpointError, PeerError, SMPError, UsageError, WaitTimeoutError
from ..messages.pauses import pauses
from ..messages.unpickling import load_data
from ..runtime import current

_T = TypeVar("_T")
_LONGEST_PAUSE = 0.02


class RollCall:
    """One call that every rank makes at the same place of the script.

    Args:
        call: its name, for messages. Ranks that make different calls are told so.
    """

    _num_calls = 0

    def __init__(self, call: str) -> None:
        runtime = current()
        RollCall._num_calls += 1
        self.call = call
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._store: Any = dist.PrefixStore(  # type: ignore[attr-defined]
            f"smp_roll_call_{RollCall._num_calls}", runtime.store
        )
        self._timeout = runtime.config.timeout
        self._transport = runtime.transport
        self._pipeline = runtime.placement.group("pp", self.rank)
        self._round = 0
        # A rank that waits for this one inside a step learns that it waits in vain.
        runtime.engine.next_exchange(call)

    def gather(self, work: Callable[[], _T]) -> list[_T]:
        """Does this rank's work and returns the results of all ranks, in their order.

        Args:
            work: returns something that can be pickled, and small: it goes through one store.

        Raises:
            SMPError: the work of this rank failed, or in the same kind that of another one.
            WaitTimeoutError: ranks did not come within the setting `timeout`; names them.
            UsageError: a rank made another call.
        """
        self._round += 1
        mine: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised below, when the others know
            mine = error
        failure = None if mine is None else (type(mine).__name__, str(mine))
        self._post(pickle.dumps((self.call, failure, result)))
        try:
            posts = [load_data(self._store.get(key)) for key in self._wait()]
        except SMPError:
            if mine is not None:  # worse news than that others are missing
                raise mine from None
            raise
        if mine is not None:
            raise mine
        self._check(posts)
        self._forget()
        return [post[2] for post in posts]

    def from_first(self, work: Callable[[], _T]) -> _T:
        """Lets rank 0 do some work and returns its result on every rank."""
        found: list[Any] = self.gather(lambda: work() if self.rank == 0 else None)
        first: _T = found[0]
        return first

    def note_progress(self) -> None:
        """Says that this rank's work goes on, so that nobody gives up waiting for it."""
        self._store.add(f"progress_{self.rank}", 1)

    def _key(self, rank: int, round_: int) -> str:
        return f"{round_}_{rank}"

    def _post(self, content: bytes) -> None:
        self._store.set(self._key(self.rank, self._round), content)

    def _wait(self) -> Sequence[str]:
        keys = [self._key(rank, self._round) for rank in range(self.size)]
        deadline, progress = time.monotonic() + self._timeout, -1
        until_next = pauses(_LONGEST_PAUSE)
        missing = list(range(self.size))
        while missing := [rank for rank in missing if not self._store.check([keys[rank]])]:
            self._transport.check()
            self._check_gone(missing)
            if time.monotonic() > deadline:
                made = sum(self._store.add(f"progress_{rank}", 0) for rank in missing)
                if made == progress or (self._round == 1 and not made):
                    raise WaitTimeoutError(self._explain(missing))
                deadline, progress = time.monotonic() + self._timeout, made
            time.sleep(next(until_next))
        return keys

    def _check_gone(self, missing: Sequence[int]) -> None:
        for position in list(self._transport.gone):
            rank = self._pipeline[position]
            if rank in missing:
                raise PeerError(
                    f"rank {rank} ended its program without {self.call}; every rank must call it",
                    rank=rank,
                )

    def _explain(self, missing: Sequence[int]) -> str:
        names = ", ".join(map(str, missing))
        ranks = f"rank {names}" if len(missing) == 1 else f"ranks {names}"
        waited = f"{self.call}: rank {self.rank} waited {self._timeout:g} s (setting `timeout`)"
        if self._round == 1:
            return f"{waited} for {ranks} to call it, too; every rank must call {self.call}"
        return f"{waited} for {ranks}, which began the call and did not get on with it"

    def _check(self, posts: Sequence[tuple[str, tuple[str, str] | None, Any]]) -> None:
        for rank, (call, failure, _) in enumerate(posts):
            if call != self.call:
                raise UsageError(
                    f"rank {rank} called {call} while rank {self.rank} called {self.call}; every "
                    "rank must make the same calls in the same order"
                )
            if failure is not None:
                kind, text = failure
                cls = getattr(errors, kind, CheckpointError)
                if not (isinstance(cls, type) and issubclass(cls, SMPError)):
                    cls = CheckpointError
                if cls is CheckpointError:
                    text = f"{kind}: {text}"
                raise cls(f"{self.call} failed on rank {rank}: {text}")

    def _forget(self) -> None:
        """Deletes what this rank posted two rounds ago: everyone has read it."""
        if self._round > 2:
            self._store.delete_key(self._key(self.rank, self._round - 2))
