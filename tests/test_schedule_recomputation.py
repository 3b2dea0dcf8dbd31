"""Recomputations in a plan: where they come, how many are held, and what they hide."""

import inspect
import itertools

import pytest

from smp_runtime.planning.schedule import Action, Kind, Plan, Policy, draw, plan
from smp_runtime.planning.simulation import simulate

F, R, B = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD
SIZES = list(itertools.product(range(1, 6), (1, 2, 4, 7)))


def without(p: Plan) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(action for action in order if action.kind is not R) for order in p.orders)


def test_the_docstring_shows_the_plan() -> None:
    drawing = draw(plan((0, 1), 4, active=4, policy="interleaved", recomputed=(0, 1)))
    assert drawing in inspect.cleandoc(plan.__doc__ or "").replace("\n    ", "\n")


def test_a_rank_recomputes_while_it_waits_for_the_output_gradient() -> None:
    p = plan((0, 1, 2), 4, active=3, policy="interleaved", recomputed=(0, 1))
    assert draw(p) == "\n".join(
        [
            "rank 0  0F0 0F1 0F2 0R0  .  0B0 0F3 0R1 0B1 0R2  .  0B2 0R3 0B3",
            "rank 1   .  1F0 1F1 1R0 1B0 1F2 1R1 1B1 1F3 1R2 1B2 1R3 1B3  .",
            "rank 2   .   .  2F0 2B0 2F1 2B1 2F2 2B2  .  2F3 2B3  .   .   .",
        ]
    )


@pytest.mark.parametrize("policy", ["interleaved", "simple"])
@pytest.mark.parametrize(("n", "m"), SIZES)
def test_recomputations_change_nothing_else_and_are_held_within_bounds(
    n: int, m: int, policy: Policy
) -> None:
    maps = [tuple(range(n)), (*range(n), 0), tuple(range(n)) * 2]
    for rank_of, ahead in itertools.product(maps, (0, 1, 2)):
        recomputed = range(0, len(rank_of), 1 + m % 2)
        plain = plan(rank_of, m, active=m, policy=policy)
        p = plan(rank_of, m, active=m, policy=policy, recomputed=recomputed, recompute_ahead=ahead)
        assert without(p) == plain.orders
        for rank, order in enumerate(p.orders):
            place = {action: position for position, action in enumerate(order)}
            mine = {s for s in recomputed if rank_of[s] == rank} if ahead else set()
            expected = {Action(s, R, i) for s in mine for i in range(m)}
            assert {action for action in order if action.kind is R} == expected
            for stage, _, i in expected:
                assert place[Action(stage, F, i)] < place[Action(stage, R, i)]
                assert place[Action(stage, R, i)] < place[Action(stage, B, i)]
            # A rank of several stages may need another one's first while it holds one.
            most = ahead + (rank_of.count(rank) > 1)
            assert p.peak_recomputed(rank) <= (most if ahead else 0)


def test_an_evaluation_recomputes_nothing() -> None:
    p = plan((0, 1), 3, active=2, policy="simple", forward_only=True, recomputed=(0, 1))
    assert all(action.kind is F for order in p.orders for action in order)


@pytest.mark.parametrize("m", [4, 8])
def test_the_bubble_hides_recomputations(m: int) -> None:
    costs = {"forward_cost": 4.0, "backward_cost": 6.0}
    plain = plan((0, 1), m, active=m, policy="interleaved")
    p = plan((0, 1), m, active=m, policy="interleaved", recomputed=(0, 1))
    hidden = simulate(p, **costs, recompute_cost=3.0).makespan
    shown = simulate(plain, forward_cost=4.0, backward_cost=9.0).makespan
    # The last stage recomputes in each of its backwards; the first one hides its last.
    assert simulate(plain, **costs).makespan == 10 * (m + 1)
    assert hidden == 10 * (m + 1) + 3 * m
    assert shown == 13 * (m + 1)
