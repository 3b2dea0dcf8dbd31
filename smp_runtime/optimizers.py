"""LAMB and NovoGrad, which SMP took from apex, in plain PyTorch.

Names of arguments and their defaults are apex's. Norms are taken over whole tensors, and LAMB's
norm of all gradients over the whole model, whatever ranks it is on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .errors import NotSupportedError
from .runtime import current, is_initialized

Closure = Callable[[], Any]


class FusedLAMB(Optimizer):
    """LAMB: Adam whose update of each tensor is as long as the tensor itself, times `lr`.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: divide the averages by what they lack at the start.
        betas: decay of the averages of gradients and of their squares.
        eps: added to the denominator.
        weight_decay: what is added of the weights. Tensors without it are updated as in Adam.
        amsgrad: not supported, as in apex.
        adam_w_mode: add the weights to the update rather than to the gradient.
        grad_averaging: weigh a new gradient by ``1 - betas[0]`` rather than by 1.
        set_grad_none: without effect; `zero_grad` does as in torch.
        max_grad_norm: gradients are scaled down to this norm over the whole model; 0: never.
        use_nvlamb: treat tensors without weight decay as the others.

    Raises:
        NotSupportedError: `amsgrad`.
    """

    steps_on_every_rank = True  # for the norm, also where there are no parameters

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        corrections = {"bias_correction": bias_correction, "grad_averaging": grad_averaging}
        super().__init__(params, {**settings, **corrections, "max_grad_norm": max_grad_norm})
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Updates the parameters."""
        loss = _loss(closure)
        limit = self.defaults["max_grad_norm"]
        norm = _norm_of_gradients(self) if limit else 0.0
        shrink = max(norm / limit, 1.0) if limit else 1.0
        for group, parameter, gradient, state in _trained(self):
            decay = group["weight_decay"]
            gradient = gradient / shrink
            if not self.adam_w_mode:
                gradient = gradient + decay * parameter
            update = _adam_update(group, parameter, gradient, state)
            if self.adam_w_mode:
                update = update + decay * parameter
            lr = group["lr"]
            if decay or self.use_nvlamb:
                length, long = update.norm(), parameter.norm()
                lr = lr * torch.where((length > 0) & (long > 0), long / length, 1.0)
            parameter.sub_(lr * update)
        return loss


class FusedNovoGrad(Optimizer):
    """NovoGrad: gradients are divided by an average of their norms, one for each tensor.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: divide the averages by what they lack at the start.
        betas: decay of the averages of gradients and of their norms.
        eps: added to the denominator.
        weight_decay: what is added of the weights.
        amsgrad: not supported, as in apex.
        reg_inside_moment: average the gradient with what is added of the weights.
        grad_averaging: weigh a new gradient by ``1 - betas[0]`` rather than by 1.
        norm_type: 2 or infinity (0 in apex).
        init_zero: begin the average of norms at 0 rather than at the first norm.
        set_grad_none: without effect; `zero_grad` does as in torch.

    Raises:
        NotSupportedError: `amsgrad`, or another `norm_type`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        if norm_type not in (0, 2, float("inf")):
            raise NotSupportedError(f"norm_type={norm_type!r}: write 2, or 0 for the largest entry")
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        corrections = {"bias_correction": bias_correction, "grad_averaging": grad_averaging}
        super().__init__(params, {**settings, **corrections})
        self.norm_type = 2 if norm_type == 2 else float("inf")
        self.reg_inside_moment = reg_inside_moment
        self.init_zero = init_zero

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Updates the parameters."""
        loss = _loss(closure)
        for group, parameter, gradient, state in _trained(self):
            beta1, beta2 = group["betas"]
            norm = gradient.norm(self.norm_type)
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(parameter)
                state["norm"] = torch.zeros_like(norm) if self.init_zero else norm.clone()
            state["step"] += 1
            if self.norm_type == 2:
                state["norm"] = (beta2 * state["norm"] ** 2 + (1 - beta2) * norm**2).sqrt()
            else:
                state["norm"] = beta2 * state["norm"] + (1 - beta2) * norm
            first, second = _corrections(group, state["step"])
            scale = state["norm"] / second**0.5 + group["eps"]
            decay = group["weight_decay"] * parameter
            new = gradient / scale + decay if self.reg_inside_moment else gradient
            weight = 1 - beta1 if group["grad_averaging"] else 1.0
            average = state["exp_avg"].mul_(beta1).add_(new, alpha=weight) / first
            parameter.sub_(
                group["lr"] * (average if self.reg_inside_moment else average / scale + decay)
            )
        return loss


def _refuse_amsgrad(amsgrad: bool) -> None:
    if amsgrad:
        raise NotSupportedError("amsgrad=True is not supported, as in apex: leave it out")


def _loss(closure: Closure | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _trained(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor, Tensor, Any]]:
    """Yields the parameters that have gradients, with their group, gradient and state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter, parameter.grad, optimizer.state[parameter]


def _adam_update(group: dict[str, Any], parameter: Tensor, gradient: Tensor, state: Any) -> Tensor:
    beta1, beta2 = group["betas"]
    if not state:
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    weight = 1 - beta1 if group["grad_averaging"] else 1.0
    average = state["exp_avg"].mul_(beta1).add_(gradient, alpha=weight)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    first, second = _corrections(group, state["step"])
    update: Tensor = (average / first) / ((square / second).sqrt() + group["eps"])
    return update


def _corrections(group: dict[str, Any], step: int) -> tuple[float, float]:
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1**step, 1 - beta2**step


def _norm_of_gradients(optimizer: Optimizer) -> float:
    """Returns the norm of all gradients, also of those on other pipeline ranks."""
    model = current().model if is_initialized() else None
    part = None if model is None else model.local_part
    gradients = [
        gradient
        for _, parameter, gradient, _ in _trained(optimizer)
        if part is None or part.counts_here(parameter)
    ]
    norms = [gradient.norm().double() for gradient in gradients]
    total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
    if part is not None:
        config = current().config
        if config.fp16 or config.bf16:
            raise NotSupportedError(
                "FusedLAMB with max_grad_norm in 16-bit training over several pipeline ranks is "
                "not supported yet: write max_grad_norm=0 and call optimizer.clip_master_grads"
            )
        dist.all_reduce(total, group=current().groups.of("pp"))
    return float(total.sqrt())
