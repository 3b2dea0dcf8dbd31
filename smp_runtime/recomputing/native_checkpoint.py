"""torch's own activation checkpointing, called from glue.

Inside a placed module it works as it always does. Called from glue it can't: the recomputation
happens on one rank, where not all of those modules are. There its function runs as glue, and each
placed module that it calls is checkpointed by itself (`regions`). Around one placed module that is
the same thing. Around modules of several ranks, or none, it runs without activation checkpointing,
after one warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch.distributed as dist
import torch.utils.checkpoint

from ..execution.body import Body, current_body
from .checkpointed_call import is_on, is_switched_off
from .regions import Region

_log = logging.getLogger("smp_runtime")

_MOST_NAMES = 6
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
        with _checkpointing_natively(body, preserve):
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
        with _checkpointing_natively(body, preserve):
            return run(*args)

    function.apply = staticmethod(apply)  # type: ignore[method-assign]


@contextmanager
def checkpointing_calls(body: Body, preserve_rng_state: bool) -> Iterator[Region]:
    """Checkpoints the calls of placed modules that glue makes inside, if they are of one rank."""
    before, body.region = body.region, Region(preserve_rng_state)
    try:
        yield body.region
        body.engine.known.stages |= body.region.settle()
        if before is not None:
            before.include(body.region)
    finally:
        body.region = before


@contextmanager
def _checkpointing_natively(body: Body, preserve_rng_state: bool) -> Iterator[None]:
    """Does the same, and warns of what runs without."""
    with checkpointing_calls(body, preserve_rng_state) as region:
        yield
    if is_on() and (not dist.is_initialized() or dist.get_rank() == 0):
        if not region.owners:
            _warn("no module that is placed on a pipeline rank")
        elif region.is_split:
            _warn(f"modules of several pipeline ranks ({_named(region.owners)})")


def _body_in_glue() -> Body | None:
    body = current_body()
    return body if body is not None and body.glue.is_active else None


def _named(owners: Mapping[str, int]) -> str:
    named = [f"{path} on {owner}" for path, owner in islice(owners.items(), _MOST_NAMES)]
    return ", ".join(named) + (", ..." if len(owners) > _MOST_NAMES else "")


@functools.cache
def _warn(what: str) -> None:
    _log.warning(
        "torch.utils.checkpoint was called around %s: it runs without activation checkpointing; "
        "call it around modules of one rank",
        what,
    )
