"""Scaled losses for `torch.autocast` in float16: torch's scaler, with one mind on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from . import device
from .runtime import current


class GradScaler(torch.amp.GradScaler):
    """torch's `GradScaler`: if gradients overflow on one rank, all ranks skip the step.

    Use it as torch's: ``model.backward(scaler.scale(loss))`` in the step, then
    ``scaler.step(optimizer)`` and ``scaler.update()``. All ranks keep equal scales.

    Args:
        args: of `torch.amp.GradScaler` but for the device, which is this rank's.
        kwargs: likewise.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(kwargs.pop("device", device.current_device().type), *args, **kwargs)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # A rank without gradients has looked at nothing, but must know what others found.
        anywhere = found.setdefault(found_inf.device, found_inf)
        for other in found.values():
            torch.maximum(anywhere, other.to(anywhere), out=anywhere)
        runtime = current()
        with runtime.collective("smp.GradScaler"):
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=runtime.groups.of("mp"))
        return found
