"""What moves between ranks in one microbatch, and what is used of it where.

An operation runs on one rank. Operands that it lacks are sent there, once per tensor and rank; a
tensor that comes from a shallower segment of the backward pass than the operation belongs to is
cut off from it (see `segments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import device
from ..errors import PathMismatchError
from ..messages.heads import Edge
from ..messages.transport import Address, Message, Topic
from .values import Fresh, Operand, Value

if TYPE_CHECKING:
    from .body import Body


class Copies:
    """The transfers of one body, and the copies that they left on this rank.

    Attributes:
        expected: bytes of the tensors that are to come.
    """

    def __init__(self, body: Body) -> None:
        self._body = body
        self.expected: dict[Address, int] = {}
        self._num_cuts = 0

    def depth_at(self, operands: Sequence[Operand], target: int) -> int:
        """Returns the segment in which an operation on `target` belongs."""
        depth = 0
        if torch.is_grad_enabled():
            for _, value in operands:
                if value is not None and value.meta.requires_grad:
                    depth = max(depth, value.depth + (value.owner != target))
        return depth

    def move(self, operands: Sequence[Operand], target: int) -> list[Address]:
        """Moves what `target` lacks; every rank calls this and does its part.

        Returns:
            On the target, the messages to wait for. Elsewhere nothing.
        """
        pending = []
        for tensor, value in operands:
            if value is None or value.owner == target:
                continue
            carries = torch.is_grad_enabled() and value.meta.requires_grad
            fresh = self._now(value)
            if fresh in (value.copies.get((target, carries)), value.copies.get((target, True))):
                continue
            transfer = self._body.next_number(value.origin)
            value.copies[target, carries] = fresh
            if self._body.rank == value.owner:
                self._send(tensor, value, transfer, target, carries)
            elif self._body.rank == target:
                address = self._body.address(Topic.DATA, transfer, value.owner)
                pending.append(address)
                value.awaited[carries] = address
                self.expected[address] = value.meta.num_bytes
        return pending

    def _send(
        self, tensor: torch.Tensor, value: Value, transfer: int, target: int, carries: bool
    ) -> None:
        real = self.base(tensor, value)
        if carries:
            self._body.segments.add_root(value.depth, real, transfer, target)
        address = self._body.address(Topic.DATA, transfer, self._body.rank)
        self._body.engine.transport.send(target, address, _edge_of(value), [real.detach()])

    def base(self, tensor: torch.Tensor, value: Value) -> torch.Tensor:
        """Returns the real tensor of a value that this rank owns."""
        return tensor if value.base is None else value.base

    def local(self, tensor: torch.Tensor, value: Value | None, depth: int) -> torch.Tensor:
        """Returns the real tensor to compute with at `depth` on this rank, after `move`."""
        if value is None:
            return tensor
        carries = torch.is_grad_enabled() and value.meta.requires_grad
        if value.owner == self._body.rank:
            real, real_depth = self.base(tensor, value), value.depth
        else:
            real, real_depth = self._copy(value, carries), value.depth + 1
        if not carries or real_depth == depth:
            return real
        key = (depth, True)
        kept = value.aliases.get(key)
        if kept is not None and kept[0] == self._now(value):
            return kept[1]
        self._num_cuts -= 1  # cuts are this rank's own affair: numbers of their own, below zero
        self._body.segments.add_root(real_depth, real, self._num_cuts, self._body.rank)
        # `data`, not `detach`: beginning a graph counts as a write, which must not be counted
        # against what autograd saved of `real`. Real writes are, in `note_change`.
        alias = self._body.segments.add_leaf(depth, real.data, self._num_cuts, self._body.rank)
        value.aliases[key] = (self._now(value), alias)
        return alias

    def _now(self, value: Value) -> Fresh:
        return Fresh(value.cell.num_writes, self._body.num_backwards)

    def _copy(self, value: Value, carries: bool) -> torch.Tensor:
        for wanted in (carries, True):
            kept = value.aliases.get((value.depth + 1, wanted))
            if kept is not None and kept[0] == self._now(value):
                return kept[1]
        address = value.awaited.pop(carries)
        del self.expected[address]
        message = self._body.engine.receive(address)
        self._check_edge(value, message, address)
        data = message.tensors[0].to(device.local(value.meta.device))
        if carries:
            data = self._body.segments.add_leaf(value.depth + 1, data, address.number, value.owner)
        value.aliases[value.depth + 1, carries] = (self._now(value), data)
        return data

    def _check_edge(self, value: Value, message: Message, address: Address) -> None:
        expected = _edge_of(value)
        if message.content != expected:
            name = self._body.engine.transport.name
            raise PathMismatchError(
                f"microbatch {address.microbatch}, transfer {address.number}: rank "
                f"{name(address.source)} sent {_describe(message.content)}, but rank "
                f"{name(self._body.rank)} expects {_describe(expected)}. Every rank must take the "
                "same path through the step; look for a branch that depends on the rank, on time, "
                "or on random numbers drawn outside the step"
            )


def _edge_of(value: Value) -> Edge:
    return Edge(value.origin, value.meta.shape, value.meta.dtype)


def _describe(content: Any) -> str:
    if not isinstance(content, Edge):
        return repr(content)
    return f"{content.origin} ({str(content.dtype).removeprefix('torch.')}{list(content.shape)})"
