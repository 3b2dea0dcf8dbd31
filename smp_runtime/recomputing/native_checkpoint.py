"""torch's own activation checkpointing, called from glue.

Inside a placed module it works as it always does. Called from glue it can't: the recomputation
happens on one rank, where not all of those modules are. There its function runs as glue, and each
placed module that it calls is checkpointed by itself (`checkpointed_call`). Around one placed
module that is the same thing. Around several, what the glue between them saves stays: then, and
where the function calls no placed module, there is one warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint

from ..execution.body import Body, current_body
from .checkpointed_call import is_switched_off

_log = logging.getLogger("smp_runtime")

_GENERATOR = "_checkpoint_without_reentrant_generator"


@functools.cache
def watch_checkpointing() -> None:
    """Makes torch's checkpointing leave the work to placed modules in glue.

    Both ways in are replaced below `torch.utils.checkpoint.checkpoint`, which is often imported
    by name before this package is. Outside glue it stays what it is.
    """
    native = getattr(torch.utils.checkpoint, _GENERATOR)

    @functools.wraps(native)
    def generator(run: Any, preserve: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
        if is_switched_off():
            yield
            return
        body = _body_in_glue()
        if body is None:
            yield from native(run, preserve, *args, **kwargs)
            return
        with checkpointing_calls(body, preserve), _watching(body):
            yield

    setattr(torch.utils.checkpoint, _GENERATOR, generator)
    function = torch.utils.checkpoint.CheckpointFunction
    native_apply: Callable[..., Any] = function.apply

    def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if is_switched_off():
            return run(*args)
        body = _body_in_glue()
        if body is None:
            return native_apply(run, preserve, *args)
        with checkpointing_calls(body, preserve), _watching(body):
            return run(*args)

    function.apply = staticmethod(apply)  # type: ignore[method-assign]


@contextmanager
def checkpointing_calls(body: Body, preserve_rng_state: bool) -> Iterator[None]:
    """Checkpoints the calls of placed modules that glue makes inside."""
    before, body.checkpoints_calls = body.checkpoints_calls, preserve_rng_state
    try:
        yield
    finally:
        body.checkpoints_calls = before


@contextmanager
def _watching(body: Body) -> Iterator[None]:
    """Warns unless what runs inside calls modules of exactly one rank."""
    before, body.checkpointed_ranks = body.checkpointed_ranks, set()
    try:
        yield
    finally:
        ranks, body.checkpointed_ranks = body.checkpointed_ranks, before
    body.checkpointed_ranks |= ranks
    if len(ranks) != 1:
        _warn()


def _body_in_glue() -> Body | None:
    body = current_body()
    return body if body is not None and body.glue.is_active else None


@functools.cache
def _warn() -> None:
    _log.warning(
        "torch.utils.checkpoint was called around modules of several pipeline ranks, or outside "
        "any: modules on one rank are checkpointed each by itself, and the operations between them "
        "run without activation checkpointing"
    )
