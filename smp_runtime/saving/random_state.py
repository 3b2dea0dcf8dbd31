"""The random generators of every rank, in a form that is saved and restored.

Ranks differ, so each one's generators are saved. What is drawn in a step does not come from them
but from streams keyed by the step's number (`rng`), which is saved once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import device
from ..execution.rng import host_random_state, set_host_random_state
from ..planning.placement import Coordinates

GeneratorState = dict[str, Any]


def generator_state(here: Coordinates) -> GeneratorState:
    """Returns the states of this rank's generators, in plain values and tensors."""
    python, numpy = host_random_state()
    if numpy is not None:
        numpy = (numpy[0], torch.from_numpy(numpy[1].astype("int64")), *map(_plain, numpy[2:]))
    return {
        "dp_rank": here.dp_rank,
        "pp_rank": here.pp_rank,
        "torch": list(device.random_state()),
        "python": python,
        "numpy": numpy,
    }


def restore_generators(saved: Sequence[GeneratorState], here: Coordinates) -> bool:
    """Sets this rank's generators to where they were on the rank that had its place.

    That is the one of the same replica and the same partition, else the first of the same replica.

    Returns:
        False where there was no such replica, and nothing was changed.
    """
    replica = [state for state in saved if state["dp_rank"] == here.dp_rank]
    if not replica:
        return False
    same = [state for state in replica if state["pp_rank"] == here.pp_rank]
    state = (same or sorted(replica, key=lambda state: int(state["pp_rank"])))[0]
    numpy = state["numpy"]
    if numpy is not None:
        numpy = (numpy[0], numpy[1].numpy().astype("uint32"), *numpy[2:])
    set_host_random_state((state["python"], numpy))
    device.set_random_state(tuple(state["torch"]))
    return True


def _plain(number: Any) -> Any:
    return number.item() if hasattr(number, "item") else number
