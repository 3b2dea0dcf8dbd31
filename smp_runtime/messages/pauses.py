"""Pauses between looks at a store that all ranks of the job look at."""

from __future__ import annotations

from collections.abc import Iterator

_SHORTEST = 0.001


def pauses(longest: float) -> Iterator[float]:
    """Yields seconds to sleep: short ones first, for most waits are short, then up to `longest`.

    A job of many ranks would keep its store busy with short ones only.
    """
    pause = _SHORTEST
    while True:
        yield min(pause, longest)
        pause *= 2
