"""A wrapper looks like the module inside."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_runtime.execution.wrapping import Level, Wrapper


class User(nn.Module):
    """A user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.config = {"hidden": 3}

    def forward(self, x: Tensor, scale: float = 1.0, *, labels: Tensor | None = None) -> Tensor:
        """Computes."""
        return self.norm(self.layer(x)) * scale

    def describe(self) -> str:
        return f"a user's model with {self.config}"


def wrap(module: nn.Module | None = None) -> Any:
    return Wrapper(module or User(), lambda *args, **kwargs: ("called", args, kwargs))


def test_calling_the_wrapper_calls_what_it_was_given() -> None:
    assert wrap()(1, labels=2) == ("called", (1,), {"labels": 2})


def test_signature_and_docstring_of_forward_are_the_users() -> None:
    assert inspect.signature(wrap().forward) == inspect.signature(User().forward)
    assert wrap().forward.__doc__ == "Computes."


def test_attributes_and_methods_of_the_module_are_found() -> None:
    wrapped = wrap()
    assert wrapped.config == {"hidden": 3}
    assert wrapped.describe() == "a user's model with {'hidden': 3}"
    assert wrapped.layer is wrapped.get_module().layer
    with pytest.raises(AttributeError, match="nothing"):
        wrapped.nothing  # noqa: B018


def test_names_are_those_of_the_plain_model() -> None:
    model = User()
    wrapped = wrap(model)
    for kind in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        mine = [(name, id(each)) for name, each in getattr(wrapped, kind)()]
        assert mine == [(name, id(each)) for name, each in getattr(model, kind)()]
    assert [name for name, _ in wrapped.named_parameters(prefix="p")][0] == "p.layer.weight"
    assert list(wrapped.parameters())[0] is model.layer.weight
    assert len(list(wrapped.modules())) == 3


def test_levels_between_are_smps() -> None:
    model = User()
    wrapped = wrap(model)
    assert isinstance(wrapped.module, Level)
    assert wrapped.module.module is model
    assert wrapped.module.config is model.config
    assert wrapped.get_module() is model


def test_modes_reach_the_module() -> None:
    wrapped = wrap()
    assert wrapped.eval() is wrapped
    assert [module.training for module in wrapped.get_module().modules()] == [False] * 3
    assert not wrapped.training
    wrapped.train()
    assert [module.training for module in wrapped.get_module().modules()] == [True] * 3


def test_types_are_converted_in_the_same_objects() -> None:
    model = User()
    parameters = list(model.parameters())
    wrapped = wrap(model)
    assert wrapped.half() is wrapped
    assert {parameter.dtype for parameter in parameters} == {torch.float16}
    wrapped.to(torch.float64)
    assert {parameter.dtype for parameter in parameters} == {torch.float64}
    assert model.norm.num_batches_tracked.dtype == torch.int64


def test_what_lives_elsewhere_changes_its_type_only() -> None:
    model = User()
    model.layer.weight = nn.Parameter(torch.empty(3, 2, device="meta"))
    wrapped = wrap(model)
    wrapped.to(torch.bfloat16)
    assert model.layer.weight.is_meta
    assert model.layer.weight.dtype == model.layer.bias.dtype == torch.bfloat16


def test_gradients_flags_and_zero_grad_work() -> None:
    wrapped = wrap()
    wrapped.layer.weight.grad = torch.ones(3, 2)
    wrapped.zero_grad()
    assert wrapped.layer.weight.grad is None
    wrapped.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in wrapped.get_module().parameters())


def test_apply_reaches_every_module() -> None:
    seen: list[str] = []
    wrapped = wrap()
    wrapped.apply(lambda module: seen.append(type(module).__name__))
    assert {"Linear", "BatchNorm1d"} <= set(seen)
