"""Scaled losses for `torch.autocast` in float16: torch's scaler, with one mind on all ranks.

A rank sees its own gradients only. If one of them overflowed there, all ranks must skip the step
and shrink the scale, or the parts of the model would drift apart without a word. So torch's scaler
asks the other ranks wherever it looks at the gradients of a `DistributedOptimizer`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from . import device
from .runtime import current


class GradScaler(torch.amp.GradScaler):
    """torch's `GradScaler`, for the device of this rank.

    Use it as torch's: ``model.backward(scaler.scale(loss))`` in the step, then
    ``scaler.step(optimizer)`` and ``scaler.update()``. If gradients overflow on one rank, all ranks
    skip the step, and all keep equal scales.

    Args:
        args: of `torch.amp.GradScaler` but for the device.
        kwargs: likewise.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(kwargs.pop("device", device.current_device().type), *args, **kwargs)


@functools.cache
def watch_grad_scalers(kind: type) -> None:
    """Makes torch's scalers ask all ranks about the gradients of optimizers of a class."""
    native = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(native)
    def unscale(
        self: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found = native(self, optimizer, inv_scale, found_inf, allow_fp16)
        return _agree(found, found_inf) if isinstance(optimizer, kind) else found

    torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]


def _agree(
    found: dict[torch.device, torch.Tensor], none: torch.Tensor
) -> dict[torch.device, torch.Tensor]:
    """Returns what was found on this rank's devices, or worse if it was so on another rank."""
    # A rank without gradients has looked at nothing, but must know what others found.
    anywhere = found.setdefault(none.device, none)
    for other in found.values():
        torch.maximum(anywhere, other.to(anywhere), out=anywhere)
    runtime = current()
    with runtime.collective("GradScaler"):
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=runtime.groups.of("mp"))
    return found
