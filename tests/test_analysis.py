"""What an operation does to tensors is found without their data, and remembered by signature."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from smp_runtime.execution.analysis import (
    Analyser,
    Effect,
    New,
    Same,
    autocast_state,
    fill,
    signature,
)
from smp_runtime.tensors import meta_of
from smp_runtime.trees import iter_tensors


def effect_of(
    func: Callable[..., Any],
    *args: Any,
    analyser: Analyser | None = None,
    **kwargs: Any,
) -> Effect:
    operands = list(iter_tensors((args, kwargs)))
    metas = [meta_of(operand) for operand in operands]
    return (analyser or Analyser()).effect(func, args, kwargs, operands, metas)


def result_of(effect: Effect) -> New:
    (result,) = effect.results
    assert isinstance(result, New)
    return result


X = torch.zeros(2, 3)


def test_a_new_result_has_its_shape_and_type() -> None:
    effect = effect_of(torch.matmul, X, torch.zeros(3, 5))
    assert effect.known
    assert result_of(effect).meta.describe() == "float32[2, 5]"
    assert result_of(effect).view_of is None
    assert effect.changed == ()
    assert result_of(effect_of(torch.Tensor.__gt__, X, 0)).meta.dtype == torch.bool


def test_a_result_keeps_the_layout_that_torch_would_give_it() -> None:
    images = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert result_of(effect_of(torch.relu, images)).meta.stride == images.stride()
    assert result_of(effect_of(torch.relu, X.t())).meta.stride == (1, 3)


@pytest.mark.parametrize(
    ("func", "args", "stride"),
    [
        (torch.Tensor.view, (3, 2), (2, 1)),
        (torch.Tensor.t, (), (1, 3)),
        (torch.Tensor.__getitem__, (slice(1, 2),), (3, 1)),
        (torch.Tensor.unsqueeze, (0,), (6, 3, 1)),
        (torch.Tensor.expand, (4, 2, 3), (0, 3, 1)),
        (torch.Tensor.detach, (), (3, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_views_are_known_as_such(func: Any, args: Any, stride: tuple[int, ...]) -> None:
    result = result_of(effect_of(func, X, *args))
    assert result.view_of == 0
    assert result.meta.stride == stride


def test_the_viewed_operand_is_named() -> None:
    other = torch.zeros(3, 2)
    assert result_of(effect_of(lambda x, y: y.view(6), X, other)).view_of == 1


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (torch.Tensor.contiguous, ()),
        (torch.Tensor.to, (torch.float32,)),
        (torch.Tensor.float, ()),
        (torch.Tensor.cpu, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_result_may_be_the_operand(func: Any, args: Any) -> None:
    assert effect_of(func, X, *args).results == (Same(0),)


def test_a_result_is_new_where_something_has_to_be_done() -> None:
    assert isinstance(effect_of(torch.Tensor.contiguous, X.t()).results[0], New)
    assert isinstance(effect_of(torch.Tensor.to, X, torch.float64).results[0], New)


def test_dropout_off_gives_a_new_tensor_or_the_operand_as_torch_does() -> None:
    x = torch.zeros(2)
    is_same = F.dropout(x, training=False) is x
    result = effect_of(F.dropout, x, training=False).results[0]
    assert isinstance(result, Same) is is_same


def test_change_in_place_is_found_and_its_result_is_the_operand() -> None:
    effect = effect_of(torch.Tensor.add_, X, torch.ones(3))
    assert effect.changed == ((0, meta_of(X)),)
    assert effect.results == (Same(0),)


def test_setting_an_item_changes_and_returns_nothing() -> None:
    effect = effect_of(torch.Tensor.__setitem__, X, (slice(None), 0), torch.ones(2))
    assert effect.known
    assert effect.template is None
    assert [index for index, _ in effect.changed] == [0]


def test_a_change_through_a_view_is_of_the_operand() -> None:
    effect = effect_of(lambda x: x[0].zero_(), X)
    assert [index for index, _ in effect.changed] == [0]


def test_a_change_may_make_an_operand_require_gradients() -> None:
    weight = torch.zeros(3, requires_grad=True)
    ((index, meta),) = effect_of(torch.Tensor.add_, X, weight).changed
    assert index == 0
    assert meta.requires_grad


def test_what_is_written_to_out_is_changed() -> None:
    out = torch.zeros(2, 3)
    effect = effect_of(torch.add, X, 1, out=out)
    assert [index for index, _ in effect.changed] == [1]
    assert effect.results == (Same(1),)


def test_one_tensor_in_two_places_is_one_operand() -> None:
    effect = effect_of(torch.Tensor.mul_, X, X)
    assert [index for index, _ in effect.changed] == [0]


def test_several_results_have_a_template() -> None:
    effect = effect_of(torch.max, X, 1)
    assert type(effect.template) is torch.return_types.max
    assert [result.meta.dtype for result in effect.results if isinstance(result, New)] == [
        torch.float32,
        torch.int64,
    ]
    parts = effect_of(torch.split, X, 2, dim=1)
    assert [part.meta.shape for part in parts.results if isinstance(part, New)] == [(2, 2), (2, 1)]
    assert [part.view_of for part in parts.results if isinstance(part, New)] == [0, 0]


def test_plain_results_are_known() -> None:
    assert effect_of(torch.Tensor.size, X, 1).template == 3
    assert effect_of(lambda x: (True, x.dim(), None), X).template == (True, 2, None)


def test_the_text_of_a_tensor_is_only_known_with_its_data() -> None:
    assert not effect_of(torch.Tensor.__repr__, X).known
    assert not effect_of(torch.Tensor.__format__, X, "").known


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (torch.Tensor.item, ()),
        (torch.Tensor.tolist, ()),
        (torch.Tensor.__bool__, ()),
        (torch.nonzero, ()),
        (torch.unique, ()),
        (torch.masked_select, (torch.ones(()).bool(),)),
        (torch.Tensor.numpy, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_only_the_data_can_tell(func: Any, args: Any) -> None:
    effect = effect_of(func, torch.zeros(()), *args)
    assert not effect.known
    assert effect.results == ()


def test_wrong_calls_are_left_to_the_owner() -> None:
    assert not effect_of(torch.matmul, X, X).known


def test_gradients_are_required_of_what_follows_from_parameters() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    assert result_of(effect_of(torch.add, X, weight)).meta.requires_grad
    with torch.no_grad():
        assert not result_of(effect_of(torch.add, X, weight)).meta.requires_grad
    assert not result_of(effect_of(torch.Tensor.argmax, weight)).meta.requires_grad


def test_operands_with_gaps_keep_them_and_are_not_changed_by_being_read() -> None:
    h = torch.zeros(2, 4, requires_grad=True) * 1
    effect = effect_of(torch.mul, h.split([1, 3], dim=1)[1], 2)
    assert effect.changed == ()
    viewed = effect_of(torch.Tensor.__getitem__, h.split([1, 3], dim=1)[1], (slice(None), 0))
    assert result_of(viewed).meta.stride == (4,)
    assert viewed.changed == ()


def test_a_parameter_may_not_be_changed_but_what_was_computed_may() -> None:
    assert not effect_of(torch.Tensor.add_, torch.nn.Parameter(torch.zeros(3)), 1).known
    assert effect_of(torch.Tensor.add_, torch.zeros(3, requires_grad=True) * 1, 1).known


def test_the_operands_are_untouched() -> None:
    x = torch.zeros(2)
    effect_of(torch.Tensor.add_, x, 1)
    assert x.tolist() == [0.0, 0.0]
    assert x._version == 0


def test_inference_mode_does_not_disturb() -> None:
    with torch.inference_mode():
        assert effect_of(torch.Tensor.add_, torch.zeros(2), 1).changed != ()


class Counted:
    """A function that knows how often it ran."""

    def __init__(self) -> None:
        self.num_runs = 0

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.num_runs += 1
        return x + 1


def runs(*calls: tuple[Sequence[Any], Mapping[str, Any]]) -> int:
    func, analyser = Counted(), Analyser()
    for args, kwargs in calls:
        effect_of(func, *args, analyser=analyser, **kwargs)
    return func.num_runs


def test_equal_calls_are_analysed_once() -> None:
    assert runs(((X,), {}), ((torch.ones(2, 3),), {}), ((X.clone(), ), {})) == 1  # fmt: skip
    assert runs(((X, [1, "a"], slice(2)), {"b": (3,)}), ((X, [1, "a"], slice(2)), {"b": (3,)})) == 1


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.zeros(3, 2),), {}),
        ((torch.zeros(3, 2).t(),), {}),
        ((X.double(),), {}),
        ((torch.zeros(2, 3, requires_grad=True),), {}),
        ((X, 1), {}),
        ((X,), {"dim": 1}),
    ],
)
def test_other_calls_are_analysed_again(args: Any, kwargs: Any) -> None:
    assert runs(((X,), {}), (args, kwargs)) == 2


def test_numbers_that_are_equal_are_not_alike() -> None:
    assert runs(((X, 1), {}), ((X, 1.0), {}), ((X, True), {})) == 3


def test_the_same_operand_twice_differs_from_two_alike() -> None:
    assert runs(((X, X), {}), ((X, X.clone()), {})) == 2


def test_grad_mode_and_autocast_are_part_of_the_signature() -> None:
    func, analyser = Counted(), Analyser()
    effect_of(func, X, analyser=analyser)
    with torch.no_grad():
        effect_of(func, X, analyser=analyser)
    assert func.num_runs == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        effect_of(func, X, analyser=analyser)
    with torch.autocast("cpu", dtype=torch.float16):
        effect_of(func, X, analyser=analyser)
    assert func.num_runs == 4


def test_autocast_changes_the_type_of_results() -> None:
    analyser = Analyser()
    w = torch.zeros(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = effect_of(torch.matmul, X, w, analyser=analyser)
    high = effect_of(torch.matmul, X, w, analyser=analyser)
    assert result_of(low).meta.dtype == torch.bfloat16
    assert result_of(high).meta.dtype == torch.float32


def test_what_has_no_hash_is_analysed_each_time() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

    assert runs(((X, Unhashable()), {}), ((X, Unhashable()), {})) == 2


def test_templates_are_filled_with_tensors() -> None:
    effect = effect_of(torch.max, X, 1)
    tensors = [torch.ones(2), torch.zeros(2)]
    filled = fill(effect.template, lambda index: tensors[index])
    assert type(filled) is torch.return_types.max
    assert filled.values is tensors[0]
    assert filled.indices is tensors[1]
    effect = effect_of(lambda x: {"a": [x, None], "b": (x + 1, 3)}, X)
    filled = fill(effect.template, lambda index: index)
    assert filled == {"a": [0, None], "b": (1, 3)}


def test_signatures_put_positions_in_the_place_of_tensors() -> None:
    x, y = torch.zeros(1), torch.zeros(1)
    positions = {id(x): 0, id(y): 1}
    assert signature([x, y], positions) == (list, (..., 0), (..., 1))
    assert signature([x, y], positions) != signature([y, x], positions)
    assert signature((x,), positions) != signature([x], positions)
    assert signature({"a": slice(1, 2)}, {}) == signature({"a": slice(1, 2)}, {})
    with pytest.raises(TypeError, match="object is no plain value"):
        signature([object()], {})


def test_autocast_state_is_empty_where_it_is_off() -> None:
    assert autocast_state() == ()
    with torch.autocast("cpu", dtype=torch.float16):
        assert ("cpu", True, torch.float16) in autocast_state()
