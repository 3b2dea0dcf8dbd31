"""Data parallelism of one rank's part of the model, from the beginning of a step to its end.

Replicas agree on what to reduce as long as they take the same steps. Inside `join` they need not:
every step begins with a word from each replica, and those that have run out of data take part in
what the others reduce, without gradients of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ..errors import UsageError
from .collective_reduction import CommHook
from .reduction import Reduction, Span
from .replicas import Buffers, Replicas

_OUT, _PRESENT, _REDUCES = 0, 1, 2
_NO_PASS = -1


class Held(NamedTuple):
    """What a rank holds, in an order that is equal on all replicas.

    Attributes:
        parameters: all of them.
        shared: those whose gradients are summed with other stages after the backward passes.
        buffers: all of them.
    """

    parameters: Sequence[nn.Parameter]
    shared: Sequence[nn.Parameter]
    buffers: Sequence[torch.Tensor]


class DataParallel:
    """What one rank does together with the replicas of its part.

    Args:
        replicas: they.
        held: returns what this rank holds.
        share_state: gives all replicas the optimizer's state of one of them.
        bucket_bytes: most bytes of gradients that one all-reduce takes.
        is_overlapped: reduce during the backward pass.
        as_views: gradients are views of the buckets.
        broadcast_buffers: give all replicas the first one's buffers after each reduction.
        passes: steps whose gradients are accumulated before they are reduced.
    """

    def __init__(
        self,
        replicas: Replicas,
        held: Callable[[], Held],
        share_state: Callable[[int], None],
        *,
        bucket_bytes: int,
        is_overlapped: bool,
        as_views: bool,
        broadcast_buffers: bool,
        passes: int,
    ) -> None:
        self.replicas = replicas
        self._held = held
        self._share_state = share_state
        self._is_overlapped = is_overlapped
        self._broadcast_buffers = broadcast_buffers
        self._passes = passes
        self._num_passes = 0
        self._is_accumulating = False
        self._reduces = True
        self._last_microbatch = 0
        self._num_trainings = 0
        self._has_begun = False
        self._queued_in = _NO_PASS
        self._buffers = Buffers()
        self._reduction: Reduction | None = None
        if replicas.group is not None:
            self._reduction = Reduction(
                replicas.group,
                bucket_bytes,
                is_overlapped=is_overlapped,
                as_views=as_views,
                neighbours=replicas.neighbours,
            )
        # Of a `join`:
        self._is_joining = False
        self._divides_by_present = False
        self._is_strict = False
        self._present = list(range(replicas.size))

    @property
    def spans(self) -> list[Span]:
        """When each bucket of the last step was under way."""
        return [] if self._reduction is None else self._reduction.spans

    @property
    def divisor(self) -> int:
        """What the sums over replicas are divided by."""
        return len(self._present) if self._divides_by_present else self.replicas.size

    # -- a step ------------------------------------------------------------------------------

    def begin_step(
        self, last_microbatch: int, *, is_training: bool, weight: float | None = None
    ) -> float:
        """Agrees on the step with the other replicas.

        Args:
            last_microbatch: the one whose gradients are reduced while they come.
            is_training: there will be a backward pass.
            weight: what this replica's batch weighs in the mean over all; on all replicas or none.

        Returns:
            The sum of the replicas' weights, 0 without.
        """
        self._last_microbatch = last_microbatch
        self._has_begun = True
        # In a join the numbers of steps differ, and must not count afterwards.
        self._num_trainings += is_training and not self._is_joining
        is_last_pass = (self._num_passes + 1) % self._passes == 0
        self._reduces = is_training and is_last_pass and not self._is_accumulating
        if self._is_joining:
            return self._tell(_REDUCES if self._reduces else _PRESENT, weight or 0.0)[1]
        return 0.0 if weight is None else self.replicas.add_up([weight])[0]

    def arm(self) -> None:
        """Prepares the reduction of this step, as soon as it is known what this rank holds."""
        if self._reduction is None:
            return
        if not self._reduces:
            self._reduction.stop()
            return
        held = self._held()
        self._reduction.begin(
            held.parameters,
            held.shared,
            self._last_microbatch,
            self.divisor,
            step=0 if self._is_joining else self._num_trainings,
        )
        self._buffers.note(held.buffers)

    def end_step(self, has_run_backward: bool) -> None:
        """Reduces what there is to reduce.

        Raises:
            UsageError: gradients came, but not by `model.backward`.
        """
        if has_run_backward and not self._is_accumulating:
            self._num_passes += 1
        if self._reduction is None:
            return
        if self._reduces and (has_run_backward or self._is_joining):
            self._reduce(self._reduction)
        elif self._reduces and self._reduction.has_gradients:
            raise UsageError(
                "gradients of a step would stay different on every replica: call "
                "model.backward(loss) in the step, not loss.backward()"
            )
        else:
            self._reduction.stop()

    def close(self) -> None:
        """Reduces nothing any more: the parameters may outlive the runtime."""
        if self._reduction is not None:
            self._reduction.close()

    def _reduce(self, reduction: Reduction) -> None:
        buffers = list(self._held().buffers) if self._broadcast_buffers else []
        changed = reduction.finish(self._buffers.changed(buffers))
        self.replicas.broadcast(
            [buffer for buffer, flag in zip(buffers, changed, strict=True) if flag],
            self._present[0],
        )

    # -- outside steps -----------------------------------------------------------------------

    def watch_backward(self) -> None:
        """Reduces after each backward pass outside a step, which a single stage allows."""
        if self._reduction is not None:
            self._reduction.watch(self._held().parameters, self._queue)

    def _queue(self) -> None:
        # By its number: a pass that raised has forgotten what was queued in it.
        current: int = torch._C._current_graph_task_id()
        if not self._is_accumulating and self._queued_in != current:
            self._queued_in = current
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._reduce_outside)

    def _reduce_outside(self) -> None:
        self._queued_in = _NO_PASS
        self._reduces = True
        self.arm()
        assert self._reduction is not None
        self._reduce(self._reduction)

    # -- settings ----------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside accumulate this rank's own gradients; the next one outside reduces all."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduces by a hook; see `DistributedModel.register_comm_hook`."""
        if not self._is_overlapped:
            raise UsageError(
                "register_comm_hook needs overlapping_allreduce=True, which is the default of "
                "smp.DistributedModel"
            )
        if state is None and hook in vars(default_hooks).values():
            state = self.replicas.group  # else the hook would take the group of all ranks
        if self._reduction is not None:
            self._reduction.use_hook(state, hook)

    # -- uneven numbers of steps -------------------------------------------------------------

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Lets replicas take different numbers of steps; see `DistributedModel.join`."""
        if not enable or self.replicas.size == 1:
            yield
            return
        self._is_joining = True
        self._divides_by_present = not divide_by_initial_world_size
        self._is_strict = throw_on_early_termination
        try:
            yield
            self._follow()
        finally:
            self._is_joining = self._divides_by_present = self._is_strict = False
            self._num_passes = 0
            self._present = list(range(self.replicas.size))

    def _tell(self, what: int, weight: float = 0.0) -> tuple[list[int], float]:
        """Says what this replica is about to do; returns what all do, and the sum of weights."""
        numbers = [0.0] * self.replicas.size
        numbers[self.replicas.rank] = float(what)
        *told, total = self.replicas.add_up([*numbers, weight])
        if any(told):
            self._present = [replica for replica, it in enumerate(told) if it != _OUT]
            if self._is_strict and len(self._present) < self.replicas.size:
                absent = sorted(set(range(self.replicas.size)) - set(self._present))
                raise UsageError(
                    f"replicas {absent} have no more batches, and join was told to raise then "
                    "(throw_on_early_termination=True)"
                )
        return [int(it) for it in told], total

    def _follow(self) -> None:
        """Takes part in the others' reductions until none of them goes on."""
        while any(told := self._tell(_OUT)[0]):
            if _REDUCES in told:
                self._take_part()
        if len(self._present) < self.replicas.size:
            # Who left early has old parameters, and would go on from old averages of gradients.
            held, source = self._held(), self._present[0]
            self.replicas.broadcast([*held.parameters, *held.buffers], source)
            self._share_state(source)

    def _take_part(self) -> None:
        held = self._held()
        if self._reduction is None or not self._has_begun:
            raise UsageError(
                "a replica left join() before its first step, so it does not know its part of "
                "the model; give every replica at least one batch"
            )
        gradients = [parameter.grad for parameter in held.parameters]
        for parameter in held.parameters:
            parameter.grad = None
        self._reduces = True
        self.arm()
        self._reduce(self._reduction)
        for parameter, gradient in zip(held.parameters, gradients, strict=True):
            parameter.grad = gradient
