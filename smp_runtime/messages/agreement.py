"""Every rank must be given the same settings: compared once, before ranks depend on each other."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import ConfigError, WaitTimeoutError
from .pauses import pauses

_LONGEST_PAUSE = 0.02


def check_settings(
    store: Store, name: str, rank: int, size: int, settings: Mapping[str, Any], timeout: float
) -> None:
    """Compares this rank's settings with those of all others; every rank calls it.

    Rank 0 reads what all others wrote and writes a verdict, which all raise if it is bad.

    Args:
        store: torch's store; all ranks have the same one.
        name: tells apart comparisons in one store.
        rank: this rank, globally.
        size: number of ranks.
        settings: what to compare, as JSON can hold it.
        timeout: seconds to wait for ranks that have not come.

    Raises:
        ConfigError: two ranks have different settings; names them, on every rank.
        WaitTimeoutError: a rank did not call `smp.init` in time.
    """
    board = PrefixStore(f"smp_runtime/settings/{name}", store)
    board.set(f"{rank}", json.dumps(dict(settings)))
    if rank == 0:
        verdict = ""
        for other in range(1, size):
            theirs = json.loads(_read(board, f"{other}", other, timeout))
            verdict = verdict or _compare(settings, theirs, other)
        board.set("verdict", verdict or "equal")
    else:
        verdict = _read(board, "verdict", 0, timeout)
    if verdict not in ("", "equal"):
        raise ConfigError(verdict)


def _read(board: Store, key: str, writer: int, timeout: float) -> str:
    deadline, until_next = time.monotonic() + timeout, pauses(_LONGEST_PAUSE)
    while not board.check([key]):
        if time.monotonic() > deadline:
            raise WaitTimeoutError(
                f"rank {writer} did not come to smp.init within {timeout:g} s (setting `timeout`); "
                "every rank must call it"
            )
        time.sleep(next(until_next))
    return board.get(key).decode()


def _compare(mine: Mapping[str, Any], theirs: Mapping[str, Any], other: int) -> str:
    differing = [
        f"{key}={mine.get(key)!r} and {key}={theirs.get(key)!r}"
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key)
    ]
    if not differing:
        return ""
    return (
        f"ranks 0 and {other} were given different settings: {', '.join(differing)}. Start every "
        "rank with the same config and the same SM_HP_MP_PARAMETERS"
    )
