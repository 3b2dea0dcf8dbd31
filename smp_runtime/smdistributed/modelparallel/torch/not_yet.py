"""Names of features that do not exist yet: they import, and say so when they are used."""

from collections.abc import Iterator
from typing import Any, NoReturn

import smp_runtime
from smp_runtime.errors import NotSupportedError

NAMES = (
    "delay_param_initialization",
    "load",
    "model_creation",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "set_activation_checkpointing",
)


def runtime_or_placeholder(name: str) -> Any:
    """Returns what the runtime offers under a name, or else what refuses to be called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupportedError(f"smp.{name} is not supported yet")

    return getattr(smp_runtime, name, refuse)


def placeholders() -> Iterator[tuple[str, Any]]:
    """Yields what stands for each name that the runtime does not offer."""
    for name in NAMES:
        if not hasattr(smp_runtime, name):
            yield name, runtime_or_placeholder(name)
