"""One microbatch on one rank: its values and the numbers by which ranks speak of them.

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
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import NotSupportedError, UsageError
from ..messages.transport import Address, Message, Topic, Transport
from ..tensors import TensorMeta, meta_of
from .backward_pass import BackwardPass
from .copies import Copies
from .rng import RandomStreams
from .segments import Segments
from .values import LEAF, Cell, Operand, StandIn, Value, tag, tag_of

if TYPE_CHECKING:
    from ..recomputing.known_calls import Known
    from ..recomputing.recomputation import Recomputation
    from ..recomputing.regions import Region
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
    known: Known
    module_names: dict[int, str]
    step: int
    debug: bool

    def wait(self, body: Body, addresses: Sequence[Address]) -> None:
        """Suspends the body until all messages are there."""

    def enter_stage(self, body: Body, stage: int, addresses: Sequence[Address]) -> None:
        """Suspends the body until it may run modules of a stage and all messages are there."""

    def enter_backward(self, body: Body, depth: int, addresses: Sequence[Address]) -> None:
        """Suspends the body until it may run a segment's backward and all messages are there."""

    def recompute_ahead(
        self,
        body: Body,
        depth: int,
        addresses: Sequence[Address],
        recomputations: Sequence[Recomputation],
    ) -> None:
        """Recomputes what a segment's backward needs first, while its messages are not there."""

    def receive(self, address: Address) -> Message:
        """Takes a message that is there."""


