"""The engine: bodies in threads, in the order of the plan, with their world around them."""

import contextvars
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

import smp_runtime as smp
from smp_runtime.execution.body import current_body
from smp_runtime.messages.transport import Address, Topic
from tests.local_ranks import LocalRank, backward, run_ranks
from tests.worlds import run_world

WIDTH = 4


def chain(length: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(length)])


def pins(length: int) -> dict[str, int]:
    return {str(index): index for index in range(length)}


def microbatches(count: int) -> list[Tensor]:
    return [torch.full((2, WIDTH), float(i + 1)) for i in range(count)]


def train(
    size: int, count: int, look: Callable[[LocalRank, Any], Any], **options: Any
) -> list[Any]:
    """Trains a chain with one module per rank for a step, and returns what `look` sees."""
    torch.manual_seed(3)
    model, xs = chain(size), microbatches(count)

    def body(rank: LocalRank) -> Any:
        mine = rank.place(model, pins(size), xs[0])

        def step(x: Tensor) -> Tensor:
            loss = mine(x).square().mean()
            backward(loss)
            return loss

        rank.step(step, xs)
        return look(rank, mine)

    return run_ranks(size, body, **options)


# -- one rank ---------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_microbatches() -> None:
    assert run_ranks(1, lambda rank: rank.step(lambda x: x * 2, [1, 2, 3])) == [[2, 4, 6]]


def test_steps_are_numbered() -> None:
    def body(rank: LocalRank) -> list[int]:
        numbers = []
        for _ in range(3):
            rank.step(lambda x: numbers.append(rank.engine.step), [1])
        return numbers

    assert run_ranks(1, body) == [[1, 2, 3]]
    assert run_ranks(2, body) == [[1, 2, 3]] * 2


def test_a_single_rank_runs_its_bodies_in_the_calling_thread() -> None:
    def body(rank: LocalRank) -> bool:
        return rank.step(lambda x: threading.current_thread(), [1])[0] is threading.current_thread()

    assert run_ranks(1, body) == [True]


def test_a_single_rank_trains_with_the_scale_of_the_loss() -> None:
    model = chain(1)

    def step(x: Tensor) -> None:
        with current_body().glue.suspended():  # type: ignore[union-attr] - as DistributedModel
            out = model(x)
        backward(out.sum())

    run_ranks(1, lambda rank: rank.step(step, microbatches(2), loss_scale=0.5))
    bias = model[0].bias
    assert isinstance(bias, Tensor)
    assert bias.grad is not None
    assert bias.grad.tolist() == [2.0] * WIDTH  # 2 samples, 2 microbatches, scale 0.5


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_outside_the_model_is_trained_by_every_microbatch(size: int) -> None:
    model, xs = chain(2), microbatches(3)

    def body(rank: LocalRank) -> Tensor | None:
        mine = rank.place(model, pins(2), xs[0]) if size > 1 else nn.Identity()
        temperature = nn.Parameter(torch.ones(()))

        def step(x: Tensor) -> None:
            backward((mine(x) * temperature).sum())

        rank.step(step, xs)
        return temperature.grad

    expected = sum((model(x) if size > 1 else x).sum().item() for x in xs)
    gradient = run_ranks(size, body)[0]
    assert gradient is not None
    assert gradient.item() == pytest.approx(expected, rel=1e-5)


# -- results ----------------------------------------------------------------------------------


def test_results_reach_every_rank_in_their_containers() -> None:
    model, x = chain(2), torch.ones(2, WIDTH)

    def body(rank: LocalRank) -> Any:
        mine: Any = rank.place(model, pins(2), x)

        def step(x: Tensor) -> Any:
            h = mine[0](x)
            return {"h": h, "all": [BaseModelOutput(last_hidden_state=mine[1](h)), "word", x, None]}

        return rank.step(step, [x])[0]

    for result in run_ranks(2, body):
        assert type(result["h"]) is Tensor
        assert not result["h"].requires_grad
        torch.testing.assert_close(result["h"], model[0](x).detach())
        output, word, same, nothing = result["all"]
        assert type(output) is BaseModelOutput
        torch.testing.assert_close(output.last_hidden_state, model(x).detach())
        assert (word, same.tolist(), nothing) == ("word", x.tolist(), None)


def test_results_keep_their_graph_on_their_owner_if_asked_to() -> None:
    model, x = chain(2), torch.ones(2, WIDTH)

    def body(rank: LocalRank) -> bool:
        mine = rank.place(model, pins(2), x)
        return rank.step(lambda x: mine(x), [x], detach=False)[0].requires_grad

    assert run_ranks(2, body) == [False, True]


def test_nothing_outlives_its_step() -> None:
    model, x = chain(2), torch.ones(2, WIDTH)

    def body(rank: LocalRank) -> list[Any]:
        mine: Any = rank.place(model, pins(2), x)
        ghosts = []

        def step(x: Tensor) -> Tensor:
            h = mine[0](x)
            loss = mine[1](h).sum()
            ghosts.extend([weakref.ref(h), weakref.ref(loss)])
            backward(loss)
            return loss

        rank.step(step, [x, x])
        gc.collect()
        return [ghost() for ghost in ghosts]

    assert run_ranks(2, body) == [[None] * 4] * 2


