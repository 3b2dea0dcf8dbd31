"""What one rank puts into a checkpoint: its own part, and of what several hold one rank's copy."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UsageError
from ..execution.placing import LocalPart
from ..runtime import Runtime
from .optimizer_state import NamesItsState, Piece, groups, local_state, parameter_names
from .random_state import generator_state


@dataclass(frozen=True)
class LocalState:
    """What one rank puts into a checkpoint.

    Attributes:
        model: parameters and buffers that this rank writes, by name.
        aliases: further names of those, with the name in `model`.
        optimizer: state of the optimizer that this rank writes: parameter, kind, values.
        facts: what is small, for `checkpoint_writer.merge_facts`.
        user_content: the bytes of the script's content, on rank 0.
    """

    model: dict[str, Tensor]
    aliases: dict[str, str]
    optimizer: list[tuple[str, str, Tensor | Piece]]
    facts: dict[str, Any]
    user_content: bytes = field(repr=False, default=b"")


def collect(
    module: nn.Module,
    part: LocalPart | None,
    optimizer: Optimizer | None,
    runtime: Runtime,
    seed: int,
    *,
    copy: bool,
) -> LocalState:
    """Collects what this rank puts into a checkpoint.

    Args:
        module: the user's model.
        part: what is local; None if the model is not partitioned: rank 0 has all of it then.
        optimizer: the wrapped optimizer, if there is one.
        runtime: the runtime.
        seed: of the random streams.
        copy: copy tensors, so that they may change while they are written.
    """
    here = runtime.here
    names = parameter_names(module)
    kept = _copied if copy else _as_it_is
    is_first_replica = here.rdp_rank == 0
    model: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    extra_state: dict[str, Any] = {}
    first_name: dict[int, str] = {}
    for key, entry in module.state_dict(keep_vars=True).items():
        if not isinstance(entry, Tensor):
            if _runs_here(key, module, part, here.pp_rank):
                extra_state[key] = deepcopy(entry) if copy else entry
            continue
        first = first_name.setdefault(id(entry), key)
        holders = {0} if part is None else part.holders(first)
        if not is_first_replica or min(holders) != here.pp_rank:
            continue
        if entry.is_meta:
            raise UsageError(
                f"{key} has no values yet: it is made in the first step; save after that"
            )
        if first != key:
            aliases[key] = first
        else:
            model[key] = kept(entry)
    counted = {
        names[id(p)]
        for p in module.parameters()
        if (here.pp_rank == 0 if part is None else part.counts_here(p))
    }
    state = {} if optimizer is None else local_state(optimizer, names)
    files, scalars = _split(state, counted, is_first_replica)
    scaler: dict[str, Any] = (
        optimizer.loss_scaler_state() if isinstance(optimizer, NamesItsState) else {}
    )
    return LocalState(
        model,
        aliases,
        [(name, kind, _map(kept, values)) for name, kind, values in files],
        {
            "groups": None if optimizer is None else groups(optimizer, names),
            "scalars": {
                name: {kind: _map(_copied, value) for kind, value in values.items()}
                for name, values in scalars.items()
            },
            "extra_state": extra_state,
            "generators": generator_state(here),
            "num_steps": runtime.engine.num_steps,
            "seed": seed,
            "loss_scaler": scaler,
        },
    )


def _split(
    state: Mapping[str, Mapping[str, Any]], counted: set[str], is_first_replica: bool
) -> tuple[list[tuple[str, str, Tensor | Piece]], dict[str, dict[str, Any]]]:
    """Separates the tensors that go into files of this rank from what is small."""
    files: list[tuple[str, str, Tensor | Piece]] = []
    scalars: dict[str, dict[str, Any]] = {}
    for name, values in state.items():
        if name not in counted:
            continue
        for kind, value in values.items():
            if isinstance(value, Piece):
                files.append((name, kind, value))
            elif not is_first_replica:
                continue
            elif isinstance(value, Tensor) and value.dim():
                files.append((name, kind, value))
            else:
                scalars.setdefault(name, {})[kind] = value
    return files, scalars


def _runs_here(key: str, module: nn.Module, part: LocalPart | None, rank: int) -> bool:
    """Says whether this rank speaks for the extra state of a module."""
    if part is None:
        return rank == 0
    path = key.rpartition(".")[0]
    owner = part.owner_of(path)
    return rank == (0 if owner is None else owner)


def _map(change: Any, value: Any) -> Any:
    if isinstance(value, Piece):
        return Piece(change(value.values), value.start)
    return change(value) if isinstance(value, Tensor) else value


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
