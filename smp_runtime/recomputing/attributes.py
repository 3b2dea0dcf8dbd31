"""What modules keep in attributes, noted before a call and put back for its recomputation.

Noted for every checkpointed call, and nearly always as it was for the call before: so comparing
is what must be cheap, and the notes are shared for as long as they hold.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..execution.arguments import contents, mutable_arguments
from ..execution.ownership import keeps_nothing
from ..trees import LEAF_TYPES, is_dict

NamedModules = Sequence[tuple[str, nn.Module]]

_OURS = {
    "_smp_activation_checkpointing",
    "_smp_checkpointed_calls",
    "_smp_drawing_path",
    "_smp_placed",
}
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | _OURS
_chain = itertools.chain.from_iterable
_training_of = operator.attrgetter("training")


class Contents:
    """What lists, dicts, sets and objects hold.

    Args:
        mutables: them; each may come more than once.
    """

    def __init__(self, mutables: Iterable[Any]) -> None:
        found = {id(mutable): mutable for mutable in mutables}
        self.mutables = list(found.values())
        self._held = [(mutable, contents(mutable)) for mutable in self.mutables]
        objects = [mutable for mutable in self.mutables if _is_object(mutable)]
        self._objects = _Variables(objects)
        # An object without attributes holds nothing.
        self._others = [
            (mutable, held)
            for mutable, held in self._held
            if not _is_object(mutable) and (isinstance(mutable, (list, set)) or is_dict(mutable))
        ]

    def is_current(self) -> bool:
        """Says whether all of them hold the very same objects."""
        return self._objects.is_current() and all(
            _is_same(contents(mutable), held) for mutable, held in self._others
        )

    def now(self) -> Contents:
        """Returns what the same ones hold at this moment."""
        return self if self.is_current() else Contents(self.mutables)

    def apply(self) -> None:
        """Makes them hold what they held, where they hold something else now."""
        for mutable, held in self._held:
            if not _is_same(contents(mutable), held):
                _refill(mutable, held)

    def has_tensors(self) -> bool:
        """Says whether one of them holds a tensor."""
        return any(
            isinstance(value, torch.Tensor)
            for _, held in self._held
            for value in (held if isinstance(held, list) else held.values())
        )


class Attributes:
    """The attributes of modules, and what lists, dicts, sets and objects in them hold.

    Args:
        modules: whose attributes; torch's own keep nothing but their mode.
        others: more that is to be noted with them.

    Attributes:
        tensors: those among the attributes, with their names.
    """

    def __init__(self, modules: NamedModules, others: Sequence[Any] = ()) -> None:
        self._modules = modules
        self._plain = [module for _, module in modules if keeps_nothing(module)]
        self._modes = list(map(_training_of, self._plain))
        watched = [item for item in modules if not keeps_nothing(item[1])]
        self._variables = _Variables([module for _, module in watched])
        self.tensors: list[tuple[str, torch.Tensor]] = []
        found = list(others)
        for path, module in watched:
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    self.tensors.append((f"{path}.{name}" if path else name, value))
                elif type(value) not in LEAF_TYPES and name not in _INTERNAL:
                    found += mutable_arguments(value)
        self._contents = Contents(found)

    def is_of(self, modules: NamedModules) -> bool:
        """Says whether the notes are of these modules and hold: nothing was changed since."""
        is_same = modules is self._modules or list(modules) == list(self._modules)
        return is_same and self.is_current()

    def is_current(self) -> bool:
        """Says whether all attributes, and what they hold, are the very same objects."""
        return (
            list(map(_training_of, self._plain)) == self._modes
            and self._variables.is_current()
            and self._contents.is_current()
        )

    def now(self) -> Attributes:
        """Returns the same of this moment, for the same mutable objects and more."""
        return self if self.is_current() else Attributes(self._modules, self._contents.mutables)

    def apply(self) -> None:
        """Makes attributes and what they hold what they were."""
        if self.is_current():
            return
        for module, mode in zip(self._plain, self._modes, strict=True):
            vars(module)["training"] = mode
        for module, held in self._variables:
            attributes = vars(module)
            for name in attributes.keys() - held.keys() - _INTERNAL:
                del attributes[name]
            attributes.update((name, held[name]) for name in held if name not in _INTERNAL)
        self._contents.apply()

    def has_tensors(self) -> bool:
        """Says whether there are tensors in it: whoever keeps it keeps their memory."""
        return bool(self.tensors) or self._contents.has_tensors()


class _Variables:
    """The attributes of many objects, compared in one go."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._held = [dict(vars(each)) for each in objects]
        self._sizes = list(map(len, self._held))
        self._names = list(_chain(self._held))
        self._values = list(_chain(map(dict.values, self._held)))

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        return zip(self._objects, self._held, strict=True)

    def is_current(self) -> bool:
        now: list[dict[str, Any]] = list(map(vars, self._objects))
        return (
            list(map(len, now)) == self._sizes
            and list(_chain(now)) == self._names
            and all(map(operator.is_, _chain(map(dict.values, now)), self._values))
        )


def _is_object(mutable: Any) -> bool:
    """Says whether what it holds is in its attributes."""
    if isinstance(mutable, (list, set)) or type(getattr(mutable, "__dict__", None)) is not dict:
        return False
    return not is_dict(mutable) or dataclasses.is_dataclass(mutable)


def _is_same(now: Any, before: Any) -> bool:
    """Compares lists or dicts by the identity of what they hold, and its order."""
    if len(now) != len(before) or not all(map(operator.is_, now, before)):
        return False
    return type(before) is list or all(map(operator.is_, now.values(), before.values()))


def _refill(mutable: Any, content: Any) -> None:
    if isinstance(mutable, list):
        mutable[:] = content
    elif isinstance(mutable, set):
        mutable.clear()
        mutable.update(content)
    else:
        target = mutable if hasattr(mutable, "keys") else vars(mutable)
        for key in [key for key in target if key not in content]:
            del target[key]
        for key, value in content.items():
            target[key] = value
