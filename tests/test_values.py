"""Tags, cells and stand-ins."""

import pytest
import torch

from smp_runtime.errors import UsageError
from smp_runtime.execution.values import Cell, StandIn, Value, tag, tag_of
from smp_runtime.tensors import TensorMeta, meta_of


def make_value(tensor: torch.Tensor, cell: Cell) -> Value:
    return Value("scope", 3, meta_of(tensor), 1, cell, "an origin", 0)


def stand_in(requires_grad: bool = False) -> StandIn:
    meta = TensorMeta((2, 3), (1, 2), torch.bfloat16, torch.device("cpu"), requires_grad)
    return StandIn(meta)


def test_a_value_belongs_to_the_owner_of_its_cell() -> None:
    cell = Cell(1)
    first, second = make_value(torch.zeros(1), cell), make_value(torch.zeros(2), cell)
    assert (first.owner, second.owner, cell.num_values) == (1, 1, 2)
    cell.owner = 0
    assert (first.owner, second.owner) == (0, 0)


def test_a_new_value_has_no_copies() -> None:
    value = make_value(torch.zeros(1), Cell(0))
    assert (value.copies, value.awaited, value.aliases, value.base) == ({}, {}, {}, None)


def test_a_tag_is_of_one_tensor_object() -> None:
    tensor = torch.zeros(2)
    value = make_value(tensor, Cell(0))
    assert tag_of(tensor) is None
    tag(tensor, value)
    assert tag_of(tensor) is value
    assert tag_of(tensor.view(2)) is None
    assert tag_of(tensor.clone()) is None


def test_a_stand_in_looks_like_its_meta() -> None:
    made = stand_in(requires_grad=True)
    assert isinstance(made, torch.Tensor)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.bfloat16)
    assert (made.device.type, made.requires_grad) == ("cpu", True)
    assert meta_of(made) == TensorMeta(
        (2, 3), (1, 2), torch.bfloat16, torch.device("cpu"), requires_grad=True
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda made: made + 1,
        lambda made: torch.relu(made),
        lambda made: made.sum(),
        lambda made: made[0],
        lambda made: made.zero_(),
        lambda made: made.bool(),
    ],
)
def test_there_is_nothing_to_compute_with(use: object) -> None:
    with pytest.raises(UsageError, match=r"data is on another pipeline rank.*@smp\.step"):
        use(stand_in())  # type: ignore[operator]


def test_a_detached_stand_in_is_a_stand_in() -> None:
    detached = stand_in(requires_grad=True).detach()
    assert type(detached) is StandIn
    assert detached.shape == (2, 3)
    assert not detached.requires_grad


def test_a_stand_in_can_carry_a_tag() -> None:
    made = stand_in()
    value = make_value(made, Cell(1))
    tag(made, value)
    assert tag_of(made) is value
