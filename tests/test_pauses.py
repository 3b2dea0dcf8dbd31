"""Pauses grow to the longest, and stay there."""

from itertools import islice

from smp_runtime.messages.pauses import pauses


def test_pauses_double_up_to_the_longest() -> None:
    assert list(islice(pauses(0.01), 7)) == [0.001, 0.002, 0.004, 0.008, 0.01, 0.01, 0.01]
