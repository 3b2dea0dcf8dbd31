"""What the glue of one microbatch sets in dicts and objects, found there again when it goes on.

A parent may fill a context that it shares with its children (`self.context.mask = ...`). While the
body is suspended another one fills the same context; so a body that goes on puts back what it had
set. What others set under other names stays, and so do lists: what collects for all microbatches
must lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_ABSENT = object()
_LIBRARIES = ("torch", "builtins", "functools", "logging", "threading")


class Entries:
    """The entries of dicts and of objects' attributes that one body has set."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        self._own: dict[tuple[int, Any], tuple[dict[Any, Any], Any]] = {}

    def watch(self, holders: Iterable[dict[Any, Any]]) -> None:
        """The body begins or goes on: what is in the holders now is not its own doing."""
        self._before = {id(holder): (holder, dict(holder)) for holder in holders}

    def note(self) -> None:
        """The body stops: finds what it has set since it went on."""
        for identity, (holder, before) in self._before.items():
            for key, value in holder.items():
                if before.get(key, _ABSENT) is not value:
                    self._own[identity, key] = holder, value
        gone = [place for place, (holder, _) in self._own.items() if place[1] not in holder]
        for place in gone:
            del self._own[place]

    def restore(self) -> None:
        """Puts back what the body has set."""
        for (_, key), (holder, value) in self._own.items():
            holder[key] = value


def holder_of(held: Any) -> dict[Any, Any] | None:
    """Returns where a module's attribute keeps entries: a dict itself, or an object's attributes.

    None for all else: tensors, modules, functions, and objects of libraries.
    """
    if type(held) is dict:
        return held
    if isinstance(held, (torch.Tensor, nn.Module, type)) or callable(held):
        return None
    if type(held).__module__.partition(".")[0] in _LIBRARIES:
        return None
    attributes = getattr(held, "__dict__", None)
    return attributes if type(attributes) is dict else None
