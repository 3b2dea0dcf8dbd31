"""Arguments are cut along their batch dimension, and results are joined with their types kept."""

import argparse
import dataclasses
import logging
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from smp_runtime.errors import MicrobatchError
from smp_runtime.microbatch import Splitter, StepOutput, join


def output() -> StepOutput:
    return StepOutput([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 6.0]])])


def test_outputs_are_a_list_by_microbatch() -> None:
    assert [tensor.tolist() for tensor in output().outputs] == [[[1.0, 2.0]], [[3.0, 6.0]]]
    assert len(output()) == 2


def test_reductions() -> None:
    assert output().reduce_mean().tolist() == [[2.0, 4.0]]
    assert output().reduce_sum().tolist() == [[4.0, 8.0]]


def test_concat_and_stack() -> None:
    assert output().concat().tolist() == [[1.0, 2.0], [3.0, 6.0]]
    assert output().stack().tolist() == [[[1.0, 2.0]], [[3.0, 6.0]]]


def test_concat_of_scalars_is_a_vector() -> None:
    assert StepOutput([torch.tensor(1.0), torch.tensor(2.0)]).concat().tolist() == [1.0, 2.0]


def test_counts_can_be_summed() -> None:
    counts = StepOutput([torch.tensor(3), torch.tensor(4)])
    assert counts.reduce_sum().item() == 7


def test_detach_cuts_the_graph() -> None:
    weight = torch.ones(1, requires_grad=True)
    attached = StepOutput([weight * 2])
    assert not attached.detach().outputs[0].requires_grad
    assert attached.outputs[0].requires_grad


def test_output_shows_its_tensors() -> None:
    assert repr(StepOutput([torch.tensor(1)])) == "StepOutput([tensor(1)])"


class Pair(NamedTuple):
    left: Any
    right: Any


class Sliceable:
    """Splits itself, and remembers how it was asked to."""

    def __init__(self, asked: tuple[int, int, int] | None = None) -> None:
        self.asked = asked

    def smp_slice(self, num_microbatches: int, microbatch: int, axis: int) -> "Sliceable":
        return Sliceable((num_microbatches, microbatch, axis))


def split(
    value: Any, num: int = 2, whole: tuple[str, ...] = (), axes: dict[str, int] | None = None
) -> list[Any]:
    """Splits the one argument `x`."""
    splitter = Splitter(lambda x: None, whole, axes or {})
    return [args[0] for args, _ in splitter.split((value,), {}, num)]


def test_tensors_are_cut_along_the_first_dimension() -> None:
    parts = split(torch.arange(8).view(4, 2))
    assert [part.tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_parts_share_the_memory_of_the_whole() -> None:
    whole = torch.zeros(4)
    assert split(whole)[1].data_ptr() == whole[2:].data_ptr()


def test_a_change_in_place_is_counted_for_its_microbatch_only() -> None:
    tokens = torch.arange(12).view(4, 3)
    splitter = Splitter(lambda x, y, z: None, ["z"], {})
    calls = [args for args, _ in splitter.split((tokens[:, :-1], tokens[:, 1:], tokens), {}, 2)]
    before = [[tensor._version for tensor in args] for args in calls]
    calls[1][1].mul_(10)
    after = [[tensor._version for tensor in args] for args in calls]
    changes = [
        [b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)
    ]
    assert changes == [[0, 0, 0], [1, 1, 0]]  # x and y of one microbatch share their memory
    assert calls[1][0].tolist() == [[6, 70], [9, 100]]
    assert tokens.tolist() == [[0, 1, 2], [3, 4, 5], [6, 70, 80], [9, 100, 110]]
    assert calls[0][2] is calls[1][2] is tokens


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 2, requires_grad=True),
        torch.ones(4, 2, requires_grad=True) * 2,
        torch.tensor([1j, 2j, 3j, 4j]).conj(),
        torch.ones(4, 2).view(torch.int32),
        torch.nn.Buffer(torch.ones(4, 2)),
    ],
    ids=["leaf", "history", "conjugate", "other dtype", "buffer"],
)
def test_other_tensors_are_cut_as_torch_does(tensor: torch.Tensor) -> None:
    for part, expected in zip(split(tensor), tensor.chunk(2), strict=True):
        assert torch.equal(part, expected)
        assert part.requires_grad is tensor.requires_grad
        assert (part.grad_fn is None) is (expected.grad_fn is None)
        assert part.data_ptr() == expected.data_ptr()