class Body:
    """The state of one microbatch of one step on this rank.

    Args:
        engine: suspends and resumes this body.
        microbatch: position among the step's microbatches.
        loss_scale: what a backward pass starts from instead of 1.
        streams: the random streams of this microbatch.

    Attributes:
        loss_scale: as given.
        glue: watches the operations of this body.
        copies: what moves between ranks.
        segments: its part of the autograd graph.
        backward_pass: runs that backwards.
        backward_depth: the segment whose backward runs or waits; all deeper ones are over.
        num_backwards: how many backward passes it has begun.
        digest: of the path that it took so far; equal on all ranks.
        last_origin: the last thing on that path.
        failed_with: what a computation raised that only this rank runs, and which one.
        hook: path of the module whose forward hook runs on its owner, "" if none does.
        written: once replicated tensors that an owned operand changed in place.
        call_depth: the segment of the placed module that runs.
        region: the call of a checkpointing function that is running in glue, if any.
        compute_seconds: time spent in placed modules, owned operations and backward passes.
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
        self.loss_scale = loss_scale
        self.glue: GlueMode
        self.digest = 0
        self.last_origin = "the beginning of the body"
        self.backward_depth = sys.maxsize
        self.num_backwards = 0
        self.call_depth = 0
        self.region: Region | None = None
        self.compute_seconds = 0.0
        self.failed_with: tuple[Exception, str] | None = None
        self.hook = ""
        self._recomputations: dict[int, list[weakref.ref[Recomputation]]] = {}
        self.copies = Copies(self)
        self.segments = Segments()
        self.backward_pass = BackwardPass(self, loss_scale)
        self._number = 0
        self._stages: dict[int, int] = {}
        self._static: dict[int, Value] = {}
        self._kept_alive: list[torch.Tensor] = []
        self.written: list[tuple[weakref.ref[torch.Tensor], Value]] = []
        # By identity, and with the storage, so that an identity can't be given to another one.
        self._owned_memory: dict[int, tuple[Any, Cell]] = {}

    @property
    def number(self) -> int:
        """How far the body has come: the last number it gave."""
        return self._number

    # -- numbers and addresses ---------------------------------------------------------------

    def next_number(self, origin: str) -> int:
        """Numbers a value, transfer, call or question; equal on all ranks."""
        if self.failed_with is not None:
            self.check_caught()
        self._number += 1
        self.digest = zlib.crc32(origin.encode(), self.digest)
        self.last_origin = origin
        return self._number

    def check_caught(self) -> None:
        """Makes sure that nothing failed on this rank that the other ranks know nothing of.

        Raises:
            NotSupportedError: the body caught the exception of a computation and went on.
        """
        if self.failed_with is None:
            return
        error, origin = self.failed_with
        # While it is handled it may still be on its way out, through a `finally`.
        if sys.exception() is not error:
            raise NotSupportedError(
                f"the step's body caught {type(error).__name__}: {error}, which {origin} "
                f"raised on rank {self.rank} only, so the other ranks go on as if nothing had "
                "happened; catch it inside one module, or let it pass"
            ) from error

    def address(self, topic: Topic, number: int, source: int) -> Address:
        """Returns the address of one of this body's messages."""
        return Address(topic, self.engine.step, self.microbatch, number, source)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Counts the time inside as computation, for the step's report."""
        begun = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.failed_with = error, self.last_origin
            raise
        finally:
            self.compute_seconds += time.perf_counter() - begun

    # -- values ------------------------------------------------------------------------------

    def operands(self, tensors: Iterable[torch.Tensor]) -> list[Operand]:
        """Says whose the tensors in the arguments of a call are."""
        return [Operand(tensor, self.value_of(tensor)) for tensor in tensors]

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """Returns the value that a tensor is in this body, None if it is replicated."""
        value = tag_of(tensor)
        if value is not None and value.scope is self:
            return value
        known = self._static.get(id(tensor))
        if known is not None:
            self.engine.ownership.check_written(tensor, self.step, self.microbatch)
            return known
        owner = self.engine.ownership.owner_of(tensor)
        if owner is not None:
            meta = self.engine.ownership.meta_of(tensor)
            return self._keep(tensor, self.new_value(owner, meta, 0, "a parameter"))
        if value is not None:
            return self._take_over(tensor, value)
        if self._owned_memory and type(tensor) is torch.Tensor:
            owned = self._owned_memory.get(tensor.untyped_storage()._cdata)
            if owned is not None:
                cell = owned[1]
                # Not what the object says: it is the real one on one rank only.
                meta = meta_of(tensor)._replace(requires_grad=cell.depth is not None)
                value = self.new_value(cell.owner, meta, cell.depth or 0, "a view", cell)
                tag(tensor, value)
                return value
        self.engine.ownership.check_placed(tensor)
        if tensor.requires_grad and tensor.is_leaf:
            # Every rank made this leaf; its gradient must come together on one of them.
            return self.adopt(tensor, 0, meta_of(tensor), LEAF)
        if tensor.requires_grad and self.size > 1:
            # Nothing replicated has a history: this came out of a module behind glue's back.
            raise NotSupportedError(
                f"a tensor ({meta_of(tensor).describe()}) made inside a module of rank "
                f"{self.rank} came out by a list or object that the other ranks don't see; "
                "return it from the module, or keep it in an attribute of the module"
            )
        return None

    def _take_over(self, tensor: torch.Tensor, value: Value) -> Value:
        """Makes a value of another body, which the user kept, one of this body."""
        is_leaf = value.is_leaf
        if getattr(value.scope, "step", None) == self.step and not is_leaf:
            raise UsageError(
                f"microbatch {self.microbatch} uses {value.origin} of another microbatch of "
                "the same step; what one microbatch leaves for the next must be detached and "
                "live inside one module"
            )
        origin = LEAF if is_leaf else "a tensor of an earlier body"
        # The tag stays as it is: other microbatches may use the tensor as well.
        taken = self.new_value(value.owner, value.meta, 0, origin)
        taken.base = value.base
        return self._keep(tensor, taken)

    def forget(self, parameter: torch.Tensor) -> None:
        """Forgets the value of a parameter that is about to look different."""
        self._static.pop(id(parameter), None)

    def _keep(self, tensor: torch.Tensor, value: Value) -> Value:
        """Remembers the value of a tensor that is not of this body alone."""
        self._static[id(tensor)] = value
        self._kept_alive.append(tensor)
        return value

    def note_uses(self, operands: Iterable[Operand]) -> None:
        """Notes that values of parameters and buffers are used as they are now."""
        for tensor, value in operands:
            if value is not None and id(tensor) in self._static:
                self.engine.ownership.note_read(tensor, self.step, self.microbatch)

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

    def adopt(self, tensor: torch.Tensor, owner: int, meta: TensorMeta, origin: str) -> Value:
        """Says that a tensor is a value of a rank."""
        value = self.new_value(owner, meta, 0, origin)
        tag(tensor, value)
        return value

    def note_stage(self, depth: int, stage: int) -> None:
        """Notes that a module of `stage` ran in the segment at `depth`."""
        self._stages[depth] = max(stage, self._stages.get(depth, stage))

    def stage_at(self, depth: int) -> int | None:
        """Returns the stage whose backward the segment at `depth` is, None if it has none."""
        return self._stages.get(depth)

    def note_recomputation(self, recomputation: Recomputation) -> None:
        """Notes a checkpointed call of the segment whose module runs."""
        noted = self._recomputations.setdefault(self.call_depth, [])
        noted.append(weakref.ref(recomputation))

    def take_recomputations(self, depth: int) -> list[Recomputation]:
        """Returns the checkpointed calls of a segment, in their order; those that still matter."""
        noted = [reference() for reference in self._recomputations.pop(depth, ())]
        return [found for found in noted if found is not None and not found.is_over]

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
        follows = meta.requires_grad and torch.is_grad_enabled()
        if value is None:
            cell = Cell(target)
            cell.depth = depth if follows else None
            if self.rank != target and tuple(tensor.shape) != meta.shape:
                raise NotSupportedError(
                    f"a tensor of shape {tuple(tensor.shape)} was given another shape, "
                    f"{meta.shape}, by an operation on rank {target}; make it of that shape first"
                )
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                self._owned_memory[storage._cdata] = (storage, cell)
            value = self.new_value(target, meta, depth, "a tensor changed in place", cell)
            tag(tensor, value)
            self.written.append((weakref.ref(tensor), value))
            return
        self._check_change(value, target)
        if id(tensor) in self._static:
            self.engine.ownership.note_write(tensor, self.step, self.microbatch)
        value.cell.owner = target
        value.cell.num_writes += 1
        has_new_look = (meta.shape, meta.stride) != (value.meta.shape, value.meta.stride)
        value.meta = meta
        if follows:
            value.depth = value.cell.depth = depth
        if has_new_look and isinstance(tensor, StandIn):
            torch._C._swap_tensor_impl(tensor, StandIn(meta))
        if self.rank == target and used is not None and used is not tensor:
            if not isinstance(tensor, StandIn) and not tensor.is_meta:
                torch.autograd.graph.increment_version(self.copies.base(tensor, value))
            value.base = used

    def _check_change(self, value: Value, target: int) -> None:
        if value.cell.is_partial_view:
            raise NotSupportedError(
                f"{value.origin} is a view of a tensor of another pipeline rank and can't be "
                "changed in place; write `x = x.clone()` before the change"
            )
        if value.owner != target and value.cell.num_values > 1:
            raise NotSupportedError(
                f"a module of rank {target} changed {value.origin} of rank {value.owner} in "
                "place while views of it exist; pass it a clone"
            )

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


_thread = threading.local()


def current_body() -> Body | None:
    """Returns the body that runs in this thread, None outside a step."""
    return getattr(_thread, "body", None)


def set_current_body(body: Body | None) -> None:
    """Says which body runs in this thread."""
    _thread.body = body
