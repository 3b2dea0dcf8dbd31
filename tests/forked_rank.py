"""The inside of a forked rank: from its first line to its exit code. `worlds.py` is the outside."""

import atexit
import ctypes
import faulthandler
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smp_runtime.errors import PeerError


@dataclass(frozen=True)
class Seat:
    """Which rank of which world a process is, and the folder where it writes."""

    index: int
    world: int
    folder: Path

    def path(self, kind: str) -> Path:
        """Returns the path of one of its files: "out", "err" or "stack"."""
        return self.folder / f"{self.index}.{kind}"


@dataclass
class Report:
    """What a rank tells the process that forked it, at its end."""

    when: float
    value: Any = None
    exception: BaseException | None = None
    exception_text: str = ""
    traceback_text: str = ""
    is_echo: bool = False


def run_rank(
    seat: Seat,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    outbox: Connection,
    release: tuple[Connection, Connection] | None,
) -> None:
    """Is the whole life of a forked process."""
    take(seat)
    code = 0
    try:
        store = dist.FileStore(  # type: ignore[attr-defined]
            str(seat.folder / "store"), seat.world
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=seat.index,
            world_size=seat.world,
            timeout=timedelta(seconds=timeout),
        )
        report = pickle.dumps(Report(value=fn(*args), when=time.monotonic()))
    except BaseException as error:
        code = exit_code_of(error)
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        report = pickle.dumps(report_of(error))
    outbox.send_bytes(report)
    if release is not None and code == 0:
        # Unread messages in the sockets of a process that ends reset its connections, which may
        # take from a peer what was sent to it before.
        release[1].close()
        release[0].poll(None)
    atexit._run_exitfuncs()
    raise SystemExit(code)


def take(seat: Seat) -> None:
    """Cuts the process off from the test session and sets it up as a launcher would."""
    if sys.platform == "linux":
        die_with_parent = 1  # PR_SET_PDEATHSIG: a killed test session leaves no rank behind
        ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
    atexit._clear()  # the session's exit functions are not ours to run
    logging.getLogger().handlers.clear()  # nor do its handlers write to our standard error
    for descriptor, kind in ((1, "out"), (2, "err")):
        file = os.open(seat.path(kind), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (until the end)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    stacks = seat.path("stack").open("w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, stacks)
    os.environ |= {
        "RANK": str(seat.index),
        "LOCAL_RANK": str(seat.index),
        "WORLD_SIZE": str(seat.world),
        "LOCAL_WORLD_SIZE": str(seat.world),
        "GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name[:2] == "lo"),
    }
    torch.set_num_threads(1)
    gc.freeze()  # collections need not walk what the session had loaded


def exit_code_of(error: BaseException) -> int:
    """Returns the code with which a script that raises `error` ends."""
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    return 1


def report_of(error: BaseException) -> Report:
    """Returns `error` in a form that surely travels."""
    report = Report(
        when=time.monotonic(),
        exception_text="".join(traceback.format_exception_only(error)).strip(),
        traceback_text="".join(traceback.format_exception(error)),
        is_echo=isinstance(error, PeerError),
    )
    with suppress(Exception):
        pickle.loads(pickle.dumps(error))
        report.exception = error
    return report
