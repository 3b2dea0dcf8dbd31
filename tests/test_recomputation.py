"""A checkpointed call computes what the plain one does, and leaves the same traces."""

import contextlib
import copy
import gc
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from smp_runtime.errors import NotSupportedError, RecomputationError
from smp_runtime.recomputing.known_calls import Habits, Known
from smp_runtime.recomputing.recomputation import Recomputation, Slot
from smp_runtime.recomputing.saved_bytes import SavedBytes

WIDTH = 6


class Checkpointed(nn.Module):
    """Calls a module checkpointed."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.__dict__["known"] = Known()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        modules = tuple(self.inner.named_modules())
        call = Recomputation("inner", self.inner, modules, True, self.known)
        return call.forward(args, kwargs)


def train(model: nn.Module, run: Callable[[nn.Module], Any]) -> Any:
    """Runs forward and backward of three microbatches and returns all that is left."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    losses = [run(model) for _ in range(3)]
    drawn = random.random(), float(np.random.rand()), torch.rand([]).item()
    torch.autograd.backward(losses)
    after = random.random(), float(np.random.rand()), torch.rand([]).item()
    return [loss.item() for loss in losses], drawn, after


def compare(build: Callable[[], nn.Module], run: Callable[[nn.Module], Any] | None = None) -> Any:
    """Asserts that a module and its checkpointed copy end alike, bit for bit; returns both."""
    torch.manual_seed(0)
    plain = build()
    checkpointed = Checkpointed(copy.deepcopy(plain))
    run = run or (lambda model: model(data()).square().mean())
    assert train(checkpointed, run) == train(plain, run)
    for (name, expected), found in zip(
        plain.named_parameters(), checkpointed.parameters(), strict=True
    ):
        if expected.grad is None:
            assert found.grad is None, name
        else:
            assert torch.equal(expected.grad, found.grad), name
    for (name, expected), found in zip(plain.named_buffers(), checkpointed.buffers(), strict=True):
        assert torch.equal(expected, found), name
    return plain, checkpointed.inner


def data(requires_grad: bool = True) -> Tensor:
    return torch.ones(5, WIDTH, requires_grad=requires_grad).cumsum(0)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.first(x)))


def test_statistics_of_normalisation_are_updated_once() -> None:
    plain, checkpointed = compare(Norm)
    assert checkpointed.norm.num_batches_tracked == plain.norm.num_batches_tracked == 3


class Counters(nn.Module):
    """Counts its calls in a buffer, an attribute and a list, and computes with the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("num_calls", torch.zeros(()))
        self.count, self.log, self.stats = 0, [], {"last": 0}
        self.state = type("State", (), {})()
        self.state.total = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.count += 1
        self.log.append(self.count)
        self.stats["last"] = len(self.log)
        self.state.total += self.stats["last"]
        x = torch.tanh(self.layer(x)) * float(self.num_calls) * self.count
        return torch.sin(x) if self.count % 2 else torch.cos(x * self.state.total)


def test_what_a_forward_changes_is_changed_once_and_seen_as_it_was() -> None:
    plain, checkpointed = compare(Counters)
    assert (checkpointed.count, checkpointed.log) == (3, [1, 2, 3])
    assert (checkpointed.stats, checkpointed.state.total) == ({"last": 3}, plain.state.total)


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.tanh(self.layer(x * random.random())))
        return x * float(np.random.rand()) if random.random() < 0.5 else torch.sin(x)


def test_random_numbers_are_drawn_again_and_the_generators_left_alone() -> None:
    compare(Draws)


class Auxiliary(nn.Module):
    """Leaves a loss in an attribute, and sums them in another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.total: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        self.loss = h.square().mean()
        self.total = self.total + self.loss
        return h


