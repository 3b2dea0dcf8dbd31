"""The results of the bodies, which every rank gets."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import NotSupportedError
from ..messages.transport import Address, Topic
from ..trees import iter_tensors, map_tensors
from .arguments import opaque_arguments
from .body import Body
from .values import tag_of, untag


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
    check_objects(result)

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


def settle(body: Body) -> list[tuple[torch.Tensor, Address]]:
    """Makes tensors of the script that this body changed in place equal on all ranks again.

    Such a tensor outlives the body, a running sum of losses, say; then the rank that changed it
    sends it to the others.

    Returns:
        The tensors that wait for their data, and the messages that bring it.
    """
    waiting = []
    for reference, value in body.written:
        number = body.next_number("a tensor of the script")
        address = body.address(Topic.DATA, number, value.owner)
        tensor = reference()
        if value.owner == body.rank:
            data = [] if tensor is None else [body.copies.base(tensor, value).detach()]
            for peer in body.engine.transport.peers:
                body.engine.transport.send(peer, address, None, data)
        elif tensor is not None:
            waiting.append((tensor, address))
        if tensor is not None:
            untag(tensor)
    return waiting


def check_objects(result: Any) -> None:
    """Refuses objects whose tensors would be missing on the ranks that don't own them.

    Raises:
        NotSupportedError: an object that is no container holds tensors of this body.
    """
    for item in opaque_arguments(result):
        held = iter_tensors(dict(getattr(item, "__dict__", {})))
        if any(tag_of(tensor) is not None for tensor in held):
            raise NotSupportedError(
                f"the step returned a {type(item).__name__} that holds tensors; return them in a "
                "tuple, list, dict or dataclass, which every rank can be given"
            )
