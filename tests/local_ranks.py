"""Pipeline ranks as threads of this process: the real engine over socket pairs.

A test of the core needs several ranks, but seldom several processes::

    def test_sum() -> None:
        def body(rank: LocalRank) -> float:
            results = rank.step(lambda x: model(x).sum(), [torch.ones(2)])
            ...

        assert run_ranks(2, body) == [3.0, 3.0]

What is process-wide (`smp.init`, a DistributedModel, torch's process groups) is not to be had
here: `worlds.py` is for that.
"""

import copy
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from smp_runtime.errors import PeerError
from smp_runtime.execution.body import current_body
from smp_runtime.execution.clock import Clock
from smp_runtime.execution.engine import Engine
from smp_runtime.execution.placing import LocalPart, seed_drawing_modules
from smp_runtime.messages.transport import Transport
from smp_runtime.messages.wire import Stream
from smp_runtime.planning.partitioning import partition
from smp_runtime.tracing.trace import trace_model

TIMEOUT = 20.0


def local_streams(size: int) -> list[list[Stream | None]]:
    """Returns for each of `size` ranks its connections to the others."""
    streams: list[list[Stream | None]] = [[None] * size for _ in range(size)]
    for a in range(size):
        for b in range(a + 1, size):
            near, far = socket.socketpair()
            streams[a][b], streams[b][a] = Stream(near, b, TIMEOUT), Stream(far, a, TIMEOUT)
    return streams


class LocalRank:
    """One rank: its engine, and its part of a model once there is one."""

    def __init__(
        self, streams: Sequence[Stream | None], rank: int, options: Mapping[str, Any]
    ) -> None:
        self.transport = Transport(streams, rank)
        given = {"policy": "interleaved", "active": 4, "timeout": TIMEOUT, **options}
        self.engine = Engine(self.transport, clock=Clock(), **given)
        self.index = self.transport.rank
        self.part: LocalPart | None = None
        self._stages: tuple[int, ...] = ()

    def place(self, model: nn.Module, pins: Mapping[str, int], *args: Any) -> nn.Module:
        """Partitions a copy of `model` by hand and returns it."""
        mine = copy.deepcopy(model)
        trace = trace_model(mine, args, {})
        made = partition(trace.root, self.transport.size, pinned=pins, tied="copy")
        seed_drawing_modules(mine, trace.drawing_modules)
        self.part = LocalPart(mine, made, self.index, self.engine.ownership, self.engine.reports)
        self._stages = made.rank_of
        return mine

    def step(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any] = ((),),
        *,
        loss_scale: float = 1.0,
        seed: int = 0,
        detach: bool = True,
    ) -> list[Any]:
        """Runs one step; `arguments` are those of each microbatch, a tuple if there are several."""
        calls = [(each if isinstance(each, tuple) else (each,), {}) for each in arguments]

        def body(*args: Any) -> Any:
            if self._stages:  # as with a DistributedModel, the first body of all tells them
                self.engine.set_stages(self._stages)
                self._stages = ()
            return function(*args)

        self.engine.begin_step()
        scales = [loss_scale] * len(calls)
        results = self.engine.run(body, calls, loss_scales=scales, seed=seed, detach=detach)
        self.engine.end_step()
        return results


def backward(*losses: Tensor) -> None:
    """Does what ``model.backward`` does."""
    body = current_body()
    assert body is not None
    with body.glue.suspended():
        body.backward_pass.run(losses, [None] * len(losses))


def run_ranks(size: int, fn: Callable[[LocalRank], Any], **options: Any) -> list[Any]:
    """Runs ``fn(rank)`` on `size` ranks and returns their results in the order of ranks.

    Args:
        size: number of ranks.
        fn: any callable.
        options: for the engines.

    Raises:
        BaseException: what a rank raised; an echo of another rank's failure only if nothing else.
    """
    ranks = [LocalRank(streams, rank, options) for rank, streams in enumerate(local_streams(size))]
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def live(rank: LocalRank) -> None:
        torch.manual_seed(0)
        try:
            results[rank.index] = fn(rank)
        except BaseException as error:
            errors.append(error)
            with suppress(Exception):
                rank.transport.fail(f"rank {rank.index}: {error!r}")
        finally:
            rank.transport.close(patience=0.5)

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
        assert not thread.is_alive(), "a rank did not end"
    for error in sorted(errors, key=lambda error: isinstance(error, PeerError)):
        raise error
    return results
