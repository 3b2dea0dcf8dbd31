"""Chooses the fewest modules to checkpoint so that a step fits into a budget of memory.

The bytes are those of the trace. A rank saves, for each microbatch in flight, the input of a module
that is checkpointed or all that another one saves. A backward frees them from the last module to
the first, and rebuilds what each checkpointed one saves for as long as it runs; the peak is where
the sum of both is largest. In a pipeline the last checkpointed module may be rebuilt before its
backward begins, or held until then. First stages hold more microbatches, so they choose more.

Once steps were measured, their numbers correct those of the trace: what was counted as saved scales
what is predicted, and what a rank holds besides is the peak of its device without that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..planning.module_tree import ModuleNode, is_below
from ..planning.partition_table import Partition, in_units


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank runs at one place of the execution order.

    Args:
        path: the module; "" for operations that can't be checkpointed.
        in_flight: how many microbatches its stage holds at once.
        saved: bytes that it saves for one microbatch.
        kept: bytes of its input, which stay if it is checkpointed.
        order: number of its first call.
    """

    path: str
    in_flight: int
    saved: int
    kept: int = 0
    order: int = 0

    @property
    def gain(self) -> int:
        """Bytes that all microbatches in flight save less if it is checkpointed."""
        return (self.saved - self.kept) * self.in_flight


def peak(parts: Sequence[Part], chosen: Collection[str], *, is_ahead: bool) -> int:
    """Returns the bytes that a rank saves at the peak.

    Args:
        parts: all that it runs, in the order of execution.
        chosen: the modules that are checkpointed.
        is_ahead: whether one of them is rebuilt before the backward begins.
    """
    waiting = current = most = rebuilt = 0  # of later microbatches; of the one that goes back
    for part in parts:
        is_chosen = part.path in chosen
        stash = part.kept if is_chosen else part.saved
        waiting += stash * (part.in_flight - 1)
        current += stash
        if is_chosen:
            rebuilt = part.saved - part.kept
        most = max(most, current + rebuilt * (is_ahead or is_chosen))
    return waiting + most


