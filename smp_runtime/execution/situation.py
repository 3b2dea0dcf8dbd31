"""What a rank is doing right now, for people who want to know why nothing happens."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .engine import Engine
from .failure import drawn, user_line
from .paths import describe
from .runs import Run

_MOST_FRAMES = 25
_SILENT = ("no answer", "", "stopped, killed, or its machine is lost")


class Situation(NamedTuple):
    """What a rank is doing; all of it plain, so that it can travel.

    Attributes:
        rank: the global rank.
        pp_rank: its partition.
        step: number of its current or last step.
        activity: what it is in: "step 3", a collective, "" between steps.
        idle: seconds since something last happened.
        waits: what its bodies wait for, with sizes, and at which line.
        sends: what it has been sending for long, to whom.
        schedule: the drawn schedule with the current action marked, "" without one.
        stack: where its main thread and its bodies are.
    """

    rank: int
    pp_rank: int
    step: int
    activity: str
    idle: float
    waits: Sequence[str]
    sends: Sequence[str]
    schedule: str
    stack: str


class Observer:
    """Looks at an engine from another thread.

    Args:
        engine: runs the steps of this rank.
        rank: the global rank.

    Attributes:
        rank: the global rank.
        collective: the collective outside the steps that the main thread is in, "" for none.
    """

    def __init__(self, engine: Engine, rank: int) -> None:
        self.collective = ""
        self.rank = rank
        self._engine = engine
        self._seen: Any = None
        self._changed = time.monotonic()

    @property
    def activity(self) -> str:
        """What this rank is in; "" between steps."""
        return self.collective or (f"step {self._engine.step}" if self._engine.is_in_step else "")

    @property
    def step(self) -> int:
        """The number of its current or last step."""
        return self._engine.step

    def idle_seconds(self) -> float:
        """Returns the seconds since something last happened, as far as calls of this show."""
        engine = self._engine
        bodies = [(run.body.number, run.state) for run in list(engine.runs)]
        seen = (self.activity, engine.step, bodies, engine.transport.counts())
        if seen != self._seen:
            self._seen, self._changed = seen, time.monotonic()
        return time.monotonic() - self._changed

    def situation(self) -> Situation:
        """Describes what this rank is doing."""
        engine, transport = self._engine, self._engine.transport
        waiting = [run for run in list(engine.runs) if run.state == "waiting"]
        now = time.monotonic()
        return Situation(
            self.rank,
            transport.rank,
            engine.step,
            self.activity,
            round(self.idle_seconds(), 1),
            [text for run in waiting for text in self._waits_of(run)],
            [
                f"{_size(num_bytes)} to rank {transport.name(peer)} for {now - since:.1f} s"
                for peer, (num_bytes, since) in list(transport.sending.items())
            ],
            drawn(engine.plan, engine.present(), transport.rank),
            _stacks(),
        )

    def _waits_of(self, run: Run) -> list[str]:
        transport = self._engine.transport
        return [
            f"{describe(address, transport)}{_expected(run, address)}, after "
            f"{run.body.last_origin}{user_line(run.thread)}"
            for address in run.addresses
            if not transport.has(address)
        ]


def table(situations: Mapping[int, Situation], ended: Mapping[int, str], size: int) -> str:
    """Returns a table of what all ranks are doing.

    Args:
        situations: of the ranks that answered.
        ended: of those that ended their programs, when.
        size: number of ranks.
    """
    rows = [("rank", "pp_rank", "in", "idle", "waits for / sends")]
    for rank in range(size):
        found = situations.get(rank)
        if found is None:
            state = ("has ended", "", ended[rank]) if rank in ended else _SILENT
            rows.append((f"{rank}", "", *state))
            continue
        details = [*found.waits, *[f"sends {text}" for text in found.sends]] or [""]
        activity = found.activity or f"no step (after {found.step})"
        rows.append((f"{rank}", f"{found.pp_rank}", activity, f"{found.idle:.1f} s", details[0]))
        rows += [("", "", "", "", detail) for detail in details[1:]]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _expected(run: Run, address: Any) -> str:
    num_bytes = run.body.copies.expected.get(address)
    return "" if num_bytes is None else f" ({_size(num_bytes)})"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes} B"


def _stacks() -> str:
    """Shows where the main thread and the bodies are."""
    frames = sys._current_frames()
    texts = []
    for thread in threading.enumerate():
        is_ours = thread is threading.main_thread() or thread.name.startswith("smp-body")
        if is_ours and thread.ident in frames:
            stack = traceback.format_stack(frames[thread.ident])[-_MOST_FRAMES:]
            texts.append(f"{thread.name}:\n{''.join(stack)}")
    return "".join(texts)
