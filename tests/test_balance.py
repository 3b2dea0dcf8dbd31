from itertools import combinations
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from smp_runtime.planning.balance import (
    Budget,
    Item,
    SharedGroup,
    StageCosts,
    balanced_cuts,
    rank_costs,
    rank_cuts,
)

COMPUTE_ONLY = Budget(0.0, lambda stage: 1)


def cuts_of(costs: list[float], num_stages: int) -> tuple[int, ...] | None:
    return balanced_cuts(
        len(costs), num_stages, StageCosts([Item(c) for c in costs], {}, COMPUTE_ONLY)
    )


def smallest_largest_cost(num_items: int, num_stages: int, cost: StageCosts) -> float:
    """By trying every cut."""
    best = inf
    for inner in combinations(range(1, num_items), num_stages - 1):
        starts = (0, *inner)
        ends = (*inner, num_items)
        best = min(best, max(cost(s, starts[s], ends[s]) for s in range(num_stages)))
    return best


def test_equal_items_are_dealt_evenly():
    assert cuts_of([1.0] * 8, 4) == (0, 2, 4, 6)


def test_a_heavy_last_item_stands_alone():
    assert cuts_of([1, 1, 1, 1, 4], 2) == (0, 4)


def test_of_equal_largest_costs_the_most_even_cut_wins():
    # The last item alone costs 5 in any case; the other four may be cut anyhow below that.
    assert cuts_of([1, 1, 1, 1, 5], 3) == (0, 2, 4)


def test_of_equally_even_cuts_the_first_one_wins():
    assert cuts_of([1, 1, 1], 2) == (0, 1)


def test_no_stage_is_empty():
    assert cuts_of([0.0, 0.0, 9.0], 3) == (0, 1, 2)
    assert cuts_of([1.0, 1.0], 3) is None


def test_memory_weight_one_balances_memory_only():
    items = [Item(9.0, 1), Item(1.0, 1), Item(1.0, 1), Item(1.0, 1)]
    assert balanced_cuts(4, 2, StageCosts(items, {}, Budget(0.0, lambda _: 1))) == (0, 1)
    assert balanced_cuts(4, 2, StageCosts(items, {}, Budget(1.0, lambda _: 1))) == (0, 2)


def test_early_stages_hold_more_microbatches():
    items = [Item(1.0, 0, 10)] * 6
    costs = StageCosts(items, {}, Budget(1.0, lambda stage: 2 - stage))
    assert balanced_cuts(6, 2, costs) == (0, 2)
    assert [costs.memory(stage, 0, 2) for stage in (0, 1)] == [40, 20]


def test_a_limit_moves_the_cut_away_from_the_even_one():
    items = [Item(1.0, 30), Item(1.0, 30), Item(1.0, 10), Item(1.0, 10)]
    assert balanced_cuts(4, 2, StageCosts(items, {}, Budget(0.0, lambda _: 1, 50))) == (0, 1)
    assert balanced_cuts(4, 2, StageCosts(items, {}, Budget(0.0, lambda _: 1, 39))) is None


def test_a_copied_parameter_costs_each_holder():
    items = [Item(1.0, groups=frozenset({7})), Item(1.0), Item(1.0, groups=frozenset({7}))]
    costs = StageCosts(items, {7: SharedGroup(100, 0.5)}, Budget(0.0, lambda _: 1))
    assert costs.memory(0, 0, 1) == costs.memory(0, 0, 3) == 100
    assert costs(0, 0, 1) == (1.0 + 0.5) / 3
    assert costs(0, 0, 3) == 1.0  # Nobody to exchange with.


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[Item], int, Budget]:
    item = st.builds(
        Item,
        st.integers(0, 20).map(float),
        st.integers(0, 50),
        st.integers(0, 10),
        st.frozensets(st.integers(0, 1), max_size=1),
    )
    items = draw(st.lists(item, min_size=1, max_size=9))
    num_stages = draw(st.integers(1, len(items)))
    weight = draw(st.sampled_from([0.0, 0.2, 0.8, 1.0]))
    limit = draw(st.none() | st.integers(50, 300))
    return items, num_stages, Budget(weight, lambda stage: num_stages - stage, limit)


@settings(max_examples=300, deadline=None)
@given(rows())
def test_no_contiguous_cut_is_better(row):
    items, num_stages, budget = row
    costs = StageCosts(items, {0: SharedGroup(20, 3.0), 1: SharedGroup(5, 0.0)}, budget)
    starts = balanced_cuts(len(items), num_stages, costs, costs.slack())
    best = smallest_largest_cost(len(items), num_stages, costs)
    if starts is None:
        assert best == inf
        return
    ends = (*starts[1:], len(items))
    assert starts[0] == 0 and all(first < end for first, end in zip(starts, ends, strict=True))
    assert max(costs(s, starts[s], ends[s]) for s in range(num_stages)) == best


def test_720_items_on_64_stages_take_seconds():
    items = [Item(float(1 + i % 9), i % 5, 1) for i in range(720)]
    costs = StageCosts(items, {}, Budget(0.0, lambda _: 1))
    starts = balanced_cuts(720, 64, costs)
    assert starts is not None and len(starts) == 64


# Ranks that take stages in turn.


def test_a_rank_with_a_very_slow_stage_does_little_else():
    items = [Item(1.0)] * 8 + [Item(8.0)]
    costs = StageCosts(items, {}, COMPUTE_ONLY)
    starts = balanced_cuts(9, 4, costs)
    assert starts == (0, 2, 5, 8)
    moved = rank_cuts(starts, 9, 2, costs)
    assert max(rank_costs(moved, 9, 2, costs)) == 9 / 16
    assert rank_costs(starts, 9, 2, costs) == (5 / 16, 11 / 16)


def test_even_stages_stay_as_they_are():
    costs = StageCosts([Item(1.0)] * 8, {}, COMPUTE_ONLY)
    assert rank_cuts((0, 2, 4, 6), 8, 2, costs) == (0, 2, 4, 6)
