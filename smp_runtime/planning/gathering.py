"""Brings the users of shared parameters together: in the row to cut, they are one item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

from .balance import Item, SharedGroup

__all__ = ["rows_together"]

ANCHOR_TRIALS = 64
"""How many ways to gather the users of shared parameters are tried at most."""


def rows_together(
    items: Sequence[Item], shared: Mapping[int, SharedGroup]
) -> Iterator[tuple[list[Item], list[int]]]:
    """Yields a row for each way to gather the users of shared parameters at one of them.

    With the row comes, for each item given, the index in the row of what it is part of.
    """
    clusters = _clusters(items)
    choices: list[tuple[int, ...]] = [tuple(cluster) for cluster in clusters]
    if prod(map(len, choices)) > ANCHOR_TRIALS:
        choices = [(cluster[0], cluster[-1]) for cluster in clusters]
    if prod(map(len, choices)) > ANCHOR_TRIALS:
        choices = [(cluster[0],) for cluster in clusters]
    for anchors in product(*choices):
        anchor_of = {
            user: anchor
            for cluster, anchor in zip(clusters, anchors, strict=True)
            for user in cluster
        }
        kept = [i for i in range(len(items)) if anchor_of.get(i, i) == i]
        members = {i: [j for j in anchor_of if anchor_of[j] == i] or [i] for i in kept}
        position = {i: at for at, i in enumerate(kept)}
        yield (
            [_merged([items[j] for j in members[i]], shared) for i in kept],
            [position[anchor_of.get(i, i)] for i in range(len(items))],
        )


def _merged(items: Sequence[Item], shared: Mapping[int, SharedGroup]) -> Item:
    groups = {group for item in items for group in item.groups}
    return Item(
        sum(item.compute for item in items),
        sum(item.state_bytes for item in items)
        + sum(shared[group].state_bytes for group in groups),
        sum(item.activation_bytes for item in items),
    )


def _clusters(items: Sequence[Item]) -> list[list[int]]:
    """Returns the sets of items that shared parameters hold together, directly or over others."""
    clusters: list[tuple[set[int], set[int]]] = []
    for index, item in enumerate(items):
        if not item.groups:
            continue
        members, groups = {index}, set(item.groups)
        for cluster in [cluster for cluster in clusters if cluster[1] & groups]:
            clusters.remove(cluster)
            members |= cluster[0]
            groups |= cluster[1]
        clusters.append((members, groups))
    return sorted(sorted(members) for members, _ in clusters)
