"""What one rank is told to do, and what it tells in return."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shape import Shape


@dataclass(frozen=True)
class Job:
    """One contestant's work, as every rank of it gets it."""

    subject: str  # the file that knows how: its function `build` is called
    shape: Shape
    num_microbatches: int
    num_ranks: int = 1
    is_one_world: bool = True  # False: the ranks know nothing of each other
    options: Mapping[str, Any] = field(default_factory=dict)  # for `build`

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        content = json.loads(text)
        return cls(**{**content, "shape": Shape(**content["shape"])})


@dataclass(frozen=True)
class Trainer:
    """What `build` makes: a step and what there is to tell about it."""

    step: Callable[[], float | None]  # one optimizer step; the loss, None if another rank knows it
    details: Callable[[], dict[str, Any]] = dict  # after a step: anything worth printing


@dataclass(frozen=True)
class Turn:
    """What one rank says after its steps."""

    began: float  # on the machine's monotonic clock, which all processes share
    ended: float
    num_steps: int
    user: float  # CPU seconds of all threads
    system: float
    peak_bytes: int  # above what the imports alone took
    losses: list[float | None]
    details: list[dict[str, Any]]  # of each step
