"""Gradients averaged over replicas, bucket by bucket, while the backward pass goes on.

DistributedDataParallel can't serve: it arms its reduction in a forward, and in a pipeline the last
forward is not that of the last backward. Here nothing but gradients of the last microbatch starts
a bucket, and buckets start in one order on all replicas, that of the first step's gradients.

A rank may run several backward passes for one microbatch (segments, or losses one after the
other), and a parameter may get a gradient in more than one of them. How many to wait for is
learned: the most that any step had. Should another one come after its bucket was launched, it is
kept apart and averaged after the others. What was expected and did not come is not waited for
beyond the last backward pass.

Buckets go through memory that the replicas share where all run on one machine without accelerator,
else, or where the script has a communication hook, through the process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import UsageError
from ..execution.body import current_body
from ..messages.shared_memory import Neighbours, is_available
from ..tensors import gradient_type
from .buckets import Bucket, lay_out
from .collective_reduction import CollectiveReduction, CommHook
from .combined_flags import CombinedFlags
from .staged_reduction import PART_BYTES, StagedReduction

_NEVER = 1 << 30


class Span(NamedTuple):
    """When one bucket was under way, on the clock of `time.perf_counter`."""

    launched: float
    reduced: float


class Reduction:
    """The gradient reduction of one rank with its replicas.

    Args:
        group: the replicas, in a process group that nobody else uses: collectives launched from a
            backward pass must not mix with those of the script.
        bucket_bytes: most bytes of a bucket.
        is_overlapped: launch buckets during the backward pass; the result is the same.
        as_views: gradients are views of the buckets.
        neighbours: returns the replicas if all are on this machine; every one of them calls it.

    Attributes:
        spans: when each bucket of the last step was under way, in the order of their ends.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        bucket_bytes: int,
        *,
        is_overlapped: bool,
        as_views: bool,
        neighbours: Callable[[], Neighbours | None] = lambda: None,
    ) -> None:
        self._group = group
        self._size = group.size()
        self._bucket_bytes = bucket_bytes
        self._is_overlapped = is_overlapped
        self._as_views = as_views
        self._neighbours = neighbours
        self._has_hook = False
        self._way: CollectiveReduction | StagedReduction = CollectiveReduction(group, self._stamp)
        self._parameters: list[nn.Parameter] = []
        self._handles: list[RemovableHandle] = []
        self._expected: dict[nn.Parameter, int] = {}
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._pending: list[int] = []
        self._counts: dict[nn.Parameter, int] = {}
        self._last_microbatch: int | None = None
        self._on_backward: Callable[[], None] | None = None
        self._divisor = float(self._size)
        self._step = 0
        self._shared: set[int] = set()
        self._launched: list[float] = []
        self._had: list[list[bool]] = []
        self.spans: list[Span] = []

    @property
    def num_buckets(self) -> int:
        """The number of buckets, 0 before the first reduction."""
        return len(self._buckets)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have come that are to be averaged in this step."""
        return self._last_microbatch is not None and bool(self._counts)

    def use_hook(self, state: Any, hook: CommHook) -> None:
        """Reduces by ``hook(state, bucket)`` from now on."""
        self._has_hook = True
        self._take_way(CollectiveReduction(self._group, self._stamp, hook, state))

    def watch(self, parameters: Sequence[nn.Parameter], on_backward: Callable[[], None]) -> None:
        """Calls `on_backward` for each gradient that comes outside of steps."""
        self._watch([parameter for parameter in parameters if parameter.requires_grad])
        self._on_backward = on_backward

    def begin(
        self,
        parameters: Sequence[nn.Parameter],
        shared: Sequence[nn.Parameter],
        last_microbatch: int,
        divisor: int | None = None,
        step: int = 0,
    ) -> None:
        """Arms the reduction for a step, before any backward pass of its last microbatch.

        Args:
            parameters: this rank's parameters, in an order equal on all replicas.
            shared: those among them whose gradients are complete only after the step.
            last_microbatch: the one whose gradients complete the sums.
            divisor: what sums are divided by; the number of replicas if not given.
            step: a number that must be the same on all replicas.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if [id(p) for p in trained] != [id(p) for p in self._parameters]:
            self._watch(trained)
        self._shared = {id(parameter) for parameter in shared}
        self._divisor = float(divisor or self._size)
        self._step = step
        self._counts = {}
        self._launched, self._had, self.spans = [], [], []
        self._way.begin(self._divisor)
        self._pending = [len(bucket.parameters()) for bucket in self._buckets]
        self._last_microbatch = last_microbatch

    def stop(self) -> None:
        """Disarms the reduction: gradients stay this rank's own."""
        self._last_microbatch = None
        self.spans = []

    def close(self) -> None:
        """Leaves the parameters alone from now on, and frees what was shared."""
        self._watch([])
        self._way = CollectiveReduction(self._group, self._stamp)

    def finish(self, written: Sequence[bool] = ()) -> list[bool]:
        """Launches what is left, waits, and gives the parameters their averages.

        A parameter that got a gradient on some replicas only counts as zero on the others; one
        that got none anywhere keeps ``grad is None``.

        Args:
            written: flags to be combined on the way: true where it is true on any replica.

        Returns:
            The combined flags.

        Raises:
            UsageError: the replicas are in different steps, or train different parameters.
        """
        if not self._buckets and self._parameters:
            self._lay_out()
        self._last_microbatch = None
        while len(self._launched) < len(self._buckets):
            self._launch()
        in_order = [p for bucket in self._buckets for p in bucket.parameters()]
        is_late = [p.grad is not None for p in in_order]
        own = [has for flags in self._had for has in flags]
        device = in_order[0].device if in_order else None
        flags = CombinedFlags([*own, *is_late, *written], self._step, self._group, device)
        self._way.finish()
        combined = flags.wait()
        present, late = combined[: len(own)], combined[len(own) : 2 * len(own)]
        self._collect(present, [p for p, flag in zip(in_order, late, strict=True) if flag])
        for parameter, count in self._counts.items():
            self._expected[parameter] = max(count, self._expected.get(parameter, 0))
        return combined[2 * len(own) :]

    # -- while backward passes run -----------------------------------------------------------

    def _watch(self, trained: list[nn.Parameter]) -> None:
        """Begins anew for other parameters than before."""
        for handle in self._handles:
            handle.remove()
        self._parameters = trained
        self._handles = [
            p.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for p in trained
        ]
        self._buckets, self._expected, self._bucket_of = [], {}, {}

    def _note(self, parameter: torch.Tensor) -> None:
        """Called when a backward pass has added to a parameter's gradient."""
        body = current_body()
        if body is None:
            if self._on_backward is not None:
                self._on_backward()
            return
        if body.microbatch != self._last_microbatch:
            return
        assert isinstance(parameter, nn.Parameter)
        count = self._counts.pop(parameter, 0) + 1
        self._counts[parameter] = count  # at the end: the order of the last gradients
        if not self._buckets or id(parameter) in self._shared:
            return
        if count == self._expected.get(parameter, _NEVER):
            self._pending[self._bucket_of[parameter]] -= 1
            while (
                self._is_overlapped
                and len(self._launched) < len(self._buckets)
                and not self._pending[len(self._launched)]
            ):
                self._launch()

    def _launch(self) -> None:
        """Starts the next bucket."""
        index = len(self._launched)
        self._launched.append(time.perf_counter())
        self._had.append(self._way.launch(index))
        if self._last_microbatch is not None:  # else `finish` goes on with all of them
            self._way.advance()

    def _stamp(self, index: int) -> None:
        """Notes that a bucket is reduced."""
        self.spans.append(Span(self._launched[index], time.perf_counter()))

    # -- after the last backward pass --------------------------------------------------------

    def _lay_out(self) -> None:
        """Makes the buckets, in the order in which the first replica's gradients came."""
        positions = {parameter: index for index, parameter in enumerate(self._parameters)}
        came = [positions[parameter] for parameter in self._counts]
        absent = set(range(len(positions))) - set(came)
        came += sorted(absent, reverse=True)
        shapes = [(tuple(p.shape), str(p.dtype)) for p in self._parameters]
        may_share = not self._has_hook and is_available()
        may_share &= all(p.device.type == "cpu" for p in self._parameters)
        told: list[Any] = [None] * self._size
        dist.all_gather_object(told, (shapes, came, may_share), group=self._group)
        for replica, (other, _, _) in enumerate(told):
            if other != told[0][0]:
                raise UsageError(
                    f"replicas 0 and {replica} train different parameters ({len(told[0][0])} and "
                    f"{len(other)} on this rank): freeze and build the same on every replica"
                )
        order = [self._parameters[index] for index in told[0][1]]
        # Sums over stages come last, whenever their parts came.
        own = [parameter for parameter in order if id(parameter) not in self._shared]
        shared = [parameter for parameter in order if id(parameter) in self._shared]
        if isinstance(self._way, CollectiveReduction) and all(may for _, _, may in told):
            self._share_memory()
        self._buckets = lay_out(own, self._bucket_bytes, shared, as_views=self._as_views)
        self._bucket_of = {
            p: bucket.index() for bucket in self._buckets for p in bucket.parameters()
        }
        self._take_way(self._way)

    def _take_way(self, way: CollectiveReduction | StagedReduction) -> None:
        """Reduces in some way from now on."""
        self._way = way
        way.lay_out(self._buckets)
        way.begin(self._divisor)

    def _share_memory(self) -> None:
        """Goes through shared memory, if that way is open to all replicas."""
        neighbours = self._neighbours()
        parts = None if neighbours is None else neighbours.share(PART_BYTES)
        # One of them alone may be at a limit of its own, of descriptors or memory.
        is_open = torch.tensor(parts is not None, dtype=torch.int32)
        dist.all_reduce(is_open, op=dist.ReduceOp.MIN, group=self._group)
        if neighbours is not None and parts is not None and is_open.item():
            self._way = StagedReduction(neighbours, parts, self._stamp)

    def _collect(self, present: Sequence[bool], late: Sequence[nn.Parameter]) -> None:
        """Waits for all buckets and gives out what they hold, and what came too late for them."""
        left_over: dict[nn.Parameter, torch.Tensor] = {}
        begin = 0
        for index, bucket in enumerate(self._buckets):
            parameters = bucket.parameters()
            flags = present[begin : begin + len(parameters)]
            begin += len(parameters)
            after_launch = self._way.give_out(index, flags)
            for parameter, gradient in zip(parameters, after_launch, strict=True):
                if gradient is not None:
                    left_over[parameter] = gradient
        for parameter in late:
            gradient = left_over.get(
                parameter, torch.zeros_like(parameter, dtype=gradient_type(parameter))
            )
            gradient = gradient.div(self._divisor)
            dist.all_reduce(gradient, group=self._group)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
