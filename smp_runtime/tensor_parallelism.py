"""The API of tensor parallelism, which does not exist yet.

The settings accept only `tensor_parallel_degree` 1. At that degree there is nothing to do, and
that is what these functions do: scripts written for any degree run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

_Class = TypeVar("_Class", bound=type[nn.Module])


@contextmanager
def tensor_parallelism(enabled: bool = True, **options: Any) -> Iterator[None]:
    """Marks the modules created inside for tensor parallelism; also a decorator.

    Args:
        enabled: without effect at tensor degree 1.
        options: of the distributed modules; without effect at tensor degree 1.
    """
    yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **options: Any) -> None:
    """Marks a module for tensor parallelism; without effect at tensor degree 1."""


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
) -> Callable[[_Class], _Class]:
    """Registers a distributed form of the decorated class; without effect at tensor degree 1."""
    return lambda module_cls: module_cls


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
) -> None:
    """Registers a distributed form of a class; without effect at tensor degree 1."""


class TensorQueries:
    """What a model says of tensor parallelism, of which it has none."""

    def distributed_modules(self) -> list[nn.Module]:
        """Returns the modules that are cut over tensor ranks: none."""
        return []

    def is_distributed_parameter(self, param: torch.Tensor) -> bool:
        """Says whether a parameter is cut over tensor ranks: no."""
        return False

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Says whether a buffer is cut over tensor ranks: no."""
        return False

    def is_scaled_batch_parameter(self, param: torch.Tensor) -> bool:
        """Says whether a parameter sees the batches of all tensor ranks at once: no."""
        return False

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Says whether a buffer sees the batches of all tensor ranks at once: no."""
        return False

    def default_reducer_named_parameters(self: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of this rank whose gradients are averaged over the DP group."""
        yield from self.local_named_parameters()

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters whose gradients are averaged over the RDP group only: none."""
        yield from ()


def register_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Says that a module uses another one's parameter.

    Without effect: what a forward uses is seen here without being told.
    """
