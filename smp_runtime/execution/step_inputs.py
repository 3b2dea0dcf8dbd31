"""A step's arguments come from pipeline rank 0.

Only that rank needs data. Tensors and plain values travel; objects that belong to a process
(modules, optimizers, functions) stay where they are: in their place each rank uses its own, the
one at the same place of its own arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import PathMismatchError, UsageError
from ..messages.transport import Address, Topic
from ..tensors import as_bytes, meta_of
from ..trees import freeze, is_dict, iter_tensors, thaw, with_items
from .engine import Engine

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice)
_PICKLED = (torch.device, torch.dtype, torch.Size, argparse.Namespace)

Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Own(NamedTuple):
    """The place of an object that each rank has for itself."""

    path: tuple[Any, ...]


def share_inputs(engine: Engine, call: Call, seed: int) -> tuple[Call, int]:
    """Returns rank 0's arguments and seed on every rank.

    Raises:
        UsageError: another rank's arguments lack an object that has to be its own.
    """
    transport = engine.transport
    address = Address(Topic.INPUTS, engine.step, -1, 0, 0)
    if transport.rank == 0:
        tensors: list[torch.Tensor] = []
        places: dict[int, int] = {}

        def refer(obj: Any) -> int | None:
            if not isinstance(obj, torch.Tensor):
                return None
            if id(obj) not in places:
                places[id(obj)] = len(tensors)
                tensors.append(obj)
            return places[id(obj)]

        frozen = freeze(_without_own(call, ()), refer)
        grads = [tensor.requires_grad for tensor in tensors]
        for peer in transport.peers:
            transport.send(peer, address, (frozen, grads, seed), tensors)
        return call, seed
    message = engine.fetch(address)
    frozen, grads, seed = message.content
    for tensor, requires_grad in zip(message.tensors, grads, strict=True):
        tensor.requires_grad_(requires_grad)
    shared = thaw(frozen, lambda index: message.tensors[index])
    return _with_own(shared, call), seed


def check_equal(engine: Engine, call: Call) -> None:
    """Compares every rank's own arguments, where they are not sent from rank 0.

    Raises:
        PathMismatchError: the tensors of two ranks differ.
    """
    transport = engine.transport
    digest = 0
    for tensor in iter_tensors(call):
        meta = meta_of(tensor)._replace(requires_grad=False)
        digest = zlib.crc32(repr(meta).encode(), digest)
        if meta.num_elements:
            digest = zlib.crc32(as_bytes(tensor).numpy().data, digest)
    for peer in transport.peers:
        transport.send(peer, Address(Topic.INPUTS, engine.step, -1, 1, transport.rank), digest)
    for peer in transport.peers:
        theirs = engine.fetch(Address(Topic.INPUTS, engine.step, -1, 1, peer)).content
        if theirs != digest:
            raise PathMismatchError(
                f"step {engine.step}: ranks {transport.rank} and {peer} were given different "
                "batches, but broadcast_inputs is off; give every rank of a pipeline the same "
                "batch, or leave broadcast_inputs on"
            )


def _without_own(obj: Any, path: tuple[Any, ...]) -> Any:
    """Replaces the objects that stay with their process by their places."""
    if isinstance(obj, (torch.Tensor, *_PLAIN, *_PICKLED)) or hasattr(obj, "smp_slice"):
        return obj
    if type(obj).__module__ == "numpy":
        return obj
    if isinstance(obj, (list, tuple, set)) or is_dict(obj):
        return _rebuild(obj, lambda key, item: _without_own(item, (*path, key)))
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return obj
    return _Own(path)


def _with_own(obj: Any, mine: Any) -> Any:
    """Puts this rank's own objects in the places left for them."""
    if isinstance(obj, _Own):
        found = mine
        for key in obj.path:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                raise UsageError(
                    f"pipeline rank 0 passed a {'/'.join(map(str, obj.path))} to the step that can "
                    "not be sent (a module, an optimizer, a function or the like); pass the same "
                    "object at the same place on every rank"
                ) from None
        return found
    if (isinstance(obj, (list, tuple, set)) or is_dict(obj)) and not isinstance(obj, torch.Size):
        return _rebuild(obj, lambda _, item: _with_own(item, mine))
    return obj


def _rebuild(obj: Any, change: Callable[[Any, Any], Any]) -> Any:
    if is_dict(obj):
        items = {key: change(key, item) for key, item in obj.items()}
        return obj if all(items[key] is obj[key] for key in items) else with_items(obj, items)
    if isinstance(obj, set):
        return {change(item, item) for item in obj}
    parts = [change(index, item) for index, item in enumerate(obj)]
    if all(new is old for new, old in zip(parts, obj, strict=True)):
        return obj
    return type(obj)(*parts) if hasattr(obj, "_fields") else type(obj)(parts)
