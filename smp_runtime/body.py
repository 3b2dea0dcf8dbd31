"""One microbatch on one rank: its values, its transfers, its backward pass.

The step function's body runs once per microbatch on every rank. All ranks make the same sequence
of numbered things (values, transfers, calls, questions), because they run the same program on
the same metas; so a number and a microbatch address a message. What this rank owns it computes
and sends; what it does not own it represents by stand-ins; where data must come first, the body
is suspended and the engine runs another one.
"""

from __future__ import annotations

import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from . import device
from .errors import NotSupportedError, PathMismatchError, UsageError
from .rng import RandomStreams
from .segments import Segments, run_backward
from .tensors import TensorMeta, meta_of
from .transport import Address, Message, Topic, Transport
from .trees import iter_tensors, map_tensors
from .values import Cell, Fresh, StandIn, Value, tag, tag_of

if TYPE_CHECKING:
    from .analysis import Analyser
    from .glue import GlueMode
    from .ownership import Ownership
    from .reports import Reports


class Scheduler(Protocol):
    """What a body needs of the engine."""

    transport: Transport
    ownership: Ownership
    analyser: Analyser
    reports: Reports
    step: int

    def wait(self, body: Body, addresses: Sequence[Address]) -> None:
        """Suspends the body until all messages are there."""

    def enter_stage(self, body: Body, stage: int, addresses: Sequence[Address]) -> None:
        """Suspends the body until it may run modules of a stage and all messages are there."""

    def enter_backward(self, body: Body, depth: int, addresses: Sequence[Address]) -> None:
        """Suspends the body until it may run a segment's backward and all messages are there."""

    def receive(self, address: Address) -> Message:
        """Takes a message that is there."""


class Operand(NamedTuple):
    """A tensor in the arguments of a call, and its value if it is owned."""

    tensor: torch.Tensor
    value: Value | None


