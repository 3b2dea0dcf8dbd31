"""Pipeline schedules: which rank computes which microbatch of which stage when.

A step is planned before it runs, by one rule. Planning goes in beats; in each beat every rank
takes the best backward that is ready, then the best forward that is ready, and best is the one
that is furthest along its microbatch's path. `interleaved` limits how far the forwards run
ahead, `simple` holds the backwards until the forwards have ended. That is all: on a chain of
stages the rule yields 1F1B and GPipe, with several stages per rank it yields a looped schedule,
and no map of stages to ranks makes it stall. Where activations are recomputed, that is an action
of its own. It needs nothing from other ranks, so a rank without a ready action takes the next one
while it waits for the output gradient; else it comes right before its backward.

The plan says what to compute. What must move follows from it (`transfers`), and so does how
long it takes (`simulation`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, get_args

from smp_runtime.errors import ScheduleError

Policy = Literal["interleaved", "simple"]


class Kind(StrEnum):
    """What an action does with one microbatch of one stage."""

    FORWARD = "F"  # Roughly: stash[i] = inputs; outputs = stage(inputs)
    RECOMPUTE = "R"  # Roughly: activations[i] = stage(stash[i])
    BACKWARD = "B"  # Roughly: input_grads = backward(stash.pop(i), output_grads)


class Action(NamedTuple):
    """One cell of a plan. Prints as stage, kind, microbatch: ``2F0``."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one step computes: for every rank its actions, in order.

    Attributes:
        rank_of: the rank of each stage, in the order of execution.
        num_microbatches: how many microbatches the step has.
        orders: for each rank, its actions in the order in which it takes them.
    """

    rank_of: tuple[int, ...]
    num_microbatches: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """Returns the actions of one rank, in order; none if it holds no stage."""
        return self.orders[rank] if rank < len(self.orders) else ()

    def source(self, action: Action) -> Action | None:
        """Returns the action whose result `action` starts from, or None for a step's input.

        ``0F3 -> 1F3 -> 2F3 -> 2B3 -> 1B3 -> 0B3`` on three stages. These arrows, and the order
        of each rank, are all there is to wait for.
        """
        stage, kind, i = action
        if kind is Kind.FORWARD:
            return Action(stage - 1, kind, i) if stage > 0 else None
        if kind is Kind.RECOMPUTE:
            return Action(stage, Kind.FORWARD, i)
        if stage < self.num_stages - 1:
            return Action(stage + 1, kind, i)
        return Action(stage, Kind.FORWARD, i)

    def peak_stashed(self, stage: int) -> int:
        """Returns how many microbatches a stage stashes at most.

        That is, how many are between the start of their forward and the end of their backward.
        An evaluation stashes none.
        """
        stashed = peak = 0
        for action in reversed(self.orders[self.rank_of[stage]]):
            if action.stage == stage and action.kind is not Kind.RECOMPUTE:
                stashed = max(stashed + (1 if action.kind is Kind.BACKWARD else -1), 0)
                peak = max(peak, stashed)
        return peak

    def peak_in_flight(self, rank: int) -> int:
        """Returns how many microbatches a rank has in flight at most, on any of its stages."""
        # Each one comes in with the first stage's forward and goes with its backward.
        return self.peak_stashed(self.rank_of.index(rank)) if rank in self.rank_of else 0

    def peak_recomputed(self, rank: int) -> int:
        """Returns how many microbatches' recomputations a rank holds at most at once."""
        held: set[tuple[int, int]] = set()
        peak = 0
        for stage, kind, i in self.orders[rank]:
            if kind is Kind.RECOMPUTE:
                held.add((stage, i))
                peak = max(peak, len(held))
            elif kind is Kind.BACKWARD:
                held.discard((stage, i))
        return peak


