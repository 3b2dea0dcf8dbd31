from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional

from smp_runtime.planning.module_tree import ModuleNode
from smp_runtime.tracing.op_cost import CPU, parameter_gradient_cost
from smp_runtime.tracing.trace import trace_model

X = torch.zeros(2, 4)


def nodes(root: ModuleNode) -> dict[str, ModuleNode]:
    return {node.path: node for node in root.walk()}


class Residual(nn.Module):
    """Declares its layers in another order than it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.first(x).relu())


def test_order_is_that_of_execution():
    tree = nodes(trace_model(Residual(), (X,)).root)
    assert {path: node.calls for path, node in tree.items()} == {
        "": (0,),
        "first": (1,),
        "last": (2,),
        "unused": (),
    }


def test_a_module_called_twice_has_two_calls():
    shared = nn.Linear(4, 4)
    tree = nodes(trace_model(nn.Sequential(shared, nn.ReLU(), shared), (X,)).root)
    assert tree["0"].calls == (1, 3)
    assert "2" not in tree  # A module has one path, its first.


def test_facts_are_those_of_the_parameters_and_persistent_buffers():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
            self.register_buffer("kept", torch.ones(2, dtype=torch.float64))
            self.register_buffer("derived", torch.ones(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    weight, kept = trace_model(Holder(), (X,)).root.own_parameters
    assert (weight.name, weight.num_elements, weight.bytes) == ("weight", 4, 16)
    assert (weight.requires_grad, weight.is_buffer, weight.first_use) == (False, False, 1)
    assert (kept.name, kept.bytes, kept.is_buffer, kept.first_use) == ("kept", 16, True, None)


def test_a_shared_parameter_has_one_group():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    facts = dict(trace_model(model, (X,)).root.facts())
    assert facts["0.weight"].group == facts["1.weight"].group


def test_cost_of_a_linear_is_three_products():
    rows, inner, outer = 512, 1024, 2048
    model = nn.Sequential(nn.Linear(inner, inner, bias=False), nn.Linear(inner, outer, bias=False))
    tree = nodes(trace_model(model, (torch.zeros(rows, inner),)).root)
    product = 2 * rows * inner * outer / CPU.flops
    gradient = parameter_gradient_cost(4 * inner * outer, CPU)
    assert tree["1"].compute == pytest.approx(3 * product + gradient, rel=0.01)
    # The first one needs no gradient of its input.
    assert tree["0"].compute == pytest.approx(2 * product / 2 + gradient / 2, rel=0.01)


def test_frozen_modules_have_no_backward():
    frozen = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
    tree = nodes(trace_model(nn.Sequential(frozen), (torch.zeros(512, 1024),)).root)
    assert tree["0"].compute == pytest.approx(2 * 512 * 1024 * 1024 / CPU.flops, rel=0.01)
    assert tree["0"].activation_bytes == 0


def test_activations_are_what_autograd_saves():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    tree = nodes(trace_model(model, (X,)).root)
    # The input of the first, the result of the ReLU, which is also the input of the last.
    assert [tree[path].activation_bytes for path in "012"] == [2 * 4 * 4, 2 * 8 * 4, 0]
    assert [tree[path].output_bytes for path in "012"] == [2 * 8 * 4, 2 * 8 * 4, 2 * 3 * 4]


def test_the_loss_is_charged_to_the_head():
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 1000)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.head(self.body(x)), y)

    tree = nodes(trace_model(Classifier(), (X, torch.zeros(2, dtype=torch.long))).root)
    assert {cost.origin for cost in tree[""].own_costs if cost.compute} == {tree["head"].order}


# What may be placed as a whole.


def test_a_module_entered_from_outside_is_not_closed():
    class Peeking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.Linear(4, 4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body.a(self.body(x))

    tree = nodes(trace_model(Peeking(), (X,)).root)
    assert [path for path, node in tree.items() if not node.is_closed] == ["body"]


def test_two_parents_of_one_module_are_not_closed_but_glue_may_be_shared():
    class Parent(nn.Module):
        def __init__(self, child: nn.Module, act: nn.Module) -> None:
            super().__init__()
            self.own, self.child, self.act = nn.Linear(4, 4), child, act

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.child(self.own(x)))

    act = nn.ReLU()
    shared = nn.Linear(4, 4)
    tree = nodes(trace_model(nn.Sequential(Parent(shared, act), Parent(shared, act)), (X,)).root)
    assert [path for path, node in tree.items() if not node.is_closed] == ["0", "1"]
    tree = nodes(
        trace_model(
            nn.Sequential(Parent(nn.Linear(4, 4), act), Parent(nn.Linear(4, 4), act)), (X,)
        ).root
    )
    assert all(node.is_closed for node in tree.values())


def test_using_a_childs_parameter_without_calling_it_is_opaque():
    model = nn.Sequential(nn.MultiheadAttention(4, 2, batch_first=True))
    attention = model[0]
    x = torch.zeros(1, 3, 4)
    tree = nodes(trace_model(attention, (x, x, x)).root)
    assert tree[""].is_opaque and tree[""].is_closed
    assert tree["out_proj"].calls == ()


class Outside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, modules):
        for module in modules:
            x = module(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class InFunction(nn.Module):
    """Calls some of its layers inside an autograd function."""

    def __init__(self, num_inside: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.num_inside = num_inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Outside.apply(x, self.layers[: self.num_inside])
        for layer in self.layers[self.num_inside :]:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("num_inside", "indivisible"), [(0, []), (1, ["1.layers.0"]), (2, ["1"]), (3, ["1"])]
)
def test_what_an_autograd_function_calls_is_indivisible(num_inside, indivisible):
    native = torch.autograd.Function.apply
    model = nn.Sequential(nn.Linear(4, 4), InFunction(num_inside))
    tree = nodes(trace_model(model, (X,)).root)
    assert [path for path, node in tree.items() if node.is_indivisible] == indivisible
    assert torch.autograd.Function.apply == native


def test_the_whole_model_is_never_indivisible():
    tree = nodes(trace_model(InFunction(3), (X,)).root)
    assert not any(node.is_indivisible for node in tree.values())


def test_layers_inside_torchs_checkpointing_may_live_apart():
    class Checkpointed(InFunction):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            run = nn.Sequential(*self.layers)
            return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=True)

    tree = nodes(trace_model(nn.Sequential(nn.Linear(4, 4), Checkpointed(3)), (X,)).root)
    assert not any(node.is_indivisible for node in tree.values())


def test_a_parameter_given_as_an_argument_keeps_the_receiver_closed():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return x * scale + self.bias

    class Giver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.child = Scale()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.child(x, self.scale)

    tree = nodes(trace_model(Giver(), (X,)).root)
    assert all(node.is_closed for node in tree.values())


# Where it cannot run on fake tensors.


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) if x.sum() == 0 else self.a(x)


def test_a_branch_on_a_value_runs_for_real():
    trace = trace_model(Branching(), (X,))
    assert trace.source == "real"
    assert nodes(trace.root)["b"].calls == (2,)
    assert nodes(trace.root)["a"].activation_bytes == 2 * 4 * 4


def test_on_meta_the_declared_order_has_to_do():
    with torch.device("meta"):
        model = Branching()
    with pytest.warns(UserWarning, match="DataDependent"):
        trace = trace_model(model, (X,))
    assert trace.source == "declared"
    assert [node.calls for node in trace.root.walk()] == [(0,), (1,), (2,)]
    assert trace.drawing_modules == {"", "a", "b"}


def test_measured_times_are_those_of_the_clock():
    model = nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 8))
    tree = nodes(trace_model(model, (torch.zeros(64, 256),), measure_times=True).root)
    assert 0 < tree["1"].compute < tree["0"].compute < 1
