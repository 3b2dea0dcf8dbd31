"""After a sharded step: every replica gets the slices of all, at once or at the first use.

The gathers are launched in one order on all replicas, that of the model's parameters, which is
mostly the order in which a forward uses them. Where they are deferred only the waiting is left to
the first use, so replicas may use parameters in different orders. The price is memory: until then
a bucket holds its parameters a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..replication.replicas import Replicas
from ..runtime import current
from .awaited_parameters import await_at_first_use

BUCKET_BYTES = 25 << 20


class ParameterGather:
    """Gathers parameters after each step.

    Args:
        replicas: they.
        new_slice: returns this replica's new slice of a parameter, flat; None if it has none.
        is_deferred: whether `run` returns while gathers are under way.
    """

    def __init__(
        self,
        replicas: Replicas,
        new_slice: Callable[[nn.Parameter], torch.Tensor | None],
        is_deferred: bool,
    ) -> None:
        self._replicas = replicas
        self._new_slice = new_slice
        self._is_deferred = is_deferred

    @torch.no_grad()
    def run(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives all parameters their values, now or at their first use.

        Args:
            parameters: those that were stepped on, in an order equal on all replicas.
        """
        model = current().model
        module = nn.Module() if model is None else model.get_module()
        # The values may come later, in the middle of a forward; they count as written now.
        torch.autograd.graph.increment_version(parameters)
        waiting: list[_Gather] = []
        is_compiled = {id(p) for part in _compiled(module) for p in part.parameters()}
        for bucket in _buckets(_in_order_of(module, parameters), self._is_deferred):
            gather = _Gather(self._replicas, bucket, [self._new_slice(p) for p in bucket])
            shows_uses = all(type(p) is nn.Parameter and id(p) not in is_compiled for p in bucket)
            if self._is_deferred and shows_uses:
                await_at_first_use(bucket, gather.finish_later)
                continue
            waiting.append(gather)
            if len(waiting) > 1:
                waiting.pop(0).finish()
        for gather in waiting:
            gather.finish()


class _Gather:
    """One bucket on its way.

    Args:
        replicas: from whom, and to whom.
        parameters: of one type and device.
        own: this replica's new slices of them.
    """

    def __init__(
        self,
        replicas: Replicas,
        parameters: Sequence[nn.Parameter],
        own: Sequence[torch.Tensor | None],
    ) -> None:
        self._parameters = parameters
        self._lengths = [-(-parameter.numel() // replicas.size) for parameter in parameters]
        first = parameters[0]
        sent = torch.zeros(sum(self._lengths), dtype=first.dtype, device=first.device)
        for place, values in zip(torch.split(sent, self._lengths), own, strict=True):
            if values is not None:
                place[: values.numel()].copy_(values)
        self._slices = [torch.empty_like(sent) for _ in range(replicas.size)]
        self._work: Any = dist.all_gather(self._slices, sent, group=replicas.group, async_op=True)

    def finish(self) -> None:
        """Waits, and gives the parameters their values; their versions counted this before."""
        self._work.wait()
        parts = [torch.split(each, self._lengths) for each in self._slices]
        for parameter, slices in zip(self._parameters, zip(*parts, strict=True), strict=True):
            whole = torch.cat(slices)[: parameter.numel()]
            parameter.data.copy_(whole.view(parameter.shape))
        self._slices = []

    def finish_later(self) -> None:
        """Does the same outside of the optimizer's step.

        Raises:
            PeerError: another rank failed before it sent its slices.
        """
        with current().collective("the gather of parameters after optimizer.step"):
            self.finish()


def _in_order_of(module: nn.Module, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns parameters in a model's order, and at the end those that it does not have."""
    places = {parameter: place for place, parameter in enumerate(module.parameters())}
    return sorted(parameters, key=lambda parameter: places.get(parameter, len(places)))


def _buckets(
    parameters: Iterable[nn.Parameter], first_are_small: bool
) -> Iterator[list[nn.Parameter]]:
    """Yields parameters of one type and device that are gathered at once.

    The first buckets are small if somebody waits for them at once, as the last of a reduction are.
    """
    made: list[list[nn.Parameter]] = []
    fillable: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        most = BUCKET_BYTES >> max(3 - len(made), 0) if first_are_small else BUCKET_BYTES
        bucket = fillable.get(kind)
        if bucket is None or sum(p.nbytes for p in bucket) + parameter.nbytes > most:
            bucket = fillable[kind] = []
            made.append(bucket)
        bucket.append(parameter)
    yield from made


def _compiled(module: nn.Module) -> Iterator[nn.Module]:
    """Yields modules that run as compiled code, which uses parameters unseen."""
    for part in module.modules():
        is_optimized = part._compiled_call_impl is not None or "_orig_mod" in part._modules
        if is_optimized or isinstance(part, torch.jit.ScriptModule):
            yield part
