"""Chooses the fewest modules to checkpoint so that a step fits into a budget of memory.

The bytes are those of the trace. A rank saves, for each microbatch in flight, the input of a module
that is checkpointed or all that another one saves. A backward frees them from the last module to
the first, and rebuilds what each checkpointed one saves for as long as it runs; the peak is where
the sum of both is largest. In a pipeline the last checkpointed module may be rebuilt before its
backward begins, or held until then. First stages hold more microbatches, so they choose more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

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
class RankChoice:
    """What one rank checkpoints.

    Args:
        rank: the rank.
        paths: the chosen modules.
        num_candidates: how many there were.
        saved: bytes saved for backward at the peak, as predicted.
        total: these, and parameters, gradients and optimizer state.
        budget: bytes that the rank may use.
    """

    rank: int
    paths: tuple[str, ...]
    num_candidates: int
    saved: int
    total: int
    budget: int

    def __str__(self) -> str:
        fits = "" if self.total <= self.budget else ", which is too little"
        return (
            f"activation checkpointing, auto: partition {self.rank} checkpoints {len(self.paths)} "
            f"of {self.num_candidates} modules; predicted: {in_units(self.saved)} saved at the "
            f"peak, {in_units(self.total)} in all of a budget of {in_units(self.budget)}{fits}"
        )


def choose(
    rank: int, parts: Sequence[Part], state: int, budget: int, *, is_ahead: bool
) -> RankChoice:
    """Chooses for one rank: the largest gains first, until it fits.

    Args:
        rank: the rank.
        parts: all that it runs, in the order of execution.
        state: bytes of its parameters, gradients and optimizer state.
        budget: bytes that it may use.
        is_ahead: whether the last checkpointed module is rebuilt before the backward begins.

    Returns:
        The choice: all modules, if even that does not suffice.
    """
    candidates = [part for part in parts if part.path]
    waiting = sorted(candidates, key=lambda part: -part.gain)
    chosen: set[str] = set()
    while state + peak(parts, chosen, is_ahead=is_ahead) > budget and waiting:
        chosen.add(waiting.pop(0).path)
    saved = peak(parts, chosen, is_ahead=is_ahead)
    paths = tuple(part.path for part in candidates if part.path in chosen)
    return RankChoice(rank, paths, len(candidates), saved, state + saved, budget)


def choose_all(
    root: ModuleNode,
    partition: Partition | None,
    in_flight: Mapping[int, int],
    paths: Sequence[str],
    budget: int,
) -> list[RankChoice]:
    """Chooses for every rank.

    Args:
        root: the costs of the model.
        partition: who holds what; None if one rank holds everything.
        in_flight: microbatches that each stage holds at once.
        paths: the modules that may be checkpointed. Those on several ranks are left out.
        budget: bytes that each rank may use.
    """
    parts = _parts_by_rank(root, partition, in_flight, paths)
    if partition is None:
        states = [sum({fact.group: fact.state_bytes for _, fact in root.facts()}.values())]
    else:
        states = [share.total_bytes - share.activation_bytes for share in partition.ranks]
    is_ahead = partition is not None
    return [
        choose(rank, parts.get(rank, []), state, budget, is_ahead=is_ahead)
        for rank, state in enumerate(states)
    ]


def _parts_by_rank(
    root: ModuleNode,
    partition: Partition | None,
    in_flight: Mapping[int, int],
    paths: Sequence[str],
) -> dict[int, list[Part]]:
    """Returns what each rank runs, in the order of execution."""
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
