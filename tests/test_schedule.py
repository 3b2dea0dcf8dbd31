"""Plans against happens-before, the caps, and the textbook's 1F1B and GPipe written anew here."""

import inspect
import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_runtime.errors import ScheduleError
from smp_runtime.planning.schedule import Action, Kind, Plan, Policy, draw, plan, starts

F, B = Kind.FORWARD, Kind.BACKWARD
POLICIES: tuple[Policy, ...] = ("interleaved", "simple")
CHAINS = [(n, m) for n in range(1, 9) for m in range(1, 9)]


def textbook_1f1b(stage: int, n: int, m: int) -> Iterator[Action]:
    warmup = min(n - 1 - stage, m)
    yield from (Action(stage, F, i) for i in range(warmup))
    for i in range(m - warmup):
        yield Action(stage, F, warmup + i)
        yield Action(stage, B, i)
    yield from (Action(stage, B, i) for i in range(m - warmup, m))


def textbook_gpipe(stage: int, m: int) -> Iterator[Action]:
    yield from (Action(stage, F, i) for i in range(m))
    yield from (Action(stage, B, i) for i in range(m))


def replay(p: Plan, *, forward_only: bool = False) -> None:
    """Runs the ranks' lists, each as far as it can go; knows nothing of `starts`."""
    n, done = len(p.rank_of), set[Action]()
    position = [0] * len(p.orders)
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(p.orders):
            while position[rank] < len(order):
                stage, kind, i = order[position[rank]]
                needs = [Action(stage, F, i)] if kind is B else []
                if kind is F and stage > 0:
                    needs.append(Action(stage - 1, F, i))
                if kind is B and stage < n - 1:
                    needs.append(Action(stage + 1, B, i))
                if not done.issuperset(needs):
                    break
                assert p.rank_of[stage] == rank
                assert order[position[rank]] not in done
                done.add(order[position[rank]])
                position[rank] += 1
                progress = True
    kinds = [F] if forward_only else [F, B]
    expected = itertools.product(range(n), kinds, range(p.num_microbatches))
    assert done == {Action(*cell) for cell in expected}
    assert sum(position) == sum(map(len, p.orders)) == len(done)


def peak(order: Sequence[Action], stages: set[int]) -> int:
    """Counts the stashed microbatches of all `stages` together, at their peak."""
    steps = [1 if action.kind is F else -1 for action in order if action.stage in stages]
    return max(itertools.accumulate(steps, initial=0))


def check(p: Plan, active: int, policy: Policy) -> None:
    """Everything that holds for any map of stages to ranks."""
    replay(p)
    n = len(p.rank_of)
    for stage, rank in enumerate(p.rank_of):
        for kind in (F, B):
            own = [a.microbatch for a in p.orders[rank] if a.stage == stage and a.kind is kind]
            assert own == list(range(p.num_microbatches))
        stashed = peak(p.orders[rank], {stage})
        assert stashed == p.peak_stashed(stage) <= active
        if policy == "interleaved" and p.rank_of.count(rank) == 1:
            assert stashed <= n - stage
    for rank in set(p.rank_of):
        own_stages = [s for s in range(n) if p.rank_of[s] == rank]
        assert p.peak_in_flight(rank) == p.peak_stashed(own_stages[0])
        if policy == "interleaved" and len(own_stages) > 1:
            bound = 2 * n - 2 - own_stages[0] - own_stages[-1] + len(own_stages)
            assert peak(p.orders[rank], set(own_stages)) <= bound


# The staircase


@pytest.mark.parametrize(("policy", "active"), [("interleaved", 3), ("simple", 4)])
def test_the_docstring_shows_the_plan(policy: Policy, active: int) -> None:
    drawing = draw(plan((0, 1, 2), 4, active=active, policy=policy))
    assert drawing in inspect.cleandoc(plan.__doc__ or "").replace("\n    ", "\n")


def test_a_loop_is_drawn_like_a_chain() -> None:
    assert draw(plan((0, 1, 0, 1), 4, active=4, policy="interleaved")) == "\n".join(
        [
            "rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3",
            "rank 1   .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .",
        ]
    )


def test_the_failing_cell_is_marked() -> None:
    p = plan((0, 1), 2, active=2, policy="interleaved")
    assert draw(p, mark=(1, Action(1, F, 1))) == "\n".join(
        [
            "rank 0  0F0 0F1  .  0B0  .  0B1",
            "rank 1   .  1F0 1B0[1F1]1B1  .    <-- here",
        ]
    )
    assert draw(p, mark=(0, Action(0, F, 0))).startswith("rank 0 [0F0]0F1  . ")


