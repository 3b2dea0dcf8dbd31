"""`DistributedOptimizer`: a torch optimizer that steps on this rank's parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import Optimizer

from . import device
from .amp import watch_grad_scalers
from .errors import NotSupportedError, UsageError
from .execution.placing import LocalPart
from .optimization.loss_scale import LossScale, StaticLossScale, make_loss_scale
from .optimization.optimizer_dicts import StateDicts
from .optimization.substitutes import Substitutes
from .replication.replicas import Replicas
from .runtime import current, is_initialized
from .saving.optimizer_state import NamedState, parameter_names

Closure = Callable[[], Any]

_ELEMENTWISE = (
    *(optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.SGD),
    *(optim.RMSprop, optim.Rprop, optim.Adagrad, optim.Adadelta, optim.ASGD),
)


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
        static_loss_scale: what the loss is multiplied with in float16; None for 1. Without effect
            in float32 and bfloat16.
        dynamic_loss_scale: find the scale by trying, instead.
        dynamic_loss_args: settings of the dynamic scale, each by its name or all as a dict
            `dynamic_loss_args`: init_scale (2**32), scale_factor (2.0), scale_window (1000),
            min_scale (1), delayed_shift (1), consecutive_hysteresis (False).

    Returns:
        The same object. With `fp16` or `bf16` it has float32 master weights, and the members
        `optimizer` (itself), `clip_master_grads`, `overflow`, `loss_scale` and `loss_scaler`.

    Raises:
        NotSupportedError: LBFGS on a model over several ranks, or an optimizer that needs whole
            parameters with `shard_optimizer_state`.
        ConfigError: a setting of the loss scale is out of range.
    """
    runtime = current()
    config = runtime.config
    if isinstance(optimizer, torch.optim.LBFGS) and runtime.placement.size("pp") > 1:
        raise NotSupportedError(
            "LBFGS needs all parameters in one place and can't step on a partitioned model; use a "
            "first-order optimizer such as AdamW"
        )
    cls: Any = type(optimizer)
    is_16_bit = config.fp16 or config.bf16
    is_sharded = config.shard_optimizer_state and runtime.placement.size("rdp") > 1
    if isinstance(optimizer, LocalOptimizer):
        pass
    elif is_16_bit or is_sharded:
        if is_sharded:
            _check_elementwise(optimizer)
        scale = make_loss_scale(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        optimizer.__class__ = _local(cls, SubstitutingOptimizer)
        assert isinstance(optimizer, SubstitutingOptimizer)
        optimizer.set_up(is_16_bit, is_sharded, scale if config.fp16 else StaticLossScale(1.0))
    else:
        optimizer.__class__ = _local(cls, LocalOptimizer)
    watch_grad_scalers(LocalOptimizer)
    if runtime.model is not None:
        runtime.model.attach_optimizer(optimizer)
    else:
        runtime.early_optimizer = optimizer
    return optimizer


def keep_local(optimizer: Optimizer, part: LocalPart) -> None:
    """Takes the parameters of other ranks out of the optimizer."""
    if isinstance(optimizer, StateDicts):
        optimizer.remember_groups()
    for group in optimizer.param_groups:
        group["params"] = [tensor for tensor in group["params"] if part.is_local(tensor)]
    for tensor in list(optimizer.state):
        if not part.is_local(tensor):
            del optimizer.state[tensor]


class LocalOptimizer(StateDicts):
    """What every optimizer made here has beside torch's own.

    Attributes:
        overflow: whether gradients overflowed in the last step; in float32 nobody looks.
        step_was_skipped: accelerate's name for the same.
        loss_scale: what the loss is multiplied with, in `model.backward`.
    """

    overflow = False
    step_was_skipped = False
    loss_scale = 1.0
    _is_accelerate_prepared = True  # accelerate leaves it alone, as its step is not torch's

    def clip_master_grads(self, max_norm: float) -> torch.Tensor:
        """Does what `DistributedModel.clip_grad_norm_` does.

        Returns:
            The norm before; -1 if gradients of 16 bits overflowed, so that `step` will skip them.

        Raises:
            UsageError: there is no `DistributedModel`.
        """
        model = current().model
        if model is None:
            raise UsageError("clip_master_grads needs the smp.DistributedModel of the script")
        return model.clip_grad_norm_(max_norm)

    def update(self, step: Callable[[Closure | None], Any], closure: Closure | None) -> Any:
        """Takes a step of torch's optimizer, `step`, on what there is to step on."""
        return step(closure)


class SubstitutingOptimizer(LocalOptimizer):
    """An optimizer that steps on something else than the parameters: see `substitutes`.

    Attributes:
        loss_scaler: the scale of the loss, and what it depends on.
        optimizer: this object: SMP's scripts build their schedulers on it.
    """

    loss_scaler: LossScale
    _substitutes: Substitutes
    _is_16_bit: bool

    def set_up(self, is_16_bit: bool, is_sharded: bool, loss_scaler: LossScale) -> None:
        """Called by `DistributedOptimizer`."""
        optimizer: Any = self
        replicas = Replicas(current()) if is_sharded else None
        is_deferred = current().config.overlap_parameter_gather
        self._substitutes = Substitutes(optimizer, replicas, is_deferred)
        self._is_16_bit = is_16_bit
        self.loss_scaler = loss_scaler

    @property
    def optimizer(self) -> Any:
        """This object."""
        return self

    @property
    def loss_scale(self) -> float:  # type: ignore[override]
        """What the loss is multiplied with, in `model.backward`."""
        return self.loss_scaler.loss_scale

    def clip_master_grads(self, max_norm: float) -> torch.Tensor:
        """Scales gradients so that their norm over the whole model is at most `max_norm`."""
        norm = super().clip_master_grads(max_norm)
        return norm if torch.isfinite(norm) else torch.full_like(norm, -1.0)

    def update(self, step: Callable[[Closure | None], Any], closure: Closure | None) -> Any:
        """Steps on the substitutes, unless gradients of 16 bits overflowed on any rank."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_16_bit:
            self.overflow = self.step_was_skipped = not self._are_finite()
            self.loss_scaler.update(self.overflow)
            if self.overflow:
                return loss
        with self._substitutes.in_place():
            step(None)
        with current().collective("optimizer.step"):
            self._substitutes.write_back()
        return loss

    def _are_finite(self) -> bool:
        runtime = current()
        gradients = [
            parameter.grad
            for group in self._groups()
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        norms = torch._foreach_norm(gradients, math.inf) if gradients else ()
        worst = torch.zeros((), device=device.current_device())
        for norm in norms:
            worst = torch.maximum(worst, norm.to(worst))  # keeps NaN
        bad = (~torch.isfinite(worst)).int()
        with runtime.collective("optimizer.step"):
            dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=runtime.groups.of("mp"))
        return not bad.item()

    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = vars(self)["param_groups"]
        return groups

    # -- state, for `optimizer_state` --------------------------------------------------------

    def named_local_state(self) -> NamedState:
        """Returns the state on this rank; a tensor that is sharded as a `Piece`."""
        return {
            name: state
            for name, parameter in self._named()
            if (state := self._substitutes.state(parameter))
        }

    def load_named_local_state(self, states: NamedState) -> None:
        """Takes its part of state in which every tensor is whole, or a `Piece` of this rank."""
        for name, parameter in self._named():
            if name in states:
                self._substitutes.load(parameter, states[name])

    def state_names(self) -> Sequence[str]:
        """Returns the names of the parameters whose state this rank needs."""
        return [name for name, _ in self._named()]

    def loss_scaler_state(self) -> dict[str, Any]:
        """Returns what is known of the loss scale; equal on all ranks."""
        return self.loss_scaler.state_dict()

    def load_loss_scaler_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `loss_scaler_state` returned."""
        if state:
            self.loss_scaler.load_state_dict(state)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        model = current().model
        if model is None:
            raise UsageError("the state of this optimizer needs the smp.DistributedModel")
        names = parameter_names(model.get_module())
        return [(names[id(parameter)], parameter) for parameter in self._substitutes.held()]


@functools.cache
def _local(cls: type[Any], base: type[LocalOptimizer]) -> type[Any]:
    class Local(base, cls):  # type: ignore[misc, valid-type]
        def step(self, closure: Closure | None = None) -> Any:
            """Updates this rank's parameters; harmless where there are none."""
            return self.update(self._step_if_any, closure)

        def _step_if_any(self, closure: Closure | None) -> Any:
            has_parameters = any(group["params"] for group in self.param_groups)
            if has_parameters or getattr(self, "steps_on_every_rank", False):
                return cls.step(self, closure)
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


def _check_elementwise(optimizer: Optimizer) -> None:
    """Refuses optimizers whose update of one element depends on the others.

    Raises:
        NotSupportedError: it is not known to work element by element.
    """
    if not isinstance(optimizer, _ELEMENTWISE):
        known = ", ".join(cls.__name__ for cls in _ELEMENTWISE)
        raise NotSupportedError(
            f"{type(optimizer).__name__} is not known to update each element by itself, as "
            f"shard_optimizer_state needs it: use one of {known}, or leave the setting out"
        )
