"""What an optimizer steps on in place of parameters: float32 masters, slices, or both.

With 16-bit parameters a step may be smaller than their last digit, so it is made on a float32
master, and the parameter is its rounded copy. With sharded optimizer state each replica steps on a
slice of every parameter, and the replicas gather each other's slices. A slice is a run of the
flattened parameter, equally long on every replica but for the last, so each holds 1/replicas of
the state to the element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointMismatchError
from ..replication.replicas import Replicas
from ..saving.optimizer_state import Piece
from .awaited_parameters import await_all
from .parameter_gather import ParameterGather

MASTER = "master"


class Substitute:
    """What stands for one parameter in the optimizer.

    Args:
        parameter: it.
        start: where in the flattened parameter the slice begins.
        stop: where it ends.

    Attributes:
        tensor: what the optimizer steps on: shares the parameter's memory where it can.
        is_master: it is float32 and the parameter is not.
    """

    def __init__(self, parameter: nn.Parameter, start: int, stop: int) -> None:
        self.parameter = parameter
        self.start = start
        self.stop = stop
        self.is_slice = stop - start < parameter.numel()
        self.is_master = parameter.dtype in (torch.float16, torch.bfloat16)
        self.tensor = self._part(parameter.detach())
        if self.is_master:
            self.tensor = self.tensor.float()
        self._version = parameter._version

    def take_gradient(self) -> None:
        """Gives the substitute its part of the parameter's gradient."""
        gradient = self.parameter.grad
        if gradient is not None:
            self.tensor.grad = self._part(gradient.detach()).to(self.tensor.dtype)

    def follow(self) -> None:
        """Takes over what others wrote to the parameter since the last step."""
        if self.parameter._version != self._version or not self._is_attached():
            values = self._part(self.parameter.detach())
            if self.is_master:
                self.tensor.copy_(values)
            else:
                self.tensor.data = values

    def write_back(self) -> None:
        """Gives the parameter what the step made of the substitute."""
        self.tensor.grad = None
        if not self.is_slice and self.is_master:
            self.parameter.detach().copy_(self.tensor)

    def note(self) -> None:
        """Remembers the parameter as it is."""
        self._version = self.parameter._version

    def piece(self, value: Any) -> Any:
        """Returns a value of the optimizer's state as what it is of the parameter's."""
        is_part = isinstance(value, torch.Tensor) and value.shape == self.tensor.shape
        return Piece(value, self.start) if self.is_slice and is_part else value

    def cut(self, value: Any) -> Any:
        """Returns this substitute's part of a value of the parameter's state.

        Raises:
            CheckpointMismatchError: the value is another part.
        """
        if isinstance(value, Piece):
            given = (value.start, value.start + len(value.values))
            if given != (self.start, self.stop):
                raise CheckpointMismatchError(
                    f"elements {given[0]} to {given[1]} of a parameter's state were given to the "
                    f"rank that has {self.start} to {self.stop}; the parameter had another shape"
                )
            return value.values.to(self.tensor.device, copy=True)
        if not isinstance(value, torch.Tensor) or value.shape != self.parameter.shape:
            return value
        part = self._part(value).to(self.tensor.device, copy=True)
        # Gradients' averages of a 16-bit parameter are kept as wide as its master.
        return part.to(self.tensor.dtype) if part.is_floating_point() else part

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.reshape(-1)[self.start : self.stop] if self.is_slice else whole

    def _is_attached(self) -> bool:
        """Says whether a substitute that shares the parameter's memory still does."""
        if self.is_master or not self.parameter.is_contiguous():
            return self.is_master
        offset = self.start * self.parameter.element_size()
        return self.tensor.data_ptr() == self.parameter.data_ptr() + offset


class Substitutes:
    """The substitutes for the parameters of one optimizer.

    Args:
        optimizer: it.
        replicas: over which its state is sharded; None if it is not.
        is_gather_deferred: whether parameters are gathered by their first use, or by `write_back`.
    """

    def __init__(
        self, optimizer: Optimizer, replicas: Replicas | None, is_gather_deferred: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._replicas = replicas if replicas is not None and replicas.size > 1 else None
        self._gather: ParameterGather | None = None
        if self._replicas is not None:
            self._gather = ParameterGather(self._replicas, self._new_slice, is_gather_deferred)
        self._made: dict[nn.Parameter, Substitute] = {}

    def slice_of(self, parameter: torch.Tensor, replica: int) -> tuple[int, int]:
        """Returns where a replica's part of the flattened parameter begins and ends."""
        size = parameter.numel()
        if self._replicas is None:
            return 0, size
        length = -(-size // self._replicas.size)
        return min(replica * length, size), min((replica + 1) * length, size)

    def held(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of which this rank has a part to step on."""
        rank = self._replicas.rank if self._replicas is not None else 0
        for parameter in _parameters(self._optimizer):
            start, stop = self.slice_of(parameter, rank)
            if start < stop or not parameter.numel():
                yield parameter

    def of(self, parameter: nn.Parameter) -> Substitute:
        """Returns the substitute of a parameter; made now if there is none yet."""
        made = self._made.get(parameter)
        if made is None:
            rank = self._replicas.rank if self._replicas is not None else 0
            made = self._made[parameter] = Substitute(parameter, *self.slice_of(parameter, rank))
        self._absorb(made)
        return made

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the substitutes and their gradients in place of the parameters for a step."""
        await_all()
        given = [group["params"] for group in self._optimizer.param_groups]
        held = set(self.held())
        with torch.no_grad():
            for group in self._optimizer.param_groups:
                made = [self.of(parameter) for parameter in group["params"] if parameter in held]
                for substitute in made:
                    substitute.follow()
                    substitute.take_gradient()
                group["params"] = [substitute.tensor for substitute in made]
        try:
            yield
        finally:
            for group, parameters in zip(self._optimizer.param_groups, given, strict=True):
                group["params"] = parameters

    @torch.no_grad()
    def write_back(self) -> None:
        """Gives all parameters their new values, those of other replicas' slices included."""
        substitutes = [self.of(parameter) for parameter in self.held()]
        for substitute in substitutes:
            substitute.write_back()
        if self._gather is not None:
            self._gather.run(list(_parameters(self._optimizer)))
        for substitute in substitutes:
            substitute.note()

    def _new_slice(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns what a step made of this replica's slice, flat; None if it has none."""
        assert self._replicas is not None
        start, stop = self.slice_of(parameter, self._replicas.rank)
        return self.of(parameter).tensor.reshape(-1) if start < stop else None

    # -- state -------------------------------------------------------------------------------

    def state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Returns the optimizer's state of this rank's part of a parameter."""
        substitute = self.of(parameter)
        state = {
            kind: substitute.piece(value)
            for kind, value in self._optimizer.state.get(substitute.tensor, {}).items()
        }
        if state and substitute.is_master:
            state[MASTER] = substitute.piece(substitute.tensor)
        return state

    def load(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Takes this rank's part of the state of a parameter, given whole or as a `Piece`."""
        self._optimizer.state[parameter] = dict(state)
        self.of(parameter)

    @torch.no_grad()
    def _absorb(self, substitute: Substitute) -> None:
        """Takes over state that was given to the parameter itself."""
        if substitute.parameter is substitute.tensor:
            return
        whole = self._optimizer.state.pop(substitute.parameter, None)
        if not whole:
            return
        master = whole.pop(MASTER, None)
        if master is not None and substitute.is_master:
            substitute.tensor.copy_(substitute.cut(master))
            substitute.note()
        self._optimizer.state[substitute.tensor] = {
            kind: substitute.cut(value) for kind, value in whole.items()
        }


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
