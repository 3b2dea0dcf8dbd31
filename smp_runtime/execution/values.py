"""Who owns a tensor, and what the other ranks hold for it.

A tensor without a tag is *replicated*: every rank of the pipeline group has the same one. A tag
(`Value`, an attribute of the tensor object) says that one rank owns it. On that rank the tensor
object is the real one; elsewhere it is a `StandIn`, or a once replicated tensor whose data an
owned operand has changed. Every rank runs the same program, so every rank makes the same values
in the same order and knows of each who owns it, what it looks like and which ranks have a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import device
from ..errors import UsageError
from ..tensors import TensorMeta, meta_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..messages.transport import Address

_TAG = "_smp_value"

LEAF = "a leaf outside the model"
"""Origin of a tensor that every rank made and that requires a gradient."""


class Cell:
    """The memory that a value and its views share.

    Attributes:
        owner: the rank that has the data.
        num_writes: how often it was changed in place.
        num_values: how many values share it.
        is_partial_view: it is a view of a copy, so a change in place would miss the original.
        depth: the segment of the last write that gradients follow, None if there was none.
    """

    __slots__ = ("depth", "is_partial_view", "num_values", "num_writes", "owner")

    def __init__(self, owner: int, *, is_partial_view: bool = False) -> None:
        self.owner = owner
        self.num_writes = 0
        self.num_values = 0
        self.is_partial_view = is_partial_view
        self.depth: int | None = None


class Fresh(NamedTuple):
    """When a copy was made; a copy made at another time than now is stale.

    Attributes:
        num_writes: the cell's writes.
        epoch: backward passes of the body; the graph behind a copy is used up by one.
    """

    num_writes: int
    epoch: int


class Value:
    """The tag of an owned tensor.

    Attributes:
        scope: the body in which the value was made; numbers mean something only there.
        number: position among all values, transfers and calls of the body; equal on all ranks.
        meta: what the tensor looks like.
        depth: how often data that it depends on crossed ranks, counting only what gradients
            follow; which segment of the backward pass it belongs to (see `segments`).
        cell: the memory behind it.
        origin: what made it, for error messages.
        epoch: backward passes of the body before it was made.
        copies: when each rank received it last; the second part of the key says whether the copy
            carries gradients back.
        awaited: on this rank, the copy that is under way (by the same second part): the address
            of its message.
        aliases: on this rank, the tensors to use instead at some depth (a received copy, or the
            local tensor cut off from an earlier segment), and when they were made.
        base: on the owner, the real tensor where that is not the tagged object itself.
    """

    __slots__ = (
        "aliases",
        "awaited",
        "base",
        "cell",
        "copies",
        "depth",
        "epoch",
        "meta",
        "number",
        "origin",
        "scope",
    )

    def __init__(
        self,
        scope: object,
        number: int,
        meta: TensorMeta,
        depth: int,
        cell: Cell,
        origin: str,
        epoch: int,
    ) -> None:
        self.scope = scope
        self.number = number
        self.meta = meta
        self.depth = depth
        self.cell = cell
        self.origin = origin
        self.epoch = epoch
        self.copies: dict[tuple[int, bool], Fresh] = {}
        self.awaited: dict[bool, Address] = {}
        self.aliases: dict[tuple[int, bool], tuple[Fresh, torch.Tensor]] = {}
        self.base: torch.Tensor | None = None
        cell.num_values += 1

    @property
    def is_leaf(self) -> bool:
        """Says whether it is a leaf that every rank made for itself."""
        return self.origin == LEAF

    @property
    def owner(self) -> int:
        """The pipeline rank that has the data."""
        return self.cell.owner


class Operand(NamedTuple):
    """A tensor in the arguments of a call, and its value if it is owned."""

    tensor: torch.Tensor
    value: Value | None


class StandIn(torch.Tensor):
    """A tensor of another rank: shape, type and device without data.

    Operations on it are taken over by the function mode of the step. Where none is active, there
    is nothing to compute with, and that is an error rather than garbage.
    """

    @staticmethod
    def __new__(cls, meta: TensorMeta) -> StandIn:
        """Makes a stand-in that looks like `meta`."""
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride,
            dtype=meta.dtype,
            device=device.local(meta.device),
            requires_grad=meta.requires_grad,
        )
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuses to compute.

        Raises:
            UsageError: always, except for a detach, which autograd does on its own.
        """
        if func is torch.ops.aten.detach.default:
            stand_in = args[0]
            return StandIn(meta_of(stand_in)._replace(requires_grad=False))
        raise UsageError(
            f"{func} was called on a tensor whose data is on another pipeline rank; tensors made "
            "inside an @smp.step function can only be used inside it, or returned from it. Inside, "
            "what computes unseen by torch's function modes (torch.jit.script, torch.func.vmap, "
            "torch.compile, C++ extensions) must be part of a module that lives on one rank"
        )


def tag(tensor: torch.Tensor, value: Value) -> None:
    """Says that `tensor` is `value`."""
    tensor._smp_value = value  # type: ignore[attr-defined]


def untag(tensor: torch.Tensor) -> None:
    """Says that a tensor is replicated again."""
    vars(tensor).pop(_TAG, None)


def tag_of(tensor: torch.Tensor) -> Value | None:
    """Returns the value that `tensor` is, None if it is replicated."""
    return getattr(tensor, _TAG, None)
