"""Wires that are worse than sockets: without buffers, in strict order only; and slow at random.

`OrderedStream` has the rules of NCCL's sends and receives: no tags, what one rank sends to another
comes in that order, and a send ends only when its receiver has taken all of it. `delays` makes
sends and computations wait at random. With `pytest --wire ordered` every test with several ranks
runs on such a wire, with `--delays SECONDS` with such delays.
"""

import itertools
import os
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from smp_runtime.errors import WaitTimeoutError
from smp_runtime.execution.body import Body
from smp_runtime.messages import transport, wire

_FRAME = struct.Struct("<Bq")
_DATA, _TAKEN = 0, 1
_LONG_DELAY_SHARE = 0.02
_SHORT_DELAY = 0.003


class OrderedStream(wire.Stream):
    """A stream whose sends end when the peer has taken everything."""

    def __init__(self, connection: socket.socket, peer: int, timeout: float) -> None:
        super().__init__(connection, peer, timeout)
        self._writing = threading.Lock()
        self._taken = threading.Semaphore(0)
        self._offered: queue.Queue[memoryview | Exception] = queue.Queue()
        self._current = memoryview(b"")
        threading.Thread(target=self._sort, name="ordered wire", daemon=True).start()

    @property
    def is_near(self) -> bool:
        """No: ranks on a wire like NCCL's have accelerators, which share no memory."""
        return False

    def send(self, data: bytes | bytearray | memoryview) -> None:
        if not len(data):
            return
        self._write(_DATA, data)
        if not self._taken.acquire(timeout=self._timeout):
            raise WaitTimeoutError(f"rank {self._peer} took no data for {self._timeout:g} s")

    def receive_into(self, view: memoryview) -> None:
        while view:
            if not self._current:
                offered = self._offered.get()
                if isinstance(offered, Exception):
                    raise offered
                self._current = offered
            count = min(len(view), len(self._current))
            view[:count] = self._current[:count]
            view, self._current = view[count:], self._current[count:]
            if not self._current:
                self._write(_TAKEN, b"")

    def _write(self, kind: int, data: bytes | bytearray | memoryview) -> None:
        with self._writing:
            super().send(_FRAME.pack(kind, len(data)))
            super().send(data)

    def _sort(self) -> None:
        """Tells what the peer sends from its word that it has taken something."""
        head = bytearray(_FRAME.size)
        try:
            while True:
                super().receive_into(memoryview(head))
                kind, size = _FRAME.unpack(head)
                if kind == _TAKEN:
                    self._taken.release()
                    continue
                data = bytearray(size)
                super().receive_into(memoryview(data))
                self._offered.put(memoryview(data))
        except (OSError, EOFError) as error:
            self._offered.put(error)
            self._taken.release()


@contextmanager
def ordered() -> Iterator[None]:
    """Makes `wire.connect` connect ranks by ordered streams, in this process and its forks."""
    native = wire.Stream
    wire.Stream = OrderedStream  # type: ignore[misc]
    try:
        yield
    finally:
        wire.Stream = native  # type: ignore[misc]


@contextmanager
def delays(longest: float, seed: int = 0) -> Iterator[None]:
    """Waits before sends and computations: mostly a little, now and then up to `longest` seconds.

    Every process that is forked meanwhile draws delays of its own.
    """
    native_send, native_computing = transport.Transport.send, Body.computing
    draws: dict[int, random.Random] = {}
    numbers = itertools.count()

    def wait() -> None:
        here = threading.get_ident() ^ os.getpid()
        draw = draws.setdefault(here, random.Random(seed * 1000 + next(numbers) + os.getpid()))
        is_long = draw.random() < _LONG_DELAY_SHARE
        time.sleep(draw.random() * (longest if is_long else _SHORT_DELAY))

    def send(self: transport.Transport, *args: object, **kwargs: object) -> None:
        wait()
        native_send(self, *args, **kwargs)  # type: ignore[arg-type]

    @contextmanager
    def computing(self: Body) -> Iterator[None]:
        wait()
        with native_computing(self):
            yield

    transport.Transport.send = send  # type: ignore[method-assign,assignment]
    Body.computing = computing  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        transport.Transport.send = native_send  # type: ignore[method-assign]
        Body.computing = native_computing  # type: ignore[method-assign]
