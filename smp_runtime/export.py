"""The results of the bodies, which every rank gets."""

from __future__ import annotations

from typing import Any

import torch

from .body import Body
from .transport import Address, Topic
from .trees import map_tensors


class Exported:
    """The place of a tensor that another rank will send."""

    __slots__ = ("address", "device")

    def __init__(self, address: Address, device: torch.device) -> None:
        self.address = address
        self.device = device


def export(body: Body, result: Any, detach: bool) -> tuple[Any, list[Address]]:
    """Sends the owned tensors of the body's result to all ranks.

    Returns:
        The result with `Exported` in place of tensors that are still to come, and the
        messages that bring them.
    """
    pending: list[Address] = []

    def ship(tensor: torch.Tensor) -> Any:
        value = body.value_of(tensor)
        if value is None:
            return tensor.detach() if detach else tensor
        number = body.next_number("a result")
        if value.owner != body.rank:
            pending.append(body.address(Topic.DATA, number, value.owner))
            return Exported(pending[-1], value.meta.device)
        real = body.copies.base(tensor, value)
        address = body.address(Topic.DATA, number, body.rank)
        for peer in body.engine.transport.peers:
            body.engine.transport.send(peer, address, None, [real.detach()])
        # A fresh object: the result outlives the body and must not carry its tag.
        return real.detach() if detach or not real.requires_grad else real.view_as(real)

    return map_tensors(ship, result), pending
