"""What a call of a placed module handed out, as its owner tells the other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from ..tensors import TensorMeta
from .analysis import Slot
from .entries import holder_of
from .ownership import PlacedModule

_INTERNAL = frozenset(vars(nn.Module()))


class HookCall(NamedTuple):
    """A forward hook that fired inside a placed module.

    Attributes:
        position: place among the hooks of the placed module that every rank has.
        arguments: frozen arguments of the hook after the module itself.
        first: position of the first tensor of the report that came out through this hook.
        end: position after the last one.
    """

    position: int
    arguments: bytes
    first: int
    end: int


class Report(NamedTuple):
    """What a call of a placed module handed out.

    Attributes:
        output: the return value: a template, or frozen where it holds other things than tensors.
        metas: tensors that did not exist before, in the order in which they came out.
        hooks: hooks that fired.
        attributes: tensors that modules keep in attributes: module, name, frozen value.
        changed: arguments changed in place, with their metas afterwards.
        mutated: lists, dicts, sets and objects among the arguments that hold other things now:
            place among the mutable arguments, frozen contents.
        varies: it holds plain values, so another call may give other ones.
    """

    output: Any
    metas: tuple[TensorMeta, ...]
    hooks: tuple[HookCall, ...]
    attributes: tuple[tuple[str, str, bytes], ...]
    changed: tuple[tuple[int, TensorMeta], ...]
    mutated: tuple[tuple[int, bytes], ...]
    varies: bool

    @property
    def is_one_tensor(self) -> bool:
        """Says whether a new tensor was returned and nothing else happened."""
        _, metas, *rest = self
        return len(metas) == 1 and self.output == Slot(0) and not any(rest)


class Reports:
    """The reports known on this rank, by signature of the call; and what modules keep."""

    def __init__(self) -> None:
        self._known: dict[Any, Report] = {}
        self._single: dict[Any, TensorMeta] = {}
        self._seen: dict[str, dict[tuple[str, str], torch.Tensor]] = {}
        self._kept: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        self._own_hooks: set[tuple[int, str, int]] = set()
        # Types of attributes that are no tensors: telling this of a type is much faster.
        self._harmless: set[type] = set()
        self._glue_modules: tuple[nn.Module, ...] = ()

    def get(self, key: Any) -> Report | None:
        """Returns what is known of calls with this signature."""
        return self._known.get(key)

    def learn(self, key: Any, report: Report) -> None:
        """Remembers a report."""
        self._known[key] = report
        if report.is_one_tensor:
            self._single[key] = report.metas[0]

    def single(self, key: Any) -> TensorMeta | None:
        """Returns the result of calls that return one new tensor and do nothing else, as most."""
        return self._single.get(key)

    def look_at(self, placed: PlacedModule) -> list[tuple[str, str, torch.Tensor]]:
        """Finds tensors that a placed module's own code put into attributes since it was placed.

        An attribute that was found once is found ever after, so that reports stay alike.
        """
        is_first = placed.path not in self._seen
        if not is_first and self._is_harmless(placed):
            return []
        seen = self._seen.setdefault(placed.path, {})
        found = []
        for name, module in placed.watched:
            attributes = vars(module)
            if self._harmless.issuperset(map(type, attributes.values())):
                continue
            for attribute, tensor in attributes.items():
                if not isinstance(tensor, torch.Tensor):
                    self._harmless.add(type(tensor))
                    continue
                if seen.get((name, attribute)) is not tensor:
                    seen[name, attribute] = tensor
                    if not is_first:
                        self.note_attribute(module, attribute)
                if (id(module), attribute) in self._kept:
                    found.append((name, attribute, tensor))
        return found

    def _is_harmless(self, placed: PlacedModule) -> bool:
        """Says whether no attribute of a placed module's own modules is a tensor."""
        # Runs for every call of a placed module: no Python for each of hundreds of attributes.
        attributes = chain.from_iterable([vars(module).values() for _, module in placed.watched])
        return self._harmless.issuperset(map(type, attributes))

    def look_around(self, placed_modules: Iterable[PlacedModule]) -> None:
        """Notes attributes that glue put into placed modules, or took out of them."""
        for placed in placed_modules:
            seen = self._seen.setdefault(placed.path, {})
            for name, module in placed.watched:
                for attribute, held in vars(module).items():
                    known = seen.get((name, attribute))
                    if isinstance(held, torch.Tensor) and known is not held:
                        seen[name, attribute] = held
                        self.note_attribute(module, attribute)

    def note_attribute(self, module: nn.Module, attribute: str) -> None:
        """Notes that a placed module keeps a tensor in an attribute."""
        self._kept[id(module), attribute] = (module, attribute)

    def hooks(self, placed: PlacedModule) -> list[tuple[str, nn.Module, str, int, Any]]:
        """Lists the forward hooks that every rank has: name, module, kind, identity, hook."""
        if not placed.has_hooks:
            return []
        return [
            (name, module, kind, identity, hook)
            for name, module in placed.modules
            for kind in ("_forward_hooks", "_forward_pre_hooks")
            for identity, hook in getattr(module, kind).items()
            if (id(module), kind, identity) not in self._own_hooks
        ]

    def note_own_hooks(self, placed: PlacedModule, before: list[Any]) -> None:
        """Notes hooks that a module registered in its own forward, which ran on its owner only.

        They are the module's own affair: what they collect comes out through its result.
        """
        known = {(id(module), kind, identity) for _, module, kind, identity, _ in before}
        for _, module, kind, identity, _ in self.hooks(placed):
            if (id(module), kind, identity) not in known:
                self._own_hooks.add((id(module), kind, identity))

    def watch_glue(self, modules: tuple[nn.Module, ...]) -> None:
        """Names the modules whose own forward is glue; they may keep tensors as well."""
        self._glue_modules = modules

    def holders(self) -> list[dict[Any, Any]]:
        """Returns the dicts in attributes of modules that are glue, and those of objects there."""
        found = [
            holder_of(held)
            for module in self._glue_modules
            for attribute, held in vars(module).items()
            if attribute not in _INTERNAL
        ]
        return [holder for holder in found if holder is not None]

    def kept_attributes(self) -> list[tuple[nn.Module, str, Any]]:
        """Returns what modules keep now: each microbatch must find its own there again."""
        placed = [
            (module, attribute, vars(module).get(attribute))
            for module, attribute in self._kept.values()
        ]
        glue = [
            (module, attribute, held)
            for module in self._glue_modules
            for attribute, held in vars(module).items()
            if attribute not in _INTERNAL
        ]
        return placed + glue


def differences(known: Report, report: Report) -> str:
    """Names the parts of two reports that differ."""
    return ", ".join(
        f"{name}: {old!r} before, {new!r} now"
        for name, old, new in zip(Report._fields, known, report, strict=True)
        if old != new
    )
