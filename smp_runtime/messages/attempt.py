"""A store of torch's that holds nothing of an earlier attempt of the same job.

torchrun starts all ranks again after a failure, and its store outlives them: addresses at which
nobody listens any more, failures that are over, and roll calls of ranks that are gone lie in it.
Nothing that torchrun tells a rank is new for each attempt and the same on all machines (the count
of restarts is each machine's own). So the ranks agree on a name for theirs, and write under it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence

from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import WaitTimeoutError

_GLANCE = 0.01


def fresh_store(
    store: Store, rank: int, size: int, timeout: float, environ: Mapping[str, str] = os.environ
) -> Store:
    """Returns the part of a store that belongs to this attempt; every rank calls it.

    Args:
        store: torch's store; all ranks have the same one.
        rank: this rank, globally.
        size: number of ranks.
        timeout: seconds to wait for ranks that have not come.
        environ: where torchrun says that the store is its own; any other store ends with the ranks.

    Raises:
        WaitTimeoutError: ranks did not call `smp.init` in time; names them.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    return PrefixStore(f"attempt/{_agree(store, rank, size, timeout)}", store)


def _agree(store: Store, rank: int, size: int, timeout: float) -> str:
    """Returns a name that all ranks of this attempt know and no earlier one used.

    Every rank says hello with a word that it has just made up. Rank 0 repeats all of them beside
    the name, and a rank takes the name only when it finds its own word there, so that what an
    earlier attempt left is never taken. Rank 0 goes on when everyone has taken this name.
    """
    board = PrefixStore("smp_runtime/attempt", store)
    word = uuid.uuid4().hex
    deadline = time.monotonic() + timeout
    if rank == 0:
        hellos = [f"hello/{other}" for other in range(1, size)]
        taken = [f"taken/{other}" for other in range(1, size)]
        offer = ""
        while missing := [key for key in taken if _read(board, key) != word]:
            words = [_read(board, key) for key in hellos]
            if offer != (offer := json.dumps([word, *words])):
                board.set("offer", offer)
            _wait(deadline, timeout, [1 + taken.index(key) for key in missing])
        return word
    board.set(f"hello/{rank}", word)
    while True:
        name, *words = json.loads(_read(board, "offer") or '[""]')
        if len(words) >= rank and words[rank - 1] == word:
            board.set(f"taken/{rank}", name)
            return str(name)
        _wait(deadline, timeout, [0])


def _read(board: Store, key: str) -> str:
    return board.get(key).decode() if board.check([key]) else ""


def _wait(deadline: float, timeout: float, missing: Sequence[int]) -> None:
    if time.monotonic() > deadline:
        names = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
        raise WaitTimeoutError(
            f"{names} did not come to smp.init within {timeout:g} s (setting `timeout`); "
            "every rank must call it"
        )
    time.sleep(_GLANCE)
