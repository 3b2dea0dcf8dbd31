"""The names under which scripts written for SMP find the blocks of a transformer.

There ``model.module.module.module.transformer.seq_layers`` was the list of blocks, whatever the
model's class called it. Here the same path leads to the block list of the user's own module.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import nn


def offer_seq_layers(module: nn.Module) -> None:
    """Gives a model attributes that lead to its blocks, where it has none of their names already.

    `module`, and `transformer.seq_layers` also without it, as scripts get to them by `get_module`.
    They are no submodules: names of parameters stay as they are.
    """
    if not hasattr(module, "module"):
        module.__dict__["module"] = Level16(module)
    with suppress(AttributeError):  # there are no blocks
        inner: Any = getattr(module, "transformer", None)
        if inner is None:
            block_list(module)
            module.__dict__["transformer"] = Transformer(module)
        elif not hasattr(inner, "seq_layers"):
            vars(inner)["seq_layers"] = block_list(inner)


def block_list(module: nn.Module) -> nn.Module:
    """Returns the list of blocks that holds the most parameters.

    Raises:
        AttributeError: there is no list of at least two modules.
    """
    lists = [
        part
        for part in module.modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > 1
    ]
    if not lists:
        raise AttributeError(f"{type(module).__name__} has no list of blocks")
    return max(lists, key=lambda part: sum(each.numel() for each in part.parameters()))


class _View:
    """Shows a module's attributes, and some more."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __reduce__(self) -> Any:
        return type(self), (self._module,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_module"], name)


class Level16(_View):
    """The user's module where SMP had its 16-bit wrapper."""

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self._module

    @property
    def transformer(self) -> Any:
        """The part with the blocks, whatever its name."""
        return Transformer(getattr(self._module, "transformer", self._module))


class Transformer(_View):
    """The part of a model that has its blocks."""

    @property
    def seq_layers(self) -> nn.Module:
        """The list of the blocks."""
        found: nn.Module = getattr(self._module, "seq_layers", None) or block_list(self._module)
        return found
