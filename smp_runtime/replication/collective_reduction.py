"""Gradients averaged over replicas by the script's communication hook, or by torch's all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .buckets import Bucket

CommHook = Callable[[Any, Any], torch.futures.Future[Any]]


class CollectiveReduction:
    """Averages each bucket as a whole, in the background.

    Args:
        group: the replicas, in a process group that nobody else uses.
        on_reduced: called with the index of each bucket that is done.
        hook: what reduces a bucket, called with `state` and the bucket; an all-reduce if None.
        state: for the hook.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        on_reduced: Callable[[int], None],
        hook: CommHook | None = None,
        state: Any = None,
    ) -> None:
        self._group = group
        self._on_reduced = on_reduced
        self._hook = hook
        self._state = state
        self._buckets: Sequence[Bucket] = ()
        self._divisor = 1.0
        self._works: list[torch.futures.Future[Any]] = []

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Takes other buckets from the next step on, in the order in which they are launched."""
        self._buckets = buckets

    def begin(self, divisor: float) -> None:
        """Begins a step whose gradients are divided by `divisor`."""
        self._divisor = divisor
        self._works = []

    def launch(self, index: int) -> list[bool]:
        """Takes the gradients of the next bucket.

        Returns:
            For each of its parameters whether it had a gradient.

        Raises:
            NotSupportedError: a gradient is sparse.
        """
        bucket = self._buckets[index]
        if self._hook is not None:
            # Hooks divide, as those of DistributedDataParallel do.
            has = bucket.take_in(self._divisor / self._group.size())
            future = self._hook(self._state, bucket)
        else:
            has = bucket.take_in(self._divisor)
            work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
            assert work is not None
            future = work.get_future()
        on_reduced = self._on_reduced

        def reduced(future: torch.futures.Future[Any]) -> Any:
            on_reduced(index)
            return future.value()

        self._works.append(future.then(reduced))
        return has

    def advance(self) -> None:
        """Does nothing: what was launched goes on by itself."""

    def finish(self) -> None:
        """Does nothing: `give_out` waits for each bucket."""

    def give_out(self, index: int, is_present: Sequence[bool]) -> list[torch.Tensor | None]:
        """Waits for a bucket and gives its parameters their gradients; see `Bucket.give_out`."""
        result = self._works[index].wait()
        result = result[0] if isinstance(result, list | tuple) else result
        return self._buckets[index].give_out(result, is_present)
