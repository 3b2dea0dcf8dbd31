"""The arguments of a call as every rank sees them: what can be compared, shared or changed."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..trees import LEAF_TYPES, is_container, is_dict, map_tensors


class Change(NamedTuple):
    """A list, dict, set or object that a call changed.

    Attributes:
        position: its place among `mutable_arguments`.
        content: what it holds now; of an object, only the attributes that changed.
    """

    position: int
    content: Any


class Arguments:
    """The arguments of a call, read in one walk: it runs for every call of a placed module.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.

    Attributes:
        tensors: the tensors in them, in the order of `trees.iter_tensors`.
        signature: what is equal on all ranks, and from call to call where the arguments are
            alike. Tensors count by position; other objects differ from rank to rank, and their
            types do not.
        is_plain: there is nothing in them but tensors, plain values and tuples of those: nothing
            that the call could change, or that each rank has an object of its own for.
    """

    __slots__ = ("_positions", "args", "is_plain", "kwargs", "signature", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.tensors: list[torch.Tensor] = []
        self.is_plain = True
        self._positions: dict[int, int] = {}
        read = self._read
        self.signature = (
            *[read(item) for item in args],
            *[(name, read(item)) for name, item in kwargs.items()],
        )

    def with_tensors(self, used: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with other tensors in the places of `tensors`."""
        if all(map(operator.is_, used, self.tensors)):
            return self.args, self.kwargs
        places = iter(used)
        made: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(
            lambda _: next(places), (self.args, self.kwargs)
        )
        return made

    def _read(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in LEAF_TYPES:
            if kind is int or kind is bool:
                return kind, obj  # 1, 1.0 and True are equal, but promote differently
            # A rate that changes in each step changes no structure.
            return (kind, None) if kind is float else obj
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            return Ellipsis, self._positions.setdefault(id(obj), len(self._positions))
        if isinstance(obj, tuple):
            return kind, *[self._read(item) for item in obj]
        if isinstance(obj, slice):
            return slice, self._read(obj.start), self._read(obj.stop), self._read(obj.step)
        if isinstance(obj, type):
            return obj
        self.is_plain = False
        if isinstance(obj, list):
            return kind, *[self._read(item) for item in obj]
        if is_dict(obj):
            return kind, *[(key, self._read(item)) for key, item in obj.items()]
        if isinstance(obj, set):
            for item in obj:
                self._read(item)
        elif dataclasses.is_dataclass(obj):
            names = [field.name for field in dataclasses.fields(obj)]
            return kind, *[(name, self._read(getattr(obj, name, None))) for name in names]
        return kind.__module__, kind.__qualname__


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
