"""Which layers of a Sequential are checkpointed together: the strategies, as data.

A group is recomputed as one: it keeps the input of its first layer only.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence

from ..errors import UsageError

STRATEGIES = "'each', 'contiguous', 'group_N' with a whole number N above 0, or 'auto'"

SPLIT = "split"
"""The home of a layer whose parts are on several ranks; it is never in a group."""


def group_size(strategy: str) -> int | None:
    """Returns the most layers of a group, None for no limit.

    Raises:
        UsageError: there is no such strategy.
    """
    if strategy in ("each", "auto"):
        return 1
    if strategy == "contiguous":
        return None
    found = re.fullmatch(r"group_([1-9]\d*)", strategy) if isinstance(strategy, str) else None
    if found is None:
        raise UsageError(
            f"strategy={strategy!r} of activation checkpointing does not exist: write {STRATEGIES}"
        )
    return int(found[1])


def layer_groups(strategy: str, homes: Sequence[Hashable | None]) -> list[range]:
    """Divides layers into groups, in their order; no group crosses from one home to another.

    ``[a, b | c, d, e]`` with ``group_3`` gives ``{a, b}`` and ``{c, d, e}``.

    Args:
        strategy: `each` makes a group of every layer, `contiguous` of all neighbours with one
            home, `group_N` of up to N of them.
        homes: where each layer lives; None for a layer without parameters, which joins its
            neighbours, `SPLIT` for one that lives at several places.

    Raises:
        UsageError: there is no such strategy.
    """
    size = group_size(strategy)
    groups = []
    for run in _runs(homes):
        step = size or max(len(run), 1)
        groups += [run[first : first + step] for first in range(0, len(run), step)]
    return groups


def _runs(homes: Sequence[Hashable | None]) -> Iterator[range]:
    """Yields the longest stretches of layers with one home."""
    first, home = 0, None
    for index, here in enumerate(homes):
        if here is None and home != SPLIT:
            continue
        is_other = home is not None and here != home
        if index > first and (is_other or here == SPLIT):
            yield range(first, index)
            first = index
        home = here
    if homes:
        yield range(first, len(homes))
