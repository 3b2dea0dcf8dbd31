"""State dicts of a partitioned model, under the names of the plain one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .engine import Engine
from .placing import LocalPart
from .transport import Address, Topic


def full_state_dict(
    module: nn.Module, part: LocalPart, engine: Engine, only_rank0: bool
) -> dict[str, Any]:
    """Gathers the state dict from the ranks that hold its parts. Every rank calls it.

    Args:
        module: the user's model.
        part: what is local.
        engine: reaches the other ranks.
        only_rank0: pipeline rank 0 gets it, the others an empty dict.
    """
    rank = engine.transport.rank
    number = engine.next_exchange()
    state = module.state_dict(keep_vars=True)
    gathered: dict[int, torch.Tensor] = {}
    for position, tensor in enumerate(_unique(state)):
        owner = part.owner_that_counts(tensor)
        address = Address(Topic.STATE, -1, number, position, owner)
        wants = [0] if only_rank0 else list(range(engine.transport.size))
        if rank == owner:
            for peer in wants:
                if peer != rank and part.is_partitioned(tensor):
                    engine.transport.send(peer, address, None, [tensor.detach()])
        if part.is_local(tensor):
            gathered[id(tensor)] = tensor.detach()
        elif rank in wants:
            received = engine.fetch(address).tensors[0]
            gathered[id(tensor)] = received
    if only_rank0 and rank != 0:
        return {}
    return {
        key: gathered[id(value)] if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def load_into(module: nn.Module, part: LocalPart, entries: Mapping[str, Any], strict: bool) -> Any:
    """Copies a state dict's entries into the tensors that this rank holds.

    Raises:
        RuntimeError: keys are missing or unexpected under `strict`, or shapes differ.
    """
    state = module.state_dict(keep_vars=True)
    local = {key for key, tensor in state.items() if part.is_local(tensor)}
    missing = sorted(local - entries.keys())
    unexpected = sorted(entries.keys() - state.keys())
    problems = []
    if strict and missing:
        problems.append(f"missing keys: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected keys: {', '.join(unexpected)}")
    with torch.no_grad():
        for key in sorted(local & entries.keys()):
            if entries[key].shape != state[key].shape:
                problems.append(
                    f"{key} has shape {tuple(entries[key].shape)} in the state dict and "
                    f"{tuple(state[key].shape)} in the model"
                )
            elif not problems:
                state[key].copy_(entries[key])
    if problems:
        raise RuntimeError(f"Error(s) in loading state_dict: {'; '.join(problems)}")
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


def _unique(state: Mapping[str, Any]) -> list[torch.Tensor]:
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return list({id(tensor): tensor for tensor in tensors}.values())
