"""Remembers the Python state of a model, so that a trial run leaves no trace.

What is remembered are references: every attribute of every module, and the contents of the lists,
dicts and sets, and of the user's own objects, that can be reached from there, and the states of
random generators. The values of tensors are not copied; who writes to one saves it first.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["ModelState", "values_kept"]

HOOK_ATTRIBUTES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class ModelState:
    """The Python state of a model at the time of construction.

    Args:
        model: the model.
        others: more objects to look through, such as arguments of a call.
    """

    def __init__(self, model: nn.Module, *others: Any) -> None:
        self._modules = list(model.modules())
        self._containers: list[tuple[Any, Any]] = []
        self._generators: list[Callable[[], object]] = []
        self.tensors: list[torch.Tensor] = []
        self._remember([model, *others])

    def restore(self) -> None:
        """Puts everything back where it was, in the same containers."""
        for container, contents in self._containers:
            if isinstance(container, (list, deque)):
                container.clear()
                container.extend(contents)
            else:
                container.clear()
                container.update(contents)
        for put_back in self._generators:
            put_back()

    def remove_hooks(self) -> None:
        """Takes all hooks off the modules; `restore` brings them back."""
        for module in self._modules:
            for name in HOOK_ATTRIBUTES:
                vars(module)[name].clear()

    def replace_tensors(self, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor that is held directly by a remembered list or dict."""
        for container, contents in self._containers:
            if isinstance(contents, dict):
                places: Iterator[tuple[Any, Any]] = iter(contents.items())
            elif isinstance(contents, list):
                places = iter(enumerate(contents))
            else:
                continue
            for place, value in places:
                if isinstance(value, torch.Tensor):
                    container[place] = replace(value)

    def _remember(self, found: list[Any]) -> None:
        seen: set[int] = set()
        while found:
            value = found.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
            elif isinstance(value, (list, set, deque)):
                self._containers.append((value, copy.copy(value)))
                found.extend(value)
            elif isinstance(value, dict):
                self._containers.append((value, dict(value)))
                found.extend(value.values())
            elif isinstance(value, tuple):
                found.extend(value)
            elif (put_back := _generator_kept(value)) is not None:
                self._generators.append(put_back)
            elif _has_state(value):
                # An instance may fill its attributes through `__dict__` only.
                found.append(vars(value))


def _generator_kept(value: Any) -> Callable[[], object] | None:
    """Returns what puts a random generator back to where it is now; None for anything else."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _has_state(value: Any) -> bool:
    """Whether to look into the attributes of an object: modules, and the user's own objects."""
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, type) or not hasattr(value, "__dict__") or callable(value):
        return False
    package = type(value).__module__.partition(".")[0]
    return package == "__main__" or not (package in sys.stdlib_module_names or package == "torch")


@contextmanager
def values_kept(tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[torch.Tensor], None]]:
    """Yields what to call before a tensor is written to, so that it can be put back."""
    known = {tensor.untyped_storage().data_ptr(): tensor for tensor in _stored(tensors)}
    saved: dict[int, torch.Tensor] = {}

    def before_write(tensor: torch.Tensor) -> None:
        place = tensor.untyped_storage().data_ptr()
        if place in known and place not in saved:
            saved[place] = _flat(known[place]).clone()

    for tensor in known.values():
        # Batch norm does not tell torch that it writes to its buffers. Parameters are too large.
        if not isinstance(tensor, nn.Parameter):
            before_write(tensor)
    try:
        yield before_write
    finally:
        with torch.no_grad():
            for place, values in saved.items():
                _flat(known[place]).copy_(values)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all of the memory behind a tensor."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _stored(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        tensor
        for tensor in tensors
        if tensor.layout is torch.strided
        and not tensor.is_meta
        and not isinstance(tensor, FakeTensor)
    ]
