"""The peaks of training steps, and with which modules checkpointed they were seen."""

import pytest
from torch import nn

from smp_runtime import device
from smp_runtime.recomputing.checkpointed_modules import Mark, set_mark
from smp_runtime.recomputing.checkpointing_choice import Measurement
from smp_runtime.recomputing.measured_memory import MeasuredMemory, marks_in

NONE: frozenset[str] = frozenset()
FIRST = frozenset({"0"})


def test_a_peak_belongs_to_the_step_after_which_it_is_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    memory = MeasuredMemory(model)

    def step(total: int, saved: int = 0) -> Measurement:
        monkeypatch.setattr(device, "peak_memory_bytes", lambda: total)
        memory.note(saved)
        return memory.peak

    assert step(100, 7) == Measurement(7)  # there was no optimizer state yet
    assert step(100, 5) == Measurement(7)
    assert step(120, 9) == Measurement(9, NONE, 120, NONE)
    assert step(120, 0) == Measurement(9, NONE, 120, NONE)
    set_mark(model[0], Mark())
    assert step(120, 4) == Measurement(4, FIRST, 120, NONE)
    assert step(130, 3) == Measurement(4, FIRST, 130, FIRST)
    assert step(90, 3) == Measurement(4, FIRST, 90, FIRST)  # somebody reset it
    set_mark(model[1], Mark("contiguous"))
    assert marks_in(model) == {"0": "each", "1": "contiguous"}
    assert step(150, 2) == Measurement(4, FIRST, 90, FIRST)  # of a step in groups
    set_mark(model[1], None)
    assert step(150, 6) == Measurement(6, FIRST, 90, FIRST)
    set_mark(model[0], None)
    assert step(151, 1) == Measurement(1, NONE, 151, NONE)


def test_a_cpu_tells_no_peak() -> None:
    if not device.has_accelerator():
        assert device.peak_memory_bytes() == 0
