"""State dicts of a partitioned model, under the names of the plain one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..execution.engine import Engine
from ..execution.placing import LocalPart
from ..execution.values import tag_of
from ..messages.transport import Address, Topic


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
    exchange = engine.next_exchange()
    takers = [0] if only_rank0 else list(range(engine.transport.size))
    gathered: dict[str, Any] = {}
    first_names: dict[int, str] = {}
    for position, (key, entry) in enumerate(module.state_dict(keep_vars=True).items()):
        if not isinstance(entry, torch.Tensor):
            gathered[key] = entry
            continue
        first = first_names.setdefault(id(entry), key)
        if first in gathered:  # another name of a shared parameter
            gathered[key] = gathered[first]
            continue
        holders = part.holders(key)
        if (value := tag_of(entry)) is not None:  # glue has put another tensor in its place
            holders = {value.owner}
            entry = entry if value.base is None else value.base
        source = min(holders)
        address = Address(Topic.STATE, -1, exchange, position, source)
        if rank == source:
            for taker in takers:
                if taker not in holders:
                    engine.transport.send(taker, address, None, [entry.detach()])
        if rank in holders:
            gathered[key] = entry.detach()
        elif rank in takers:
            gathered[key] = engine.fetch(address).tensors[0]
    return gathered if rank in takers else {}


def merged(
    entries: Mapping[Any, Any], engine: Engine, call: str = "load_state_dict"
) -> dict[Any, Any]:
    """Joins the partial state dicts of the ranks of a pipeline. Every rank calls it.

    Args:
        entries: this rank's part: names of tensors, and other entries.
        engine: reaches the other ranks.
        call: the function that the user called, for messages.
    """
    rank, exchange = engine.transport.rank, engine.next_exchange(call)
    tensors = {key: entry for key, entry in entries.items() if isinstance(entry, torch.Tensor)}
    others = {key: entry for key, entry in entries.items() if key not in tensors}
    content = (list(tensors), others)
    for peer in engine.transport.peers:
        address = Address(Topic.STATE, -1, exchange, 0, rank)
        engine.transport.send(peer, address, content, list(tensors.values()))
    joined = dict(entries)
    for peer in engine.transport.peers:
        message = engine.fetch(Address(Topic.STATE, -1, exchange, 0, peer))
        names, theirs = message.content
        joined = {**theirs, **dict(zip(names, message.tensors, strict=True)), **joined}
    return joined


def load_into(module: nn.Module, entries: Mapping[str, Any], strict: bool) -> Any:
    """Copies a state dict's entries into the tensors that this rank holds.

    Raises:
        RuntimeError: keys are missing or unexpected under `strict`, or shapes differ.
    """
    state = module.state_dict(keep_vars=True)
    local = {
        key for key, entry in state.items() if isinstance(entry, torch.Tensor) and not entry.is_meta
    }
    missing = sorted(local - entries.keys())
    unexpected = sorted(entries.keys() - state.keys())
    problems = []
    if strict and missing:
        problems.append(f"missing keys: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected keys: {', '.join(unexpected)}")
    given = sorted(local & entries.keys())
    problems += [
        f"{key} has shape {tuple(entries[key].shape)} in the state dict and "
        f"{tuple(state[key].shape)} in the model"
        for key in given
        if entries[key].shape != state[key].shape
    ]
    if problems:
        raise RuntimeError(f"Error(s) in loading state_dict: {'; '.join(problems)}")
    with torch.no_grad():
        for key in given:
            state[key].copy_(entries[key])
    return nn.modules.module._IncompatibleKeys(missing, unexpected)
