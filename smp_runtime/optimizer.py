"""`DistributedOptimizer`: a torch optimizer that steps on this rank's parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .errors import NotSupportedError, UsageError
from .placing import LocalPart
from .runtime import current, is_initialized


def DistributedOptimizer(  # noqa: N802 - SMP's name
    optimizer: Optimizer,
    static_loss_scale: float | None = 1.0,
    dynamic_loss_scale: bool = False,
    **dynamic_loss_args: Any,
) -> Optimizer:
    """Makes an optimizer step on the parameters that live on this rank.

    The optimizer may have been built before or after the model was wrapped. Parameter groups
    stay as they are; after the partitioning they hold this rank's parameters, perhaps none.

    Args:
        optimizer: any torch optimizer.
        static_loss_scale: without effect in float32, as SMP has it.
        dynamic_loss_scale: without effect in float32.
        dynamic_loss_args: without effect in float32.

    Returns:
        The same object.

    Raises:
        NotSupportedError: LBFGS on a model over several ranks.
    """
    runtime = current()
    if isinstance(optimizer, torch.optim.LBFGS) and runtime.placement.size("pp") > 1:
        raise NotSupportedError(
            "LBFGS needs all parameters in one place and can't step on a partitioned model; use a "
            "first-order optimizer such as AdamW"
        )
    if not isinstance(optimizer, _LocalBase):
        cls: Any = type(optimizer)
        optimizer.__class__ = _local(cls)
    if runtime.model is not None:
        runtime.model.attach_optimizer(optimizer)
    else:
        runtime.early_optimizer = optimizer
    return optimizer


def keep_local(optimizer: Optimizer, part: LocalPart) -> None:
    """Takes the parameters of other ranks out of the optimizer."""
    for group in optimizer.param_groups:
        group["params"] = [tensor for tensor in group["params"] if part.is_local(tensor)]
    for tensor in list(optimizer.state):
        if not part.is_local(tensor):
            del optimizer.state[tensor]


class _LocalBase:
    """What every optimizer made here has beside torch's own.

    Attributes:
        overflow: whether gradients overflowed in the last step; in float32 nobody looks.
        step_was_skipped: accelerate's name for the same.
    """

    overflow = False
    step_was_skipped = False
    _is_accelerate_prepared = True  # accelerate leaves it alone, as its step is not torch's

    def clip_master_grads(self, max_norm: float) -> torch.Tensor:
        """Does what `DistributedModel.clip_grad_norm_` does.

        Raises:
            UsageError: there is no `DistributedModel`.
        """
        model = current().model
        if model is None:
            raise UsageError("clip_master_grads needs the smp.DistributedModel of the script")
        return model.clip_grad_norm_(max_norm)


@functools.cache
def _local(cls: type[Any]) -> type[Any]:
    class Local(cls, _LocalBase):  # type: ignore[misc]
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            """Updates this rank's parameters; harmless where there are none."""
            if any(group["params"] for group in self.param_groups):
                loss: float | None = super().step(closure)
                return loss
            return None if closure is None else closure()

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            """Adds a group, of which this rank's parameters stay."""
            super().add_param_group(param_group)
            model = current().model if is_initialized() else None
            if model is not None:
                model.attach_optimizer(self)

    # torch wraps `step` for its hooks, once per class; the parent's is wrapped already.
    Local.step.hooked = True  # type: ignore[attr-defined]
    Local.__name__ = cls.__name__
    Local.__qualname__ = cls.__qualname__
    Local.__module__ = cls.__module__
    Local.__doc__ = cls.__doc__
    return Local
