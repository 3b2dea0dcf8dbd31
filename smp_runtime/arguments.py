"""The arguments of a call as every rank sees them: what can be compared, shared or changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from .analysis import signature
from .trees import LEAF_TYPES, is_container, is_dict


class Change(NamedTuple):
    """A list, dict, set or object that a call changed.

    Attributes:
        position: its place among `mutable_arguments`.
        content: what it holds now; of an object, only the attributes that changed.
    """

    position: int
    content: Any


def comparable(arguments: Any, positions: Mapping[int, int]) -> Any:
    """Turns arguments into a key that is equal on all ranks.

    Tensors become their positions. Other objects differ from rank to rank and from call to
    call; their type does not.
    """
    # A rate that changes in each step changes no structure.
    return signature(arguments, positions, _type_of_opaque, with_fractions=False)


def opaque_arguments(obj: Any) -> list[Any]:
    """The arguments, or parts of them, that each rank has an object of its own for."""
    if type(obj) in LEAF_TYPES or isinstance(obj, (torch.Tensor, type)):
        return []
    if is_dict(obj):
        obj = list(obj.values())
    if isinstance(obj, (tuple, list)):
        return [leaf for item in obj for leaf in opaque_arguments(item)]
    return [] if is_container(obj) else [obj]


def holds_values(obj: Any, arguments: list[Any]) -> bool:
    """Says whether a result has parts that are neither tensors nor None nor arguments."""
    if obj is None or isinstance(obj, torch.Tensor):
        return False
    if is_dict(obj):
        return any(holds_values(item, arguments) for item in obj.values())
    if isinstance(obj, (tuple, list)):
        return any(holds_values(item, arguments) for item in obj)
    if is_container(obj) and not isinstance(obj, (set, slice)):
        return any(holds_values(item, arguments) for item in vars(obj).values())
    return not any(obj is argument for argument in arguments)


def mutable_arguments(obj: Any) -> Iterator[Any]:
    """Yields the lists, dicts, sets and objects in arguments, which a call might change."""
    if type(obj) in LEAF_TYPES or isinstance(obj, (torch.Tensor, nn.Module, slice, type)):
        return
    if isinstance(obj, tuple):
        for item in obj:
            yield from mutable_arguments(item)
        return
    yield obj
    if isinstance(obj, list):
        for item in obj:
            yield from mutable_arguments(item)
    elif is_dict(obj):
        for item in obj.values():
            yield from mutable_arguments(item)
    elif dataclasses.is_dataclass(obj):
        for item in vars(obj).values():
            yield from mutable_arguments(item)


def contents(mutable: Any) -> Any:
    """Returns a shallow copy of what a mutable argument holds."""
    if isinstance(mutable, (list, set)):
        return list(mutable)
    if is_dict(mutable) and not dataclasses.is_dataclass(mutable):
        return dict(mutable)
    return dict(getattr(mutable, "__dict__", {}))


def change_of(position: int, mutable: Any, before: Any) -> Change | None:
    """Compares a mutable argument with its contents before the call, by identity."""
    now = contents(mutable)
    if isinstance(before, list):
        same = len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
        return None if same else Change(position, now)
    changed = {key: value for key, value in now.items() if before.get(key, before) is not value}
    if not changed and len(now) == len(before):
        return None
    return Change(position, now if is_dict(mutable) else changed)


def apply_change(mutable: Any, content: Any) -> None:
    """Makes a mutable argument hold what the call left in it."""
    if isinstance(mutable, list):
        mutable[:] = content
    elif isinstance(mutable, set):
        mutable.clear()
        mutable.update(content)
    elif is_dict(mutable):
        for key in [key for key in mutable if key not in content]:
            del mutable[key]
        mutable.update(content)
    else:
        vars(mutable).update(content)


def _type_of_opaque(leaf: Any) -> Any:
    if type(leaf) in LEAF_TYPES or isinstance(leaf, type):
        return leaf
    return type(leaf).__module__, type(leaf).__qualname__
