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

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .. import device
from ..errors import NotSupportedError
from ..execution.arguments import contents, mutable_arguments
from ..execution.ownership import keeps_nothing
from ..execution.rng import host_random_state, set_host_random_state
from ..tensors import version_of
from ..trees import LEAF_TYPES

_OURS = {
    "_smp_activation_checkpointing",
    "_smp_checkpointed_calls",
    "_smp_drawing_path",
    "_smp_placed",
}
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | _OURS
_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks")

NamedModules = Sequence[tuple[str, nn.Module]]
KeptBuffers = dict[int, tuple[torch.Tensor, int, torch.Tensor]]
"""Copies of buffers by identity, with the buffer and the version that the copy is of."""


class ForwardState:
    """The world as one call found it; make it right before the call.

    Args:
        modules: the called module and its submodules, with their names for messages.
        arguments: what it is called with.
        preserve_rng_state: whether random numbers are to be drawn again.
        kept: copies of buffers, to be shared by calls: a buffer that stays as it is is copied once.
    """

    def __init__(
        self, modules: NamedModules, arguments: Any, preserve_rng_state: bool, kept: KeptBuffers
    ) -> None:
        self._modules = modules
        self._autocast = tuple(
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in ("cpu", "cuda")
        )
        self._cache = torch.is_autocast_cache_enabled()
        self._random = (device.random_state(), host_random_state()) if preserve_rng_state else None
        self._attributes = _Attributes(modules, arguments)
        self._tensors = [
            (f"{path}.{name}" if path else name, value, version_of(value))
            for path, _, held in self._attributes.held
            for name, value in held.items()
            if isinstance(value, torch.Tensor)
        ]
        self._parameters = [
            (parameter, parameter._version)
            for _, module in modules
            for parameter in module._parameters.values()
            if parameter is not None
        ]
        self._buffers = [
            (module, name, _copy(module, buffer, kept))
            for _, module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._observers: set[tuple[int, int]] = set()
        self._changed: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Runs the call inside; notes which forward hooks only look on."""
        with ExitStack() as stack:
            for _, module in self._modules:
                for name in _HOOK_TABLES:
                    table = getattr(module, name)
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
            for kind, dtype, is_enabled in self._autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled=is_enabled, cache_enabled=self._cache)
                )
            stack.enter_context(torch.enable_grad())
            if self._random is not None:
                stack.callback(_set_random, (device.random_state(), host_random_state()))
                _set_random(self._random)
            stack.callback(self._attributes.now().apply)
            self._attributes.apply()
            for module, name, copy in self._buffers:
                if name in module._buffers:
                    stack.callback(module._buffers.__setitem__, name, module._buffers[name])
                    module._buffers[name] = copy
            for _, module in self._modules:
                for name in _HOOK_TABLES:
                    table = getattr(module, name)
                    for identity in [key for key in table if (id(module), key) in self._observers]:
                        stack.callback(_put_back, table, identity, table[identity])
                        table[identity] = _look_away
            yield

    def _check(self) -> None:
        for name in self._changed:
            raise NotSupportedError(
                f"the forward changed the tensor in the attribute {name} in place, so it can't be "
                "recomputed from the same value; make it a buffer (register_buffer), or assign a "
                "new tensor instead"
            )
        if any(parameter._version != version for parameter, version in self._parameters):
            raise NotSupportedError(
                "a parameter was changed in place between the forward and its recomputation; call "
                "optimizer.step() after the step"
            )


class _Attributes:
    """What modules keep in attributes, and what lists, dicts, sets and objects there hold."""

    def __init__(self, modules: NamedModules, arguments: Any) -> None:
        self.held = [(path, module, _plain_attributes(module)) for path, module in modules]
        self._modules, self._arguments = modules, arguments
        found: dict[int, tuple[Any, Any]] = {}
        for mutable in mutable_arguments(arguments):
            found[id(mutable)] = (mutable, contents(mutable))
        for _, _, held in self.held:
            for value in held.values():
                if type(value) not in LEAF_TYPES and id(value) not in found:
                    for mutable in mutable_arguments(value):
                        found[id(mutable)] = (mutable, contents(mutable))
        self._contents = list(found.values())

    def now(self) -> _Attributes:
        """Returns the same of this moment, for the same mutable objects."""
        current = _Attributes(self._modules, self._arguments)
        known = {id(mutable) for mutable, _ in current._contents}
        current._contents += [
            (mutable, contents(mutable))
            for mutable, _ in self._contents
            if id(mutable) not in known
        ]
        return current

    def apply(self) -> None:
        """Makes attributes and what they hold what they were."""
        for _, module, held in self.held:
            attributes = vars(module)
            if not keeps_nothing(module):
                for name in attributes.keys() - held.keys() - _INTERNAL:
                    del attributes[name]
            attributes.update(held)
        for mutable, content in self._contents:
            _refill(mutable, content)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    if keeps_nothing(module):
        return {"training": module.training}
    attributes = vars(module)
    return {name: attributes[name] for name in attributes.keys() - _INTERNAL}


def _refill(mutable: Any, content: Any) -> None:
    """Makes a list, dict, set or object hold what it held, if it holds something else now."""
    now = contents(mutable)
    if isinstance(content, list):
        same = len(now) == len(content) and all(map(lambda a, b: a is b, now, content))
    else:
        same = now.keys() == content.keys() and all(now[key] is content[key] for key in now)
    if same:
        return
    if isinstance(mutable, list):
        mutable[:] = content
    elif isinstance(mutable, set):
        mutable.clear()
        mutable.update(content)
    else:
        target = mutable if hasattr(mutable, "keys") else vars(mutable)
        for key in [key for key in target if key not in content]:
            del target[key]
        for key, value in content.items():
            target[key] = value


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


def _set_random(state: tuple[Any, Any]) -> None:
    device.set_random_state(state[0])
    set_host_random_state(state[1])
