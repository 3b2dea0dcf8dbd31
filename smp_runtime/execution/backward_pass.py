"""The backward pass of one microbatch on one rank: segment by segment, from the deepest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ..errors import NonFiniteLossError, UsageError
from ..messages.transport import Topic
from ..tensors import meta_of
from .rng import SeededDraws
from .segments import run_backward

if TYPE_CHECKING:
    from .body import Body

_MOST_NAMES = 4
"""A failure is said to be in so many modules by their names, in more by the first and last."""


class BackwardPass:
    """The backward pass of one body.

    Args:
        body: the microbatch.
        loss_scale: what a backward pass starts from instead of 1.
    """

    def __init__(self, body: Body, loss_scale: float) -> None:
        self._body = body
        self._loss_scale = loss_scale
        self._cut_gradients: dict[int, torch.Tensor | None] = {}

    def run(self, tensors: Sequence[torch.Tensor], gradients: Sequence[Any]) -> None:
        """Runs this microbatch's backward pass, on this rank its own segments.

        Raises:
            UsageError: nothing to differentiate, or transfers of the loss were closed by an
                earlier call in the same body.
        """
        body = self._body
        loss_edges: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        for operand, gradient in zip(body.operands(tensors), gradients, strict=True):
            tensor, value = operand
            if value is None and body.size == 1 and tensor.requires_grad:
                value = body.adopt(tensor, body.rank, meta_of(tensor), "the loss")
            if value is None or not value.meta.requires_grad:
                raise UsageError(
                    "model.backward got a tensor that does not depend on any parameter "
                    f"({meta_of(tensor).describe()}, requires_grad False); pass the loss"
                )
            if value.epoch < body.num_backwards:
                raise UsageError(
                    "model.backward was called before for this microbatch, and this loss was "
                    "computed before that call; add the losses and call it once"
                )
            if value.owner == body.rank:
                real = body.copies.base(tensor, value)
                edge = torch.autograd.graph.get_gradient_edge(real)
                loss_edges.setdefault(value.depth, []).append((edge, self._seed(real, gradient)))
        body.num_backwards += 1
        for depth in sorted({*body.segments.depths(), *loss_edges}, reverse=True):
            self._run_segment(depth, loss_edges.get(depth, []))
        body.backward_depth = -1

    def _recomputing(self) -> AbstractContextManager[Any]:
        """What is recomputed inside draws again, also outside drawing modules."""
        streams = self._body.streams
        return SeededDraws(streams) if streams.has_drawn else nullcontext()

    def _seed(self, loss: torch.Tensor, gradient: Any) -> torch.Tensor:
        if self._body.engine.debug and not bool(torch.isfinite(loss).all()):
            raise NonFiniteLossError(
                f"the loss of microbatch {self._body.microbatch} is {loss.flatten()[:3].tolist()} "
                "(setting `debug` is on); look at the inputs, the learning rate and float16"
            )
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

    @contextmanager
    def _naming(self, depth: int) -> Iterator[None]:
        """Says of a failure which modules' backward it came in; the path ends at the loss."""
        try:
            yield
        except Exception:
            modules = self._modules_at(depth)
            what = f" of {modules}" if modules else f", after {self._body.last_origin}"
            self._body.last_origin = f"the backward pass{what}"
            raise

    def _modules_at(self, depth: int) -> str:
        """Lists the modules of this rank whose backward a segment is, as far as is known."""
        body = self._body
        stage = body.stage_at(depth)
        own = [
            placed.path or "the model"
            for placed in body.engine.ownership.placed.values()
            if placed.owner == body.rank and placed.stage == stage
        ]
        if len(own) > _MOST_NAMES:
            return f"{own[0]} to {own[-1]}, {len(own)} modules"
        return ", ".join(own)

    def _run_segment(self, depth: int, loss: list[tuple[Any, torch.Tensor]]) -> None:
        body = self._body
        segment = body.segments.pop(depth)
        addresses = [
            body.address(Topic.GRADIENT, root.transfer, root.user)
            for root in segment.roots
            if root.user != body.rank
        ]
        calls = body.take_recomputations(depth)
        if calls and not addresses and body.size > 1:
            body.engine.known.held_path = calls[-1].path
        elif any(call.is_pending for call in calls):
            with self._recomputing():
                body.engine.recompute_ahead(body, depth, addresses, calls)
        del calls
        body.engine.enter_backward(body, depth, addresses)
        edges = [edge for edge, _ in loss]
        gradients = [gradient for _, gradient in loss]
        for root in segment.roots:
            if root.user == body.rank:
                gradient = self._cut_gradients.pop(root.transfer)
            else:
                message = body.engine.receive(
                    body.address(Topic.GRADIENT, root.transfer, root.user)
                )
                gradient = message.tensors[0] if message.tensors else None
            if gradient is not None:
                edges.append(root.edge)
                gradients.append(gradient)
        with self._recomputing(), body.computing(), self._naming(depth):
            run_backward(edges, gradients)
        for leaf in segment.leaves:
            if leaf.source == body.rank:
                self._cut_gradients[leaf.transfer] = leaf.gradient
            else:
                address = body.address(Topic.GRADIENT, leaf.transfer, body.rank)
                sent = [] if leaf.gradient is None else [leaf.gradient]
                body.engine.transport.send(leaf.source, address, None, sent)
            leaf.gradient = None
