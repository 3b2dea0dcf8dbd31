"""What checkpointed calls share, from call to call and from step to step."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .attributes import Attributes
from .forward_state import KeptBuffers

if TYPE_CHECKING:
    from .recomputation import Recomputation
    from .saved_bytes import SavedBytes


@dataclass
class Habits:
    """What the calls of one module are known to do.

    Attributes:
        is_known: one call was watched.
        changes_inputs: it changes an input in place.
        attributes: what the last call found in attributes, unless it would keep tensors alive.
    """

    is_known: bool = False
    changes_inputs: bool = False
    attributes: Attributes | None = None


@dataclass
class Known:
    """What checkpointed calls share.

    Attributes:
        buffers: copies of buffers that forwards found.
        habits: of each module, by identity.
        stages: those with calls that a script checkpoints as it makes them.
        meter: counts the bytes that are saved, None if nobody asks.
        seconds: what recomputations took so far.
        held_path: what is called right before a backward that has nothing to wait for. Its
            intermediates would be recomputed at once, so they are held; those of one call at most.
    """

    buffers: KeptBuffers = field(default_factory=dict)
    habits: dict[int, Habits] = field(default_factory=dict)
    stages: set[int] = field(default_factory=set)
    meter: SavedBytes | None = None
    seconds: float = 0.0
    held_path: str = ""
    _held: weakref.ref[Recomputation] | None = None

    def hold(self, call: Recomputation) -> None:
        """Notes the call whose intermediates are held."""
        self._held = weakref.ref(call)

    def let_go(self) -> None:
        """Frees what is held: another call takes its place."""
        held = None if self._held is None else self._held()
        self._held = None
        if held is not None:
            held.let_go()

    def counting(self) -> AbstractContextManager[Any]:
        """Counts what is saved inside, if somebody asks."""
        return nullcontext() if self.meter is None else self.meter.hooks()
