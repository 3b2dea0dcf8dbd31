"""One thread for each body of a step, exactly one of which runs at a time.

A body is suspended in the middle of the user's Python. Its autocast, grad mode and function
modes, which torch keeps per thread, stay with its thread; what is kept per process (random states,
the attributes that modules keep) is put back when it goes on.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from .. import device
from .body import set_current_body
from .clock import Clock
from .entries import Entries
from .reports import Reports
from .rng import HostRandomState
from .runs import Abandoned, Run
from .thread_state import ThreadState

_log = logging.getLogger("smp_runtime")

_UNWINDING = 1.0
"""Seconds for the bodies of a step that failed to come to their ends."""


@functools.cache
def _say_once(text: str) -> None:
    _log.warning(text)


def _warn_of_profiler() -> None:
    """Says that torch's profiler does not follow bodies into their threads, if it is on."""
    if torch.autograd.profiler._is_profiler_enabled:
        _say_once(
            "torch's profiler is on, and sees nothing of the step's bodies: each runs in a thread "
            "of its own. Profile with experimental_config=torch._C._profiler._ExperimentalConfig("
            "profile_all_threads=True)"
        )


class BodyThreads:
    """The threads of the bodies on this rank.

    Args:
        clock: the emulated clock; it runs while a body runs.
        reports: knows what modules keep.
    """

    def __init__(self, clock: Clock, reports: Reports) -> None:
        self._clock = clock
        self._reports = reports
        self._idle: SimpleQueue[None] = SimpleQueue()  # a semaphore, but without Python in it
        self._is_aborted = False

    # -- called by the main thread -----------------------------------------------------------

    def make(self, runs: Sequence[Run], lives: Sequence[Callable[[], None]]) -> None:
        """Makes the threads of a step's bodies; `lives` are what they do."""
        self._is_aborted = False
        _warn_of_profiler()
        state = ThreadState.current()
        for run, live in zip(runs, lives, strict=True):
            run.thread = threading.Thread(
                # A new thread begins with an empty context; the body needs its caller's.
                target=contextvars.copy_context().run,
                args=(self._live, run, live, state),
                daemon=True,
                name=f"smp-body-{run.body.microbatch}",
            )

    def resume(self, run: Run) -> None:
        """Lets a body run until it is suspended or has ended."""
        if run.state == "new":
            assert run.thread is not None
            run.state = "running"
            run.thread.start()
        else:
            run.go.put(None)
        self._idle.get()

    def run(self, run: Run, live: Callable[[], None]) -> None:
        """Runs a body to its end in the calling thread; what it raises is left in the run."""
        self._live(run, live, None)
        self._idle.get()

    def abandon(self, runs: Sequence[Run]) -> None:
        """Unwinds the suspended bodies of a step that failed, and waits for that a little.

        A thread that unwinds through torch's C++ while the interpreter ends aborts the process.
        """
        self._is_aborted = True
        suspended = [run for run in runs if run.state == "waiting"]
        for run in suspended:
            run.go.put(None)
        deadline = time.monotonic() + _UNWINDING
        for run in suspended:
            if run.thread is not None:
                run.thread.join(max(0.0, deadline - time.monotonic()))

    def restore(self, run: Run) -> None:
        """Gives modules back what they kept when a body stopped last."""
        for module, name, kept in run.kept:
            vars(module)[name] = kept
        run.entries.restore()

    def note(self, run: Run) -> None:
        """Notes what modules keep now that a body stops."""
        run.kept = self._reports.kept_attributes()
        run.entries.note()

    def forget(self, run: Run) -> None:
        """Frees what modules kept when a body ended, as nobody will go on from there."""
        run.kept = []
        run.entries = Entries()

    def watch(self, run: Run) -> None:
        """Watches what modules keep from now on, as a body begins or goes on."""
        run.entries.watch(self._reports.holders())

    # -- called by bodies, in their threads --------------------------------------------------

    def suspend(self, run: Run) -> None:
        """Stops the calling body until the main thread resumes it."""
        run.state = "waiting"
        saved = HostRandomState.now(), device.random_state()
        self.note(run)
        self._clock.pause()
        self._idle.put(None)
        run.go.get()
        if self._is_aborted:
            raise Abandoned
        self._clock.resume()
        # Another body ran meanwhile: this one must find the world as it left it.
        saved[0].restore()
        device.set_random_state(saved[1])
        self.restore(run)
        self.watch(run)
        run.state = "running"

    def _live(self, run: Run, live: Callable[[], None], state: ThreadState | None) -> None:
        """The life of a body; `state` is what its thread takes over from its maker's."""
        set_current_body(run.body)
        self._clock.resume()
        try:
            with contextlib.nullcontext() if state is None else state.restored():
                live()
        except Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - carried to the main thread
            run.error = error
        finally:
            run.state = "done"
            run.body.backward_depth = -1
            set_current_body(None)
            self._clock.pause()
            self._idle.put(None)
