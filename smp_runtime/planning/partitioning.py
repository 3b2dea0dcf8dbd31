"""Assigns every module of a model to a pipeline rank.

The row of atoms in execution order is cut into contiguous stages so that the slowest rank is as
fast as it can be and every rank's memory suffices; ranks then take the stages in turn. Shared
parameters bend the row: either all their users move to one rank, which is then visited twice, or
each user's rank holds a copy. Manual placement only replaces the cutting.

>>> print(partition(trace_model(model, (input_ids,)).root, 2).table())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ..errors import PartitionError
from .assignment import assemble
from .atoms import Atom, atoms_at_level, charge
from .balance import Budget, Item, SharedGroup, StageCosts, balanced_cuts, rank_costs, rank_cuts
from .gathering import rows_together
from .manual_assignment import ranks_from_pins
from .module_tree import ModuleNode
from .partition_table import Partition
from .skipped import with_skipped_modules

__all__ = ["Partition", "partition"]

Tied = Literal["auto", "together", "copy"]

WORTH_OPENING = 0.9
"""Blocks are cut inside only if the slowest stage then costs less than this share of otherwise:
each tensor more that crosses ranks costs, too, and what is opened runs as glue."""

EXCHANGE = 5e-10
"""Seconds per byte and microbatch for summing the gradient of a copied parameter: about one
gigabyte per second between the holders, spread over a few microbatches per step."""

REVISIT = 1.1
"""What a step takes longer when a rank is visited more than once: the planned order of a ring
leaves more bubbles than that of a chain, by simulation 5 to 15 % at a few microbatches per rank."""


def partition(
    root: ModuleNode,
    num_partitions: int,
    *,
    stages_per_rank: int = 1,
    memory_weight: float = 0.0,
    tied: Tied = "auto",
    num_in_flight: Callable[[int], int] | None = None,
    memory_limit: int | None = None,
    pinned: Mapping[str, int] | None = None,
    default_partition: int | None = None,
) -> Partition:
    """Assigns every module below `root` to one of `num_partitions` ranks.

    Args:
        root: the costs of the model, from a trace.
        num_partitions: number of pipeline ranks.
        stages_per_rank: more than 1 deals that many stages to each rank in turn (looped).
        memory_weight: 0 balances compute, 1 memory, between them the blend of both shares.
        tied: place the users of a shared parameter together, or copy it; or take what is faster.
        num_in_flight: microbatches that a stage holds at once; by default one less per stage.
        memory_limit: bytes that one rank may hold.
        pinned: rank by module path, for manual placement; the innermost path wins.
        default_partition: rank of what is not pinned. With it or `pinned`, placement is manual.

    Raises:
        PartitionError: a rank would stay empty, memory does not suffice, or pins contradict.
    """
    root = with_skipped_modules(root)
    num_stages = num_partitions * stages_per_rank
    held = num_in_flight or (lambda stage: num_stages - stage)

    def in_flight(stage: int) -> int:
        # A rank that is visited again, as with shared parameters, makes one stage more.
        return max(1, held(min(stage, num_stages - 1)))

    if pinned is not None or default_partition is not None:
        ranks = ranks_from_pins(root, num_partitions, pinned or {}, default_partition, tied)
        return assemble(root, ranks, num_partitions, in_flight, memory_limit)
    if num_stages == 1:
        ranks = dict.fromkeys((name for name, _ in root.facts()), 0)
        return assemble(root, ranks, num_partitions, in_flight, memory_limit)
    limit = None if memory_limit is None else memory_limit / stages_per_rank
    budget = Budget(memory_weight, in_flight, limit, num_partitions)
    cut, reason = _chosen_cut(root, num_stages, tied, budget)
    ranks = _ranks_in_order_of_visit(cut, num_partitions)
    return assemble(
        root, ranks, num_partitions, in_flight, memory_limit, slowest=cut.slowest, reason=reason
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """The atoms and the stage of each; `slowest` is the largest cost of a rank."""

    atoms: Sequence[Atom]
    stages: tuple[int, ...]
    slowest: float

    @property
    def price(self) -> float:
        """What cuts are compared by: the slowest rank, and the bubbles of revisited ranks."""
        return self.slowest * (REVISIT if self.has_revisits else 1.0)

    @property
    def has_revisits(self) -> bool:
        """Whether a stage is visited more than once."""
        calls = sorted(
            (call, stage)
            for atom, stage in zip(self.atoms, self.stages, strict=True)
            for call in atom.node.calls
        )
        visits = 1 + sum(before[1] != after[1] for before, after in pairwise(calls))
        return visits > len(set(self.stages))


def _chosen_cut(root: ModuleNode, num_stages: int, tied: Tied, budget: Budget) -> tuple[_Cut, str]:
    """Returns the best cut, and in words why shared parameters are copied or not."""
    groups = [fact.group for _, fact in root.facts()]
    if tied != "auto" or len(groups) == len(set(groups)):
        return _best_cut(root, num_stages, tied, budget), ""
    try:
        together = _best_cut(root, num_stages, "together", budget)
    except PartitionError:
        copied = _best_cut(root, num_stages, "copy", budget)
        return copied, "tied_weights auto: copy, as no cut keeps all their users together"
    try:
        copied = _best_cut(root, num_stages, "copy", budget)
    except PartitionError:
        return together, "tied_weights auto: together, as no cut has room for copies"
    if copied.price == together.price:
        return together, ""
    chosen = min(together, copied, key=lambda cut: cut.price)
    unit = "compute and memory" if budget.memory_weight else "compute"
    bubbles = " (bubbles of the second visit included)" if together.has_revisits else ""
    return chosen, (
        f"tied_weights auto: {'copy' if chosen is copied else 'together'}, as the slowest partition"
        f" takes {copied.price:.1%} of the {unit} with copies (gradient exchange included) and "
        f"{together.price:.1%} together{bubbles}"
    )


def _best_cut(root: ModuleNode, num_stages: int, tied: Tied, budget: Budget) -> _Cut:
    """Opens the blocks only as deep as it takes to come near the best that any depth gives."""
    cuts: list[_Cut] = []
    atoms: tuple[Atom, ...] = ()
    level = 0
    while len(finer := atoms_at_level(root, level)) != len(atoms):
        atoms = finer
        level += 1
        cut = _cut(root, atoms, num_stages, tied, budget)
        if cut is not None:
            cuts.append(cut)
    if cuts:
        cheapest = min(cut.price for cut in cuts)
        return next(cut for cut in cuts if cheapest >= WORTH_OPENING * cut.price)
    wanted, remedy = _in_settings(num_stages, budget.num_ranks or num_stages, len(atoms))
    if len(atoms) < num_stages:
        raise PartitionError(f"{wanted} but only {len(atoms)} placeable modules: {remedy}")
    if budget.limit is not None:
        raise PartitionError(
            f"no cut into {num_stages} stages keeps every stage below {budget.limit:.0f} bytes: "
            "use more ranks, fewer active_microbatches or a larger memory limit"
        )
    raise PartitionError(
        f"{wanted} but fewer placeable modules where those that share a parameter "
        f"stay together ({len(atoms)} in all): set tied_weights to 'copy' or 'auto'"
    )


def _in_settings(num_stages: int, num_ranks: int, most: int) -> tuple[str, str]:
    """Says which settings ask for so many stages, and how to change them for at most `most`."""
    if num_stages == num_ranks:
        remedy = f"use a smaller pipeline_parallel_degree, at most {most}"
        return f"{num_stages} partitions", remedy
    product = f"pipeline_parallel_degree {num_ranks} x stages_per_rank {num_stages // num_ranks}"
    remedy = (
        f"use a smaller stages_per_rank or pipeline_parallel_degree, their product at most {most}"
    )
    return f"{num_stages} stages ({product})", remedy


def _cut(
    root: ModuleNode, atoms: Sequence[Atom], num_stages: int, tied: Tied, budget: Budget
) -> _Cut | None:
    """Returns the best cut between these atoms, None if there is none."""
    if len(atoms) < num_stages:
        return None
    items, shared = _items(root, atoms)
    if not shared:
        return _cut_items(atoms, items, {}, list(range(len(atoms))), num_stages, budget)
    cuts: list[_Cut] = []
    if tied != "copy":
        for gathered, item_of in rows_together(items, shared):
            cut = _cut_items(atoms, gathered, {}, item_of, num_stages, budget)
            cuts.extend([cut] if cut else [])
    if tied != "together":
        in_place = list(range(len(atoms)))
        copied = _cut_items(atoms, items, shared, in_place, num_stages, budget)
        cuts.extend([copied] if copied else [])
    return min(cuts, key=lambda cut: cut.price, default=None)


def _cut_items(
    atoms: Sequence[Atom],
    items: Sequence[Item],
    shared: Mapping[int, SharedGroup],
    item_of: Sequence[int],
    num_stages: int,
    budget: Budget,
) -> _Cut | None:
    """Cuts a row of items; `item_of` tells for each atom which item it belongs to."""
    cost = StageCosts(items, shared, budget)
    starts = balanced_cuts(len(items), num_stages, cost, cost.slack())
    if starts is None:
        return None
    num_ranks = budget.num_ranks or num_stages
    if num_ranks < num_stages:
        starts = rank_cuts(starts, len(items), num_ranks, cost)
    ends = [*starts[1:], len(items)]
    stages = [stage for stage in range(num_stages) for _ in range(starts[stage], ends[stage])]
    slowest = max(rank_costs(starts, len(items), num_ranks, cost))
    return _Cut(atoms, tuple(stages[item] for item in item_of), slowest)


def _items(root: ModuleNode, atoms: Sequence[Atom]) -> tuple[list[Item], dict[int, SharedGroup]]:
    """Returns the atoms as items to balance, and the parameters that several of them use."""
    users: dict[int, set[int]] = {}
    facts = {}
    for index, atom in enumerate(atoms):
        for _, fact in atom.facts:
            users.setdefault(fact.group, set()).add(index)
            facts[fact.group] = fact
    shared = {
        group: SharedGroup(
            facts[group].state_bytes,
            facts[group].bytes * EXCHANGE if facts[group].requires_grad else 0.0,
        )
        for group, indices in users.items()
        if len(indices) > 1
    }
    charges = charge(root, [atom.node for atom in atoms])
    items = []
    for atom in atoms:
        own = {fact.group: fact for _, fact in atom.facts}
        items.append(
            Item(
                charges[atom.node.path].compute,
                sum(fact.state_bytes for group, fact in own.items() if group not in shared),
                charges[atom.node.path].activation_bytes,
                frozenset(group for group in own if group in shared),
            )
        )
    return items, shared


def _ranks_in_order_of_visit(cut: _Cut, num_partitions: int) -> dict[str, int]:
    """Deals the stages to ranks in turn; ranks are numbered as execution first visits them."""
    numbers: dict[int, int] = {}
    ranks = {}
    for atom, stage in zip(cut.atoms, cut.stages, strict=True):
        rank = numbers.setdefault(stage % num_partitions, len(numbers))
        ranks.update({name: rank for name, _ in atom.facts})
    return ranks
