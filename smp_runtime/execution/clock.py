"""The emulated clock: what a step would take if every rank had a core or device of its own.

Each rank's clock advances by the CPU time of its own work. A message carries its sender's clock;
receiving it moves the receiver's clock to the time at which it would have arrived over the
modelled link, if that is later. So any number of ranks on two noisy cores gives the step time of
a cluster, bubbles included.
"""

from __future__ import annotations

import threading
import time


class Clock:
    """One rank's emulated clock, in seconds.

    Args:
        is_on: False makes every method do nothing.
        latency: seconds that a message takes at least.
        bandwidth: bytes per second of the link; 0 means that size costs nothing.
    """

    def __init__(
        self, *, is_on: bool = False, latency: float = 0.0, bandwidth: float = 0.0
    ) -> None:
        self.is_on = is_on
        self.now = 0.0
        self.started = 0.0
        self._latency = latency
        self._bandwidth = bandwidth
        self._thread = threading.local()

    def start(self) -> None:
        """Marks the beginning of a step."""
        self.started = self.now

    def resume(self) -> None:
        """Says that the calling thread works from now on."""
        if self.is_on:
            self._thread.mark = time.thread_time()

    def pause(self) -> None:
        """Counts the work of the calling thread since `resume`."""
        if self.is_on:
            used = time.thread_time()
            self.now += used - getattr(self._thread, "mark", used)
            self._thread.mark = used

    def read(self) -> float:
        """Returns the time, the calling thread's work included."""
        self.pause()
        return self.now

    def receive(self, sent: float, num_bytes: int) -> None:
        """Moves the clock to when a message sent at `sent` would have arrived, if that is later."""
        if self.is_on:
            self.pause()
            travel = num_bytes / self._bandwidth if self._bandwidth else 0.0
            self.now = max(self.now, sent + self._latency + travel)