def test_wide_cells_and_many_ranks_stay_aligned() -> None:
    rows = draw(plan(range(11), 11, active=11, policy="simple")).splitlines()
    assert rows[0].startswith("rank 0    0F0   0F1 ")
    assert rows[10].startswith("rank 10    .  ")
    assert rows[0].index("0F10") == rows[10].index("10F0 ")


# One rule, the textbook's schedules


@pytest.mark.parametrize(("n", "m"), CHAINS)
def test_interleaved_on_a_chain_is_1f1b(n: int, m: int) -> None:
    for active in (n, n + 2):
        p = plan(range(n), m, active=active, policy="interleaved")
        assert p.orders == tuple(tuple(textbook_1f1b(s, n, m)) for s in range(n))
        assert max(starts(p, lambda _: 1).values()) + 1 == 2 * (m + n - 1)


@pytest.mark.parametrize(("n", "m"), CHAINS)
def test_simple_on_a_chain_is_gpipe(n: int, m: int) -> None:
    p = plan(range(n), m, active=m, policy="simple")
    assert p.orders == tuple(tuple(textbook_gpipe(s, m)) for s in range(n))
    assert max(starts(p, lambda _: 1).values()) + 1 == 2 * (m + n - 1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("n", "m"), CHAINS)
def test_chains_rings_and_loops_within_any_cap(n: int, m: int, policy: Policy) -> None:
    maps = [tuple(range(n)), (*range(n), 0), *(tuple(range(n)) * v for v in (2, 3) if n < 5)]
    for rank_of, active in itertools.product(maps, (1, 2, 3, 10)):
        check(plan(rank_of, m, active=active, policy=policy), active, policy)


@settings(max_examples=300, deadline=None)
@given(
    rank_of=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    m=st.integers(1, 9),
    active=st.integers(1, 10),
    policy=st.sampled_from(POLICIES),
)
def test_no_map_of_stages_to_ranks_stalls(
    rank_of: list[int], m: int, active: int, policy: Policy
) -> None:
    check(plan(rank_of, m, active=active, policy=policy), active, policy)
    evaluation = plan(rank_of, m, active=active, policy=policy, forward_only=True)
    replay(evaluation, forward_only=True)
    assert all(evaluation.peak_stashed(stage) == 0 for stage in range(len(rank_of)))


@pytest.mark.parametrize("rank_of", [(0, 1, 2), (0, 1, 0), (0, 1, 0, 1)])
def test_simple_ends_the_forwards_of_a_group_before_its_first_backward(
    rank_of: tuple[int, ...],
) -> None:
    p = plan(rank_of, 5, active=2, policy="simple")
    for order in p.orders:
        for action in (a for a in order if a.kind is B):
            group_end = min((action.microbatch // 2 + 1) * 2, 5)
            later = order[order.index(action) :]
            assert not any(a.kind is F and a.microbatch < group_end for a in later)


def test_a_low_cap_holds_the_in_flight_microbatches_not_the_stages() -> None:
    # With `active - s` on stage s the deeper stages would take one microbatch at a time.
    p = plan(range(4), 16, active=2, policy="interleaved")
    assert [p.peak_stashed(stage) for stage in range(4)] == [2, 2, 2, 1]
    round_trips, clocks_of_one = 16 / 2, 2 * 4
    assert max(starts(p, lambda _: 1).values()) + 1 < 1.05 * round_trips * clocks_of_one


def test_an_evaluation_on_a_chain_never_waits() -> None:
    p = plan(range(4), 8, active=6, policy="interleaved", forward_only=True)
    assert max(starts(p, lambda _: 1).values()) + 1 == 8 + 4 - 1


# Refusals


@pytest.mark.parametrize(
    ("rank_of", "m", "active", "policy", "message"),
    [
        ((), 1, 1, "simple", "at least one stage"),
        ((0, -1), 1, 1, "simple", r"\(0, -1\)"),
        ((0,), 0, 1, "simple", "at least 1 microbatch, got 0"),
        ((0,), 1, 0, "simple", "active_microbatches must be at least 1, got 0"),
        ((0,), 1, 1, "1f1b", "interleaved.*simple.*1f1b"),
    ],
)
def test_what_is_no_step_is_refused(
    rank_of: tuple[int, ...], m: int, active: int, policy: Policy, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        plan(rank_of, m, active=active, policy=policy)


def test_a_rank_without_a_stage_has_nothing_to_do() -> None:
    p = plan((1, 2), 2, active=2, policy="interleaved")
    assert p.actions(0) == p.actions(3) == ()


def test_orders_that_wait_for_each_other_are_named() -> None:
    orders = ((Action(0, B, 0), Action(0, F, 0)), (Action(1, F, 0), Action(1, B, 0)))
    with pytest.raises(ScheduleError, match="before its action 0B0, 1F0"):
        starts(Plan((0, 1), 1, orders), lambda _: 1)
