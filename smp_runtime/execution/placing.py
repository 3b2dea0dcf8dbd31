"""Turns a partition into facts on this rank: who owns what, what stays, what goes to meta."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from .. import device
from ..creation.pending_values import fill, forget
from ..errors import PartitionError
from ..planning.partitioning import Partition
from .drawing import seed_draws
from .ownership import Ownership, keeps_nothing, placed_module
from .placed import place
from .reports import Reports


class LocalPart:
    """The part of a partitioned model that lives on this rank.

    Args:
        model: the user's model, whole on every rank.
        partition: which rank holds what.
        rank: this rank.
        ownership: is told who owns what.
        reports: is told what modules keep in attributes already.

    Attributes:
        shared: parameters that several ranks hold a copy of: name, parameter, ranks.
        parameters: all of the model, in its order.
    """

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        rank: int,
        ownership: Ownership,
        reports: Reports,
    ) -> None:
        self._model = model
        self._ranks: dict[int, set[int]] = {}
        self._ranks_by_name: dict[str, set[int]] = {}
        self._ownership = ownership
        num_ranks = ownership.num_partitions
        self._rank = rank
        for path, owner in partition.assignment.items():
            module = model.get_submodule(path)
            for tensor in (*module.parameters(), *module.buffers()):
                self._hold(tensor, owner)
            placed = placed_module(module, path, owner, partition.stage_of.get(path, 0))
            ownership.placed[path] = placed
            place(module, placed)
            reports.look_at(placed)
        inside = {
            id(module) for placed in ownership.placed.values() for _, module in placed.modules
        }
        reports.watch_glue(
            tuple(
                module
                for module in model.modules()
                if id(module) not in inside and not keeps_nothing(module)
            )
        )
        for name, owner in partition.parameters.items():
            self._hold(_tensor_at(model, name), owner)
        named = dict(model.named_parameters(remove_duplicate=True))
        self.parameters = tuple(named.values())
        self.shared = [
            (name, parameter, tuple(sorted(self._ranks[id(parameter)])))
            for name, parameter in named.items()
            if len(self._ranks.get(id(parameter), ())) > 1
        ]
        for name, tensor in named_state(model):
            # By name as well: a module may put another tensor into a buffer.
            self._ranks_by_name[name] = self._ranks.get(id(tensor), set(range(num_ranks)))
        self._check_memory(named)
        self._let_go()

    def holders(self, name: str) -> set[int]:
        """Returns the ranks that hold the parameter or buffer of a name."""
        return self._ranks_by_name.get(name, {0})

    def is_local(self, tensor: torch.Tensor) -> bool:
        """Says whether this rank holds a parameter or buffer."""
        return self._rank in self._ranks.get(id(tensor), {self._rank})

    def is_partitioned(self, tensor: torch.Tensor) -> bool:
        """Says whether a tensor is a parameter or buffer that belongs to some ranks only."""
        return id(tensor) in self._ranks

    def counts_here(self, tensor: torch.Tensor) -> bool:
        """Says whether this rank is the one that counts a parameter in sums over all ranks."""
        return min(self._ranks.get(id(tensor), {0})) == self._rank

    def owner_of(self, path: str) -> int | None:
        """Returns the rank that runs a module; None for one that is glue, which every rank runs."""
        for placed in self._ownership.placed.values():
            if not placed.path or path == placed.path or path.startswith(f"{placed.path}."):
                return placed.owner
        return None

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules placed on this rank and their submodules, with their names."""
        for path, placed in self._ownership.placed.items():
            if placed.owner == self._rank:
                for name, module in placed.modules:
                    yield ".".join(part for part in (path, name) if part), module

    def _hold(self, tensor: torch.Tensor, owner: int) -> None:
        self._ownership.own(tensor, owner)
        self._ranks.setdefault(id(tensor), set()).add(owner)

    def _check_memory(self, named: Mapping[str, nn.Parameter]) -> None:
        """Refuses parameters that share memory and are to live apart: they would drift apart."""
        first_in: dict[int, str] = {}
        for name, parameter in named.items():
            other = first_in.setdefault(_address(parameter) or -id(parameter), name)
            if self._ranks.get(id(parameter)) != self._ranks.get(id(named[other])):
                raise PartitionError(
                    f"{other} and {name} are two parameters in one memory, on different pipeline "
                    "ranks: make them one parameter (b.weight = a.weight, not b.weight.data = "
                    "a.weight.data), or place their modules on one rank"
                )

    def _let_go(self) -> None:
        """Moves what is local to the device, and frees the data of what is not."""
        for tensor, _ in self._ownership.tensors():
            if self.is_local(tensor):
                to_device(tensor)
            elif not tensor.is_meta:
                _empty(tensor)
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if id(tensor) not in self._ranks:
                to_device(tensor)
        forget()


def _address(tensor: torch.Tensor) -> int:
    """Returns where the memory of a tensor begins, 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # of some subclasses
        return 0


def to_device(tensor: torch.Tensor) -> None:
    """Moves a parameter or buffer to this rank's device and keeps the object.

    One on meta gets the values that wait for it (`pending_values`).
    """
    if tensor.is_meta:
        fill(tensor)
    target = device.current_device()
    if tensor.device.type != target.type:
        with torch.no_grad():
            tensor.data = tensor.data.to(target)


def seed_drawing_modules(model: nn.Module, paths: frozenset[str]) -> None:
    """Gives every module at `paths` random streams of its own."""
    modules = dict(model.named_modules())
    for path in sorted(paths):
        seed_draws(modules[path], path)


def _empty(tensor: torch.Tensor) -> None:
    """Frees a tensor's data and keeps the object, which optimizers may hold."""
    placeholder: torch.Tensor = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
    )
    if isinstance(tensor, nn.Parameter):
        placeholder = nn.Parameter(placeholder, requires_grad=tensor.requires_grad)
    # Not `torch.utils.swap_tensors`: it refuses where weak references exist, as nn.LSTM keeps of
    # its weights. They point to the object, and that stays.
    torch._C._swap_tensor_impl(tensor, placeholder)


def named_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _tensor_at(model: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    found: torch.Tensor = getattr(module, leaf)
    return found
