"""What a call of a module finds in the world, and how a recomputation finds it again.

A recomputation runs the same Python a second time, later, when other microbatches and other
modules have run. To compute the same it must see what the first run saw: random states, autocast,
training flags, the attributes of the modules, their buffers. And it must leave no second trace:
what the first run changed is changed already. So the state is noted before the first run, put in
place for the second one, and what was there is put back afterwards.

Attributes and arguments are noted one level deep: the attribute itself, and what a list, dict, set
or object in it holds. Deeper changes (``self.log.entries.append(x)`` where `log` is an object),
globals and class attributes are out of reach: they change twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .. import device
from ..errors import NotSupportedError
from ..execution.arguments import mutable_arguments
from ..execution.rng import HostRandomState
from ..tensors import version_of
from .attributes import Attributes, Contents, NamedModules

KeptBuffers = dict[int, tuple[torch.Tensor, int, torch.Tensor]]
"""Copies of buffers by identity, with the buffer and the version that the copy is of."""


class ForwardState:
    """The world as one call found it; make it right before the call.

    Args:
        modules: the called module and its submodules, with their names for messages.
        arguments: what it is called with.
        preserve_rng_state: whether random numbers are to be drawn again.
        kept: copies of buffers, to be shared by calls: a buffer that stays as it is is copied once.
        attributes: what an earlier call found, to be shared as long as it is so.

    Attributes:
        attributes: what this call found.
        parameters: those of the modules.
    """

    def __init__(
        self,
        modules: NamedModules,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        preserve_rng_state: bool,
        kept: KeptBuffers,
        attributes: Attributes | None,
    ) -> None:
        self._modules = modules
        self._autocast = _autocast()
        self._random = (
            (device.random_state(), HostRandomState.now()) if preserve_rng_state else None
        )
        if attributes is None or not attributes.is_of(modules):
            attributes = Attributes(modules)
        self.attributes = attributes
        args, kwargs = arguments
        self._arguments = Contents(mutable_arguments((*args, *kwargs.values())))
        self._tensors = [(name, held, version_of(held)) for name, held in attributes.tensors]
        self.parameters = [
            parameter
            for _, module in modules
            for parameter in module._parameters.values()
            if parameter is not None
        ]
        self._versions = [parameter._version for parameter in self.parameters]
        self._buffers = [
            (module, name, _copy(module, buffer, kept))
            for _, module in modules
            if module._buffers
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._observers: set[tuple[int, int]] = set()
        self._changed: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Runs the call inside; notes which forward hooks only look on."""
        watched = [
            (module, table)
            for _, module in self._modules
            for table in (module._forward_hooks, module._forward_pre_hooks)
            if table
        ]
        with ExitStack() as stack:
            for module, table in watched:
                for identity, hook in list(table.items()):
                    table[identity] = _Watched(hook, module, (id(module), identity), self)
                    stack.callback(_put_back, table, identity, hook)
            yield
        self._changed = [name for name, held, version in self._tensors if _moved(held, version)]

    def note_observer(self, key: tuple[int, int]) -> None:
        """Notes a hook that changed nothing: once is enough for it."""
        self._observers.add(key)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Makes the world look as it did before the call, and puts it back afterwards.

        Raises:
            NotSupportedError: what the call changed can't be undone for its recomputation.
        """
        self._check()
        with ExitStack() as stack:
            if self._autocast != _autocast():
                kinds, cache = self._autocast
                for kind, dtype, is_enabled in kinds:
                    stack.enter_context(
                        torch.autocast(kind, dtype, enabled=is_enabled, cache_enabled=cache)
                    )
            stack.enter_context(torch.enable_grad())
            if self._random is not None:
                generators, host = self._random
                stack.callback(device.set_random_state, device.random_state())
                device.set_random_state(generators)
                before = host if host.is_current() else HostRandomState.now()
                stack.callback(_put_host_back, host, before)
                if before is not host:
                    host.restore()
            for notes in (self.attributes, self._arguments):
                now = notes.now()
                stack.callback(now.apply)
                if now is not notes:
                    notes.apply()
            for module, name, copy in self._buffers:
                if name in module._buffers:
                    stack.callback(module._buffers.__setitem__, name, module._buffers[name])
                    module._buffers[name] = copy
            if self._observers:
                self._look_away(stack)
            yield

    def _look_away(self, stack: ExitStack) -> None:
        for _, module in self._modules:
            for table in (module._forward_hooks, module._forward_pre_hooks):
                for identity in [key for key in table if (id(module), key) in self._observers]:
                    stack.callback(_put_back, table, identity, table[identity])
                    table[identity] = _look_away

    def _check(self) -> None:
        for name in self._changed:
            raise NotSupportedError(
                f"the forward changed the tensor in the attribute {name} in place, so it can't be "
                "recomputed from the same value; make it a buffer (register_buffer), or assign a "
                "new tensor instead"
            )
        if [parameter._version for parameter in self.parameters] != self._versions:
            raise NotSupportedError(
                "a parameter was changed in place between the forward and its recomputation; call "
                "optimizer.step() after the step"
            )


def _copy(module: nn.Module, buffer: torch.Tensor, kept: KeptBuffers) -> torch.Tensor:
    """Returns a copy of a buffer that only one recomputation will change, if it may change."""
    version = version_of(buffer)
    found = kept.get(id(buffer))
    # Normalisations write to their statistics without torch counting it.
    is_silent = getattr(module, "track_running_stats", False) and module.training
    if found is not None and not is_silent:
        original, copied, copy = found
        if original is buffer and copied == version and version_of(copy) == 0:
            return copy
    copy = buffer.detach().clone()
    if not is_silent:
        kept[id(buffer)] = (buffer, version, copy)
    return copy


class _Watched:
    """A forward hook that is watched for whether it has a part in the result."""

    def __init__(
        self, hook: Any, module: nn.Module, key: tuple[int, int], state: ForwardState
    ) -> None:
        self._hook = hook
        self._module = module
        self._key = key
        self._state = state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = dict(vars(self._module))
        tensors = [item for item in args if isinstance(item, torch.Tensor)]
        versions = [version_of(tensor) for tensor in tensors]
        result = self._hook(*args, **kwargs)
        has_changed = any(map(_moved, tensors, versions)) or any(
            before.get(name, before) is not value for name, value in vars(self._module).items()
        )
        if result is None and not has_changed:
            self._state.note_observer(self._key)
        return result


def _look_away(*_: Any, **__: Any) -> None:
    """Takes the place of a hook that has seen this call already."""


def _moved(tensor: torch.Tensor, version: int) -> bool:
    return version_of(tensor) != version


def _put_back(table: dict[int, Any], identity: int, hook: Any) -> None:
    if identity in table:  # a hook may remove itself
        table[identity] = hook


def _put_host_back(used: HostRandomState, before: HostRandomState) -> None:
    if used is not before or not before.is_current():
        before.restore()


def _autocast() -> tuple[tuple[tuple[str, torch.dtype, bool], ...], bool]:
    """Returns types and flags of autocast for both kinds of devices, and of its cache."""
    kinds = tuple(
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in ("cpu", "cuda")
    )
    return kinds, torch.is_autocast_cache_enabled()
