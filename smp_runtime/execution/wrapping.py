"""A wrapper that looks like the module inside: its names, attributes, signature and modes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import UsageError


class Level(nn.Module):
    """One level of SMP's nesting, where its data parallel wrapper was."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module

    def __getattr__(self, name: str) -> Any:
        """Finds attributes of the user's module."""
        return getattr(self.__dict__["module"], name)


class Wrapper(nn.Module):
    """Wraps a module without becoming its parent: names of parameters stay those of the module.

    Args:
        module: the user's module.
        call: what calling the wrapper does.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        # Past nn.Module's own setattr, which would register a child.
        self.__dict__["_wrapped"] = module
        self.__dict__["forward"] = _with_signature_of(module, call)
        if hasattr(module, "resize_token_embeddings"):
            module.__dict__["resize_token_embeddings"] = _refuse_to_resize

    @property
    def module(self) -> nn.Module:
        """The level between this wrapper and the user's module, ``model.module.module``."""
        return Level(self.get_module())

    def get_module(self) -> nn.Module:
        """Returns the user's module."""
        module: nn.Module = self.__dict__["_wrapped"]
        return module

    def __getattr__(self, name: str) -> Any:
        """Finds attributes of the user's module, such as `config`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_wrapped" not in self.__dict__:
                raise
            return getattr(self.get_module(), name)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the user's modules under their own names."""
        yield from self.get_module().named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the children of the user's module."""
        return self.get_module().named_children()

    def train(self, mode: bool = True) -> Wrapper:
        """Sets the training flag of all modules, on every rank."""
        self.training = mode
        self.get_module().train(mode)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Converts what is here; what lives elsewhere only changes its type, and nothing moves."""

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                return tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype)
            return fn(tensor).to(tensor.device)

        self.get_module()._apply(convert, recurse)  # type: ignore[no-untyped-call]
        return self


def _refuse_to_resize(*args: Any, **kwargs: Any) -> None:
    """Takes the place of transformers' method in a wrapped model."""
    raise UsageError(
        "resize_token_embeddings makes new parameters, which the partition and the optimizer "
        "don't know: call it on the plain model before smp.DistributedModel"
    )


def _with_signature_of(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a forward with the signature of the user's, which trainers read."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    forward.__doc__ = module.forward.__doc__
    forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    return forward
