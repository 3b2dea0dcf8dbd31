"""torch's own activation checkpointing, called from glue.

Inside a placed module it works as it always does. Called from glue, around modules of several
ranks, it can't: the recomputation happens on one rank, where most of those modules are not. There
the function runs un-checkpointed, with one warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint

from .body import current_body

_log = logging.getLogger("smp_runtime")

_GENERATOR = "_checkpoint_without_reentrant_generator"


@functools.cache
def watch_checkpointing() -> None:
    """Makes torch's checkpointing step aside in glue. Outside glue it stays what it is.

    Both ways in are replaced below `torch.utils.checkpoint.checkpoint`, which is often imported
    by name before this package is.
    """
    native = getattr(torch.utils.checkpoint, _GENERATOR)

    @functools.wraps(native)
    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if _is_glue():
            _warn()
            yield
            return
        yield from native(*args, **kwargs)

    setattr(torch.utils.checkpoint, _GENERATOR, generator)
    function = torch.utils.checkpoint.CheckpointFunction
    native_apply: Callable[..., Any] = function.apply

    def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if _is_glue():
            _warn()
            return run(*args)
        return native_apply(run, preserve, *args)

    function.apply = staticmethod(apply)  # type: ignore[method-assign]


def _is_glue() -> bool:
    body = current_body()
    return body is not None and body.glue.is_active


@functools.cache
def _warn() -> None:
    _log.warning(
        "torch.utils.checkpoint was called around modules of several pipeline ranks, or outside "
        "any; that part runs without activation checkpointing"
    )