def test_a_loss_that_leaves_by_an_attribute_counts_once() -> None:
    def run(model: Any) -> Tensor:
        inner = getattr(model, "inner", model)
        return model(data()).mean() + inner.loss

    plain, checkpointed = compare(Auxiliary, run)
    assert torch.equal(plain.total, checkpointed.total)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_no_input_needs_a_gradient(is_frozen: bool) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        model[0].weight.requires_grad_(not is_frozen)
        return model

    compare(build, lambda model: model(torch.arange(7)).square().mean())


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, first: Any, *, scale: float, others: dict[str, Any] | None) -> Any:
        h = torch.tanh(self.layer(first[0] + first[1]["x"]))
        if others is not None and others["y"] is not None:
            h = h * others["y"].tanh()
        return {"out": (h * scale, [h.detach().argmax(1), None]), "name": "h"}


def test_arguments_and_results_of_any_structure() -> None:
    def run(model: nn.Module) -> Tensor:
        y = data().sin()
        out = model((data(), {"x": data()}), scale=0.5, others={"y": y, "z": None})
        assert out["name"] == "h" and out["out"][1][1] is None
        return out["out"][0].square().mean()

    compare(Structured, run)


def test_autocast_is_as_it_was() -> None:
    def run(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(data())
        assert out.dtype is torch.bfloat16
        return out.float().square().mean()

    compare(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)), run)


def test_modes_that_change_after_the_forward_are_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh())
    checkpointed = Checkpointed(copy.deepcopy(model))
    gradients = []
    for each in (model, checkpointed):
        torch.manual_seed(1)
        loss = each(data()).square().mean()
        each.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
        assert not each.training
        gradients.append(next(each.parameters()).grad)
        each.train()
    assert torch.equal(*gradients)


class InPlace(nn.Module):
    """Begins with a change of its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.first(x))) + x


def test_a_module_may_change_its_input() -> None:
    compare(InPlace, lambda model: model(data() - 2).square().mean())


def test_a_change_of_an_input_after_the_call_raises() -> None:
    model = Checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model(data())  # the first call is watched
    x = data().detach()
    loss = model(x).mean()
    x.add_(1)
    with pytest.raises(RecomputationError, match="an input of inner was changed in place after"):
        loss.backward()


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inside = Checkpointed(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU())
        )
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.after(self.inside(torch.tanh(self.before(x)))))


def test_checkpointed_calls_may_be_nested() -> None:
    compare(Nested)


class Differentiates(nn.Module):
    """Uses a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.tanh(self.layer(x)).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force + torch.sin(self.layer(x))


def test_a_forward_may_differentiate() -> None:
    compare(Differentiates)


