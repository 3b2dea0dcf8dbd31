"""Modules whose calls are checkpointed, and groups of layers that are as one.

A module gets a subclass made for its class, as placed modules do, and a mark in an attribute. The
mark can be taken off; the subclass then does nothing. Below the interception of a placed module,
so that what is checkpointed is what runs on the owner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import NotSupportedError
from ..execution.body import Body, current_body
from ..execution.calls import Call
from ..execution.ownership import PlacedModule, placed_module
from ..execution.placed import placement_of, with_base
from .checkpointed_call import call_checkpointed, is_on
from .layer_groups import SPLIT, layer_groups

_MARK = "_smp_activation_checkpointing"
_num_changes = 0


@dataclass
class Mark:
    """How the calls of a module are checkpointed.

    Attributes:
        strategy: of a Sequential, how its layers are grouped; `each` for any other module.
        preserve_rng_state: whether the recomputation draws the same random numbers.
        groups: groups of layers that were called, by the positions of their layers.
    """

    strategy: str = "each"
    preserve_rng_state: bool = True
    groups: dict[range, PlacedModule] = field(default_factory=dict)


def mark_of(module: nn.Module) -> Mark | None:
    """Returns how a module is checkpointed, None if it is not."""
    return module.__dict__.get(_MARK)


def set_mark(module: nn.Module, mark: Mark | None) -> None:
    """Makes the calls of a module checkpointed; None: no longer.

    Raises:
        NotSupportedError: the module is a ScriptModule, whose class can't be extended.
    """
    global _num_changes
    _num_changes += 1
    if mark is None:
        module.__dict__.pop(_MARK, None)
        return
    if isinstance(module, torch.jit.ScriptModule):
        raise NotSupportedError(
            f"{type(module).__name__} is a ScriptModule, whose calls can't be checkpointed; pass "
            "the Python module it was made of"
        )
    module.__dict__[_MARK] = mark
    with_base(module, _checkpointing)


def num_changes() -> int:
    """Returns how often marks were set or taken off: where it is the same, they are."""
    return _num_changes


def checkpointed_stages(placed_modules: Iterable[PlacedModule]) -> frozenset[int]:
    """Returns the stages of placed modules that are checkpointed, or have parts that are."""
    return frozenset(
        placed.stage
        for placed in placed_modules
        if any(_MARK in module.__dict__ for _, module in placed.modules)
    )


class _CheckpointingBase:
    """Marks the classes made here."""


@functools.cache
def _checkpointing(cls: Any) -> Any:
    if issubclass(cls, _CheckpointingBase):
        return cls
    members = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    members["__call__"] = _call_of(cls.__call__)
    if issubclass(cls, nn.Sequential):
        members["forward"] = _forward_of(cls.forward)
    return type(cls.__name__, (cls, _CheckpointingBase), members)


def _call_of(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mark = mark_of(self)
        if mark is None or isinstance(self, nn.Sequential) or not is_on() or _in_glue():
            return native(self, *args, **kwargs)
        return call_checkpointed(
            path_of(self),
            tuple(self.named_modules()),
            functools.partial(native, self),
            mark.preserve_rng_state,
            *args,
            **kwargs,
        )

    return call


def _forward_of(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def forward(self: nn.Sequential, input: Any) -> Any:
        mark = mark_of(self)
        if mark is None or not is_on():
            return native(self, input)
        return run_in_groups(self, input, mark)

    return forward


def _in_glue() -> bool:
    body = current_body()
    return body is not None and body.glue.is_active


def path_of(module: nn.Module) -> str:
    """Returns a module's name for messages."""
    body = current_body()
    names: Mapping[int, str] = {} if body is None else body.engine.module_names
    return names.get(id(module)) or type(module).__name__


# -- groups of layers ------------------------------------------------------------------------------


def home_of(module: nn.Module) -> Any:
    """Returns rank and stage of a placed module, None without parameters, `SPLIT` otherwise."""
    placed = placement_of(module)
    if placed is not None:
        return placed.owner, placed.stage
    is_empty = next(module.parameters(), None) is None and next(module.buffers(), None) is None
    return None if is_empty else SPLIT


def run_in_groups(sequential: nn.Sequential, input: Any, mark: Mark) -> Any:
    """Runs the layers of a Sequential, each group of them checkpointed as one.

    Layers whose parts are on several ranks run without checkpointing.
    """
    layers = tuple(sequential)
    is_glue = _in_glue()
    body, placed = current_body(), placement_of(sequential)
    if body is not None and is_glue and placed is not None:
        run = functools.partial(run_in_groups, sequential, mark=mark)
        return _call_placed(body, placed, run, input)
    homes = [home_of(layer) if is_glue else 0 for layer in layers]
    for group in layer_groups(mark.strategy, homes):
        members = [layers[position] for position in group]
        home = next((homes[position] for position in group if homes[position] is not None), None)
        if home is None or home == SPLIT:
            input = _run_in_turn(members, input)
        elif body is not None and is_glue:
            input = _call_group(body, sequential, group, members, home, input, mark)
        else:
            input = _run_group(sequential, group, members, input, mark)
    return input


def _run_in_turn(layers: Sequence[nn.Module], input: Any) -> Any:
    for layer in layers:
        input = layer(input)
    return input


def _run_group(
    sequential: nn.Sequential, group: range, members: Sequence[nn.Module], input: Any, mark: Mark
) -> Any:
    return call_checkpointed(
        _group_path(sequential, group),
        _group_modules(group, members),
        functools.partial(_run_in_turn, members),
        mark.preserve_rng_state,
        input,
    )


def _call_group(
    body: Body,
    sequential: nn.Sequential,
    group: range,
    members: Sequence[nn.Module],
    home: Any,
    input: Any,
    mark: Mark,
) -> Any:
    """Calls a group from glue: as one placed module, so that it is recomputed as one."""
    placed = mark.groups.get(group)
    if placed is None:
        container = nn.Sequential(*members)
        placed = placed_module(container, _group_path(sequential, group), *home)
        mark.groups[group] = placed
    body.engine.known.stages.add(placed.stage)
    placed.modules[0][1].training = sequential.training
    run = functools.partial(_run_group, sequential, group, members, mark=mark)
    return _call_placed(body, placed, run, input)


def _call_placed(body: Body, placed: PlacedModule, run: Callable[[Any], Any], input: Any) -> Any:
    if body.region is not None:
        body.region.enter(placed)
    num_above = body.glue.suspend()
    try:
        return Call(body, placed, run, (input,), {}).run()
    finally:
        body.glue.resume(num_above)


def _group_path(sequential: nn.Sequential, group: range) -> str:
    path = path_of(sequential)
    if len(group) == 1:
        return f"{path}.{group[0]}"
    return f"{path}[{group[0]}:{group[-1] + 1}]"


def _group_modules(group: range, members: Sequence[nn.Module]) -> tuple[tuple[str, nn.Module], ...]:
    return tuple(
        (f"{position}.{name}" if name else str(position), module)
        for position, member in zip(group, members, strict=True)
        for name, module in member.named_modules()
    )
