"""Notes of attributes hold as long as each attribute, and what it holds, is the same object."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from smp_runtime.recomputing.attributes import Attributes


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()
        self.first, self.second = object(), object()
        self.items, self.table = [[1], 2], {"a": 1.5}
        self.seen, self.config = {1}, SimpleNamespace(size=3)


def swap(module: Any) -> None:
    module.first, module.second = module.second, module.first


def rename(module: Any) -> None:
    module.__dict__ = {
        {"first": "second", "second": "first"}.get(name, name): value
        for name, value in vars(module).items()
    }


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another value": lambda module: setattr(module, "first", object()),
    "swapped values": swap,
    "swapped names": rename,
    "a new attribute": lambda module: setattr(module, "third", 1),
    "one gone": lambda module: delattr(module, "second"),
    "an equal value": lambda module: setattr(module, "items", [[1], 2]),
    "the mode": lambda module: module.eval(),
    "the mode of a part": lambda module: module.dropout.eval(),
    "a list": lambda module: module.items.append(3),
    "a list in a list": lambda module: module.items[0].append(3),
    "a dict": lambda module: module.table.update(a=True),
    "a set": lambda module: module.seen.add(2),
    "an object": lambda module: setattr(module.config, "size", 3.0),
}


def shown(module: Any) -> Any:
    held = {name: repr(value) for name, value in vars(module).items() if name[0] != "_"}
    return held, module.dropout.training


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed_and_taken_back(change: Callable[[Any], Any]) -> None:
    module = Module()
    modules = tuple(module.named_modules())
    notes = Attributes(modules)
    before = shown(module)
    assert notes.now() is notes
    assert notes.is_of(tuple(module.named_modules()))
    change(module)
    after = shown(module)
    assert not notes.is_of(modules)
    now = notes.now()
    notes.apply()
    assert shown(module) == before
    now.apply()
    assert shown(module) == after


def test_notes_of_other_modules_do_not_hold() -> None:
    module = Module()
    notes = Attributes(tuple(module.named_modules()))
    module.extra = nn.Tanh()
    assert not notes.is_of(tuple(module.named_modules()))


def test_tensors_are_named() -> None:
    module: Any = Module()
    assert not Attributes(tuple(module.named_modules())).has_tensors()
    module.config.kept = torch.ones(1)
    notes = Attributes([("layer", module)])
    assert notes.has_tensors()
    assert notes.tensors == []
    module.kept = torch.ones(2)
    assert [name for name, _ in Attributes([("layer", module)]).tensors] == ["layer.kept"]
