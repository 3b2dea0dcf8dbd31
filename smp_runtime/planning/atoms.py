"""The smallest pieces that a partitioning moves: modules in execution order, and what goes along.

The tree is opened only as far as needed. At level 0 the repeated blocks are atoms, and whatever
stands beside them (embedding, last norm, head); each further level opens every block once more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .module_tree import ModuleNode, ParameterFact, is_below, join_path

__all__ = ["Atom", "Charge", "atoms_at_level", "charge", "is_placeable"]


@dataclass(frozen=True, slots=True)
class Charge:
    """What a placed module costs, with the operations of its parents that run beside it."""

    compute: float = 0.0
    activation_bytes: int = 0

    def __add__(self, other: Charge) -> Charge:
        return Charge(self.compute + other.compute, self.activation_bytes + other.activation_bytes)


@dataclass(frozen=True, slots=True)
class Atom:
    """A module that goes to one rank as a whole.

    Args:
        node: the module.
        facts: the parameters and persistent buffers that go with it, by full name: its own, those
            of modules that are never called, those that its parents use directly.
    """

    node: ModuleNode
    facts: tuple[tuple[str, ParameterFact], ...]


def is_placeable(node: ModuleNode) -> bool:
    """Returns whether the module is called and needs nothing from outside: it can be placed."""
    return node.num_calls > 0 and node.is_closed


def atoms_at_level(root: ModuleNode, level: int) -> tuple[Atom, ...]:
    """Returns the atoms in execution order with every block opened `level` times."""
    placed: list[ModuleNode] = []
    opened: list[ModuleNode] = []
    _open(root, level, placed, opened)
    placed.sort(key=lambda node: node.calls[0])
    if not placed:
        return ()
    facts = [list(node.facts()) for node in placed]
    calls = sorted((call, index) for index, node in enumerate(placed) for call in node.calls)
    for index, fact in _left_over(opened, placed, calls):
        facts[index].append(fact)
    return tuple(Atom(node, tuple(own)) for node, own in zip(placed, facts, strict=True))


def charge(root: ModuleNode, placed: Iterable[ModuleNode]) -> Mapping[str, Charge]:
    """Returns the cost of each placed module by path.

    Operations of a parent that is not placed run where the call runs whose result they use:
    a cross entropy counts to the head, a residual sum to the later of its operands.
    """
    tops = {node.path: node for node in placed}
    calls = sorted((call, path) for path, node in tops.items() for call in node.calls)
    totals = dict.fromkeys(tops, Charge())
    for node, top in _with_top(root, tops, None):
        for cost in node.own_costs:
            home = top
            if home is None and cost.origin >= 0 and calls:
                at = bisect_right(calls, cost.origin, key=lambda call: call[0])
                home = calls[max(at - 1, 0)][1]
            if home is not None:
                totals[home] += Charge(cost.compute, cost.activation_bytes)
    return totals


def _with_top(
    node: ModuleNode, tops: Mapping[str, ModuleNode], top: str | None
) -> Iterator[tuple[ModuleNode, str | None]]:
    """Yields every module with the path of the placed module that it is or lies in, if any."""
    top = node.path if top is None and node.path in tops else top
    yield node, top
    for child in node.children:
        yield from _with_top(child, tops, top)


def _open(
    node: ModuleNode,
    level: int,
    placed: list[ModuleNode],
    opened: list[ModuleNode],
    *,
    in_block: bool = False,
) -> None:
    """Walks down to the atoms; `level` is how often a block may still be opened."""
    if not _is_called(node):
        return
    is_whole = node.is_indivisible or (in_block and node.is_opaque)
    can_open = any(map(_is_called, node.children)) and not is_whole
    # Only the outermost list of blocks opens by itself: what a block lists stays together.
    lists_blocks = not in_block and _lists_blocks(node)
    if is_placeable(node) and not (can_open and (lists_blocks or level > 0)):
        placed.append(node)
        return
    opened.append(node)
    below = level if lists_blocks or not is_placeable(node) else level - 1
    in_block = in_block or node.is_repeated_container or not lists_blocks
    for child in node.children:
        _open(child, below, placed, opened, in_block=in_block)


def _is_called(node: ModuleNode) -> bool:
    """Whether any module of the subtree that holds parameters is called."""
    return node.holds_parameters and (
        node.num_calls > 0 or any(_is_called(child) for child in node.children)
    )


def _lists_blocks(node: ModuleNode) -> bool:
    """Whether the subtree has a container of at least two called modules with parameters."""
    if node.is_repeated_container and sum(map(_is_called, node.children)) > 1:
        return True
    return any(_lists_blocks(child) for child in node.children)


def _left_over(
    opened: list[ModuleNode], placed: list[ModuleNode], calls: list[tuple[int, int]]
) -> Iterator[tuple[int, tuple[str, ParameterFact]]]:
    """Yields what no placed module holds, with the index of the atom that it goes along with."""
    for node in opened:
        for fact in node.own_parameters:
            first_use = fact.first_use if fact.first_use is not None else (node.order or 0)
            at = bisect_left(calls, first_use, key=lambda call: call[0])
            yield calls[min(at, len(calls) - 1)][1], (join_path(node.path, fact.name), fact)
    index_of = {id(node): index for index, node in enumerate(placed)}
    user: dict[int, int] = {}
    for index, node in enumerate(placed):
        for _, fact in node.facts():
            user.setdefault(fact.group, index)
    for node in opened:
        for child in node.children:
            if child.holds_parameters and not _is_called(child):
                named = list(child.facts())
                # A module that only lends its parameters out goes with the first that borrows.
                index = user.get(named[0][1].group, _last_sibling(child, opened, index_of))
                yield from ((index, fact) for fact in named)


def _last_sibling(child: ModuleNode, opened: list[ModuleNode], index_of: Mapping[int, int]) -> int:
    """Returns the last atom of the closest opened module around `child` that has one."""
    around = [node for node in opened if is_below(child.path, node.path)]
    for node in reversed(around):
        found = [index_of[id(below)] for below in node.walk() if id(below) in index_of]
        if found:
            return max(found)
    return len(index_of) - 1
