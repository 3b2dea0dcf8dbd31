"""Manual placement: ranks from pinned module paths, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from ..errors import PartitionError
from .module_tree import ModuleNode, ParameterFact, join_path

__all__ = ["ranks_from_pins"]


def ranks_from_pins(
    root: ModuleNode,
    num_partitions: int,
    pinned: Mapping[str, int],
    default_partition: int | None,
    tied: str,
) -> dict[str, int]:
    """Returns the rank of every parameter and persistent buffer by full name.

    Raises:
        PartitionError: a path or rank does not exist, a module has no rank, a rank has no
            module, or users of a shared parameter that must stay together do not.
    """
    _check_pins(root, num_partitions, pinned, default_partition)
    named = list(_with_rank(root, pinned, default_partition))
    if any(rank is None for _, _, rank in named):
        raise PartitionError(
            f"no partition is given for {_listed(list(_homeless(root, pinned)))}: place these "
            "modules with smp.partition or smp.set_partition, or set default_partition"
        )
    ranks = {name: rank for name, _, rank in named if rank is not None}
    for rank in range(num_partitions):
        if rank not in ranks.values():
            raise PartitionError(
                f"partition {rank} holds no module with parameters: place one on each of the "
                f"{num_partitions} partitions, or use a smaller pipeline_parallel_degree"
            )
    if tied == "together":
        _check_together(named)
    return ranks


def _check_pins(
    root: ModuleNode,
    num_partitions: int,
    pinned: Mapping[str, int],
    default_partition: int | None,
) -> None:
    paths = {node.path for node in root.walk()}
    for path, rank in pinned.items():
        if path not in paths:
            close = get_close_matches(path, paths, cutoff=0.3)
            raise PartitionError(f"the model has no module {path!r}; close ones: {_listed(close)}")
        if not 0 <= rank < num_partitions:
            raise PartitionError(
                f"module {path!r} is placed on partition {rank}, but there are {num_partitions} "
                f"partitions: use 0 to {num_partitions - 1}"
            )
    if default_partition is not None and not 0 <= default_partition < num_partitions:
        raise PartitionError(
            f"default_partition is {default_partition}, but there are {num_partitions} partitions: "
            f"use 0 to {num_partitions - 1}"
        )


def _with_rank(
    node: ModuleNode, pinned: Mapping[str, int], rank: int | None
) -> Iterator[tuple[str, ParameterFact, int | None]]:
    rank = pinned.get(node.path, rank)
    for fact in node.own_parameters:
        yield join_path(node.path, fact.name), fact, rank
    for child in node.children:
        yield from _with_rank(child, pinned, rank)


def _homeless(node: ModuleNode, pinned: Mapping[str, int]) -> Iterator[str]:
    """Yields the largest modules without any pin, and the parameters between them."""
    if node.path in pinned or not node.holds_parameters:
        return
    if node.path and not any(below.path in pinned for below in node.walk()):
        yield node.path
        return
    for fact in node.own_parameters:
        yield join_path(node.path, fact.name)
    for child in node.children:
        yield from _homeless(child, pinned)


def _check_together(named: list[tuple[str, ParameterFact, int | None]]) -> None:
    first: dict[int, tuple[str, int | None]] = {}
    for name, fact, rank in named:
        other, other_rank = first.setdefault(fact.group, (name, rank))
        if rank != other_rank:
            raise PartitionError(
                f"{other} on partition {other_rank} and {name} on partition {rank} are the same "
                "tensor: place both modules on one partition, or set tied_weights to 'copy'"
            )


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
