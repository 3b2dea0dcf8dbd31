"""Which modules a user-defined autograd function calls.

torch runs such a function as one operation, with a backward pass of its own, so all modules that
it calls must live on one rank: reversible layers, say, or activation checkpointing that somebody
wrote for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction


class AutogradFunctions:
    """Watches the calls of user-defined autograd functions in one run of a model.

    Those of torch's own activation checkpointing don't count: its layers may live apart.
    """

    def __init__(self) -> None:
        self._called: list[list[str]] = []
        self._depth = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches while active; no mode of torch's shows these functions."""
        replaced = vars(torch.autograd.Function)["apply"]
        native: Callable[..., Any] = replaced.__func__

        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if issubclass(cls, CheckpointFunction):
                return native(cls, *args, **kwargs)
            if not self._depth:
                self._called.append([])
            self._depth += 1
            try:
                return native(cls, *args, **kwargs)
            finally:
                self._depth -= 1

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            torch.autograd.Function.apply = replaced  # type: ignore[method-assign]

    def note(self, path: str) -> None:
        """Notes that the module at `path` is called, if a function is running."""
        if self._depth:
            self._called[-1].append(path)

    def indivisible(self, callable_paths: Container[str]) -> set[str]:
        """Returns the paths of the smallest modules that hold all that one function called.

        The whole model is none of them: it must be divided, and its functions may be lucky.

        Args:
            callable_paths: of the modules that can be placed on a rank; a list of modules can't.
        """
        found = {_common(paths, callable_paths) for paths in self._called if paths}
        return found - {""}


def _common(paths: list[str], callable_paths: Container[str]) -> str:
    names = paths[0].split(".")
    while names:
        path = ".".join(names)
        is_common = all(other == path or other.startswith(f"{path}.") for other in paths)
        if is_common and path in callable_paths:
            return path
        names.pop()
    return ""
