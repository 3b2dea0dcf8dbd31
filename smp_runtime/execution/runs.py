"""One run of the body per microbatch, and where the time of a step went."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from ..messages.transport import Address
from ..planning.schedule import Action
from .body import Body
from .entries import Entries


class Abandoned(BaseException):
    """Unwinds a suspended body whose step failed elsewhere. Not an Exception: users catch those."""


@dataclass
class Run:
    """A body and its thread.

    Attributes:
        body: the microbatch's state.
        thread: runs the body.
        path: the plan's actions for this microbatch on this rank, in order.
        num_done: how many of them are over.
        action: what the body waits to begin; None in the middle of an action.
        addresses: the messages that must be there first.
        stage: the stage it is in.
        is_admitted: it has begun to compute, so it holds activations.
        is_before_recomputation: it waits for an output gradient, and could recompute meanwhile.
        has_recomputed: it has done so, and waits for the output gradient.
        is_entering: it is about to run a module of this rank.
        state: `new`, `running`, `waiting` or `done`.
        result: what the body returned.
        unsettled: tensors of the script that wait for what another rank made of them.
        kept: what modules kept in attributes when the body stopped last.
        entries: what it has set in their dicts and objects.
        error: what it raised.
        go: gets an item when it may go on.
    """

    body: Body
    thread: threading.Thread | None = None
    path: tuple[Action, ...] = ()
    num_done: int = 0
    action: Action | None = None
    addresses: Sequence[Address] = ()
    stage: int | None = None
    is_admitted: bool = False
    is_entering: bool = False
    is_before_recomputation: bool = False
    has_recomputed: bool = False
    state: str = "new"
    result: Any = None
    unsettled: list[tuple[torch.Tensor, Address]] = field(default_factory=list)
    kept: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    entries: Entries = field(default_factory=Entries)
    error: BaseException | None = None
    go: SimpleQueue[None] = field(default_factory=SimpleQueue)


@dataclass
class StepReport:
    """Where the time of the last step went on this rank, in seconds.

    Attributes:
        wall: from the first body's start to the last result.
        busy: bodies were running.
        recomputed: checkpointed calls were recomputed, in all.
        recomputed_ahead: the part of `recomputed` while there was nothing else to do.
        saved_bytes: what was saved for backward passes at the peak, if that is counted.
        compute: the part of `busy` inside placed modules, operations on owned tensors and backward
            passes; the rest is glue.
        clock: the same as `wall` on the emulated clock, 0 unless `emulate_clock` is on.
        spans: begin and end of each stretch of running, relative to the start, with its action.
        reductions: begin and end of the all-reduce of each bucket of gradients, likewise.
        began: the start, on the clock of `time.perf_counter`.
    """

    wall: float = 0.0
    busy: float = 0.0
    recomputed: float = 0.0
    recomputed_ahead: float = 0.0
    saved_bytes: int = 0
    compute: float = 0.0
    clock: float = 0.0
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    reductions: list[tuple[float, float]] = field(default_factory=list)
    began: float = 0.0

    @property
    def bubble(self) -> float:
        """The share of the step in which this rank waited."""
        return 1.0 - self.busy / self.wall if self.wall else 0.0
