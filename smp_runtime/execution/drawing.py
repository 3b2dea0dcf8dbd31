"""Modules that draw random numbers, made to draw from streams of their own."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from .body import current_body
from .rng import SeededDraws

_DRAWING = "_smp_drawing_path"


def seed_draws(module: nn.Module, path: str) -> None:
    """Gives each call of a module that draws the stream of its path; see `rng`."""
    if not isinstance(module, _SeededBase):
        module.__dict__[_DRAWING] = path
        cls: Any = type(module)
        module.__class__ = _seeded(cls)


class _SeededBase:
    """Marks the classes made here."""


@functools.cache
def _seeded(cls: type[Any]) -> type[Any]:
    native = cls.__call__
    with_host = not cls.__module__.startswith("torch.nn.")

    @functools.wraps(native)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        body = current_body()
        if body is None:
            return native(self, *args, **kwargs)
        with body.streams.module(self.__dict__[_DRAWING], with_host=with_host):
            if body.glue.is_active or body.streams.is_watched:
                return native(self, *args, **kwargs)
            with SeededDraws(body.streams):
                return native(self, *args, **kwargs)

    return type(
        cls.__name__,
        (cls, _SeededBase),
        {
            "__call__": call,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        },
    )
