"""Arguments of calls: what is compared between ranks, and what a call may change."""

import dataclasses
from typing import Any

import pytest
import torch

from smp_runtime.execution.arguments import (
    Arguments,
    Change,
    apply_change,
    change_of,
    contents,
    holds_values,
    mutable_arguments,
    opaque_arguments,
)


class Cache:
    """An object with state, as models hand on from layer to layer."""

    def __init__(self, **state: Any) -> None:
        vars(self).update(state)


@dataclasses.dataclass
class Options:
    flags: list[int]


def signature(*args: Any, **kwargs: Any) -> Any:
    return Arguments(args, kwargs).signature


def test_objects_are_compared_by_their_type() -> None:
    assert signature(Cache(a=1)) == signature(Cache(a=2))
    assert signature([Cache()]) != signature([object()])
    assert signature({1}) == signature({2})


def test_plain_values_and_positions_are_compared() -> None:
    x, y = torch.zeros(1), torch.zeros(2)
    assert signature((x, y), k=1) == signature((y, x), k=1)
    assert signature(x, y) != signature(x, x)
    assert signature(x, k=y) != signature(x, other=y)
    for one, other in ((1, 2), (1, True), ("a", "b"), (None, 0), (torch.float32, torch.float16)):
        assert signature(one) != signature(other)
    assert signature(0.1) == signature(0.2)


def test_keys_print_alike_on_every_rank() -> None:
    assert repr(signature(Cache(), torch.float32, [1])) == repr(
        signature(Cache(), torch.float32, [1])
    )


def test_tensors_are_found_in_the_order_in_which_they_are_replaced() -> None:
    x, y, z = (torch.full((1,), float(i)) for i in range(3))
    arguments = Arguments((x, [Options([1]), {"y": y}]), {"z": (z, x)})
    assert [id(tensor) for tensor in arguments.tensors] == [id(t) for t in (x, y, z, x)]
    args, kwargs = arguments.with_tensors([x + 1, y + 1, z + 1, x + 1])
    assert args[1][1]["y"] == 2 and kwargs["z"][0] == 3
    assert arguments.with_tensors([x, y, z, x])[0] is arguments.args


@pytest.mark.parametrize(
    "argument", [[1], {"a": 1}, {1}, Cache(), Options([1]), (1, [2]), len, torch.nn.Identity()]
)
def test_what_a_call_could_change_is_not_plain(argument: Any) -> None:
    assert not Arguments((argument,), {}).is_plain
    assert not Arguments((), {"argument": argument}).is_plain


def test_tensors_and_plain_values_are_plain() -> None:
    x = torch.zeros(1)
    plain = (x, (x, 1), 1, 2.0, None, "a", slice(1, x), int, x.shape, torch.float32)
    assert Arguments(plain, {"x": x, "n": (1, 2)}).is_plain


def test_opaque_are_the_objects_that_each_rank_has_for_itself() -> None:
    cache, function = Cache(), len
    nest = (torch.zeros(1), {"cache": cache, "n": 3}, [function, None, torch.float32])
    assert opaque_arguments(nest) == [cache, function]
    assert opaque_arguments({1, 2}) == []


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, False),
        (torch.zeros(1), False),
        ((torch.zeros(1), [None]), False),
        ({"loss": torch.zeros(1)}, False),
        (3, True),
        ((torch.zeros(1), "x"), True),
        ({"aux": [True]}, True),
        (Options([1]), True),
        (slice(3), True),
    ],
)
def test_results_with_plain_values_may_change(result: Any, expected: bool) -> None:
    assert holds_values(result, []) is expected


def test_arguments_handed_back_are_no_values() -> None:
    cache = Cache()
    assert not holds_values((torch.zeros(1), cache), [cache])
    assert holds_values((torch.zeros(1), cache), [])


def test_mutable_are_containers_and_objects() -> None:
    inner: list[int] = [1]
    outer, by_name, cache, options = [inner, 2], {"a": inner}, Cache(), Options([3])
    given = (outer, (cache,), by_name, options, torch.nn.Identity(), torch.zeros(1), "x", 1, None)
    found = list(mutable_arguments(given))
    expected = [outer, inner, cache, by_name, inner, options, options.flags]
    assert [id(each) for each in found] == [id(each) for each in expected]


@pytest.mark.parametrize(
    ("mutable", "held"),
    [
        ([1, 2], [1, 2]),
        ({1}, [1]),
        ({"a": 1}, {"a": 1}),
        (Cache(a=1), {"a": 1}),
        (Options([1]), {"flags": [1]}),
    ],
)
def test_contents_are_a_copy(mutable: Any, held: Any) -> None:
    assert contents(mutable) == held
    assert contents(mutable) is not mutable


def grow(held: list[int]) -> None:
    held.append(3)


def shrink(held: list[int]) -> None:
    held.pop()


@pytest.mark.parametrize("touch", [grow, shrink, lambda held: held.reverse()])
def test_changed_lists_are_found_and_changed_elsewhere(touch: Any) -> None:
    here, elsewhere = [1, 2], [1, 2]
    before = contents(here)
    touch(here)
    change = change_of(4, here, before)
    assert change == Change(4, here)
    apply_change(elsewhere, change.content)
    assert elsewhere == here


def test_changed_dicts_lose_and_gain_keys_elsewhere() -> None:
    here, elsewhere = {"a": 1, "b": 2}, {"a": 1, "b": 2}
    before = contents(here)
    del here["a"]
    here["c"] = 3
    change = change_of(0, here, before)
    assert change is not None
    apply_change(elsewhere, change.content)
    assert elsewhere == {"b": 2, "c": 3}


def test_of_an_object_only_the_changed_attributes_are_told() -> None:
    here, elsewhere = Cache(a=1, own="here"), Cache(a=1, own="elsewhere")
    before = contents(here)
    here.a = 2  # type: ignore[attr-defined]
    here.new = 3  # type: ignore[attr-defined]
    change = change_of(0, here, before)
    assert change == Change(0, {"a": 2, "new": 3})
    apply_change(elsewhere, change.content)
    assert vars(elsewhere) == {"a": 2, "own": "elsewhere", "new": 3}


def test_changed_sets_are_changed_elsewhere() -> None:
    here, elsewhere = {1, 2}, {1, 2}
    before = contents(here)
    here.add(3)
    change = change_of(0, here, before)
    assert change is not None
    apply_change(elsewhere, change.content)
    assert elsewhere == {1, 2, 3}


@pytest.mark.parametrize("mutable", [[1], {1}, {"a": 1}, Cache(a=1), Options([1]), [], {}])
def test_what_was_left_alone_has_no_change(mutable: Any) -> None:
    assert change_of(0, mutable, contents(mutable)) is None


def test_another_tensor_of_equal_content_is_a_change() -> None:
    held = {"state": torch.zeros(1)}
    before = contents(held)
    held["state"] = torch.zeros(1)
    assert change_of(0, held, before) is not None