@dataclass(frozen=True, slots=True)
class Costs:
    """What is known of a traced model.

    Args:
        root: the costs of its modules.
        partition: who holds what; None if one rank holds everything.
        in_flight: microbatches that each stage holds at once.
    """

    root: ModuleNode
    partition: Partition | None
    in_flight: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What training steps took on one rank.

    Args:
        saved: bytes saved for backward at the peak; 0 if nobody counted.
        saved_with: the modules that were checkpointed meanwhile.
        total: bytes of all tensors on the device at the peak; 0 if the device does not tell.
        total_with: the modules that were checkpointed meanwhile.
    """

    saved: int = 0
    saved_with: frozenset[str] = frozenset()
    total: int = 0
    total_with: frozenset[str] = frozenset()

    def __or__(self, other: Measurement) -> Measurement:
        """Returns the larger numbers of both."""
        saved, saved_with = max((self.saved, self.saved_with), (other.saved, other.saved_with),
                                key=lambda pair: pair[0])  # fmt: skip
        total, total_with = max((self.total, self.total_with), (other.total, other.total_with),
                                key=lambda pair: pair[0])  # fmt: skip
        return Measurement(saved, saved_with, total, total_with)

    def correct(
        self, parts: Sequence[Part], state: int, *, is_ahead: bool
    ) -> tuple[list[Part], int]:
        """Returns the parts and the bytes held besides, corrected.

        Args:
            parts: all that the rank runs, in the order of execution, by the trace.
            state: bytes of its parameters, gradients and optimizer state, by the trace.
            is_ahead: whether a checkpointed module is rebuilt before the backward begins.
        """
        predicted = peak(parts, self.saved_with, is_ahead=is_ahead)
        scale = self.saved / predicted if self.saved and predicted else 1.0
        corrected = [
            replace(part, saved=round(part.saved * scale), kept=round(part.kept * scale))
            for part in parts
        ]
        if self.total:
            state = max(0, self.total - peak(corrected, self.total_with, is_ahead=is_ahead))
        return corrected, state


@dataclass(frozen=True, slots=True)
class RankChoice:
    """What one rank checkpoints.

    Args:
        rank: the rank.
        paths: the chosen modules.
        num_candidates: how many there were.
        saved: bytes saved for backward at the peak, as predicted.
        total: these, and parameters, gradients and optimizer state.
        budget: bytes that the rank may use.
        is_measured: whether measured steps corrected the prediction.
    """

    rank: int
    paths: tuple[str, ...]
    num_candidates: int
    saved: int
    total: int
    budget: int
    is_measured: bool = False

    def __str__(self) -> str:
        fits = "" if self.total <= self.budget else ", which is too little"
        basis = " by measured steps" if self.is_measured else ""
        return (
            f"activation checkpointing, auto: partition {self.rank} checkpoints {len(self.paths)} "
            f"of {self.num_candidates} modules; predicted{basis}: {in_units(self.saved)} saved at "
            f"the peak, {in_units(self.total)} in all of a budget of {in_units(self.budget)}{fits}"
        )


def choose(
    rank: int,
    parts: Sequence[Part],
    state: int,
    budget: int,
    *,
    is_ahead: bool,
    among: Collection[str] | None = None,
    fixed: Collection[str] = (),
) -> RankChoice:
    """Chooses for one rank: the largest gains first, until it fits.

    Args:
        rank: the rank.
        parts: all that it runs, in the order of execution.
        state: bytes of its parameters, gradients and optimizer state.
        budget: bytes that it may use.
        is_ahead: whether the last checkpointed module is rebuilt before the backward begins.
        among: the modules to choose from; None for all.
        fixed: modules that are checkpointed in any case.

    Returns:
        The choice: all modules, if even that does not suffice.
    """
    candidates = [part for part in parts if part.path and (among is None or part.path in among)]
    waiting = sorted(candidates, key=lambda part: -part.gain)
    chosen = set(fixed)
    while state + peak(parts, chosen, is_ahead=is_ahead) > budget and waiting:
        chosen.add(waiting.pop(0).path)
    saved = peak(parts, chosen, is_ahead=is_ahead)
    paths = tuple(part.path for part in candidates if part.path in chosen)
    return RankChoice(rank, paths, len(candidates), saved, state + saved, budget)


def choose_all(
    costs: Costs,
    paths: Sequence[str],
    budgets: Sequence[int],
    measured: Sequence[Measurement] = (),
    fixed: Collection[str] = (),
) -> list[RankChoice]:
    """Chooses for every rank.

    Args:
        costs: of the model.
        paths: the modules that may be checkpointed. Those on several ranks are left out.
        budgets: bytes that each rank may use; one number is for all.
        measured: what steps took on each rank, if there were any.
        fixed: modules that are checkpointed in any case.
    """
    partition = costs.partition
    known = dict.fromkeys([*paths, *sorted(fixed)])
    for each in measured:
        known |= dict.fromkeys(sorted(each.saved_with | each.total_with))
    parts = _parts_by_rank(costs, list(known))
    if partition is None:
        facts = costs.root.facts()
        states = [sum({fact.group: fact.state_bytes for _, fact in facts}.values())]
    else:
        states = [share.total_bytes - share.activation_bytes for share in partition.ranks]
    is_ahead = partition is not None
    choices = []
    for rank, state in enumerate(states):
        mine = parts.get(rank, [])
        found = measured[rank] if measured and _are_apart(known) else Measurement()
        mine, state = found.correct(mine, state, is_ahead=is_ahead)
        budget = budgets[rank % len(budgets)]
        choice = choose(rank, mine, state, budget, is_ahead=is_ahead, among=paths, fixed=fixed)
        choices.append(replace(choice, is_measured=bool(found.saved or found.total)))
    return choices


def _are_apart(paths: Iterable[str]) -> bool:
    """Says whether no module is inside another one: what those save can't be told apart."""
    ordered = sorted(paths, key=lambda path: path.split("."))
    return not any(is_below(path, before) for before, path in pairwise(ordered))


def _parts_by_rank(costs: Costs, paths: Sequence[str]) -> dict[int, list[Part]]:
    """Returns what each rank runs, in the order of execution."""
    root, partition, in_flight = costs.root, costs.partition, costs.in_flight
    homes = {"": 0} if partition is None else partition.assignment
    stages = {} if partition is None else partition.stage_of
    home_of: dict[str, str] = {}
    for node in root.walk():
        home = next((place for place in homes if is_below(node.path, place)), None)
        if home is not None:
            home_of[node.path] = home
    callers = sorted((call, node.path) for node in root.walk() for call in node.calls
                     if node.path in home_of)  # fmt: skip
    candidates = [path for path in paths if path in home_of]
    parts: dict[str, Part] = {}
    ranks: dict[str, int] = {}
    for node in root.walk():
        inside = next((path for path in candidates if is_below(node.path, path)), "")
        for cost in node.own_costs:
            # Glue runs where what it works on comes from.
            before = [path for call, path in callers if call <= cost.origin]
            home = home_of.get(node.path) or (home_of[before[-1]] if before else next(iter(homes)))
            order = node.order or 0 if inside else max(cost.origin, 0)
            key = inside or f"{home} {order}"
            known = parts.get(key, Part(inside, in_flight[stages.get(home, 0)], 0, 0, order))
            parts[key] = replace(
                known,
                saved=known.saved + cost.activation_bytes,
                order=min(known.order, order),
            )
            ranks[key] = homes[home]
    kept = {node.path: node.input_bytes for node in root.walk()}
    found: dict[int, list[Part]] = {}
    for key, part in sorted(parts.items(), key=lambda item: item[1].order):
        made = replace(part, kept=min(kept[part.path], part.saved)) if part.path else part
        found.setdefault(ranks[key], []).append(made)
    return found