def test_positional_and_keyword_arguments_stay_what_they_are() -> None:
    splitter = Splitter(lambda model, x, *, y=None, **rest: None, (), {})
    x, y, z = torch.arange(2), torch.arange(2, 4), torch.arange(4, 6)
    first, second = splitter.split(("model", x), {"y": y, "z": z}, 2)
    assert first == (("model", torch.tensor([0])), {"y": torch.tensor([2]), "z": torch.tensor([4])})
    assert second[0][1].tolist() == [1]
    assert {name: value.tolist() for name, value in second[1].items()} == {"y": [3], "z": [5]}


def test_extra_positional_arguments_are_split_too() -> None:
    splitter = Splitter(lambda model, *xs: None, (), {})
    second = splitter.split((None, torch.arange(2), torch.arange(4)[2:]), {}, 2)[1]
    assert [x.tolist() for x in second[0][1:]] == [[1], [3]]


@pytest.mark.parametrize(
    "nest",
    [
        (torch.arange(4), 1),
        [torch.arange(4), 1],
        {"left": torch.arange(4), "right": 1},
        OrderedDict(left=torch.arange(4), right=1),
        Pair(torch.arange(4), 1),
        BatchEncoding({"left": torch.arange(4), "right": 1}),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_containers_are_split_and_keep_their_types(nest: Any) -> None:
    parts = split(nest)
    assert [type(part) for part in parts] == [type(nest)] * 2
    values = [list(part.values()) if hasattr(part, "values") else list(part) for part in parts]
    assert [value[0].tolist() for value in values] == [[0, 1], [2, 3]]
    assert [value[1] for value in values] == [1, 1]


def test_model_outputs_are_split_with_their_attributes() -> None:
    parts = split(BaseModelOutput(last_hidden_state=torch.arange(4)))
    assert type(parts[1]) is BaseModelOutput
    assert parts[1].last_hidden_state.tolist() == parts[1]["last_hidden_state"].tolist() == [2, 3]


def test_sets_are_split() -> None:
    first, second = split({torch.arange(4)})
    assert (next(iter(first)).tolist(), next(iter(second)).tolist()) == ([0, 1], [2, 3])


def test_objects_may_split_themselves() -> None:
    parts = split([Sliceable()], num=3)
    assert [part[0].asked for part in parts] == [(3, 0, 0), (3, 1, 0), (3, 2, 0)]
    parts = split(Sliceable(), axes={"x": 1})
    assert parts[1].asked == (2, 1, 1)


def test_dict_that_splits_itself_is_asked() -> None:
    class Own(dict[str, Any]):
        def smp_slice(self, num_microbatches: int, microbatch: int, axis: int) -> "Own":
            return Own(part=microbatch)

    assert split(Own(x=torch.zeros(3))) == [{"part": 0}, {"part": 1}]


def test_whole_arguments_are_the_same_object_for_all() -> None:
    mask = torch.ones(1, 1, 8, 8)
    parts = split({"mask": mask}, whole=("x",))
    assert parts[0]["mask"] is parts[1]["mask"] is mask


def test_other_axes_are_cut_as_declared() -> None:
    positions = torch.arange(24).view(3, 4, 2)
    parts = split(positions, axes={"x": 1})
    assert [part.shape for part in parts] == [(3, 2, 2), (3, 2, 2)]
    assert torch.equal(parts[1], positions[:, 2:])
    assert torch.equal(split(positions, axes={"x": -2})[1], positions[:, 2:])


def test_numbers_modules_and_scalars_go_to_all() -> None:
    scalar, module = torch.tensor(0.5), torch.nn.Identity()
    assert split([scalar, module, None, "word", 3]) == [[scalar, module, None, "word", 3]] * 2


def many(x: Any, positions: Any, mask: Any, scale: Any, offsets: Any) -> None:
    """A step whose arguments have their batch dimension in different places, or none (UR-25)."""


UR_25 = (
    torch.zeros(4, 8),
    torch.zeros(3, 4, 8),
    torch.zeros(1, 1, 8, 8),
    torch.tensor(0.5),
    torch.arange(7),
)


def test_each_tensor_follows_its_declared_rule() -> None:
    splitter = Splitter(many, ["mask", "offsets"], {"positions": 1})
    for args, _ in splitter.split(UR_25, {}, 2):
        assert [tuple(tensor.shape) for tensor in args] == [
            (2, 8),
            (3, 2, 8),
            (1, 1, 8, 8),
            (),
            (7,),
        ]


def test_undeclared_batch_dimensions_raise_instead_of_guessing() -> None:
    with pytest.raises(MicrobatchError, match=r"no common batch size") as caught:
        Splitter(many, [], {}).split(UR_25, {}, 1)
    message = str(caught.value)
    for part in ("x (4, 8)", "positions (3, 4, 8)", "mask (1, 1, 8, 8)", "offsets (7,)"):
        assert part in message
    assert "non_split_inputs" in message
    assert "input_split_axes" in message


@pytest.mark.parametrize("num", [2, 3, 4, 8])
def test_a_batch_that_does_not_divide_raises_with_both_numbers(num: int) -> None:
    with pytest.raises(
        MicrobatchError, match=rf"a batch of 5 \(x \(5,\)\) does not divide into {num} microb"
    ):
        split(torch.zeros(5), num)


def test_an_empty_batch_is_split_into_empty_ones() -> None:
    assert [part.shape for part in split(torch.zeros(0, 3))] == [(0, 3), (0, 3)]


def test_an_axis_that_a_tensor_lacks_is_named() -> None:
    with pytest.raises(MicrobatchError, match=r"axis 2 for 'x'.*shape \(4, 8\)"):
        split(torch.zeros(4, 8), axes={"x": 2})


def test_unknown_names_raise_when_the_step_is_defined() -> None:
    with pytest.raises(MicrobatchError, match=r"no argument 'masks'; its arguments are x, posi"):
        Splitter(many, ["masks"], {})
    with pytest.raises(MicrobatchError, match="no argument 'y'"):
        Splitter(many, [], {"y": 1})
    Splitter(lambda x, **rest: None, ["anything"], {"else": 1})


def test_a_wrong_call_raises_as_the_function_would() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'positions'"):
        Splitter(many, [], {}).split((torch.zeros(2),), {}, 2)


@dataclasses.dataclass
class Options:
    flag: bool = True


def warnings_for(values: list[Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    logger = logging.getLogger("smp_runtime")
    propagates, logger.propagate = logger.propagate, True
    try:
        with caplog.at_level(logging.WARNING, logger="smp_runtime"):
            split(values, 2)
    finally:
        logger.propagate = propagates
    return [record.getMessage() for record in caplog.records]


def test_opaque_objects_warn_once_per_type(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = warnings_for([Options(), Options()], caplog)
    assert "Non-splittable object of type Options was passed to smp.step" in message
    assert "smp_slice(num_microbatches, microbatch, axis)" in message


def test_an_optimizer_warns(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert warnings_for([optimizer], caplog) == [
        "an optimizer was passed to smp.step; this might be a bug"
    ]


def test_usual_objects_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    usual = [1, 2.0, "x", None, True, torch.nn.Identity(), torch.device("cpu"), torch.float32]
    assert warnings_for([*usual, argparse.Namespace(lr=1), Sliceable()], caplog) == []


def test_tensors_are_joined_to_outputs() -> None:
    joined = join([torch.tensor(1.0), torch.tensor(2.0)])
    assert isinstance(joined, StepOutput)
    assert joined.reduce_sum().item() == 3.0


def test_other_leaves_are_joined_to_lists() -> None:
    assert join([1.5, 2.5]) == [1.5, 2.5]
    assert join([("a", None), ("b", None)]) == (["a", "b"], [None, None])
    shapes = [torch.Size([2, 3]), torch.Size([1])]
    assert join(shapes) == shapes


def test_a_step_that_returns_nothing_returns_none() -> None:
    assert join([None, None]) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: {"loss": tensor},
        lambda tensor: OrderedDict(loss=tensor),
        lambda tensor: [tensor],
        lambda tensor: (tensor,),
        lambda tensor: Pair(tensor, 1),
        lambda tensor: BaseModelOutput(last_hidden_state=tensor),
        lambda tensor: Options(tensor),
    ],
)
def test_joined_containers_keep_their_types(make: Any) -> None:
    results = [make(torch.tensor(1.0)), make(torch.tensor(2.0))]
    joined = join(results)
    assert type(joined) is type(results[0])
    if isinstance(joined, Options):
        joined = [joined.flag]
    (leaf, *_) = joined.values() if isinstance(joined, dict) else joined
    assert leaf.reduce_sum().item() == 3.0


def test_joined_model_output_has_its_attributes() -> None:
    joined = join([BaseModelOutput(last_hidden_state=torch.zeros(2)) for _ in range(3)])
    assert len(joined.last_hidden_state) == 3
    assert joined.hidden_states is None


@pytest.mark.parametrize(
    "results",
    [
        [{"a": 1}, {"b": 1}],
        [[1], [1, 2]],
        [torch.zeros(1), 1.0],
    ],
)
def test_results_that_differ_in_structure_raise(results: list[Any]) -> None:
    with pytest.raises(MicrobatchError):
        join(results)
