"""Placed modules: their calls are intercepted, from outside.

A placed module gets a subclass made for its class that keeps the class's name, so that
`isinstance`, forward hooks and whatever a class does in its own `__call__` stay as they are.
Called from glue, the call runs where the module lives (`calls`). Inside a placed module, and
outside a step, interception is off; in a function that runs on one rank as a whole, a module of
another rank is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import NotSupportedError
from ..recomputing.checkpointed_call import call_in_region
from .body import current_body
from .calls import Call
from .ownership import PlacedModule

_PLACED = "_smp_placed"


def place(module: nn.Module, placed: PlacedModule) -> None:
    """Intercepts a module's calls from glue.

    Raises:
        NotSupportedError: the module is a ScriptModule, whose class can't be extended.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise NotSupportedError(f"{placed.path} is a ScriptModule; partition the Python module")
    module.__dict__[_PLACED] = placed
    cls: Any = type(module)
    module.__class__ = _intercepting(cls)


def placement_of(module: nn.Module) -> PlacedModule | None:
    """Returns what is known of a placed module, None if the module is not placed as a whole."""
    return module.__dict__.get(_PLACED)


def with_base(module: nn.Module, extend: Callable[[Any], Any]) -> None:
    """Extends a module's class by `extend`, below the interception of its calls if it is placed."""
    cls: Any = type(module)
    if placement_of(module) is None:
        module.__class__ = extend(cls)
    else:
        extended: Any = extend(cls.__bases__[0])
        module.__class__ = _intercepting(extended)


@functools.cache
def _intercepting(cls: Any) -> type[Any]:
    members = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    for name in ("__call__", "forward"):
        members[name] = _intercept(getattr(cls, name))
    return type(cls.__name__, (cls,), members)


def _intercept(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def entry(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        body = current_body()
        if body is None or not body.glue.is_active:
            if body is not None and body.rank != self.__dict__[_PLACED].owner:
                raise NotSupportedError(
                    f"{self.__dict__[_PLACED].path} lives on another pipeline rank and was called "
                    "inside a function that runs on one rank as a whole (a user-defined autograd "
                    "function, say); place what calls it on one rank with smp.set_partition"
                )
            return native(self, *args, **kwargs)
        placed = self.__dict__[_PLACED]
        run = functools.partial(native, self)
        if body.region is not None:
            body.region.enter(placed)
            run = functools.partial(call_in_region, body.region, placed.path, placed.modules, run)
        num_above = body.glue.suspend()
        try:
            return Call(body, placed, run, args, kwargs).run()
        finally:
            body.glue.resume(num_above)

    return entry
