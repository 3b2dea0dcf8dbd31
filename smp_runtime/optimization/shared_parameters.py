"""Parameters that several ranks hold: their gradients are summed, so that copies stay equal.

A step may add to gradients of earlier steps. Only what this step added may be summed over the
holders, or the older part would count twice; so the older part is set aside during the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..execution.body import Body
from ..execution.engine import Engine
from ..messages.transport import Address, Topic

Shared = tuple[str, nn.Parameter, tuple[int, ...]]


class SharedGradients:
    """The gradients of this rank's shared parameters in one step.

    Args:
        engine: reaches the other holders.
        shared: the shared parameters of the model.
        set_aside: whether there may be gradients of earlier steps; False after the backward.
    """

    def __init__(self, engine: Engine, shared: Sequence[Shared], *, set_aside: bool = True) -> None:
        self._engine = engine
        self._rank = engine.transport.rank
        self._shared = [
            (number, parameter, ranks)
            for number, (_, parameter, ranks) in enumerate(shared)
            if self._rank in ranks and parameter.requires_grad
        ]
        self._earlier: dict[int, torch.Tensor | None] = {}
        for number, parameter, _ in self._shared:
            self._earlier[number] = parameter.grad if set_aside else None
            if set_aside:
                parameter.grad = None

    def add_up(self) -> None:
        """Sums what the step added over the holders, in the order of their ranks."""
        for number, parameter, ranks in self._shared:
            mine = [] if parameter.grad is None else [parameter.grad]
            for rank in ranks:
                if rank != self._rank:
                    self._engine.transport.send(rank, self._address(number, self._rank), None, mine)
        for number, parameter, ranks in self._shared:
            total: torch.Tensor | None = None
            for rank in ranks:
                part = parameter.grad
                if rank != self._rank:
                    tensors = self._engine.fetch(self._address(number, rank)).tensors
                    part = tensors[0].to(parameter.device) if tensors else None
                if part is not None:
                    total = part if total is None else total + part
            parameter.grad = total
        self.put_back()

    def put_back(self) -> None:
        """Adds the gradients of earlier steps again."""
        for number, parameter, _ in self._shared:
            earlier = self._earlier[number]
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad

    def _address(self, number: int, source: int) -> Address:
        return Address(Topic.SHARED, self._engine.step, -1, number, source)


def make_equal(shared: Sequence[Shared], engine: Engine, body: Body) -> None:
    """Gives every holder of a shared parameter the values of the first one.

    Called in a body, while the model is partitioned.
    """
    rank = engine.transport.rank
    for number, (_, parameter, ranks) in enumerate(shared):
        address = body.address(Topic.SHARED, -1 - number, ranks[0])
        if rank == ranks[0]:
            for holder in ranks[1:]:
                engine.transport.send(holder, address, None, [parameter.detach()])
        elif rank in ranks:
            engine.wait(body, [address])
            with torch.no_grad():
                parameter.copy_(engine.receive(address).tensors[0])
