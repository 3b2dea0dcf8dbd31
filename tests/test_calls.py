"""Calls of placed modules: whatever they hand out is the same on every rank."""

import argparse
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from smp_runtime.errors import NotSupportedError, PathMismatchError, UsageError
from smp_runtime.execution.body import current_body
from smp_runtime.execution.values import StandIn, tag_of
from smp_runtime.messages.transport import Topic
from tests.local_ranks import LocalRank, backward, run_ranks

WIDTH = 4


class Part(nn.Module):
    """A module on rank 1, of which a test says what it does."""

    def __init__(self, do: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.do = do

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.do(self, *args, **kwargs)


class Model(nn.Module):
    def __init__(self, do: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(WIDTH, WIDTH), Part(do)

    def forward(self, x: Tensor) -> Any:
        return self.part(self.first(x))


PINS = {"first": 0, "part": 1}
X = torch.ones(2, WIDTH)


def run(
    do: Callable[..., Any],
    glue: Callable[[Any, Tensor], Any],
    inputs: tuple[Tensor, ...] = (X,),
    prepare: Callable[[Any], Any] = lambda model: None,
) -> list[list[Any]]:
    """Runs `glue` on a model whose part on rank 1 does `do`, a step for each of the inputs.

    Returns:
        For each rank what glue returned in each step.
    """
    model = Model(lambda part, x: part.layer(x))

    def body(rank: LocalRank) -> list[Any]:
        mine: Any = rank.place(model, PINS, X)
        mine.part.do = do
        prepare(mine)
        seen: list[Any] = []

        def step(x: Tensor) -> None:
            seen.append(glue(mine, x))

        for x in inputs:
            rank.step(step, [x])
        return seen

    return run_ranks(2, body)


def layer(part: Part, x: Tensor) -> Tensor:
    result: Tensor = part.layer(x)
    return result


def owners(nest: Any) -> list[int | None]:
    found = []
    for tensor in nest:
        value = tag_of(tensor)
        found.append(None if value is None else value.owner)
    return found


def test_the_owner_gets_the_real_result_and_the_others_a_stand_in() -> None:
    def glue(model: Any, x: Tensor) -> Any:
        out = model(x)
        return type(out), tuple(out.shape), out.dtype, out.requires_grad, owners([out])

    facts = ((2, WIDTH), torch.float32, True, [1])
    assert run(layer, glue) == [[(StandIn, *facts)], [(Tensor, *facts)]]


@pytest.mark.parametrize(
    "result",
    [
        lambda x: (x, x + 1),
        lambda x: [x, None],
        lambda x: {"a": x, "b": (x, 3)},
        lambda x: OrderedDict(b=x, a=2),
        lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x, x + 1)),
        lambda x: (x, "word", 2.5, True, None, torch.float16),
        lambda x: None,
        lambda x: 7,
    ],
)
def test_results_have_the_same_structure_on_every_rank(result: Any) -> None:
    def glue(model: Any, x: Tensor) -> str:
        return shape_of(model.part(x))

    expected = shape_of(result(X))
    assert run(lambda part, x: result(part.layer(x)), glue) == [[expected], [expected]]


def shape_of(nest: Any) -> str:
    if isinstance(nest, Tensor):
        return f"tensor{tuple(nest.shape)}"
    if isinstance(nest, dict):
        inside: Any = {key: shape_of(item) for key, item in nest.items()}
    elif isinstance(nest, (tuple, list)):
        inside = [shape_of(item) for item in nest]
    else:
        inside = nest
    return f"{type(nest).__name__}({inside})"


def test_one_tensor_in_two_places_of_a_result_stays_one() -> None:
    def glue(model: Any, x: Tensor) -> bool:
        one, other = model.part(x)
        return one is other

    def twice(part: Part, x: Tensor) -> Any:
        out = part.layer(x)
        return out, out

    assert run(twice, glue) == [[True], [True]]


def test_an_argument_that_comes_back_is_that_argument() -> None:
    def glue(model: Any, x: Tensor) -> list[bool]:
        h = model.first(x)
        state = argparse.Namespace(mode="on")
        same, also, given = model.part(h, extra=x, state=state)
        return [same is h, also is x, given is state]

    def hand_back(part: Part, h: Tensor, extra: Tensor, state: Any) -> Any:
        return h, extra, state

    assert run(hand_back, glue) == [[[True, True, True]]] * 2


def test_values_that_change_with_the_data_reach_every_rank() -> None:
    def glue(model: Any, x: Tensor) -> Any:
        return model.part(x)[1]

    def count(part: Part, x: Tensor) -> Any:
        return part.layer(x), int(x.sum())

    inputs = (X, 2 * X, 5 * X)
    assert run(count, glue, inputs) == [[8, 16, 40]] * 2


def test_a_structure_is_told_once_for_each_signature() -> None:
    model = Model(layer)
    told: list[str] = []

    def body(rank: LocalRank) -> list[int]:
        mine: Any = rank.place(model, PINS, X)
        send = rank.transport.send

        def count(peer: int, address: Any, *args: Any) -> None:
            if address.topic is Topic.STRUCTURE:
                told.append(mine.part.training)
            send(peer, address, *args)

        rank.transport.send = count  # type: ignore[method-assign]
        counts = []

        def step(x: Tensor) -> None:
            mine.part(x)

        def count_after(x: Tensor) -> None:
            rank.step(step, [x, x])
            counts.append(len(told))

        count_after(X)
        count_after(X + 1)
        count_after(torch.ones(3, WIDTH))
        mine.eval()
        count_after(X)
        with torch.no_grad():
            count_after(X)
        return counts

    assert run_ranks(2, body)[1] == [1, 1, 2, 3, 4]


