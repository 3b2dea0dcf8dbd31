"""Gradient norms over the whole model, right at every degree, and never silently local."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import device
from ..execution.placing import LocalPart
from ..runtime import Runtime


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    part: LocalPart | None,
    runtime: Runtime,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clips the gradients of parameters that are spread over the pipeline group.

    Every rank calls it, with all parameters or with those it holds. Each contributes the norms of
    those it counts, at their places in the whole model, so the total is what one process computes.

    Raises:
        RuntimeError: `error_if_nonfinite`, and the norm is not finite.
    """
    local = [p for p in parameters if (part is None or part.is_local(p)) and p.grad is not None]
    gradients = {id(p): p.grad for p in local if p.grad is not None}
    target = device.current_device()  # one for all ranks: it decides the backend
    counted = [p for p in local if part is None or part.counts_here(p)]
    whole = parameters if part is None else part.parameters
    is_double = any(p.dtype == torch.float64 for p in whole)
    zero = torch.zeros((), device=target, dtype=torch.float64 if is_double else torch.float32)
    found = torch._foreach_norm([gradients[id(p)] for p in counted], norm_type) if counted else ()
    norms = [norm.to(zero) for norm in found]
    if part is not None:
        norms = _of_all_ranks(counted, norms, part, runtime.groups.of("pp"), zero, norm_type)
    total = torch.stack(norms or [zero])
    norm: torch.Tensor = torch.linalg.vector_norm(total, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is {norm.item()}, so it cannot "
            "be clipped"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    with torch.no_grad():
        for parameter in local:
            gradients[id(parameter)].mul_(factor.to(parameter.device))
    return norm


def _of_all_ranks(
    counted: Sequence[nn.Parameter],
    norms: Sequence[torch.Tensor],
    part: LocalPart,
    group: dist.ProcessGroup | None,
    zero: torch.Tensor,
    norm_type: float,
) -> list[torch.Tensor]:
    """Returns the norms that any rank counts, in the order of the model's parameters.

    What is no parameter of the model, and so is on every rank, has one place behind all others.
    """
    places = {id(parameter): place for place, parameter in enumerate(part.parameters)}
    last = len(places)
    by_place: dict[int, list[torch.Tensor]] = {}
    for parameter, norm in zip(counted, norms, strict=True):
        by_place.setdefault(places.get(id(parameter), last), []).append(norm)
    found = zero.new_zeros(2, last + 1)  # norms, and where there is one
    if by_place:
        several = [torch.stack(norms) for norms in by_place.values()]
        where = torch.tensor(list(by_place), device=zero.device)
        found[0, where] = torch.stack(
            [norms[0] if len(norms) == 1 else torch.linalg.vector_norm(norms, norm_type)
             for norms in several]
        )  # fmt: skip
        found[1, where] = 1
    dist.all_reduce(found, group=group)
    return list(found[0][found[1] > 0].unbind())


def watch_clip_grad_norm(part: LocalPart, runtime: Runtime) -> None:
    """Makes `torch.nn.utils.clip_grad_norm_` right for parameters of the partitioned model.

    It would see this rank's gradients only. Who imported the function before keeps torch's own,
    which then meets a `RemoteGradient` and fails.
    """
    native = torch.nn.utils.clip_grad_norm_
    native = getattr(native, "__wrapped__", native)

    @functools.wraps(native)
    def clip(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given: list[Any] = (
            [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        )
        # This rank may hold none of a group's parameters, while another one waits for it.
        if not given or any(part.is_partitioned(tensor) for tensor in given):
            return clip_gradients(given, part, runtime, max_norm, norm_type, error_if_nonfinite)
        return native(given, max_norm, norm_type, error_if_nonfinite, foreach)

    torch.nn.utils.clip_grad_norm_ = clip
    torch.nn.utils.clip_grad.clip_grad_norm_ = clip
