"""Makes a `Partition` from the rank of every parameter: what is placed, visited, held and shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from ..errors import PartitionError
from .atoms import Charge, charge, is_placeable
from .module_tree import ModuleNode, ParameterFact, join_path
from .partition_table import Partition, RankShare, Row, in_ranges, in_units

__all__ = ["assemble"]

Ranks = Mapping[str, int]

MOST_NOTES = 4
"""So many shared parameters are described one by one."""


def assemble(
    root: ModuleNode,
    ranks: Ranks,
    num_partitions: int,
    in_flight: Callable[[int], int],
    memory_limit: int | None = None,
    *,
    slowest: float = 0.0,
    reason: str = "",
) -> Partition:
    """Places the largest modules that lie wholly on one rank.

    Args:
        root: the costs of the model.
        ranks: the rank of every parameter and persistent buffer by full name.
        num_partitions: number of pipeline ranks.
        in_flight: microbatches that a stage holds at once.
        memory_limit: bytes that one rank may hold.
        slowest: the cost of the slowest rank, as it was planned.
        reason: why shared parameters are held as they are.
    """
    placed, direct = _largest(root, ranks)
    assignment = {node.path: rank for node, rank in placed}
    rank_of, stage_of = _visits(placed)
    charges = charge(root, [node for node, _ in placed])
    holders = _holders(root, ranks)
    active = {path: in_flight(stage) for path, stage in stage_of.items()}
    total = sum(own.compute for own in charges.values())
    scale = 1.0 / total if total else 0.0
    share = partial(_share, root, ranks, assignment, charges, active, scale)
    shares = tuple(map(share, range(num_partitions)))
    _check_memory(shares, memory_limit)
    return Partition(
        assignment=assignment,
        parameters=direct,
        holders=holders,
        rank_of=rank_of,
        stage_of=stage_of,
        tied=_tied(root, assignment, direct, holders),
        slowest=slowest,
        notes=(*_shared_notes(root, ranks), *filter(None, [reason])),
        rows=tuple(_rows(root, ranks, charges, scale)),
        ranks=shares,
    )


def _largest(root: ModuleNode, ranks: Ranks) -> tuple[list[tuple[ModuleNode, int]], dict[str, int]]:
    """Returns the placed modules, and the parameters of modules that are not placed."""
    placed: list[tuple[ModuleNode, int]] = []
    direct: dict[str, int] = {}

    def visit(node: ModuleNode) -> None:
        homes = _homes(node, ranks)
        never_called = not any(below.num_calls for below in node.walk())
        if len(homes) == 1 and (is_placeable(node) or never_called):
            placed.append((node, homes[0]))
            return
        for fact in node.own_parameters:
            name = join_path(node.path, fact.name)
            direct[name] = ranks[name]
        for child in node.children:
            visit(child)

    visit(root)
    return placed, direct


def _homes(node: ModuleNode, ranks: Ranks) -> tuple[int, ...]:
    return tuple(sorted({ranks[name] for name, _ in node.facts()}))


def _visits(
    placed: Sequence[tuple[ModuleNode, int]],
) -> tuple[tuple[int, ...], dict[str, int]]:
    """Returns the rank of each stage in execution order, and the stage of each module."""
    calls = sorted((call, node.path, rank) for node, rank in placed for call in node.calls)
    if not calls:
        return tuple(sorted({rank for _, rank in placed})), {node.path: 0 for node, _ in placed}
    rank_of = [calls[0][2]]
    stage_of = {calls[0][1]: 0}
    for (_, _, before), (_, path, rank) in pairwise(calls):
        if rank != before:
            rank_of.append(rank)
        stage_of.setdefault(path, len(rank_of) - 1)
    for node, rank in placed:
        if node.path not in stage_of:
            # Never called: with the last visit of its rank, if that is visited at all.
            visits = [stage for stage, other in enumerate(rank_of) if other == rank]
            stage_of[node.path] = visits[-1] if visits else len(rank_of) - 1
    return tuple(rank_of), stage_of


def _holders(root: ModuleNode, ranks: Ranks) -> dict[str, tuple[int, ...]]:
    first_name: dict[int, str] = {}
    homes: dict[str, set[int]] = {}
    for name, fact in root.facts():
        first = first_name.setdefault(fact.group, name)
        homes.setdefault(first, set()).add(ranks[name])
    return {name: tuple(sorted(found)) for name, found in homes.items() if len(found) > 1}


def _shared_notes(root: ModuleNode, ranks: Ranks) -> Iterator[str]:
    """Yields a line for each of the first few shared parameters, and one for all others."""
    names: dict[int, list[str]] = {}
    facts: dict[int, ParameterFact] = {}
    for name, fact in root.facts():
        names.setdefault(fact.group, []).append(name)
        facts[fact.group] = fact
    shared = [group for group, found in names.items() if len(found) > 1]
    for group in shared[:MOST_NOTES]:
        first, *others = names[group]
        homes = tuple(sorted({ranks[name] for name in names[group]}))
        fact = facts[group]
        text = f"{first} = {', '.join(others)} ({in_units(fact.bytes)})"
        if len(homes) == 1:
            yield f"shared parameter {text}: held once, on partition {homes[0]}"
        else:
            summed = ", gradients summed once per step" if fact.requires_grad else ""
            yield (
                f"shared parameter {text}: a copy on each of partitions {in_ranges(homes)}{summed};"
                f" with gradient and Adam {in_units(fact.state_bytes)} per copy"
            )
    if len(shared) > MOST_NOTES:
        yield f"and {len(shared) - MOST_NOTES} more shared parameters"


def _tied(
    root: ModuleNode, assignment: Ranks, direct: Ranks, holders: Mapping[str, tuple[int, ...]]
) -> str:
    """Returns how parameters that several placed modules use are held."""
    if holders:
        return "copy"
    users: dict[int, set[str]] = {}
    for node in root.walk():
        if node.path in assignment:
            for _, fact in node.facts():
                users.setdefault(fact.group, set()).add(node.path)
        for fact in node.own_parameters:
            if join_path(node.path, fact.name) in direct:
                users.setdefault(fact.group, set()).add(node.path)
    return "together" if any(len(paths) > 1 for paths in users.values()) else "none"


def _rows(
    root: ModuleNode, ranks: Ranks, charges: Mapping[str, Charge], scale: float
) -> Iterator[Row]:
    """Yields the lines of the table, breadth first, down to what lies wholly on one rank."""
    queue = deque([root])
    while queue:
        node = queue.popleft()
        homes = _homes(node, ranks)
        facts = {fact.group: fact for _, fact in node.facts()}
        compute = sum(charges[below.path].compute for below in node.walk() if below.path in charges)
        is_assumed = any(below.is_assumed for below in node.walk())
        yield Row(node.path, homes, _elements(facts), _bytes(facts), compute * scale, is_assumed)
        if len(homes) > 1:
            for fact in node.own_parameters:
                name = join_path(node.path, fact.name)
                only = {fact.group: fact}
                yield Row(name, (ranks[name],), _elements(only), fact.bytes, 0.0)
            queue.extend(child for child in node.children if child.holds_parameters)


def _elements(facts: Mapping[int, ParameterFact]) -> int:
    return sum(fact.num_elements for fact in facts.values() if not fact.is_buffer)


def _bytes(facts: Mapping[int, ParameterFact]) -> int:
    return sum(fact.bytes for fact in facts.values())


def _share(
    root: ModuleNode,
    ranks: Ranks,
    assignment: Ranks,
    charges: Mapping[str, Charge],
    active: Mapping[str, int],
    scale: float,
    rank: int,
) -> RankShare:
    facts = {fact.group: fact for name, fact in root.facts() if ranks[name] == rank}
    trained = {group: fact for group, fact in facts.items() if fact.requires_grad}
    own = [path for path, home in assignment.items() if home == rank]
    return RankShare(
        num_parameters=_elements(facts),
        num_trainable=_elements(trained),
        num_buffers=sum(fact.is_buffer for fact in facts.values()),
        parameter_bytes=_bytes(facts),
        gradient_bytes=sum(fact.gradient_bytes for fact in trained.values()),
        optimizer_bytes=sum(fact.optimizer_bytes for fact in trained.values()),
        activation_bytes=sum(charges[path].activation_bytes * active[path] for path in own),
        cost=sum(charges[path].compute for path in own) * scale,
    )


def _check_memory(shares: Sequence[RankShare], memory_limit: int | None) -> None:
    for rank, share in enumerate(shares):
        if memory_limit is not None and share.total_bytes > memory_limit:
            raise PartitionError(
                f"partition {rank} would hold {share.total_bytes} bytes, but the memory limit is "
                f"{memory_limit}: use more ranks or fewer active_microbatches"
            )
