"""The state dict of one rank's shard of an optimizer: plain tensors, for the same layout only.

A sharded tensor is the rank's run of the flattened one. What says where the run begins, and which
rank of which layout it belongs to, stands beside the state, in numbers and strings only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..errors import CheckpointMismatchError
from ..runtime import Runtime
from ..saving.optimizer_state import Piece

SHARD = "_smp_shard"

_REMEDY = (
    "load it at the layout at which it was saved, or use smp.save_checkpoint and "
    "smp.resume_from_checkpoint, which work at any"
)


def is_sharded(runtime: Runtime) -> bool:
    """Whether replicas hold different parts of the optimizer's state."""
    return runtime.config.shard_optimizer_state and runtime.placement.size("rdp") > 1


def as_shard(packed: Mapping[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Returns a state dict with tensors in the place of `Piece`, and what else tells them apart."""
    starts: dict[int, int] = {}
    state: dict[int, dict[str, Any]] = {}
    for number, values in packed["state"].items():
        state[number] = {}
        for kind, value in values.items():
            if isinstance(value, Piece):
                starts[number] = value.start
            state[number][kind] = value.values if isinstance(value, Piece) else value
    return {**packed, "state": state, SHARD: {**_place(runtime), "starts": starts}}


def pieces_of(state_dict: Mapping[str, Any], runtime: Runtime | None) -> dict[int, dict[str, Any]]:
    """Returns the state in what `as_shard` made, with each `Piece` again.

    Raises:
        CheckpointMismatchError: it is the shard of another rank, or of another layout.
    """
    shard = state_dict[SHARD]
    saved = {key: shard[key] for key in shard if key != "starts"}
    here = _place(runtime) if runtime is not None and is_sharded(runtime) else {}
    if here != saved:
        raise CheckpointMismatchError(
            f"the optimizer's state is the shard of {_words(saved)}, and this is {_words(here)}; "
            f"{_REMEDY}"
        )
    starts = shard["starts"]
    return {
        number: {
            kind: Piece(value, starts[number])
            if number in starts and isinstance(value, Tensor) and value.dim()
            else value
            for kind, value in values.items()
        }
        for number, values in state_dict["state"].items()
    }


def check_held(given: Iterable[str], held: Iterable[str]) -> None:
    """Makes sure that this rank holds the parameters of a shard.

    Raises:
        CheckpointMismatchError: the model is partitioned in another way.
    """
    others = sorted(set(given) - set(held))
    if others:
        raise CheckpointMismatchError(
            f"the optimizer's state is that of {others[0]}, which is not on this rank: the model "
            f"was partitioned in another way; {_REMEDY}"
        )


def _place(runtime: Runtime) -> dict[str, int]:
    sizes = runtime.placement
    return {
        "pp_rank": runtime.here.pp_rank,
        "pp_size": sizes.size("pp"),
        "rdp_rank": runtime.here.rdp_rank,
        "rdp_size": sizes.size("rdp"),
    }


def _words(place: Mapping[str, int]) -> str:
    if not place:
        return "an optimizer that is not sharded"
    return (
        f"pipeline rank {place['pp_rank']} of {place['pp_size']}, replica {place['rdp_rank']} of "
        f"{place['rdp_size']} with shard_optimizer_state"
    )