def plan(
    rank_of: Sequence[int],
    num_microbatches: int,
    *,
    active: int,
    policy: Policy,
    forward_only: bool = False,
    recomputed: Collection[int] = (),
    recompute_ahead: int = 1,
) -> Plan:
    """Plans one step.

    With ``rank_of=(0, 1, 2)``, 4 microbatches and ``active=3``, `interleaved` is 1F1B::

        rank 0  0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
        rank 1   .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3  .
        rank 2   .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  .   .

    and `simple`, with ``active=4``, is GPipe::

        rank 0  0F0 0F1 0F2 0F3  .   .   .   .  0B0 0B1 0B2 0B3
        rank 1   .  1F0 1F1 1F2 1F3  .   .  1B0 1B1 1B2 1B3  .
        rank 2   .   .  2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3  .   .

    Recomputations fill what would be idle. With ``rank_of=(0, 1)`` and both stages `recomputed`::

        rank 0  0F0 0F1 0R0  .  0B0 0F2 0R1 0B1 0F3 0R2 0B2 0R3  .  0B3
        rank 1   .  1F0 1R0 1B0 1F1 1R1 1B1 1F2 1R2 1B2 1F3 1R3 1B3  .

    Every stage takes its forwards, and its backwards, in the order of the microbatches. So
    gradients are summed in one order, and are equal bit for bit under either policy.

    Args:
        rank_of: the rank of each stage, in the order of execution. Ranks may repeat:
            ``(0, 1, 2, 0)`` keeps the first and the last stage on one rank.
        num_microbatches: how many microbatches the step has; fewer than stages is fine.
        active: how many microbatches any stage may have in flight. Under `interleaved` a rank
            that holds only stage ``s`` of ``n`` has at most ``n - s`` all the same.
        policy: `interleaved` takes backwards as early as possible; `simple` ends the forwards of
            `active` microbatches first.
        forward_only: plan an evaluation, without backwards.
        recomputed: stages whose activations are recomputed before each backward.
        recompute_ahead: how many microbatches a rank may recompute before their output gradients
            have come. With 0 none is an action of its own: each is a part of its backward.

    Raises:
        ScheduleError: an argument does not describe a step.
    """
    _check(rank_of, num_microbatches, active, policy)
    planner = _Planner(
        tuple(rank_of),
        num_microbatches,
        active,
        policy,
        forward_only,
        frozenset() if forward_only or not recompute_ahead else frozenset(recomputed),
        recompute_ahead,
    )
    return Plan(planner.rank_of, num_microbatches, planner.run())


def _check(rank_of: Sequence[int], num_microbatches: int, active: int, policy: Policy) -> None:
    if not rank_of or min(rank_of) < 0:
        raise ScheduleError(
            f"rank_of must name the rank (0 or more) of at least one stage, got {tuple(rank_of)}"
        )
    if num_microbatches < 1:
        raise ScheduleError(f"a step needs at least 1 microbatch, got {num_microbatches}")
    if active < 1:
        raise ScheduleError(f"active_microbatches must be at least 1, got {active}")
    if policy not in get_args(Policy):
        raise ScheduleError(f"pipeline must be one of {get_args(Policy)}, got {policy!r}")


