"""A call that is checkpointed: whose it is, and what is left out of it."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..execution.body import current_body
from .attributes import NamedModules
from .known_calls import Known
from .recomputation import Recomputation

if TYPE_CHECKING:
    from .regions import Region

_log = logging.getLogger("smp_runtime")
_thread = threading.local()


@contextmanager
def switched_off() -> Iterator[None]:
    """Runs what is inside without activation checkpointing: a trace wants to see what is saved."""
    before = getattr(_thread, "is_off", False)
    _thread.is_off = True
    try:
        yield
    finally:
        _thread.is_off = before


def is_switched_off() -> bool:
    """Says whether no call is checkpointed now."""
    return getattr(_thread, "is_off", False)


def is_on() -> bool:
    """Says whether a call would be checkpointed: there will be a backward pass."""
    return torch.is_grad_enabled() and not is_switched_off()


def call_checkpointed(
    path: str,
    modules: NamedModules,
    run: Callable[..., Any],
    preserve_rng_state: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls `run` on this rank, and again in the backward.

    Args:
        path: the name of what is called, for messages.
        modules: it and its submodules with their names.
        run: calls it.
        preserve_rng_state: whether the recomputation draws the same random numbers.
        args: positional arguments, on this rank.
        kwargs: keyword arguments likewise.
    """
    return _call(None, path, modules, run, preserve_rng_state, args, kwargs)


def call_in_region(
    region: Region,
    path: str,
    modules: NamedModules,
    run: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Does the same for one of the calls of a region, unless that is of several ranks already."""
    if region.is_split:
        return run(*args, **kwargs)
    return _call(region, path, modules, run, region.preserve_rng_state, args, kwargs)


def _call(
    region: Region | None,
    path: str,
    modules: NamedModules,
    run: Callable[..., Any],
    preserve_rng_state: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if not is_on():
        return run(*args, **kwargs)
    args, kwargs = _without_caches(args, kwargs)
    body = current_body()
    known = Known() if body is None else body.engine.known
    is_inner = getattr(_thread, "is_inside", False)
    recomputation = Recomputation(path, run, modules, preserve_rng_state, known, is_inner=is_inner)
    if body is not None and not is_inner:
        body.note_recomputation(recomputation)
    _thread.is_inside = True
    try:
        hold = not is_inner and path == known.held_path
        return recomputation.forward(args, kwargs, hold=hold, region=region)
    finally:
        _thread.is_inside = is_inner


def _without_caches(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leaves out transformers' caches of keys and values: they would keep what is to be freed."""
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None:
        return args, kwargs
    found = [each for each in (*args, *kwargs.values()) if isinstance(each, caches.Cache)]
    if not found:
        return args, kwargs
    _announce_cache()
    kept = {name: None if isinstance(each, caches.Cache) else each for name, each in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(None if isinstance(each, caches.Cache) else each for each in args), kept


@functools.cache
def _announce_cache() -> None:
    _log.warning(
        "a cache of keys and values is not filled under activation checkpointing, as it would keep "
        "what is to be freed; write use_cache=False in training"
    )
