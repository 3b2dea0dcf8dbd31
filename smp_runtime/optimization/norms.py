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

    Every rank passes the same parameters in the same order. Each rank contributes the norms of
    those it counts; adding up zeros leaves them exact, so the total is what one process computes.

    Raises:
        RuntimeError: `error_if_nonfinite`, and the norm is not finite.
    """
    local = [p for p in parameters if (part is None or part.is_local(p)) and p.grad is not None]
    gradients = {id(p): p.grad for p in local if p.grad is not None}
    target = device.current_device()  # one for all ranks: it decides the backend
    counted = [p for p in local if part is None or part.counts_here(p)]
    norms = dict(
        zip(
            (id(p) for p in counted),
            torch._foreach_norm([gradients[id(p)] for p in counted], norm_type) if counted else (),
            strict=True,
        )
    )
    is_double = any(p.dtype == torch.float64 for p in parameters)
    zero = torch.zeros((), device=target, dtype=torch.float64 if is_double else torch.float32)
    total = torch.stack([norms.get(id(p), zero).to(zero) for p in parameters] or [zero])
    if part is not None:
        dist.all_reduce(total, group=runtime.groups.of("pp"))
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
        if any(part.is_partitioned(tensor) for tensor in given):
            return clip_gradients(given, part, runtime, max_norm, norm_type, error_if_nonfinite)
        return native(given, max_norm, norm_type, error_if_nonfinite, foreach)

    torch.nn.utils.clip_grad_norm_ = clip
    torch.nn.utils.clip_grad.clip_grad_norm_ = clip