@dataclass(slots=True)
class _Planner:
    """The state of planning: how many forwards and backwards each stage has taken so far.

    Why it never stalls: the oldest unfinished microbatch can always go on. Its backward needs
    only its own forwards (and, under `simple`, those of its group of `active`, which fit). Its
    forward needs room on its stage, where only older microbatches, all finished, could be in the
    way, and on its rank, where an earlier stage never takes the last places (see `has_room`).
    """

    rank_of: tuple[int, ...]
    m: int
    active: int
    policy: Policy
    forward_only: bool
    recomputed: frozenset[int]
    recompute_ahead: int
    stages: tuple[tuple[int, ...], ...] = field(init=False)  # of each rank
    forwards: list[int] = field(init=False)  # of each stage
    backwards: list[int] = field(init=False)
    recomputations: list[int] = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.rank_of)
        self.stages = tuple(
            tuple(s for s in range(n) if self.rank_of[s] == rank)
            for rank in range(max(self.rank_of) + 1)
        )
        self.forwards, self.backwards, self.recomputations = [0] * n, [0] * n, [0] * n

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Plans beat by beat until every stage has seen every microbatch."""
        orders: list[list[Action]] = [[] for _ in self.stages]
        beat = (Kind.FORWARD,) if self.forward_only else (Kind.BACKWARD, Kind.FORWARD)
        # The last action of all is on the last stage of an evaluation, or on the first stage.
        while (self.forwards[-1] if self.forward_only else self.backwards[0]) < self.m:
            begun = sum(self.forwards) + sum(self.backwards)
            lengths = [len(order) for order in orders]
            for kind in beat:
                # All ranks choose before any acts: nobody uses what another makes in this beat.
                chosen = [self.best(kind, rank) for rank in range(len(self.stages))]
                for order, action in zip(orders, chosen, strict=True):
                    if action is not None:
                        order.extend(self.with_recomputation(action))
                        self.taken(kind)[action.stage] += 1
            for rank, (order, length) in enumerate(zip(orders, lengths, strict=True)):
                if len(order) == length and (action := self.recomputation_ahead(rank)) is not None:
                    order.append(action)
                    self.recomputations[action.stage] += 1
            assert sum(self.forwards) + sum(self.backwards) > begun, "no action is ready"
        return tuple(map(tuple, orders))

    def best(self, kind: Kind, rank: int) -> Action | None:
        """Returns the ready action of this kind that is furthest along its microbatch's path."""
        # Forwards climb the stages and backwards descend them.
        furthest_first = self.stages[rank][:: -1 if kind is Kind.FORWARD else 1]
        is_ready = self.forward_is_ready if kind is Kind.FORWARD else self.backward_is_ready
        for stage in furthest_first:
            if is_ready(stage):
                return Action(stage, kind, self.taken(kind)[stage])
        return None

    def with_recomputation(self, action: Action) -> tuple[Action, ...]:
        """Returns an action, with the recomputation that it needs and that was not taken before."""
        stage, kind, i = action
        if kind is Kind.FORWARD or stage not in self.recomputed or self.recomputations[stage] > i:
            return (action,)
        self.recomputations[stage] += 1
        return Action(stage, Kind.RECOMPUTE, i), action

    def recomputation_ahead(self, rank: int) -> Action | None:
        """Returns the recomputation that an idle rank may take for a later backward, if any."""
        own = [stage for stage in self.stages[rank] if stage in self.recomputed]
        if sum(self.recomputations[s] - self.backwards[s] for s in own) >= self.recompute_ahead:
            return None
        ready = [s for s in own if self.recomputations[s] < self.forwards[s]]
        # The backward that comes first: of the earliest microbatch, at the deepest stage.
        stage = min(ready, key=lambda s: (self.recomputations[s], -s), default=None)
        return None if stage is None else Action(stage, Kind.RECOMPUTE, self.recomputations[stage])

    def taken(self, kind: Kind) -> list[int]:
        """Returns the count per stage; it is also each stage's next microbatch."""
        return self.forwards if kind is Kind.FORWARD else self.backwards

    def forward_is_ready(self, stage: int) -> bool:
        """Whether the stage's next input exists and the result may be kept."""
        available = self.m if stage == 0 else self.forwards[stage - 1]
        return self.forwards[stage] < available and self.has_room(stage)

    def backward_is_ready(self, stage: int) -> bool:
        """Whether the stage's next output gradient exists and the policy lets it go."""
        i, is_last = self.backwards[stage], stage == len(self.rank_of) - 1
        available = self.forwards[stage] if is_last else self.backwards[stage + 1]
        if i >= available or self.policy == "interleaved":
            return i < available
        group_end = min((i // self.active + 1) * self.active, self.m)
        return all(self.forwards[s] >= group_end for s in self.stages[self.rank_of[stage]])

    def has_room(self, stage: int) -> bool:
        """Whether the caps allow one more microbatch in flight on the stage and its rank."""
        if self.forward_only:
            return self.forwards[stage] - self.forwards[-1] < self.active
        if self.forwards[stage] - self.backwards[stage] >= self.active:
            return False
        if self.policy == "simple":
            return True
        n, own = len(self.rank_of), self.stages[self.rank_of[stage]]
        stashed = sum(self.forwards[s] - self.backwards[s] for s in own)
        if len(own) == 1:
            # Forwards and backwards of a chain alternate: half the beats of the round trip.
            return stashed < n - stage
        # One forward in each beat from the rank's first forward until its first backward, and
        # one place more for each later stage, so that an earlier one cannot starve it.
        return stashed < 2 * n - 1 - own[0] - own[-1] + own.index(stage)


def starts(plan: Plan, cost: Callable[[Action], float], transfer: float = 0) -> dict[Action, float]:
    """Returns when each action starts if it takes `cost` and each transfer `transfer`.

    A rank takes its actions in order, each as soon as its source has arrived.

    Raises:
        ScheduleError: the ranks wait for each other. No plan made by `plan` does that.
    """
    start: dict[Action, float] = {}
    free_at = [0.0] * len(plan.orders)
    waiting = [iter(order) for order in plan.orders]
    heads = [next(actions, None) for actions in waiting]
    while any(heads):
        begun = len(start)
        for rank, actions in enumerate(waiting):
            while (action := heads[rank]) is not None:
                source = plan.source(action)
                ready_at = 0.0
                if source is not None:
                    if source not in start:
                        break
                    delay = transfer if plan.rank_of[source.stage] != rank else 0
                    ready_at = start[source] + cost(source) + delay
                start[action] = max(free_at[rank], ready_at)
                free_at[rank] = start[action] + cost(action)
                heads[rank] = next(actions, None)
        if len(start) == begun:
            stuck = ", ".join(str(action) for action in heads if action is not None)
            raise ScheduleError(f"each rank waits for another one, before its action {stuck}")
    return start


def draw(plan: Plan, *, mark: tuple[int, Action] | None = None) -> str:
    """Draws a plan as a staircase: a row for each rank, a column for each clock.

    A clock is the time of one action, if all take equally long. The cell of `mark`, a rank and
    the action it failed in or is stuck at, is bracketed::

        rank 0  0F0 0F1 0B0 0B1
        rank 1   .  1F0[1B0]...  <-- here
    """
    clocks = {action: int(start) for action, start in starts(plan, lambda _: 1).items()}
    width = max(len(str(action)) for action in clocks)
    rows = []
    for rank, order in enumerate(plan.orders):
        cells = [".".center(width)] * (max(clocks.values()) + 1)
        for action in order:
            cells[clocks[action]] = str(action).center(width)
        row = f" {' '.join(cells)} "
        if mark is not None and mark[0] == rank:
            left = clocks[mark[1]] * (width + 1)
            right = left + width + 1
            row = f"{row[:left]}[{row[left + 1 : right]}]{row[right + 1 :]}  <-- here"
        rows.append(f"rank {rank:<{len(str(len(plan.orders) - 1))}} {row}".rstrip())
    return "\n".join(rows)
