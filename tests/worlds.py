"""Runs a function on several ranks that are forked from this process.

A test says what every rank does, as a function or a closure, and gets what each returned::

    def test_sum() -> None:
        def body() -> float:
            total = torch.ones(1) * dist.get_rank()
            dist.all_reduce(total)
            return total.item()

        assert run_world(3, body) == [3.0, 3.0, 3.0]

A forked rank has torch imported already, so that a world costs a tenth of a second where spawned
ranks would cost many. The price: this process must have left torch at one thread (`conftest.py`
does that), for OpenMP's threads do not survive a fork, and must have no process group of its own.
Where a GPU is visible torch refuses a backward in a fork of a process that has run one itself.
"""

import functools
import importlib
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.forked_rank import Report, Seat, run_rank

SECONDS_AFTER_A_FAILURE = 1.0  # how long the other ranks may still go on
SECONDS_FOR_STACKS = 2.0

fork = get_context("fork")


class RankFailedError(RuntimeError):
    """A rank died without an exception, or with one that cannot travel between processes."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank of a failing world ended.

    Args:
        exit_code: as a script would have ended, negative for the number of a signal.
        stderr_text: all it wrote to its standard error, the traceback included.
        exception_text: type and message of the exception that ended it, "" if none did.
        seconds: from the start of the world to the end of the process.
    """

    exit_code: int
    stderr_text: str
    exception_text: str
    seconds: float


