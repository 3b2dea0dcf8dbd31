"""What a rank says when an exception ends it: first of all, in one line, what failed where.

The first line is the same on every rank: that of the rank that failed first. What follows from
another rank's failure here (a broken connection in one of torch's collectives, say) comes after.
"""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from types import TracebackType

from ..errors import ConnectionLostError, PeerError
from .engine import Engine
from .situation import table
from .watchdog import Watchdog

_NEWS_PATIENCE = 2.0
_BACKENDS = ("gloo", "NCCL")


def explained(error: Exception, watchdog: Watchdog) -> Exception:
    """Returns what made a collective fail: another rank's failure, if there is one.

    Another rank that fails says so before it ends, so the news are there, or about to come. A rank
    that is gone without a word does not answer a roll call.
    """
    is_told = isinstance(error, PeerError) and error.is_told
    if is_told or not any(map(_comes_from_a_collective, (error, error.__cause__))):
        return error
    found = watchdog.await_failure(_NEWS_PATIENCE)
    if found is not None:
        return found
    answers = watchdog.ask_all()
    ended = sorted(watchdog.ended)
    if ended:
        return PeerError(
            f"rank {ended[0]} ended its program {watchdog.ended[ended[0]]}, but this rank needs it "
            f"for a collective; every rank must call the step equally often ({_line(error)})",
            rank=ended[0],
        )
    silent = [rank for rank in range(watchdog.size) if rank not in answers]
    if silent:
        return PeerError(
            f"rank {silent[0]} is gone without a word: it was killed or stopped, or its machine or "
            f"the network is lost ({_line(error)})",
            rank=silent[0],
        )
    error.add_note(f"what every rank is doing:\n{table(answers, watchdog.ended, watchdog.size)}")
    return error


def speak_last(engine: Engine, watchdog: Watchdog) -> None:
    """Makes an exception that ends the program tell the other ranks, and say first what failed."""
    previous = sys.excepthook

    def speak(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        watchdog.stop()
        cause: BaseException = error
        with suppress(Exception):  # the error itself must be printed in any case
            if isinstance(error, Exception):
                cause = engine.find_cause(error)
            if not engine.transport.is_closed:
                engine.fail(cause)
            print(f"smp_runtime: {_first(cause, engine)}", file=sys.stderr, flush=True)
        previous(kind, error, trace)

    sys.excepthook = speak


def _first(cause: BaseException, engine: Engine) -> str:
    """Returns what stands before the traceback of this rank."""
    if isinstance(cause, PeerError) and cause.is_told:
        return f"{cause}\nrank {engine.transport.name(engine.transport.rank)} was here:"
    return engine.last_report.partition("\n")[0] or f"{cause!r}"


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _comes_from_a_collective(error: BaseException | None) -> bool:
    if error is None or isinstance(error, ConnectionLostError):
        return error is not None
    frames = traceback.walk_tb(error.__traceback__)
    files = [frame.f_code.co_filename.replace("\\", "/") for frame, _ in frames]
    # What was begun earlier is waited for without a frame of torch's.
    is_late = isinstance(error, RuntimeError) and any(name in str(error) for name in _BACKENDS)
    return is_late or any("/torch/distributed/" in file for file in files[-3:])
