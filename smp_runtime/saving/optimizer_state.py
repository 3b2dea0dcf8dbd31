"""The state of an optimizer by the names of parameters, which know no layout of the ranks.

An optimizer whose state is not where torch has it (sharded over replicas, or with float32 master
weights) offers the methods of `NamesItsState`; of any other one the state is read from where torch
has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import CheckpointMismatchError, NotSupportedError

NamedState = Mapping[str, Mapping[str, Any]]
"""By name of the parameter and kind, such as ``exp_avg``."""


class Piece(NamedTuple):
    """A part of a tensor that is sharded.

    Attributes:
        values: one-dimensional.
        start: where in the flattened tensor it begins.
    """

    values: Tensor
    start: int


@runtime_checkable
class NamesItsState(Protocol):
    """An optimizer that knows better than torch where its state is."""

    def named_local_state(self) -> NamedState:
        """Returns the state on this rank; a tensor that is sharded as a `Piece`."""

    def load_named_local_state(self, states: NamedState) -> None:
        """Takes its part of state in which every tensor is whole, or a `Piece` of this rank."""

    def state_names(self) -> Sequence[str]:
        """Returns the names of the parameters whose state this rank needs."""

    def loss_scaler_state(self) -> dict[str, Any]:
        """Returns what is known of the loss scale; equal on all ranks."""

    def load_loss_scaler_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `loss_scaler_state` returned."""


class Group(NamedTuple):
    """A parameter group: its settings, and the names of its parameters."""

    settings: dict[str, Any]
    names: list[str]


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Returns the first name of each parameter, by identity."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def local_state(optimizer: Optimizer, names: Mapping[int, str]) -> NamedState:
    """Returns the state of the parameters that this rank holds."""
    if isinstance(optimizer, NamesItsState):
        return optimizer.named_local_state()
    return {
        _name_of(parameter, names): dict(optimizer.state[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer.state
    }


def needed_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Returns the names of the parameters whose state this rank needs."""
    if isinstance(optimizer, NamesItsState):
        return list(optimizer.state_names())
    return [
        _name_of(parameter, names)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[Group]:
    """Returns the parameter groups with the names of this rank's parameters."""
    return [
        Group(
            {key: value for key, value in group.items() if key != "params"},
            [_name_of(parameter, names) for parameter in group["params"]],
        )
        for group in optimizer.param_groups
    ]


def load_groups(optimizer: Optimizer, saved: Sequence[Group], names: Mapping[int, str]) -> None:
    """Gives the groups the settings that were saved.

    Raises:
        CheckpointMismatchError: there are other groups, or a parameter is in another one.
    """
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointMismatchError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups and the checkpoint "
            f"{len(saved)}; build the optimizer as it was, or pass load_optimizer=False"
        )
    group_of = {name: index for index, group in enumerate(saved) for name in group.names}
    for index, group in enumerate(groups(optimizer, names)):
        for name in group.names:
            was = group_of.get(name)
            if was != index:
                where = "not in the optimizer" if was is None else f"in parameter group {was}"
                raise CheckpointMismatchError(
                    f"{name} is in parameter group {index} and was {where} when the checkpoint was "
                    "saved; build the optimizer as it was, or pass load_optimizer=False"
                )
    for group_now, group_saved in zip(optimizer.param_groups, saved, strict=True):
        group_now.update(group_saved.settings)


def load_local_state(optimizer: Optimizer, states: NamedState, names: Mapping[int, str]) -> None:
    """Gives the parameters of this rank the state that was saved for them.

    Args:
        optimizer: any torch optimizer.
        states: holds at least this rank's parameters that had a state.
        names: as from `parameter_names`.
    """
    if isinstance(optimizer, NamesItsState):
        optimizer.load_named_local_state(states)
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    local = {
        parameter: dict(states[name])
        for parameter in parameters
        if (name := _name_of(parameter, names)) in states
    }
    packed = [
        {**group, "params": [numbers[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    Optimizer.load_state_dict(
        optimizer,
        {"state": {numbers[id(p)]: state for p, state in local.items()}, "param_groups": packed},
    )
    for parameter, state in local.items():
        # torch converts to the type of the parameter, which would lose digits of a wider state.
        for kind, value in state.items():
            kept = optimizer.state[parameter][kind]
            if isinstance(value, Tensor) and value.dim() and kept.dtype != value.dtype:
                optimizer.state[parameter][kind] = value.to(kept.device)


def _name_of(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise NotSupportedError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the "
            "model; give it parameters of the wrapped model only"
        )
    return names[id(parameter)]