class Rank:
    """One forked process, as seen from this one."""

    def __init__(self, index: int, world: int, folder: Path) -> None:
        self.index = index
        self.seat = Seat(index, world, folder)
        self.report: Report | None = None
        self.ended: float | None = None
        self.inbox, self.outbox = fork.Pipe(duplex=False)

    def start(
        self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, release: Any
    ) -> None:
        """Forks the process."""
        self.process = fork.Process(
            target=run_rank, args=(self.seat, fn, args, timeout, self.outbox, release)
        )
        with warnings.catch_warnings():
            # From Python 3.12 on, any thread of this process makes a fork warn. The threads of
            # torch and pytest wait in C and hold no lock that a rank needs.
            warnings.filterwarnings(
                "ignore", message=".*multi-threaded", category=DeprecationWarning
            )
            self.process.start()
        self.outbox.close()

    @property
    def has_failed(self) -> bool:
        """Whether it ended by an exception or without a report."""
        if self.report is None:
            return self.ended is not None
        return bool(self.report.exception_text)

    def collect(self) -> None:
        """Takes in what has come from the process since the last call."""
        died = self.process.exitcode is not None
        if self.report is None and self.inbox.poll():
            with suppress(EOFError):
                self.report = pickle.loads(self.inbox.recv_bytes())
        if died and self.ended is None:
            self.ended = time.monotonic()

    def text(self, kind: str) -> str:
        """Returns one of its files: "out", "err" or "stack"."""
        path = self.seat.path(kind)
        return path.read_text(errors="replace") if path.exists() else ""

    def failure(self) -> BaseException:
        """Returns the exception that ended it, with its rank and traceback as a note."""
        if self.report is None:
            code = self.process.exitcode
            message = f"rank {self.index} of {self.seat.world} ended with code {code} and no report"
            return RankFailedError(f"{message}\n{self.text('err')}")
        error = self.report.exception or RankFailedError(self.report.exception_text)
        error.add_note(f"On rank {self.index} of {self.seat.world}:\n{self.report.traceback_text}")
        return error

    def close(self) -> None:
        """Ends the process if it still runs, and frees what belongs to it."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.inbox.close()


def run_world(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 50.0) -> list[Any]:
    """Runs ``fn(*args)`` on `n` ranks and returns their results in the order of ranks.

    The default process group (gloo) exists when `fn` begins, so `smp.init()` adopts it.

    Args:
        n: number of ranks.
        fn: any callable; its results must be picklable.
        args: for `fn`, equal on every rank.
        timeout: seconds for the whole world.

    Raises:
        TimeoutError: some rank was not done in time. Shows the stacks of all that were not.
        BaseException: the first exception that a rank raised, with the rank as a note.
    """
    with forked(n, fn, args, timeout, linger=True) as (ranks, release):
        wait_for(ranks, lambda rank: rank.report is not None or rank.ended is not None, timeout)
        failed = [rank for rank in ranks if rank.has_failed]
        if failed:
            # A rank that was told of another's failure may have been quicker to end than the
            # one that failed: what it raised is an echo.
            raise min(failed, key=order_of_failure).failure()
        release.close()
        wait_for(ranks, lambda rank: rank.ended is not None, timeout)
        bad_end = [rank for rank in ranks if rank.process.exitcode != 0]
        if bad_end:
            code = bad_end[0].process.exitcode
            raise RankFailedError(f"rank {bad_end[0].index} ended with code {code} after its work")
        return [rank.report.value for rank in ranks if rank.report is not None]


def run_world_expecting_failure(
    n: int, fn: Callable[..., Any], *args: Any, timeout: float = 50.0
) -> list[RankOutcome]:
    """Runs ``fn(*args)`` on `n` ranks, leaves each to its own end, and returns how they ended.

    Raises:
        TimeoutError: some rank had not ended in time. Shows the stacks of all that had not.
        AssertionError: no rank failed.
    """
    warm()  # once; its seconds are not the ranks'
    start = time.monotonic()
    with forked(n, fn, args, timeout, linger=False) as (ranks, _):
        wait_for(ranks, lambda rank: rank.ended is not None, timeout, stop_early=False)
        outcomes = [
            RankOutcome(
                exit_code=rank.process.exitcode or 0,
                stderr_text=rank.text("err"),
                exception_text=rank.report.exception_text if rank.report else "",
                seconds=(rank.ended or start) - start,
            )
            for rank in ranks
        ]
    assert any(outcome.exit_code for outcome in outcomes), f"none of {n} ranks failed"
    return outcomes


@contextmanager
def forked(
    n: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, linger: bool
) -> Iterator[tuple[list[Rank], connection.Connection]]:
    """Yields `n` running ranks, and what to close to let lingering ones go. Ends them after."""
    assert not dist.is_initialized(), "this process has a process group; its forks would share it"
    warm()
    release_reader, release = fork.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="world-") as name:
        ranks = [Rank(index, n, Path(name)) for index in range(n)]
        started: list[Rank] = []
        try:
            for rank in ranks:
                rank.start(fn, args, timeout, (release_reader, release) if linger else None)
                started.append(rank)
            yield ranks, release
        finally:
            for rank in started:
                rank.close()
            release.close()
            release_reader.close()
            for rank in started:
                for line in (rank.text("out") + rank.text("err")).splitlines():
                    print(f"[{rank.index}] {line}")


def wait_for(
    ranks: Sequence[Rank],
    is_done: Callable[[Rank], bool],
    timeout: float,
    stop_early: bool = True,
) -> None:
    """Returns when all ranks are done; soon after the first failure if `stop_early`."""
    deadline = time.monotonic() + timeout
    stopping = False
    while pending := [rank for rank in ranks if not is_done(rank)]:
        events = [rank.inbox for rank in pending if rank.report is None]
        sentinels = [rank.process.sentinel for rank in pending if rank.ended is None]
        if not connection.wait([*events, *sentinels], max(0.0, deadline - time.monotonic())):
            if stopping:
                return
            raise TimeoutError(describe_unfinished(pending, len(ranks), timeout))
        for rank in pending:
            rank.collect()
        if stop_early and not stopping and any(rank.has_failed for rank in ranks):
            stopping = True
            deadline = min(deadline, time.monotonic() + SECONDS_AFTER_A_FAILURE)


def order_of_failure(rank: Rank) -> tuple[bool, float]:
    """Returns a key that puts the cause of a world's failure first."""
    if rank.report is None:
        return False, rank.ended or 0.0
    return rank.report.is_echo, rank.report.when


def describe_unfinished(pending: Sequence[Rank], world: int, timeout: float) -> str:
    """Asks the ranks for their stacks and returns a message that shows them."""
    for rank in pending:
        assert rank.process.pid is not None
        os.kill(rank.process.pid, signal.SIGUSR2)
    deadline = time.monotonic() + SECONDS_FOR_STACKS
    texts = [rank.text("stack") for rank in pending]
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, texts = texts, [rank.text("stack") for rank in pending]
        if texts == before and all(texts):
            break
    names = ", ".join(str(rank.index) for rank in pending)
    lines = [f"not finished after {timeout:g} s: rank {names} of {world}"]
    for rank, text in zip(pending, texts, strict=True):
        lines += [f"rank {rank.index}:", text or "(no stack: it does not react to signals)"]
    return "\n".join(lines)


@functools.cache
def warm() -> None:
    """Imports here, once, what every rank would otherwise import for itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what others import is not under test
        for name in ("torch._dynamo", "smp_runtime", "transformers"):
            with suppress(ModuleNotFoundError):
                importlib.import_module(name)