class Body:
    """The state of one microbatch of one step on this rank.

    Args:
        engine: suspends and resumes this body.
        microbatch: position among the step's microbatches.
        loss_scale: what a backward pass starts from instead of 1.
        streams: the random streams of this microbatch.
    """

    def __init__(
        self, engine: Scheduler, microbatch: int, loss_scale: float, streams: RandomStreams
    ) -> None:
        self.engine = engine
        self.rank = engine.transport.rank
        self.size = engine.transport.size
        self.step = engine.step
        self.microbatch = microbatch
        self.streams = streams
        self.glue: GlueMode
        self.digest = 0
        self.last_origin = "the beginning of the body"
        self.backward_depth = sys.maxsize
        self.num_backwards = 0
        self.compute_seconds = 0.0
        self._loss_scale = loss_scale
        self._number = 0
        self._num_cuts = 0
        self._segments = Segments()
        self._cut_gradients: dict[int, torch.Tensor | None] = {}
        self._stages: dict[int, int] = {}
        self._static: dict[int, Value] = {}
        # By identity, and with the storage, so that an identity can't be given to another one.
        self._owned_memory: dict[int, tuple[Any, Cell]] = {}

    @property
    def number(self) -> int:
        """How far the body has come: the last number it gave."""
        return self._number

    # -- numbers and addresses ---------------------------------------------------------------

    def next_number(self, origin: str) -> int:
        """Numbers a value, transfer, call or question; equal on all ranks."""
        self._number += 1
        self.digest = zlib.crc32(origin.encode(), self.digest)
        self.last_origin = origin
        return self._number

    def address(self, topic: Topic, number: int, source: int) -> Address:
        """Returns the address of one of this body's messages."""
        return Address(topic, self.engine.step, self.microbatch, number, source)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Counts the time inside as computation, for the step's report."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.compute_seconds += time.perf_counter() - begun

    # -- values ------------------------------------------------------------------------------

    def operands(self, arguments: Any) -> list[Operand]:
        """Finds the tensors in arguments and whose they are."""
        return [Operand(tensor, self.value_of(tensor)) for tensor in iter_tensors(arguments)]

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """Returns the value that a tensor is in this body, None if it is replicated."""
        value = tag_of(tensor)
        if value is not None:
            if value.scope is self:
                return value
            if getattr(value.scope, "step", None) == self.step:
                raise UsageError(
                    f"microbatch {self.microbatch} uses {value.origin} of another microbatch of "
                    "the same step; what one microbatch leaves for the next must be detached and "
                    "live inside one module"
                )
            # Kept by the user from another body: the same owner, a new number.
            kept = self._adopt(tensor, value.owner, value.meta, "a tensor of an earlier body")
            kept.base = value.base
            return kept
        owner = self.engine.ownership.owner_of(tensor)
        if owner is not None:
            known = self._static.get(id(tensor))
            if known is None:
                meta = self.engine.ownership.meta_of(tensor)
                known = self.new_value(owner, meta, 0, "a parameter")
                self._static[id(tensor)] = known
            return known
        if self._owned_memory and type(tensor) is torch.Tensor:
            owned = self._owned_memory.get(tensor.untyped_storage()._cdata)
            if owned is not None:
                cell = owned[1]
                value = self.new_value(cell.owner, meta_of(tensor), 0, "a view", cell)
                tag(tensor, value)
                return value
        if tensor.requires_grad and tensor.is_leaf:
            # Every rank made this leaf; its gradient must come together on one of them.
            return self._adopt(tensor, 0, meta_of(tensor), "a leaf made in the body")
        return None

    def new_value(
        self, owner: int, meta: TensorMeta, depth: int, origin: str, cell: Cell | None = None
    ) -> Value:
        """Makes the next value."""
        number = self.next_number(origin)
        return Value(self, number, meta, depth, cell or Cell(owner), origin, self.num_backwards)

    def stand_in(self, value: Value) -> StandIn:
        """Makes what this rank holds for a value of another rank."""
        made = StandIn(value.meta)
        tag(made, value)
        return made

    def _adopt(self, tensor: torch.Tensor, owner: int, meta: TensorMeta, origin: str) -> Value:
        value = self.new_value(owner, meta, 0, origin)
        tag(tensor, value)
        return value

    # -- transfers ---------------------------------------------------------------------------

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
            transfer = self.next_number(value.origin)
            value.copies[target, carries] = fresh
            if self.rank == value.owner:
                self._send(tensor, value, transfer, target, carries)
            elif self.rank == target:
                address = self.address(Topic.DATA, transfer, value.owner)
                pending.append(address)
                value.awaited[carries] = address
        return pending

    def _send(
        self, tensor: torch.Tensor, value: Value, transfer: int, target: int, carries: bool
    ) -> None:
        real = self.base(tensor, value)
        if carries:
            self._segments.add_root(value.depth, real, transfer, target)
        address = self.address(Topic.DATA, transfer, self.rank)
        content = (value.origin, value.meta.shape, value.meta.dtype)
        self.engine.transport.send(target, address, content, [real.detach()])

    def base(self, tensor: torch.Tensor, value: Value) -> torch.Tensor:
        """Returns the real tensor of a value that this rank owns."""
        return tensor if value.base is None else value.base

    def local(self, tensor: torch.Tensor, value: Value | None, depth: int) -> torch.Tensor:
        """Returns the real tensor to compute with at `depth` on this rank, after `move`."""
        if value is None:
            return tensor
        carries = torch.is_grad_enabled() and value.meta.requires_grad
        if value.owner == self.rank:
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
        self._segments.add_root(real_depth, real, self._num_cuts, self.rank)
        # `data`, not `detach`: beginning a graph counts as a write, which must not be counted
        # against what autograd saved of `real`. Real writes are, in `note_change`.
        alias = self._segments.add_leaf(depth, real.data, self._num_cuts, self.rank)
        value.aliases[key] = (self._now(value), alias)
        return alias

    def _now(self, value: Value) -> Fresh:
        return Fresh(value.cell.num_writes, self.num_backwards)

    def _copy(self, value: Value, carries: bool) -> torch.Tensor:
        for wanted in (carries, True):
            kept = value.aliases.get((value.depth + 1, wanted))
            if kept is not None and kept[0] == self._now(value):
                return kept[1]
        address = value.awaited.pop(carries)
        message = self.engine.receive(address)
        self._check_edge(value, message, address)
        data = message.tensors[0].to(device.local(value.meta.device))
        if carries:
            data = self._segments.add_leaf(value.depth + 1, data, address.number, value.owner)
        value.aliases[value.depth + 1, carries] = (self._now(value), data)
        return data

    def _check_edge(self, value: Value, message: Message, address: Address) -> None:
        expected = (value.origin, value.meta.shape, value.meta.dtype)
        if message.content != expected:
            raise PathMismatchError(
                f"microbatch {self.microbatch}, transfer {address.number}: rank {address.source} "
                f"sent {_edge(message.content)}, but rank {self.rank} expects {_edge(expected)}. "
                "Every rank must take the same path through the step; look for a branch that "
                "depends on the rank, on time, or on random numbers drawn outside the step"
            )

    def note_stage(self, depth: int, stage: int) -> None:
        """Notes that a module of `stage` ran in the segment at `depth`."""
        self._stages[depth] = max(stage, self._stages.get(depth, stage))

    def stage_at(self, depth: int) -> int | None:
        """Returns the stage whose backward the segment at `depth` is, None if it has none."""
        return self._stages.get(depth)

    # -- results -----------------------------------------------------------------------------

    def note_change(
        self, operand: Operand, meta: TensorMeta, target: int, used: torch.Tensor | None, depth: int
    ) -> None:
        """Notes that an operation on `target` changed an operand in place.

        Args:
            operand: what was changed.
            meta: what it looks like now.
            target: the rank that ran the operation.
            used: on the target, the tensor that was really changed.
            depth: the segment of the operation.
        """
        tensor, value = operand
        if value is None:
            cell = Cell(target)
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                self._owned_memory[storage._cdata] = (storage, cell)
            value = self.new_value(target, meta, depth, "a tensor changed in place", cell)
            tag(tensor, value)
            return
        if value.cell.is_partial_view:
            raise NotSupportedError(
                f"{value.origin} is a view of a tensor of another pipeline rank and can't be "
                "changed in place; write `x = x.clone()` before the change"
            )
        if value.owner != target:
            if value.cell.num_values > 1:
                raise NotSupportedError(
                    f"a module of rank {target} changed {value.origin} of rank {value.owner} in "
                    "place while views of it exist; pass it a clone"
                )
            value.cell.owner = target
        value.cell.num_writes += 1
        value.meta = meta
        if meta.requires_grad and torch.is_grad_enabled():
            value.depth = depth
        if self.rank == target and used is not None and used is not tensor:
            if value.owner == self.rank and not tensor.is_meta and type(tensor) is torch.Tensor:
                torch.autograd.graph.increment_version(self.base(tensor, value))
            value.base = used

    def new_result(
        self,
        real: torch.Tensor | None,
        meta: TensorMeta,
        target: int,
        depth: int,
        origin: str,
        viewed: Operand | None = None,
    ) -> torch.Tensor:
        """Makes the value of a result: tags the real tensor on `target`, a stand-in elsewhere."""
        cell = None
        if viewed is not None and viewed.value is not None:
            if viewed.value.owner == target:
                cell = viewed.value.cell
            else:
                cell = Cell(target, is_partial_view=True)
        value = self.new_value(target, meta, depth if meta.requires_grad else 0, origin, cell)
        if real is None:
            return self.stand_in(value)
        if tag_of(real) is not None or self.engine.ownership.owner_of(real) is not None:
            real = real.view_as(real)  # the object is another value already
        tag(real, value)
        return real

    # -- backward ----------------------------------------------------------------------------

    def backward(self, tensors: Sequence[torch.Tensor], gradients: Sequence[Any]) -> None:
        """Runs this microbatch's backward pass, on this rank its own segments.

        Raises:
            UsageError: nothing to differentiate, or transfers of the loss were closed by an
                earlier call in the same body.
        """
        loss_edges: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        for operand, gradient in zip(self.operands(tensors), gradients, strict=True):
            tensor, value = operand
            if value is None and self.size == 1 and tensor.requires_grad:
                value = self._adopt(tensor, self.rank, meta_of(tensor), "the loss")
            if value is None or not value.meta.requires_grad:
                raise UsageError(
                    "model.backward got a tensor that does not depend on any parameter "
                    f"({meta_of(tensor).describe()}, requires_grad False); pass the loss"
                )
            if value.epoch < self.num_backwards:
                raise UsageError(
                    "model.backward was called before for this microbatch, and this loss was "
                    "computed before that call; add the losses and call it once"
                )
            if value.owner == self.rank:
                real = self.base(tensor, value)
                edge = torch.autograd.graph.get_gradient_edge(real)
                loss_edges.setdefault(value.depth, []).append((edge, self._seed(real, gradient)))
        self.num_backwards += 1
        for depth in sorted({*self._segments.depths(), *loss_edges}, reverse=True):
            self._run_segment(depth, loss_edges.get(depth, []))
        self.backward_depth = -1

    def _seed(self, loss: torch.Tensor, gradient: Any) -> torch.Tensor:
        # The loss is scaled here, by what its gradient starts from, so that no pass over the
        # gradients is needed afterwards.
        if gradient is None:
            if loss.numel() != 1:
                raise UsageError(
                    f"model.backward got a tensor of shape {tuple(loss.shape)}; pass a scalar "
                    "loss, or the output gradients as grad_tensors"
                )
            return torch.full_like(loss, self._loss_scale)
        scaled: torch.Tensor = gradient * self._loss_scale
        return gradient if self._loss_scale == 1.0 else scaled

    def _run_segment(self, depth: int, loss: list[tuple[Any, torch.Tensor]]) -> None:
        segment = self._segments.pop(depth)
        addresses = [
            self.address(Topic.GRADIENT, root.transfer, root.user)
            for root in segment.roots
            if root.user != self.rank
        ]
        self.engine.enter_backward(self, depth, addresses)
        edges = [edge for edge, _ in loss]
        gradients = [gradient for _, gradient in loss]
        for root in segment.roots:
            if root.user == self.rank:
                gradient = self._cut_gradients.pop(root.transfer)
            else:
                message = self.engine.receive(
                    self.address(Topic.GRADIENT, root.transfer, root.user)
                )
                gradient = message.tensors[0] if message.tensors else None
            if gradient is not None:
                edges.append(root.edge)
                gradients.append(gradient)
        with self.computing():
            run_backward(edges, gradients)
        for leaf in segment.leaves:
            if leaf.source == self.rank:
                self._cut_gradients[leaf.transfer] = leaf.gradient
            else:
                address = self.address(Topic.GRADIENT, leaf.transfer, self.rank)
                sent = [] if leaf.gradient is None else [leaf.gradient]
                self.engine.transport.send(leaf.source, address, None, sent)
            leaf.gradient = None

    # -- the end -----------------------------------------------------------------------------

    def export(self, result: Any, detach: bool) -> tuple[Any, list[Address]]:
        """Sends the owned tensors of the body's result to all ranks.

        Returns:
            The result with `Exported` in place of tensors that are still to come, and the
            messages that bring them.
        """
        pending: list[Address] = []

        def ship(tensor: torch.Tensor) -> Any:
            value = self.value_of(tensor)
            if value is None:
                return tensor.detach() if detach else tensor
            number = self.next_number("a result")
            if value.owner != self.rank:
                pending.append(self.address(Topic.DATA, number, value.owner))
                return Exported(pending[-1], value.meta.device)
            real = self.base(tensor, value)
            address = self.address(Topic.DATA, number, self.rank)
            for peer in self.engine.transport.peers:
                self.engine.transport.send(peer, address, None, [real.detach()])
            # A fresh object: the result outlives the body and must not carry its tag.
            return real.detach() if detach or not real.requires_grad else real.view_as(real)

        return map_tensors(ship, result), pending


_thread = threading.local()


def current_body() -> Body | None:
    """Returns the body that runs in this thread, None outside a step."""
    return getattr(_thread, "body", None)


def set_current_body(body: Body | None) -> None:
    """Says which body runs in this thread."""
    _thread.body = body


class Exported:
    """The place of a tensor that another rank will send."""

    __slots__ = ("address", "device")

    def __init__(self, address: Address, device: torch.device) -> None:
        self.address = address
        self.device = device


def _edge(content: Any) -> str:
    if not isinstance(content, tuple) or len(content) != 3:
        return repr(content)
    origin, shape, dtype = content
    return f"{origin} ({str(dtype).removeprefix('torch.')}{list(shape)})"
