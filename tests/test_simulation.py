"""Simulated times against closed formulas, and the looped schedule against the best there is."""

import itertools

import pytest

from smp_runtime.planning.schedule import Action, Kind, plan
from smp_runtime.planning.simulation import simulate

F, B = Kind.FORWARD, Kind.BACKWARD


def test_spans_busy_and_bubble_of_a_small_step() -> None:
    p = plan((0, 1), 1, active=1, policy="interleaved")
    timeline = simulate(p, forward_cost=(1, 2), backward_cost=(2, 4), transfer_cost=0.5)
    assert dict(timeline.spans) == {
        Action(0, F, 0): (0, 1),
        Action(1, F, 0): (1.5, 3.5),
        Action(1, B, 0): (3.5, 7.5),
        Action(0, B, 0): (8, 10),
    }
    assert timeline.makespan == 10
    assert timeline.busy == (3, 6)
    assert timeline.bubble == pytest.approx((0.7, 0.4))


def test_a_transfer_within_a_rank_is_free() -> None:
    p = plan((0, 0), 1, active=1, policy="interleaved")
    assert simulate(p, forward_cost=1, backward_cost=2, transfer_cost=9).makespan == 6


def test_costs_for_another_number_of_stages_are_refused() -> None:
    p = plan((0, 1), 1, active=1, policy="interleaved")
    with pytest.raises(ValueError, match="3 costs given for 2 stages"):
        simulate(p, forward_cost=(1, 1, 1), backward_cost=2)


def test_ranks_without_stages_idle() -> None:
    p = plan((0, 2), 1, active=1, policy="interleaved")
    assert simulate(p, forward_cost=1, backward_cost=2).bubble == (0.5, 1, 0.5)


@pytest.mark.parametrize("policy", ["interleaved", "simple"])
def test_a_chain_takes_the_textbook_time(policy: str) -> None:
    for n, m in itertools.product(range(1, 7), range(1, 9)):
        p = plan(range(n), m, active=max(n, m), policy=policy)  # type: ignore[arg-type]
        assert simulate(p, forward_cost=1, backward_cost=2).makespan == 3 * (m + n - 1)


@pytest.mark.parametrize(
    ("ranks", "turns", "m"),
    [(2, 2, 2), (2, 2, 4), (2, 2, 8), (2, 4, 8), (3, 2, 6), (3, 3, 9), (4, 2, 8), (4, 4, 16)],
)
def test_a_loop_divides_the_bubble_by_its_turns(ranks: int, turns: int, m: int) -> None:
    """The bound that Megatron's schedule for several stages per rank reaches, with its memory."""
    p = plan(tuple(range(ranks)) * turns, m, active=2 * ranks, policy="interleaved")
    timeline = simulate(p, forward_cost=1, backward_cost=2)
    work, bubble_of_chain = 3 * turns * m, 3 * turns * (ranks - 1)
    assert timeline.makespan == work + bubble_of_chain / turns
    for rank, order in enumerate(p.orders):
        stashed = itertools.accumulate(1 if action.kind is F else -1 for action in order)
        assert max(stashed) <= (turns - 1) * ranks + 2 * (ranks - 1 - rank) + 1


@pytest.mark.parametrize("m", range(2, 13))
def test_a_loop_is_faster_than_the_chain(m: int) -> None:
    for ranks, turns in itertools.product(range(2, 5), range(2, 5)):
        chain = plan(range(ranks), m, active=ranks, policy="interleaved")
        loop = plan(tuple(range(ranks)) * turns, m, active=2 * ranks, policy="interleaved")
        assert (
            simulate(loop, forward_cost=1, backward_cost=2).makespan
            < simulate(chain, forward_cost=turns, backward_cost=2 * turns).makespan
        )
