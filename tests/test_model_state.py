"""A trace leaves the model as it was."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from smp_runtime.tracing.trace import trace_model

X = torch.zeros(2, 4)


class Stateful(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self, *, looks_at_values: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))
        self.plain = torch.zeros(3)
        self.counter = 0
        self.history: list[int] = []
        self.by_name = {"calls": {"inner": 0}}
        self.looks_at_values = looks_at_values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        self.history.append(self.counter)
        self.by_name["calls"]["inner"] += 1
        self.last_input = x
        self.steps += 1
        self.plain[0] = 7
        x.add_(1)
        x = self.drop(self.linear(self.norm(x))) * random.random() * np.random.rand()
        if self.looks_at_values and x.sum() > 1e9:
            x = x + 1
        return x


@pytest.mark.parametrize("looks_at_values", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("measure_times", [False, True])
def test_the_model_stays_as_it_was(looks_at_values, measure_times):
    model, x = Stateful(looks_at_values=looks_at_values), torch.ones(2, 4)
    fired = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: fired.append("forward"))
        module.register_forward_pre_hook(lambda *_: fired.append("pre"))
    parameters = dict(model.named_parameters())
    attributes = {path: dict(vars(module)) for path, module in model.named_modules()}
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    history, hooks = model.history, dict(model.linear._forward_hooks)

    trace = trace_model(model, (x,), measure_times=measure_times)

    source = "measured" if measure_times else "real" if looks_at_values else "fake"
    assert trace.source == source
    assert trace.drawing_modules == {"", "drop"}
    assert fired == []
    assert model.linear._forward_hooks == hooks
    assert all(now is parameters[name] for name, now in model.named_parameters())
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == attributes
    assert model.history is history and history == []
    assert model.by_name == {"calls": {"inner": 0}} and model.counter == 0
    assert all(torch.equal(now, tensors[name]) for name, now in model.state_dict().items())
    assert torch.equal(model.plain, torch.zeros(3)) and torch.equal(x, torch.ones(2, 4))
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_is_restored_when_its_forward_raises():
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear(x)
            raise KeyError("no such thing")

    model = Failing()
    weight = model.linear.weight
    with pytest.warns(UserWarning, match="declared order.*fake: KeyError.*real: KeyError"):
        trace = trace_model(model, (X,))
    assert trace.source == "declared"
    assert model.linear.weight is weight and not model.linear._forward_hooks


def test_hooks_fire_where_the_forward_needs_them():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_pre_hook(lambda module, args: (args[0]["x"],))
    assert trace_model(model, ({"x": X},)).source == "fake"


def test_dropout_that_is_off_does_not_draw():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0))
    assert trace_model(model, (X,)).drawing_modules == {"0"}
    assert trace_model(model.eval(), (X,)).drawing_modules == frozenset()


class OwnGenerators(nn.Module):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = torch.Generator().manual_seed(3)
        self.python = random.Random(3)
        self.numpy = [np.random.RandomState(3), np.random.default_rng(3)]
        self.linear = nn.Linear(4, 4)

    def draw(self) -> list[float]:
        drawn = [torch.rand(1, generator=self.torch).item(), self.python.random()]
        return drawn + [float(generator.uniform()) for generator in self.numpy]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if sum(self.draw()) > 0 else x


def test_generators_of_the_model_are_put_back():
    model = OwnGenerators()
    assert trace_model(model, (X,)).source == "fake"
    assert model.draw() == OwnGenerators().draw()
