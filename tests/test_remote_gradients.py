"""The gradient of a parameter of another rank can't be mistaken for one."""

from typing import Any

import pytest
import torch
from torch import nn

from smp_runtime.errors import UsageError
from smp_runtime.optimization.remote_gradients import RemoteGradient, RemoteGradients


class SecondElsewhere:
    """The local part of a model whose second module is on another rank."""

    def __init__(self, model: nn.Sequential) -> None:
        self.local = set(map(id, model[0].parameters()))

    def is_local(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.local


def make() -> tuple[nn.Sequential, RemoteGradients]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, device="meta"))
    part: Any = SecondElsewhere(model)
    return model, RemoteGradients(model, part)


def remote() -> RemoteGradient:
    return RemoteGradient(torch.empty(2, 3, device="meta", dtype=torch.bfloat16))


def test_it_looks_like_its_parameter() -> None:
    gradient = remote()
    assert (gradient.shape, gradient.dtype, gradient.device.type) == (
        (2, 3),
        torch.bfloat16,
        "meta",
    )
    assert repr(gradient) == "RemoteGradient(shape=(2, 3))"


@pytest.mark.parametrize(
    "use",
    [
        lambda gradient: gradient.norm(),
        lambda gradient: gradient * 2,
        lambda gradient: gradient.mul_(0.5),
        lambda gradient: torch.isfinite(gradient),
        lambda gradient: gradient.item() if gradient.numel() == 1 else gradient.sum(),
        lambda gradient: torch._foreach_norm([gradient]),
        lambda gradient: torch.stack([gradient]),
    ],
)
def test_computing_with_it_says_what_to_write(use: Any) -> None:
    with pytest.raises(UsageError, match=r"model\.clip_grad_norm_\(max_norm\).*local_parameters"):
        use(remote())


def test_it_can_be_set_to_zero_and_detached() -> None:
    gradient = remote()
    assert gradient.zero_() is gradient
    gradient.detach_()
    assert isinstance(gradient.detach(), RemoteGradient)


def test_only_parameters_of_other_ranks_are_marked() -> None:
    model, gradients = make()
    gradients.mark()
    assert model[0].weight.grad is None
    assert isinstance(model[1].weight.grad, RemoteGradient)
    assert isinstance(model[1].bias.grad, RemoteGradient)


def test_frozen_parameters_are_not_marked() -> None:
    model, gradients = make()
    model[1].bias.requires_grad_(False)
    gradients.mark()
    assert model[1].bias.grad is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_marks_survive_the_zeroing_of_gradients(set_to_none: bool) -> None:
    model, gradients = make()
    gradients.mark()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad(set_to_none=set_to_none)
    gradients.mark()
    assert isinstance(model[1].weight.grad, RemoteGradient)


def test_an_optimizer_of_all_parameters_fails_instead_of_updating_some() -> None:
    model, gradients = make()
    gradients.mark()
    model[0].weight.grad = torch.ones(3, 2)
    with pytest.raises(UsageError, match="smp.DistributedOptimizer"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_torchs_own_clipping_fails_instead_of_clipping_some() -> None:
    model, gradients = make()
    gradients.mark()
    model[0].weight.grad = torch.ones(3, 2)
    with pytest.raises(UsageError, match="clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_marks_follow_a_change_of_type() -> None:
    model, gradients = make()
    gradients.mark()
    model.zero_grad()
    model.to(torch.bfloat16)
    gradients.mark()
    assert model[1].weight.grad is not None
    assert model[1].weight.grad.dtype == torch.bfloat16


def test_a_marked_model_can_be_converted() -> None:
    model, gradients = make()
    gradients.mark()
    gradients.clear()
    model.to(torch.bfloat16)
    assert model[1].weight.dtype == model[0].weight.dtype == torch.bfloat16
    gradients.mark()
    assert isinstance(model[1].weight.grad, RemoteGradient)
