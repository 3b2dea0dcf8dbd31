"""Which rank owns which parameter, buffer and module, once the model is partitioned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import device
from ..errors import NotSupportedError, UsageError
from ..tensors import TensorMeta, meta_of


class PlacedModule(NamedTuple):
    """A module whose whole subtree runs on one rank.

    Attributes:
        path: its name in the user's model, as in `named_modules`.
        origin: what its results are called in messages.
        owner: the pipeline rank that runs it.
        stage: the stage that it belongs to.
        modules: it and its submodules with their names.
        watched: those of them that may keep tensors in attributes.
        hook_tables: the tables of their forward hooks.
        parameters: their parameters.
    """

    path: str
    origin: str
    owner: int
    stage: int
    modules: tuple[tuple[str, nn.Module], ...]
    watched: tuple[tuple[str, nn.Module], ...]
    hook_tables: tuple[dict[int, Any], ...]
    parameters: tuple[nn.Parameter, ...]

    def kinds_of_parameters(self) -> tuple[tuple[torch.dtype, bool], ...]:
        """Returns types and autograd flags of the parameters: results depend on them."""
        return tuple([(parameter.dtype, parameter.requires_grad) for parameter in self.parameters])

    @property
    def has_hooks(self) -> bool:
        """Says whether a forward hook would fire in a call."""
        return any(self.hook_tables)


def placed_module(module: nn.Module, path: str, owner: int, stage: int) -> PlacedModule:
    """Collects what is to be known of a placed module."""
    modules = tuple(module.named_modules())
    watched = tuple(item for item in modules if not keeps_nothing(item[1]))
    hook_tables = tuple(
        table for _, part in modules for table in (part._forward_hooks, part._forward_pre_hooks)
    )
    return PlacedModule(
        path=path,
        origin=f"the output of {path or 'the model'}",
        owner=owner,
        stage=stage,
        modules=modules,
        watched=watched,
        hook_tables=hook_tables,
        parameters=tuple(module.parameters()),
    )


def keeps_nothing(module: nn.Module) -> bool:
    """Says whether a module never stores a tensor in an attribute: torch's own don't."""
    return type(module).__module__.startswith("torch.nn.")


_ADVICE = (
    "the module that changes it has children on several ranks, where microbatches take turns: "
    "place it on one rank (smp.set_partition), or use one microbatch"
)


def _state_of(module: nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


class Ownership:
    """The owners of a partitioned model's parameters, buffers and modules.

    Args:
        num_partitions: size of the pipeline group.
    """

    def __init__(self, num_partitions: int) -> None:
        self.num_partitions = num_partitions
        self.placed: dict[str, PlacedModule] = {}
        # By identity, and with the tensor, so that an identity can't be given to another object.
        self._owners: dict[int, tuple[torch.Tensor, int]] = {}
        self._unplaced: dict[int, torch.Tensor] = {}
        # The last step and microbatch in which glue changed or used a tensor, or a module ran here.
        self._writers: dict[int, tuple[int, int]] = {}
        self._readers: dict[int, tuple[int, int]] = {}
        self._callers: dict[str, tuple[int, int]] = {}
        self._step_of_last_write = -1

    def own(self, tensor: torch.Tensor, owner: int) -> None:
        """Says that a parameter or buffer belongs to a rank; the first word counts."""
        self._owners.setdefault(id(tensor), (tensor, owner))

    def expect(self, model: nn.Module) -> None:
        """Says which parameters will get their owners in the partitioning."""
        self._unplaced = {id(parameter): parameter for parameter in model.parameters()}

    def check_placed(self, tensor: torch.Tensor) -> None:
        """Makes sure that a tensor is no parameter that has no owner yet.

        Raises:
            UsageError: it is one.
        """
        if self._unplaced and not self._owners and id(tensor) in self._unplaced:
            raise UsageError(
                "a parameter of the model was used before the first call of the model; the model "
                "is partitioned in that call: call model(...) first in the step"
            )

    def note_read(self, tensor: torch.Tensor, step: int, microbatch: int) -> None:
        """Notes that glue of a microbatch uses a parameter or buffer."""
        now = (step, microbatch)
        self._readers[id(tensor)] = max(now, self._readers.get(id(tensor), now))

    def note_call(self, placed: PlacedModule, step: int, microbatch: int) -> None:
        """Notes that a placed module runs here, with its parameters and buffers as they are now.

        Raises:
            NotSupportedError: glue of a later microbatch changed one of them already.
        """
        self._callers[placed.path] = (step, microbatch)
        if self._step_of_last_write == step:
            for _, module in placed.modules:
                for tensor in _state_of(module):
                    self.check_written(tensor, step, microbatch)

    def note_write(self, tensor: torch.Tensor, step: int, microbatch: int) -> None:
        """Notes that glue changed a parameter or buffer in place.

        Raises:
            NotSupportedError: a later microbatch has used what was there before.
        """
        self._writers[id(tensor)] = (step, microbatch)
        self._step_of_last_write = step
        users = [self._readers.get(id(tensor), (-1, -1))]
        for placed in self.placed.values():
            if any(tensor is held for _, part in placed.modules for held in _state_of(part)):
                users.append(self._callers.get(placed.path, (-1, -1)))
        for last_step, user in users:
            if last_step == step and user > microbatch:
                raise NotSupportedError(
                    f"microbatch {microbatch} changes a parameter or buffer in place that "
                    f"microbatch {user} has used already; {_ADVICE}"
                )

    def check_written(self, tensor: torch.Tensor, step: int, microbatch: int) -> None:
        """Makes sure that no later microbatch changed a parameter or buffer already.

        Raises:
            NotSupportedError: one did.
        """
        last_step, writer = self._writers.get(id(tensor), (-1, -1))
        if last_step == step and writer > microbatch:
            raise NotSupportedError(
                f"a parameter or buffer was changed in place by microbatch {writer} before "
                f"microbatch {microbatch} had ended; {_ADVICE}"
            )

    def owner_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the rank of a parameter or buffer, None for any other tensor."""
        found = self._owners.get(id(tensor))
        return None if found is None else found[1]

    def meta_of(self, tensor: torch.Tensor) -> TensorMeta:
        """Returns what a parameter or buffer looks like on its owner."""
        return meta_of(tensor)._replace(device=torch.device(device.current_device().type))

    def tensors(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yields each parameter and buffer with its owner."""
        yield from self._owners.values()
