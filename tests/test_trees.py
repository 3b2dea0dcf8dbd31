"""Nests: types and identities survive a map; references survive a trip through bytes."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from smp_runtime.trees import freeze, is_container, iter_tensors, map_tensors, thaw

ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


class Pair(NamedTuple):
    left: Any
    right: Any


OldPair = namedtuple("OldPair", ["left", "right"])


@dataclasses.dataclass
class Options:
    mask: Any
    name: str = "options"


@dataclasses.dataclass(frozen=True)
class Fixed:
    mask: Any


class Batch(dict[str, Any]):
    """A dict subclass with an attribute of its own, as tokenizers return."""


def double(nest: Any) -> Any:
    return map_tensors(lambda tensor: tensor * 2, nest)


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        ((1,), True),
        ([], True),
        ({}, True),
        ({1}, True),
        (slice(1), True),
        (Options(None), True),
        (Options, False),
        ("text", False),
        (torch.zeros(1), False),
        (torch.nn.Identity(), False),
    ],
)
def test_what_a_container_is(obj: object, expected: bool) -> None:
    assert is_container(obj) is expected


def test_map_replaces_tensors_and_nothing_else() -> None:
    marker = object()
    nest = {"a": [ONE, (TWO, "x", None)], "b": marker}
    result = double(nest)
    assert result == {"a": [2.0, (4.0, "x", None)], "b": marker}
    assert result["b"] is marker
    assert nest["a"][0] is ONE


@pytest.mark.parametrize(
    "nest",
    [
        (ONE, TWO),
        [ONE, TWO],
        Pair(ONE, TWO),
        OldPair(ONE, TWO),
        OrderedDict(b=ONE, a=TWO),
        {"left": ONE, "right": TWO},
        Options([ONE, TWO]),
        Fixed((ONE, TWO)),
        torch.return_types.max((ONE, TWO)),
        BaseModelOutput(last_hidden_state=ONE, hidden_states=(TWO,)),
        slice(ONE, TWO),
        Batch(left=ONE, right=TWO),
        {"deep": [Pair(Options(ONE), {"x": TWO})]},
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_types_survive(nest: Any) -> None:
    result = double(nest)
    assert type(result) is type(nest)
    assert [tensor.item() for tensor in iter_tensors(result)] == [2.0, 4.0]
    assert [tensor.item() for tensor in iter_tensors(nest)] == [1.0, 2.0]


def test_fields_and_attributes_of_special_dicts_survive() -> None:
    output = double(BaseModelOutput(last_hidden_state=ONE))
    assert output.last_hidden_state.item() == output["last_hidden_state"].item() == 2.0
    assert double(defaultdict(list, a=ONE))["missing"] == []
    batch = Batch(a=ONE)
    batch.encoding = "kept"  # type: ignore[attr-defined]
    assert double(batch).encoding == "kept"
    assert double(Options(ONE, name="kept")).name == "kept"
    assert list(double(OrderedDict(b=ONE, a=TWO))) == ["b", "a"]


@pytest.mark.parametrize(
    "nest",
    [
        (ONE, [TWO]),
        {"a": ONE},
        {ONE},
        Pair(ONE, None),
        Options(ONE),
        BaseModelOutput(last_hidden_state=ONE),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_nothing_changed_means_the_same_object(nest: Any) -> None:
    assert map_tensors(lambda tensor: tensor, nest) is nest


def test_the_unchanged_parts_of_a_changed_nest_are_the_same_objects() -> None:
    kept = [TWO]
    result = map_tensors(lambda tensor: ONE if tensor is ONE else tensor, [kept, torch.zeros(1)])
    assert result[0] is kept
    result = map_tensors(lambda tensor: tensor if tensor is TWO else TWO, [kept, ONE])
    assert result[0] is kept
    assert result[1] is TWO


def test_sets_are_mapped() -> None:
    assert {tensor.item() for tensor in double({ONE, TWO})} == {2.0, 4.0}


def test_iter_visits_in_the_order_of_map() -> None:
    nest = {"b": [ONE, Pair(TWO, Options(ONE))], "a": slice(TWO, None, ONE)}
    visited: list[torch.Tensor] = []
    map_tensors(lambda tensor: visited.append(tensor) or tensor, nest)
    found = list(iter_tensors(nest))
    assert [tensor.item() for tensor in found] == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert all(a is b for a, b in zip(found, visited, strict=True))


def test_iter_finds_nothing_in_leaves() -> None:
    assert list(iter_tensors([1, "x", None, torch.nn.Linear(1, 1)])) == []


def test_freeze_leaves_tensors_out_and_thaw_puts_others_in() -> None:
    left_out: list[torch.Tensor] = []

    def refer(obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if not any(obj is tensor for tensor in left_out):
            left_out.append(obj)
        return [obj is tensor for tensor in left_out].index(True)

    nest = BaseModelOutput(last_hidden_state=ONE, hidden_states=(TWO, TWO))
    frozen = freeze(nest, refer)
    assert isinstance(frozen, bytes)
    assert len(frozen) < 500
    assert [tensor.item() for tensor in left_out] == [1.0, 2.0]
    result = thaw(frozen, lambda index: torch.tensor(10.0 * (index + 1)))
    assert type(result) is BaseModelOutput
    assert result.last_hidden_state.item() == 10.0
    assert [tensor.item() for tensor in result.hidden_states] == [20.0, 20.0]


def test_references_may_stand_for_any_object() -> None:
    module = torch.nn.Identity()
    frozen = freeze([module, {"n": 3}], lambda obj: ("module", 0) if obj is module else None)
    result = thaw(frozen, lambda reference: reference)
    assert result == [("module", 0), {"n": 3}]


def test_equal_nests_freeze_to_equal_bytes() -> None:
    def frozen(value: float) -> bytes:
        return freeze({"x": [torch.tensor(value)], "y": (1, "z")}, lambda obj: (
            0 if isinstance(obj, torch.Tensor) else None
        ))  # fmt: skip

    assert frozen(1.0) == frozen(2.0)


def test_what_cannot_be_pickled_raises() -> None:
    with pytest.raises(Exception, match="pickle"):
        freeze([lambda: None], lambda obj: None)
