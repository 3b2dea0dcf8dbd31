"""What training steps take of memory on this rank, and with which modules checkpointed."""

from __future__ import annotations

from torch import nn

from .. import device
from .checkpointed_modules import mark_of, num_changes
from .checkpointing_choice import Measurement


class MeasuredMemory:
    """Notes the peaks of training steps.

    The device's peak is never reset, as scripts read it, too: it belongs to the step after which it
    is another one. The first step's is left out, as the optimizer makes its state after it; and
    steps in which layers are checkpointed in groups, as the prediction knows single modules.

    Args:
        module: the model.

    Attributes:
        peak: the most so far. Of what is saved for backward: while the same modules are
            checkpointed as in the last step.
    """

    def __init__(self, module: nn.Module) -> None:
        self.peak = Measurement()
        self._module = module
        self._changes = -1
        self._marked: dict[str, str] = {}
        self._total = -1  # no step yet

    def note(self, saved: int) -> None:
        """Notes a training step that ended.

        Args:
            saved: bytes saved for backward at its peak; 0 if nobody counted.
        """
        total, before = device.peak_memory_bytes(), self._total
        self._total = total
        if self._changes != num_changes():
            self._changes, self._marked = num_changes(), marks_in(self._module)
        if any(strategy != "each" for strategy in self._marked.values()):
            return
        now, peak = frozenset(self._marked), self.peak
        if saved and (peak.saved_with != now or saved > peak.saved):
            peak = Measurement(saved, now, peak.total, peak.total_with)
        if before not in (-1, total):
            peak = Measurement(peak.saved, peak.saved_with, total, now)
        self.peak = peak


def marks_in(module: nn.Module) -> dict[str, str]:
    """Returns the marked modules in a module, with their strategies."""
    return {
        path: mark.strategy
        for path, part in module.named_modules()
        if (mark := mark_of(part)) is not None
    }