# -- order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["interleaved", "simple"])
def test_gradients_are_those_of_the_microbatches_in_their_order(policy: str) -> None:
    def gradients(rank: LocalRank, mine: nn.Module) -> list[Tensor | None]:
        return [parameter.grad for parameter in mine[rank.index].parameters()]  # type: ignore[index]

    found = train(3, 5, gradients, policy=policy)
    torch.manual_seed(3)
    model = chain(3)
    for x in microbatches(5):
        model(x).square().mean().backward()
    for rank, gradients_there in enumerate(found):
        for mine, parameter in zip(gradients_there, model[rank].parameters(), strict=True):
            assert torch.equal(mine, parameter.grad)


def test_in_flight_are_as_many_as_the_schedule_allows() -> None:
    def in_flight(rank: LocalRank, mine: nn.Module) -> int:
        return rank.engine.max_in_flight

    assert train(3, 6, in_flight, active=5) == [3, 2, 1]
    assert train(3, 6, in_flight, active=2) == [2, 2, 1]
    assert train(2, 4, in_flight, policy="simple", active=4) == [4, 4]


def test_the_plan_can_be_looked_at() -> None:
    def order(rank: LocalRank, mine: nn.Module) -> list[str]:
        assert rank.engine.plan is not None
        return [str(action) for action in rank.engine.plan.actions(rank.index)]

    assert train(2, 2, order) == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]


def test_the_report_says_where_the_time_went() -> None:
    def report(rank: LocalRank, mine: nn.Module) -> Any:
        return rank.engine.report

    for seen in train(2, 3, report):
        assert 0 < seen.busy <= seen.wall
        assert seen.bubble == pytest.approx(1 - seen.busy / seen.wall)
        labels = [label for label, *_ in seen.spans]
        assert "" in labels
        assert all(0 <= begin <= end <= seen.wall for _, begin, end in seen.spans)


def test_no_rank_runs_more_than_two_steps_ahead() -> None:
    steps = [0, 0]
    ahead = []

    def body(rank: LocalRank) -> None:
        def step(x: int) -> None:
            steps[rank.index] = rank.engine.step
            if rank.index == 1:
                time.sleep(0.02)
            else:
                ahead.append(steps[0] - steps[1])

        for _ in range(8):
            rank.step(step, [1])

    run_ranks(2, body)
    assert max(ahead) <= 2


# -- what is around a body --------------------------------------------------------------------

COLOUR = contextvars.ContextVar("COLOUR", default="grey")


def seen_in_bodies(look: Callable[[], Any], size: int = 2) -> list[Any]:
    """Returns what the bodies of two microbatches see, after having waited for one another."""
    model, x = chain(2), torch.ones(2, WIDTH)

    def body(rank: LocalRank) -> list[Any]:
        mine = rank.place(model, pins(2), x)

        def step(x: Tensor) -> Any:
            before = look()
            mine(x).sum().item()
            return before, look()

        COLOUR.set("green")
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return rank.step(step, [x, x])

    return run_ranks(size, body)


def test_modes_and_context_variables_follow_into_bodies() -> None:
    def look() -> Any:
        return COLOUR.get(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    state = ("green", False, True)
    assert seen_in_bodies(look) == [[(state, state)] * 2] * 2


def test_what_a_body_sets_is_not_seen_by_another() -> None:
    def look() -> Any:
        before = COLOUR.get()
        COLOUR.set(before + "er")
        torch.set_grad_enabled(True)
        return before

    assert seen_in_bodies(look) == [[("green", "greener")] * 2] * 2


def test_python_draws_the_same_for_the_same_microbatch_and_is_restored() -> None:
    def body(rank: LocalRank) -> Any:
        random.seed(1)
        expected = random.random()
        random.seed(1)
        drawn = [rank.step(lambda x: random.random(), [1, 2], seed=seed) for seed in (5, 5, 6)]
        assert random.random() == expected
        return drawn

    ((first, second, other),) = run_ranks(1, body)
    assert len({*first, *second, *other}) == 6  # each step and microbatch has its own


def _keeps_the_generator() -> bool:
    smp.init({"pipeline_parallel_degree": dist.get_world_size(), "microbatches": 2})
    draw = smp.step(lambda x: x + torch.rand(2, 3))
    before = torch.get_rng_state()
    draw(torch.zeros(4, 3))
    return torch.equal(torch.get_rng_state(), before)


@pytest.mark.world
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_leaves_torchs_generator_where_it_was(size: int) -> None:
    # In processes: ranks that are threads share the generator.
    assert run_world(size, _keeps_the_generator) == [True] * size


def test_evaluations_do_not_change_the_numbers_of_training() -> None:
    def draw(x: int) -> float:
        return torch.rand(()).item()

    def body(rank: LocalRank) -> list[Any]:
        drawn = []
        for is_training in (True, True) if rank_evaluates is False else (True, False, True):
            with torch.set_grad_enabled(is_training):
                numbers = rank.step(draw, [1])
            if is_training:
                drawn.append(numbers)
        return drawn

    rank_evaluates = False
    without = run_ranks(1, body)
    rank_evaluates = True
    assert run_ranks(1, body) == without


# -- outside the bodies -----------------------------------------------------------------------


def test_exchanges_are_numbered_and_fetched() -> None:
    def body(rank: LocalRank) -> Any:
        number = rank.engine.next_exchange()
        assert rank.engine.next_exchange() == number + 1
        for peer in rank.transport.peers:
            address = Address(Topic.STATE, -1, number, 0, rank.index)
            rank.transport.send(peer, address, f"from {rank.index}")
        return rank.engine.fetch(Address(Topic.STATE, -1, number, 0, 1 - rank.index)).content

    assert run_ranks(2, body) == ["from 1", "from 0"]
