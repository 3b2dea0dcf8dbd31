"""Names of features that do not exist yet: they import, and say so when they are used."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

import smp_runtime
from smp_runtime.errors import NotSupportedError

NAMES = (
    "load",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
)


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


def runtime_or_placeholder(name: str) -> Any:
    """Returns what the runtime offers under a name, or else what refuses to be called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupportedError(f"smp.{name} is not supported yet")

    return getattr(smp_runtime, name, refuse)


def placeholders() -> Iterator[tuple[str, Any]]:
    """Yields what stands for each name that the runtime does not offer."""
    for name in NAMES:
        yield name, runtime_or_placeholder(name)
    for context in (model_creation, delay_param_initialization):
        yield context.__name__, getattr(smp_runtime, context.__name__, context)
