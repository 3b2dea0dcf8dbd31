"""The backward pass of one microbatch on one rank, in pieces that run once each.

The autograd graph is cut where data crosses ranks: what arrives is a new root of the graph
(`receive`), what leaves is kept by its gradient edge. A rank may receive again after it has sent,
so its part of the graph falls into *segments*, numbered by depth: how often data crossed ranks
before it got here. A gradient needed at depth d comes only from segments deeper than d, on
whatever rank, so running segments from the deepest to the shallowest never waits in a circle and
runs each part of the graph once. A local tensor used at a greater depth than its own is cut as
well; otherwise its part of the graph would run twice.

That no gradient came is news too: it travels, so that a parameter which got none keeps
``grad is None``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Leaf:
    """Where the graph of a segment begins: a received tensor, or one cut from a shallower segment.

    Attributes:
        transfer: number of the transfer in its body.
        source: the rank that waits for the gradient; this rank itself for a local cut.
        gradient: what the backward pass left here, None if nothing came.
    """

    __slots__ = ("gradient", "source", "transfer")

    def __init__(self, transfer: int, source: int) -> None:
        self.transfer = transfer
        self.source = source
        self.gradient: torch.Tensor | None = None


class Root(NamedTuple):
    """Where a segment's backward pass begins: a tensor that left it.

    Attributes:
        edge: the gradient edge; it does not keep the tensor's data alive.
        transfer: number of the transfer in its body.
        user: the rank whose gradient it waits for; this rank itself for a local cut.
        owner: what keeps the graph behind the edge alive, None where the edge does.
    """

    edge: GradientEdge
    transfer: int
    user: int
    owner: object


class Segment:
    """The roots and leaves of one depth."""

    __slots__ = ("leaves", "roots")

    def __init__(self) -> None:
        self.roots: list[Root] = []
        self.leaves: list[Leaf] = []


class Segments:
    """All segments of one microbatch on this rank."""

    def __init__(self) -> None:
        self._by_depth: dict[int, Segment] = {}

    def add_root(self, depth: int, tensor: torch.Tensor, transfer: int, user: int) -> None:
        """Notes that `tensor` left the segment at `depth`; call it before anything changes it."""
        edge = get_gradient_edge(tensor)
        self._at(depth).roots.append(Root(edge, transfer, user, _owner_of(tensor, edge)))

    def add_leaf(self, depth: int, data: torch.Tensor, transfer: int, source: int) -> torch.Tensor:
        """Makes `data` the beginning of a graph in the segment at `depth` and returns it."""
        leaf = Leaf(transfer, source)
        self._at(depth).leaves.append(leaf)
        with torch.enable_grad():
            anchor = torch.empty(0, requires_grad=True)
            received: torch.Tensor = _Receive.apply(anchor, data, leaf)  # type: ignore[no-untyped-call]
        return received

    def depths(self) -> list[int]:
        """The depths of the segments, deepest first."""
        return sorted(self._by_depth, reverse=True)

    def pop(self, depth: int) -> Segment:
        """Removes and returns a segment, an empty one if nothing crossed there."""
        return self._by_depth.pop(depth, None) or Segment()

    def _at(self, depth: int) -> Segment:
        return self._by_depth.setdefault(depth, Segment())


def _owner_of(tensor: torch.Tensor, edge: GradientEdge) -> object:
    """Returns what keeps the graph behind an edge alive, None where the edge does.

    That of a function written in Python is not kept by its Python object. Torch 2.6 and 2.7 give
    no more than that; edges of later ones bring what keeps it.
    """
    if hasattr(edge, "ownership_token") or not isinstance(edge.node, torch._C._FunctionBase):
        return None
    with torch.enable_grad():
        return tensor.view_as(tensor).grad_fn


def run_backward(edges: list[GradientEdge], gradients: list[torch.Tensor]) -> None:
    """Runs the backward pass of one segment; leaves get theirs through `Leaf.gradient`."""
    if edges:
        # In this thread, also for a device: what is recomputed must find its body here.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(edges, gradients)


class _Receive(torch.autograd.Function):
    """Turns received data into a tensor that has a history, so that it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, data: torch.Tensor, leaf: Leaf) -> torch.Tensor:
        ctx.leaf = leaf
        ctx.set_materialize_grads(False)
        # A plain leaf that requires a gradient could not be changed in place. Dirty data can.
        ctx.mark_dirty(data)
        return data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        ctx.leaf.gradient = gradients[0]
        return None, None, None
