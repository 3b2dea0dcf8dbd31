"""What one call of a checkpointing function in glue comprises: the placed modules that it calls.

Which ranks these are is known once it has returned. Until then what they saved is held. Where all
are of one rank it is let go then, and recomputed in the backward; where they are of several it
stays, as without checkpointing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..execution.ownership import PlacedModule
    from .recomputation import Recomputation


class Region:
    """One such call in one microbatch.

    Args:
        preserve_rng_state: whether recomputations draw the same random numbers.
    """

    def __init__(self, preserve_rng_state: bool) -> None:
        self.preserve_rng_state = preserve_rng_state
        self._owners: dict[str, int] = {}
        self._stages: set[int] = set()
        self._held: list[tuple[Recomputation, bool]] = []

    def enter(self, placed: PlacedModule) -> None:
        """Notes that a placed module is called; on every rank."""
        self._owners[placed.path] = placed.owner
        self._stages.add(placed.stage)

    def include(self, inner: Region) -> None:
        """Notes what a region inside this one called and has settled by itself."""
        self._owners |= inner.owners

    def hold(self, call: Recomputation, is_last: bool) -> None:
        """Notes a call on this rank, which keeps what it saved.

        Args:
            call: the call.
            is_last: it comes right before its backward, and is held until then.
        """
        self._held.append((call, is_last))

    @property
    def owners(self) -> dict[str, int]:
        """The ranks of the modules that were called, by their paths."""
        return self._owners

    @property
    def is_split(self) -> bool:
        """Whether they are of several ranks."""
        return len(set(self._owners.values())) > 1

    def settle(self) -> frozenset[int]:
        """Lets go what is held, or keeps it for good; returns the stages with recomputations."""
        for call, is_last in self._held:
            if self.is_split:
                call.keep()
            else:
                call.settle(hold=is_last)
        return frozenset() if self.is_split else frozenset(self._stages)
