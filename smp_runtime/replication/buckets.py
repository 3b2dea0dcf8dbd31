"""Gradients in buckets: what one all-reduce takes.

A bucket is one flat buffer with a place for each of its parameters. When it is launched the
gradients move into it and the parameters are left without one, so that a gradient that comes
later, against all expectation, is noticed and can't be mixed into a running all-reduce. Towards a
communication hook a bucket is what DistributedDataParallel's `GradBucket` is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import nn

from ..errors import NotSupportedError
from ..tensors import gradient_type


class Bucket:
    """The gradients of some parameters in one flat buffer.

    Args:
        index: its position in the order in which buckets are launched.
        parameters: whose gradients it takes; of one type and on one device.
        is_last: no other bucket follows.
        as_views: reduced gradients are views of the buffer, which saves a copy and its memory.

    Attributes:
        dtype: the type of its gradients.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[nn.Parameter],
        is_last: bool,
        *,
        as_views: bool = False,
    ) -> None:
        self._index = index
        self._is_last = is_last
        self._as_views = as_views
        self._parameters = list(parameters)
        self.dtype = gradient_type(parameters[0])
        self._buffer: torch.Tensor | None = None
        self._set_aside: list[torch.Tensor | None] = []

    # In the first step all gradients are there when the first bucket is launched. So the memory of
    # a bucket is not taken before it is its turn, when those before it have freed theirs.

    @cached_property
    def _flat(self) -> torch.Tensor:
        size = sum(parameter.numel() for parameter in self._parameters)
        return torch.zeros(size, dtype=self.dtype, device=self._parameters[0].device)

    @cached_property
    def _places(self) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in self._parameters]
        places = torch.split(self._flat, sizes)
        return [place.view(p.shape) for place, p in zip(places, self._parameters, strict=True)]

    # -- what a communication hook sees ------------------------------------------------------

    def index(self) -> int:
        """Returns the position among the buckets."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Returns the flat buffer, shape ``(elements,)``."""
        return self._flat if self._buffer is None else self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the buffer for hooks that follow in this step."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Returns each parameter's gradient, a view of the buffer."""
        return self._places

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters."""
        return self._parameters

    def is_last(self) -> bool:
        """Says whether no other bucket follows in this step."""
        return self._is_last

    # -- a step ------------------------------------------------------------------------------

    @torch.no_grad()
    def take_in(self, divisor: float) -> list[bool]:
        """Moves the gradients into the buffer, divided; zeros where there is none.

        Returns:
            For each parameter whether it had one.

        Raises:
            NotSupportedError: a gradient is sparse.
        """
        has = [parameter.grad is not None for parameter in self._parameters]
        if not self._as_views:
            self._set_aside = [parameter.grad for parameter in self._parameters]
        for parameter, place in zip(self._parameters, self._places, strict=True):
            gradient = parameter.grad
            if gradient is None:
                place.zero_()
                continue
            check_dense(gradient)
            if gradient.data_ptr() == place.data_ptr():
                if divisor != 1:
                    place.div_(divisor)
            elif divisor != 1:
                torch.div(gradient, divisor, out=place)
            else:
                place.copy_(gradient)
            parameter.grad = None
        return has

    @torch.no_grad()
    def give_out(
        self, result: torch.Tensor, is_present: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Gives the parameters the reduced gradients.

        Args:
            result: the reduced buffer, perhaps the buffer itself.
            is_present: for each parameter whether any replica had a gradient.

        Returns:
            For each parameter the gradient that came after the launch, None as a rule.
        """
        if result.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(result.reshape(-1))
        self._buffer = None
        late = [parameter.grad for parameter in self._parameters]
        before = self._set_aside or [None] * len(self._parameters)
        for parameter, gradient, place, has in zip(
            self._parameters, before, self._places, is_present, strict=True
        ):
            if not has:
                parameter.grad = None
            elif self._as_views:
                parameter.grad = place
            else:
                if gradient is None:
                    gradient = torch.empty_like(parameter, dtype=place.dtype)
                parameter.grad = gradient.copy_(place)
        self._set_aside = []
        return late


def check_dense(gradient: torch.Tensor) -> None:
    """Makes sure that a gradient can be averaged.

    Raises:
        NotSupportedError: it is sparse.
    """
    if gradient.is_sparse:
        raise NotSupportedError(
            f"a parameter of shape {tuple(gradient.shape)} has a sparse gradient, which can't be "
            "averaged over replicas: build its module with sparse=False"
        )


def lay_out(
    parameters: Sequence[nn.Parameter],
    limit: int,
    shared: Sequence[nn.Parameter] = (),
    *,
    as_views: bool = False,
) -> list[Bucket]:
    """Makes buckets of parameters in their order, each of one type and at most `limit` bytes.

    What the backward pass can't hide is the last bucket, for its last gradient comes at the end.
    So the last ones are small: an eighth, a fourth and a half of the limit.

    Args:
        parameters: in the order in which their gradients come.
        limit: most bytes of a bucket. A parameter above it has a bucket of its own.
        shared: parameters whose gradients come after all others, in buckets of their own.
        as_views: see `Bucket`.
    """
    last_first = _runs(parameters[::-1], [limit // 8, limit // 4, limit // 2, limit])
    runs = [run[::-1] for run in last_first][::-1] + list(_runs(shared, [limit]))
    return [
        Bucket(index, run, index == len(runs) - 1, as_views=as_views)
        for index, run in enumerate(runs)
    ]


def _runs(
    parameters: Sequence[nn.Parameter], limits: Sequence[int]
) -> Iterator[list[nn.Parameter]]:
    """Yields runs of parameters; the last of the limits holds for all that follow."""
    run: list[nn.Parameter] = []
    num_bytes = num_runs = 0
    for parameter in parameters:
        kind = gradient_type(parameter)
        size = parameter.numel() * kind.itemsize
        is_other = bool(run) and (kind, parameter.device) != (gradient_type(run[0]), run[0].device)
        if run and (is_other or num_bytes + size > limits[min(num_runs, len(limits) - 1)]):
            yield run
            run, num_bytes, num_runs = [], 0, num_runs + 1
        run.append(parameter)
        num_bytes += size
    if run:
        yield run
