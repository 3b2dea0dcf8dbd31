"""A parameter that is awaited has its values whenever something looks at them, and not before."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from smp_runtime.optimization import awaited_parameters
from smp_runtime.optimization.awaited_parameters import (
    AwaitedParameter,
    await_all,
    await_at_first_use,
)

OLD = torch.arange(4.0).view(2, 2)
NEW = OLD + 10


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    awaited_parameters._arrivals.clear()


class Sender:
    """Gives parameters their values when it is asked to, and counts that."""

    def __init__(self, *parameters: nn.Parameter, values: Tensor = NEW) -> None:
        self.parameters = parameters
        self.values = values
        self.num_calls = 0
        await_at_first_use(parameters, self.arrive)

    def arrive(self) -> None:
        self.num_calls += 1
        for parameter in self.parameters:
            parameter.data.copy_(self.values)


def awaited() -> tuple[nn.Parameter, Sender]:
    parameter = nn.Parameter(OLD.clone())
    return parameter, Sender(parameter)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def saved(parameter: nn.Parameter) -> Tensor:
    file = io.BytesIO()
    torch.save({"a": parameter}, file)
    file.seek(0)
    found: Tensor = torch.load(file)["a"]
    return found


def summed(parameter: nn.Parameter) -> Tensor:
    total = torch.zeros(2, 2)
    torch._foreach_add_([total], [parameter])
    return total


def in_a_module(parameter: nn.Parameter) -> Tensor:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = parameter
    found: Tensor = layer(torch.eye(2)).t()
    return found


def in_a_state_dict(parameter: nn.Parameter) -> Tensor:
    return nn.ParameterList([parameter]).state_dict()["0"]


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "operator": lambda p: p + 0,
    "operator_of_another": lambda p: torch.zeros(2, 2) + p,
    "function": lambda p: F.linear(torch.eye(2), p).t(),
    "module": in_a_module,
    "keyword": lambda p: torch.add(torch.zeros(2, 2), other=p),
    "list": lambda p: torch.stack([p])[0],
    "foreach": summed,
    "operator_by_name": lambda p: torch.ops.aten.add.Tensor(p, 0),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "array": lambda p: torch.tensor(p.detach().numpy()),
    "list_of_numbers": lambda p: torch.tensor(p.tolist()),
    "item": lambda p: torch.tensor([[q.item() for q in row] for row in p]),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch_save": saved,
    "state_dict": in_a_state_dict,
    "same_class": lambda p: type(p)(p.data),
    "autograd_function": lambda p: Doubled.apply(p) / 2,  # type: ignore[no-untyped-call]
    "vmap": lambda p: torch.vmap(lambda x: x @ p)(torch.eye(2)),
    "inference": lambda p: torch.inference_mode()(lambda: p * 1)(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_whatever_needs_the_values_waits_for_them(use: Callable[[nn.Parameter], Any]) -> None:
    parameter, sender = awaited()
    assert torch.equal(use(parameter).detach().clone(), NEW)
    assert sender.num_calls == 1
    assert type(parameter) is nn.Parameter


def test_text_and_addresses_wait_as_well() -> None:
    for use in (repr, str, nn.Parameter.data_ptr, nn.Parameter.untyped_storage, nn.Parameter.sum):
        parameter, sender = awaited()
        use(parameter)
        assert sender.num_calls == 1


def test_what_can_be_told_without_values_does_not_wait() -> None:
    parameter, sender = awaited()
    assert isinstance(parameter, nn.Parameter)
    assert (parameter.shape, parameter.dtype, parameter.device.type) == ((2, 2), OLD.dtype, "cpu")
    assert parameter.numel() == 4
    assert parameter.requires_grad
    assert parameter.is_leaf
    parameter.grad = torch.ones(2, 2)
    assert torch.equal(parameter.grad, torch.ones(2, 2))
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.zero_grad()
    assert parameter.grad is None
    parameter.requires_grad_(False)
    assert {parameter: 1}[parameter] == 1
    assert sender.num_calls == 0
    assert type(parameter) is AwaitedParameter


def test_parameters_sent_together_arrive_together() -> None:
    first, second, third = (nn.Parameter(OLD.clone()) for _ in range(3))
    sender, other = Sender(first, second), Sender(third)
    assert torch.equal(first + second, NEW * 2)
    assert [type(p) for p in (first, second, third)] == [
        *[nn.Parameter] * 2, AwaitedParameter
    ]  # fmt: skip
    await_all()
    await_all()
    assert (sender.num_calls, other.num_calls) == (1, 1)
    assert torch.equal(third, NEW)


def test_what_the_script_writes_is_written_after_the_arrival() -> None:
    parameter, _ = awaited()
    with torch.no_grad():
        parameter[0] = 0
    assert parameter.tolist() == [[0.0, 0.0], [12.0, 13.0]]
    layer = nn.Linear(2, 2, bias=False)
    sender = Sender(layer.weight)
    layer.load_state_dict({"weight": OLD})
    assert sender.num_calls == 1
    assert torch.equal(layer.weight, OLD)


def test_gradients_are_those_of_a_plain_parameter() -> None:
    x = torch.randn(3, 2)
    plain = nn.Parameter(NEW.clone())
    parameter, _ = awaited()
    for it in (parameter, plain):
        F.linear(x, it).square().sum().backward()  # type: ignore[no-untyped-call]
    assert parameter.grad is not None
    assert plain.grad is not None
    assert torch.equal(parameter.grad, plain.grad)


def test_the_arrival_counts_as_no_write() -> None:
    parameter, _ = awaited()
    before = parameter._version
    await_all()
    assert parameter._version == before


@pytest.mark.parametrize("train", [True, False])
def test_modules_that_hand_on_parameters_of_their_children_see_new_ones(train: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(2, 1).train(train)
    same = copy.deepcopy(attention)
    with torch.no_grad():
        same.out_proj.weight.copy_(NEW)
    x = torch.randn(3, 1, 2)
    Sender(attention.out_proj.weight)
    for ours, theirs in zip(attention(x, x, x), same(x, x, x), strict=True):
        assert torch.equal(ours, theirs)


class Watching(TorchDispatchMode):
    """Writes down the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_who_watches_operations_does_not_see_the_arrival() -> None:
    parameter, _ = awaited()
    with Watching() as watching:
        parameter.add(1)
    assert watching.seen == ["aten.add.Tensor"]
    parameter, sender = awaited()
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameter.add(1)
    assert sender.num_calls == 1
    assert torch.equal(parameter, NEW)


def test_an_arrival_that_fails_is_asked_again() -> None:
    parameter = nn.Parameter(OLD.clone())

    def arrive() -> None:
        raise RuntimeError("the line is dead")

    await_at_first_use([parameter], arrive)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the line is dead"):
            parameter.sum()