class OwnFunction(torch.autograd.Function):
    """Reads what it saved twice, and saves its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.exp()
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[1] * ctx.saved_tensors[0].sign().abs()


class EndsInOwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = OwnFunction.apply(torch.tanh(self.layer(x)))
        return out


def test_a_function_of_the_users_own_may_come_last_and_nothing_is_left() -> None:
    _, model = compare(EndsInOwnFunction)
    checkpointed = Checkpointed(model)
    meter = SavedBytes(model.parameters())
    gc.collect()
    gc.disable()  # circles would be garbage that only the collector finds
    try:
        before = num_calls_alive()
        for _ in range(30):
            with meter.hooks():
                loss = checkpointed(data()).mean()
            loss.backward()
            assert meter.now == 0
        del loss
        if leaves_circles():
            gc.collect()
        assert num_calls_alive() == before
    finally:
        gc.enable()


class Stopped(Exception):
    """Raised by a hook."""


def leaves_circles() -> bool:
    """Returns whether torch makes garbage of a function that a hook stops, as 2.7 does.

    The function goes on holding the result that it was about to save, and the result holds it. The
    end of a recomputation is such a stop.
    """
    contexts = []

    class Noted(OwnFunction):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            contexts.append(weakref.ref(ctx))
            return OwnFunction.forward(ctx, x)

    def stop(_: Tensor) -> None:
        raise Stopped

    with (
        contextlib.suppress(Stopped),
        torch.autograd.graph.saved_tensors_hooks(stop, lambda tensor: tensor),
    ):
        Noted.apply(data())
    return contexts[0]() is not None


def num_calls_alive() -> int:
    return sum(type(each) in (Recomputation, Slot) for each in gc.get_objects())


def test_a_forward_hook_that_looks_on_sees_each_call_once() -> None:
    seen: list[Tensor] = []

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    plain, checkpointed = build(), Checkpointed(build())
    checkpointed.inner.load_state_dict(plain.state_dict())
    for model in (plain, checkpointed.inner):
        model[1].register_forward_hook(lambda m, a, out: seen.append(out.detach()))
        model[0].register_forward_hook(lambda m, a, out: out * 2)
    for model in (plain, checkpointed):
        torch.manual_seed(0)
        model(data()).square().mean().backward()
    assert len(seen) == 2 and torch.equal(*seen)
    assert torch.equal(plain[0].weight.grad, checkpointed.inner[0].weight.grad)


class Unsteady(nn.Module):
    """Does something else each time it runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.kind, self.__dict__["runs"] = kind, itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        is_first = next(self.runs) == 0
        x = torch.tanh(self.layer(x))
        if self.kind == "fewer":
            return torch.sin(torch.tanh(x)) if is_first else torch.sin(x).detach() + x
        if self.kind == "shape":
            return torch.tanh(x if is_first else torch.cat([x, x]))[:5]
        if self.kind == "dtype":
            return torch.tanh(x if is_first else x.double()).float()
        return torch.tanh((self.layer if is_first else self.wide)(x))[:, :WIDTH]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("fewer", "saved . tensors for its backward, but its forward saved"),
        ("shape", r"saved float32\[10, 6\] on cpu as tensor"),
        ("dtype", r"saved float64\[5, 6\] on cpu as tensor"),
        ("parameter", r"but its forward saved a parameter, float32\[6, 6\]"),
    ],
)
def test_another_second_run_raises_with_the_path(kind: str, message: str) -> None:
    model = Checkpointed(Unsteady(kind))
    model.known.habits[id(model.inner)] = Habits(is_known=True)
    loss = model(data()).sum()
    with pytest.raises(RecomputationError, match="recomputation of inner.*" + message):
        loss.backward()


class Scratch(nn.Module):
    """Changes a tensor that is neither buffer nor parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(WIDTH, WIDTH), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return torch.tanh(self.layer(x)) * float(self.seen)


def test_a_tensor_in_an_attribute_that_is_changed_in_place_raises_with_its_name() -> None:
    model = Checkpointed(Scratch())
    model(data())
    loss = model(data()).sum()
    with pytest.raises(NotSupportedError, match="attribute seen in place.*register_buffer"):
        loss.backward()


def test_a_parameter_that_changed_before_the_backward_raises() -> None:
    model = Checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model(data())
    loss = model(data()).sum()
    with torch.no_grad():
        model.inner[0].weight.add_(1)
    with pytest.raises(NotSupportedError, match="a parameter was changed in place between"):
        loss.backward()


def test_only_inputs_are_kept_between_the_passes() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
                            for _ in range(4)])  # fmt: skip
    wrapped = nn.Sequential(*map(Checkpointed, model))
    meter = SavedBytes(model.parameters())
    for block in wrapped:
        block.known.meter = meter
    input_bytes, intermediate_bytes = 32 * 64 * 4, 2 * 32 * 256 * 4
    for _ in range(3):
        meter.peak = 0
        with meter.hooks():
            loss = wrapped(torch.randn(32, 64, requires_grad=True)).sum()
            assert meter.now == 4 * input_bytes
            loss.backward()
        assert meter.now == 0
    assert meter.peak <= 4 * input_bytes + intermediate_bytes


class Noisy(nn.Module):
    """Draws one number of NumPy's pairs of normal numbers in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * np.random.randn() + random.gauss(0, 1))


def test_a_drawn_half_of_a_pair_is_drawn_again() -> None:
    compare(Noisy)
    compare(lambda: nn.Sequential(Checkpointed(Noisy()), Checkpointed(Noisy()), nn.Tanh()))