def test_training_and_evaluation_may_return_other_things() -> None:
    def glue(model: Any, x: Tensor) -> list[int]:
        lengths = []
        for mode in (True, False, True):
            model.train(mode)
            lengths.append(len(model.part(x)))
        return lengths

    def more_in_training(part: Part, x: Tensor) -> Any:
        return (part.layer(x),) * (2 if part.training else 1)

    assert run(more_in_training, glue) == [[[2, 1, 2]]] * 2


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_module_may_be_frozen_and_thawed_inside_and_between_steps(is_inside: bool) -> None:
    model = Model(layer)

    def body(rank: LocalRank) -> list[bool]:
        mine: Any = rank.place(model, PINS, X)
        required = []
        for is_trained in (True, False, True):
            if not is_inside:
                mine.part.requires_grad_(is_trained)

            def step(x: Tensor, is_trained: bool = is_trained) -> None:
                if is_inside:
                    mine.part.requires_grad_(is_trained)
                required.append(mine.part(x).requires_grad)

            rank.step(step, [X])
        return required

    assert run_ranks(2, body) == [[True, False, True]] * 2


def test_a_structure_that_changes_with_the_data_is_an_error() -> None:
    def maybe(part: Part, x: Tensor) -> Any:
        return part.layer(x) if x.sum() > 10 else None

    with pytest.raises(PathMismatchError, match=r"part gave another structure.*plain number"):
        run(maybe, lambda model, x: model.part(x), (X, 2 * X))


def test_a_structure_may_change_where_a_number_says_so() -> None:
    def maybe(part: Part, x: Tensor) -> Any:
        is_large = bool(x.sum() > 10)
        return (part.layer(x) if is_large else None), is_large

    def glue(model: Any, x: Tensor) -> bool:
        return model.part(x)[0] is not None

    assert run(maybe, glue, (X, 2 * X, X)) == [[False, True, False]] * 2


def test_a_result_that_cannot_be_sent_names_the_module() -> None:
    with pytest.raises(NotSupportedError, match="part handed out something that can't be sent"):
        run(lambda part, x: (part.layer(x), lambda: 0), lambda model, x: model.part(x))


def test_an_argument_changed_in_place_is_the_changed_one_everywhere() -> None:
    def grow(part: Part, h: Tensor) -> None:
        h += part.layer(torch.zeros_like(h))
        h.mul_(0)

    def glue(model: Any, x: Tensor) -> Any:
        h = x.clone()
        model.part(h)
        return owners([h]), (h + 1).tolist()

    ones = [[1.0] * WIDTH] * 2
    assert run(grow, glue) == [[([1], ones)]] * 2


def test_a_filled_list_is_filled_everywhere() -> None:
    def collect(part: Part, x: Tensor, into: list[Any], notes: dict[str, Any]) -> Tensor:
        out = part.layer(x)
        into.append(out * 2)
        notes["seen"] = len(into)
        return out

    def glue(model: Any, x: Tensor) -> Any:
        into: list[Any] = []
        notes: dict[str, Any] = {}
        for _ in range(2):
            model.part(x, into, notes)
        return len(into), owners(into), notes

    assert run(collect, glue) == [[(2, [1, 1], {"seen": 2})]] * 2


def test_a_tensor_in_an_attribute_can_be_read_everywhere() -> None:
    def keep(part: Part, x: Tensor) -> Tensor:
        part.kept = part.layer(x)
        return part.kept + 1

    def glue(model: Any, x: Tensor) -> Any:
        out = model.part(x)
        return owners([model.part.kept]), (out - model.part.kept).sum().item()

    assert run(keep, glue, (X, 2 * X)) == [[([1], pytest.approx(8.0))] * 2] * 2


def test_inside_a_module_everything_is_native() -> None:
    def look(part: Part, x: Tensor) -> Any:
        body = current_body()
        assert body is not None
        return part.layer(x), body.glue.is_active, type(x) is Tensor

    def glue(model: Any, x: Tensor) -> Any:
        return model.part(model.first(x))[1:]

    assert run(look, glue) == [[(False, True)]] * 2


def test_keyword_arguments_and_modes_reach_the_owner() -> None:
    def look(part: Part, x: Tensor, *, scale: Tensor, flag: bool) -> Any:
        return (part.layer(x) * scale).dtype, flag, torch.is_grad_enabled()

    def glue(model: Any, x: Tensor) -> Any:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return model.part(x, scale=torch.ones((), dtype=torch.bfloat16), flag=True)

    assert run(look, glue) == [[(torch.bfloat16, True, False)]] * 2


def test_microbatches_do_not_share_tensors() -> None:
    model, kept = Model(layer), {}

    def body(rank: LocalRank) -> None:
        mine: Any = rank.place(model, PINS, X)

        def step(x: Tensor) -> None:
            out = mine(x)
            before = kept.setdefault(rank.index, out)
            backward((before + out).sum())

        rank.step(step, [X, X])

    with pytest.raises(UsageError, match="of another microbatch of the same step"):
        run_ranks(2, body)


def test_detached_tensors_may_be_kept_from_step_to_step() -> None:
    model = Model(layer)

    def body(rank: LocalRank) -> list[float]:
        mine: Any = rank.place(model, PINS, X)
        memory = [torch.zeros(2, WIDTH)]

        def step(x: Tensor) -> Tensor:
            out = mine(x + memory[0] * 0)
            total = (out - memory[0]).abs().sum()
            memory[0] = out.detach()
            return total

        return [rank.step(step, [X])[0].item() for _ in range(3)]

    first, second = run_ranks(2, body)
    assert first == second
    assert first[0] > 0
    assert first[1:] == [0.0, 0.0]
