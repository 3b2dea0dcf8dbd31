"""Nested arguments and results: finding, replacing and shipping the tensors inside them.

Two tools for two needs. `map_tensors` rebuilds a nest of containers with other tensors in it and
leaves everything else as the very same object: that is how a call gets its local arguments.
`freeze` turns a nest into bytes with the tensors left out, for any picklable Python object: that
is how the structure of a result reaches the ranks that did not compute it.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import operator
import pickle
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from .messages.unpickling import DataUnpickler

T = TypeVar("T")


LEAF_TYPES = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.Size,
    }
)
"""Types that are never a container and never hold a tensor."""


def is_container(obj: object) -> bool:
    """Says whether `map_tensors` looks inside `obj`."""
    return (
        isinstance(obj, (tuple, list, set, slice))
        or is_dict(obj)
        or (dataclasses.is_dataclass(obj) and not isinstance(obj, type))
    )


def is_dict(obj: object) -> bool:
    """Says whether `obj` is a dict, a subclass, or one in disguise as tokenizers return."""
    return isinstance(obj, (dict, UserDict))


def with_items(obj: Any, items: Mapping[Any, Any]) -> Any:
    """Returns a dict of the type of `obj` with these items, and its other attributes."""
    if type(obj) is dict:
        return dict(items)
    # A shallow copy keeps the type and whatever attributes the subclass carries. Items one by
    # one: transformers' ModelOutput refuses `update`.
    result = copy.copy(obj)
    for key, item in items.items():
        result[key] = item
    return result


def map_tensors(replace: Callable[[torch.Tensor], Any], obj: Any) -> Any:
    """Replaces each tensor in a nest; see `map_instances`."""
    return map_instances(torch.Tensor, replace, obj)


def map_instances(kind: type[T], replace: Callable[[T], Any], obj: Any) -> Any:
    """Replaces each object of a type in nested tuples, lists, dicts, sets, slices, dataclasses.

    Types survive: named tuples, dict subclasses such as Hugging Face's ModelOutput, dataclasses.
    A container in which nothing changed is returned as the same object.
    """
    if type(obj) in LEAF_TYPES:
        return obj
    if isinstance(obj, kind):
        return replace(obj)
    if isinstance(obj, (tuple, list)):
        parts = [map_instances(kind, replace, item) for item in obj]
        if all(map(operator.is_, parts, obj)):
            return obj
        if isinstance(obj, tuple) and hasattr(obj, "_fields"):
            return type(obj)(*parts)
        return type(obj)(parts)
    if is_dict(obj):
        items = {key: map_instances(kind, replace, value) for key, value in obj.items()}
        return obj if all(items[key] is obj[key] for key in items) else with_items(obj, items)
    if isinstance(obj, set):
        members = [map_instances(kind, replace, item) for item in obj]
        return obj if all(item in obj for item in members) else type(obj)(members)
    if isinstance(obj, slice):
        ends = [map_instances(kind, replace, end) for end in (obj.start, obj.stop, obj.step)]
        return slice(*ends)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return _map_dataclass(kind, replace, obj)
    return obj


def _map_dataclass(kind: type[T], replace: Callable[[T], Any], obj: Any) -> Any:
    names = [field.name for field in dataclasses.fields(obj) if hasattr(obj, field.name)]
    values = {name: map_instances(kind, replace, getattr(obj, name)) for name in names}
    if all(values[name] is getattr(obj, name) for name in names):
        return obj
    result = copy.copy(obj)
    for name, value in values.items():
        object.__setattr__(result, name, value)
    return result


def iter_tensors(obj: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a nest in the order in which `map_tensors` visits them."""
    found: list[torch.Tensor] = []
    _collect((obj,), found)
    return iter(found)


def _collect(items: Iterable[Any], found: list[torch.Tensor]) -> None:
    # This runs for every operation of the glue: what is most frequent is tested first.
    for obj in items:
        kind = type(obj)
        if kind in LEAF_TYPES:
            continue
        if isinstance(obj, torch.Tensor):
            found.append(obj)
        elif kind is tuple or kind is list:
            _collect(obj, found)
        elif kind is slice:
            _collect((obj.start, obj.stop, obj.step), found)
        elif is_dict(obj):
            _collect(obj.values(), found)
        elif isinstance(obj, (tuple, list, set)):
            _collect(obj, found)
        elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
            names = [field.name for field in dataclasses.fields(obj)]
            _collect([getattr(obj, name, None) for name in names], found)


def freeze(obj: Any, refer: Callable[[Any], Any]) -> bytes:
    """Pickles a nest; what `refer` gives a reference for (not None) is left out.

    Raises:
        Exception: whatever pickle raises for an object that can't be pickled.
    """
    sink = io.BytesIO()
    pickler = _Pickler(sink, pickle.HIGHEST_PROTOCOL)
    pickler.refer = refer
    pickler.dump(obj)
    return sink.getvalue()


def thaw(frozen: bytes, resolve: Callable[[Any], Any]) -> Any:
    """Rebuilds what `freeze` made; `resolve` turns each reference into an object.

    Raises:
        NotSupportedError: the bytes hold more than data.
    """
    unpickler = _Unpickler(io.BytesIO(frozen))
    unpickler.resolve = resolve
    return unpickler.load()


class _Pickler(pickle.Pickler):
    refer: Callable[[Any], Any]

    def persistent_id(self, obj: Any) -> Any:
        return self.refer(obj)


class _Unpickler(DataUnpickler):
    resolve: Callable[[Any], Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.resolve(pid)
