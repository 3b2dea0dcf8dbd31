"""Cuts a row of items into contiguous runs whose largest cost is as small as possible.

The items are what a stage may hold, in execution order; a run is a stage. The result is optimal
for the given costs: of all contiguous cuts it has the smallest largest cost, among those the
most even one, among those the one that cuts first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from math import inf

__all__ = [
    "Budget",
    "Item",
    "SharedGroup",
    "StageCosts",
    "balanced_cuts",
    "rank_costs",
    "rank_cuts",
]

TOLERANCE = 1e-9
"""Relative differences of costs below this come from rounding."""

Cost = Callable[[int, int, int], float]
"""The cost of stage `s` if it holds the items from `first` up to, not including, `end`."""


@dataclass(frozen=True, slots=True)
class Item:
    """What a stage holds wholly or not at all.

    Args:
        compute: forward and backward of one microbatch.
        state_bytes: parameters with gradient and optimizer state, without shared ones.
        activation_bytes: bytes saved for backward per microbatch in flight.
        groups: the shared parameters that it uses.
    """

    compute: float
    state_bytes: int = 0
    activation_bytes: int = 0
    groups: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """A parameter that several items use: a stage with any of them holds it once.

    Args:
        state_bytes: what each stage that uses it holds.
        exchange: compute of each holder for summing the gradient with the other holders.
    """

    state_bytes: int
    exchange: float = 0.0


@dataclass(frozen=True, slots=True)
class Budget:
    """How compute and memory are weighed.

    Args:
        memory_weight: 0 balances compute only, 1 memory only.
        in_flight: microbatches that a stage holds at once at most.
        limit: bytes that one stage may hold; None for no limit.
        num_ranks: how many ranks take the stages in turn; None for a rank for each.
    """

    memory_weight: float
    in_flight: Callable[[int], int]
    limit: float | None = None
    num_ranks: int | None = None


@dataclass(slots=True)
class StageCosts:
    """The blended cost of every possible stage, as shares of the whole model."""

    items: Sequence[Item]
    shared: Mapping[int, SharedGroup]
    budget: Budget
    _compute: list[float] = field(init=False)
    _state: list[int] = field(init=False)
    _activation: list[int] = field(init=False)
    _users: list[tuple[SharedGroup, list[int]]] = field(init=False)
    _scale: tuple[float, float] = field(init=False)
    _in_flight: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._compute = [0.0, *accumulate(item.compute for item in self.items)]
        self._state = [0, *accumulate(item.state_bytes for item in self.items)]
        self._activation = [0, *accumulate(item.activation_bytes for item in self.items)]
        self._users = [
            (group, [i for i, item in enumerate(self.items) if key in item.groups])
            for key, group in sorted(self.shared.items())
        ]
        shared_bytes = sum(group.state_bytes for group, _ in self._users)
        memory = self._state[-1] + shared_bytes + self._activation[-1]
        weight = self.budget.memory_weight
        self._scale = (
            (1.0 - weight) / self._compute[-1] if self._compute[-1] else 0.0,
            weight / memory if memory else 0.0,
        )

    def __call__(self, stage: int, first: int, end: int) -> float:
        """Returns the cost of stage `stage` with the items ``first:end``."""
        compute, memory = self._compute_and_memory(stage, first, end)
        if self.budget.limit is not None and memory > self.budget.limit:
            return inf
        return self._scale[0] * compute + self._scale[1] * memory

    def memory(self, stage: int, first: int, end: int) -> int:
        """Returns the bytes of stage `stage` with the items ``first:end``."""
        return self._compute_and_memory(stage, first, end)[1]

    def slack(self) -> float:
        """Returns by how much the cost may fall at most when a stage grows."""
        return self._scale[0] * sum(group.exchange for group, _ in self._users)

    def _compute_and_memory(self, stage: int, first: int, end: int) -> tuple[float, int]:
        if stage not in self._in_flight:
            self._in_flight[stage] = self.budget.in_flight(stage)
        compute = self._compute[end] - self._compute[first]
        memory = self._state[end] - self._state[first]
        memory += (self._activation[end] - self._activation[first]) * self._in_flight[stage]
        for group, users in self._users:
            count = bisect_left(users, end) - bisect_left(users, first)
            if count:
                memory += group.state_bytes
                compute += group.exchange if count < len(users) else 0.0
        return compute, memory


def balanced_cuts(
    num_items: int, num_stages: int, cost: Cost, slack: float = 0.0
) -> tuple[int, ...] | None:
    """Returns the first item of every stage, or None if no cut keeps every cost finite.

    Args:
        num_items: number of items in the row.
        num_stages: number of stages; none is empty.
        cost: the cost of a stage. It must not fall by more than `slack` when the stage grows.
        slack: see `cost`.
    """
    if num_items < num_stages:
        return None
    bound = _upper_bound(num_items, num_stages, cost, slack)
    smallest = _least(num_items, num_stages, cost, slack, bound, join=max)
    if smallest is None:
        return None
    most_even = _least(
        num_items, num_stages, cost, slack, smallest[0], join=lambda before, own: before + own * own
    )
    return (most_even or smallest)[1]


def rank_costs(
    starts: Sequence[int], num_items: int, num_ranks: int, cost: Cost
) -> tuple[float, ...]:
    """Returns the summed costs of the stages of each rank; ranks take the stages in turn."""
    totals = [0.0] * num_ranks
    for stage, (first, end) in enumerate(pairwise([*starts, num_items])):
        totals[stage % num_ranks] += cost(stage, first, end)
    return tuple(totals)


def rank_cuts(
    starts: tuple[int, ...], num_items: int, num_ranks: int, cost: Cost
) -> tuple[int, ...]:
    """Moves cuts by one item at a time as long as that makes the slowest rank faster.

    What is best for stages may be bad for ranks: one with a very slow stage should do little else.
    """
    slowest = max(rank_costs(starts, num_items, num_ranks, cost))
    has_moved = True
    while has_moved:
        has_moved = False
        for stage, step in product(range(1, len(starts)), (-1, 1)):
            moved = (*starts[:stage], starts[stage] + step, *starts[stage + 1 :])
            if any(first >= end for first, end in pairwise([*moved, num_items])):
                continue
            now = max(rank_costs(moved, num_items, num_ranks, cost))
            if now < slowest * (1 - TOLERANCE):
                starts, slowest, has_moved = moved, now, True
    return starts


def _least(
    num_items: int,
    num_stages: int,
    cost: Cost,
    slack: float,
    bound: float,
    *,
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]] | None:
    """Dynamic programming over prefixes; only stages that cost at most `bound` are tried.

    ``best[i]`` is the least joined cost of the first ``i`` items in the stages so far.
    """
    best = [0.0] + [inf] * num_items
    choices: list[list[int]] = []
    for stage in range(num_stages):
        last_end = num_items - (num_stages - 1 - stage)
        following, choice = [inf] * (num_items + 1), [-1] * (num_items + 1)
        first_end = num_items if stage == num_stages - 1 else stage + 1
        for end in range(first_end, last_end + 1):
            for first in range(end - 1, stage - 1, -1):
                own = cost(stage, first, end)
                if own == inf or own - slack > bound:
                    break
                if own > bound or best[first] == inf:
                    continue
                joined = join(best[first], own)
                # `<=` on the way down: of equal cuts the first one wins.
                if joined <= following[end]:
                    following[end], choice[end] = joined, first
        best = following
        choices.append(choice)
    if best[num_items] == inf:
        return None
    cuts, end = [], num_items
    for choice in reversed(choices):
        end = choice[end]
        cuts.append(end)
    return best[num_items], tuple(reversed(cuts))


def _upper_bound(num_items: int, num_stages: int, cost: Cost, slack: float) -> float:
    """Returns a largest cost that some cut is known to reach, found by filling stages greedily.

    It only saves work: the programming above then skips every stage that costs more.
    """
    low, reached = 0.0, inf
    high = num_stages * sum(cost(0, i, i + 1) for i in range(num_items))
    if high == inf:
        return inf
    for _ in range(40):
        target = (low + high) / 2
        largest = _fill(num_items, num_stages, cost, target)
        if largest is None:
            low = target
        else:
            reached = min(reached, largest)
            high = min(target, largest)
    return reached


def _fill(num_items: int, num_stages: int, cost: Cost, target: float) -> float | None:
    """Fills each stage up to `target` in turn; returns the largest cost, None if items stay."""
    first, largest = 0, 0.0
    for stage in range(num_stages):
        must_stop = num_items - (num_stages - 1 - stage)
        end = first + 1
        while end < must_stop and cost(stage, first, end + 1) <= target:
            end += 1
        own = cost(stage, first, end)
        if own > target:
            return None
        first, largest = end, max(largest, own)
    return largest if first == num_items else None
