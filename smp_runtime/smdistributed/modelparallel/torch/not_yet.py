"""Contexts around the creation of a model, for as long as the runtime has none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import smp_runtime


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **options: Any
) -> Iterator[None]:
    """Sets the default type of what is created inside.

    Args:
        tensor_parallelism: without effect at tensor degree 1.
        dtype: the default type; None leaves it.
        options: of distributed modules; without effect at tensor degree 1.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Lets parameters be made at once: every rank builds the whole model."""
    yield


def placeholders() -> Iterator[tuple[str, Any]]:
    """Yields what stands for each name that the runtime does not offer."""
    for context in (model_creation, delay_param_initialization):
        yield context.__name__, getattr(smp_runtime, context.__name__, context)
