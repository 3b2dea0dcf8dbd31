"""Byte streams between the ranks of a group: the one file that opens sockets.

Two ranks on one machine talk over a Unix socket, others over TCP. A message between two ranks
costs some ten microseconds here; torch's gloo backend takes a quarter of a millisecond at least,
and CPU time of a thread of its own, whatever the size (measured). Where each rank listens is
exchanged over a process group, together with a secret that a caller has to show: nobody else on
the network gets a word in.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import socket
import struct
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import PeerError, WaitTimeoutError

_HELLO = struct.Struct("<32sI")  # secret, rank of the caller
_BUFFER_BYTES = 4 * 1024 * 1024
_PATIENCE = 2.0
_LONGEST_PATH = 90
_NOTE_BYTES = 1024
_LONGEST_SILENCE = 60.0  # of a machine, not of a rank: the kernel answers for it


class _Listening(NamedTuple):
    """Where a rank listens, as it tells the others."""

    machine: str
    path: str
    host: str
    port: int
    secret: bytes


class Stream:
    """An open connection to one peer. Sending and receiving may go on at the same time."""

    def __init__(self, connection: socket.socket, peer: int, timeout: float) -> None:
        self._socket = connection
        self._peer = peer
        self._timeout = timeout
        connection.settimeout(None)
        # Python's own timeout would also end a quiet wait for the next message.
        limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        if connection.family != socket.AF_UNIX:
            _watch_link(connection, timeout)

    @property
    def is_near(self) -> bool:
        """Whether the peer runs on this machine."""
        return self._socket.family == socket.AF_UNIX

    def fileno(self) -> int:
        """Returns the file descriptor, for those who wait for several streams at once."""
        return self._socket.fileno()

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Sends all of `data`; it may change as soon as this returns.

        Raises:
            WaitTimeoutError: the peer took nothing for the whole timeout.
            OSError: the peer is gone.
        """
        try:
            self._socket.sendall(data)
        except BlockingIOError:
            raise WaitTimeoutError(
                f"rank {self._peer} took no data for {self._timeout:g} s (setting `timeout`)"
            ) from None

    def receive_into(self, view: memoryview) -> None:
        """Fills `view`.

        Raises:
            EOFError: the peer closed the connection.
            OSError: the connection broke.
        """
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("it closed the connection")
            view = view[count:]

    def receive_ready(self) -> bytes:
        """Returns what has arrived and was not received yet, without waiting.

        Raises:
            EOFError: the peer closed the connection, and nothing is left.
            OSError: the connection broke.
        """
        try:
            data = self._socket.recv(_NOTE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        if not data:
            raise EOFError("it closed the connection")
        return data

    def send_file(self, file: int | None) -> None:
        """Hands the peer, on this machine, an open file; None to say that there is none."""
        socket.send_fds(self._socket, [b"f"], [] if file is None else [file])

    def receive_file(self) -> int | None:
        """Waits for what the peer hands over; the descriptor is the caller's to close.

        Raises:
            EOFError: the peer closed the connection.
            WaitTimeoutError: nothing came in time.
        """
        waiting = select.poll()  # unlike `select` it takes descriptors above 1023
        waiting.register(self._socket, select.POLLIN)
        if not waiting.poll(self._timeout * 1000):
            raise WaitTimeoutError(
                f"rank {self._peer} sent nothing for {self._timeout:g} s (setting `timeout`)"
            )
        data, files, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not data:
            raise EOFError("it closed the connection")
        return files[0] if files else None

    def end(self) -> None:
        """Says that nothing more will be sent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection; whoever still waits on it gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(
    group: dist.ProcessGroup | None, rank: int, size: int, timeout: float
) -> list[Stream | None]:
    """Connects every two ranks of a group. All of them call it.

    Args:
        group: the process group over which they say where they listen.
        rank: this rank's position in it.
        size: number of ranks.
        timeout: seconds that it may take.

    Returns:
        A stream for each rank, None at this rank's own place.

    Raises:
        WaitTimeoutError: a rank did not come in time.
        PeerError: a rank can't be reached.
    """
    streams: list[Stream | None] = [None] * size
    if size == 1:
        return streams
    folder = Path(tempfile.mkdtemp(prefix="smp-"))
    if len(str(folder)) > _LONGEST_PATH:  # a Unix socket's path may have some 100 characters
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="smp-", dir="/tmp"))
    try:
        with socket.socket(socket.AF_UNIX) as near, socket.socket(socket.AF_INET) as far:
            mine = _listen(near, far, folder, size, _own_address(group, size))
            notes = _exchange([*mine[:-1], mine.secret.hex()], size, group)
            everyone = [_Listening._make([*note, bytes.fromhex(key)]) for *note, key in notes]
            for peer in range(rank):
                streams[peer] = Stream(
                    _call(everyone[peer], mine, rank, peer, timeout), peer, timeout
                )
            for peer in range(rank + 1, size):
                door = near if everyone[peer].machine == mine.machine else far
                caller, connection = _answer(door, mine.secret, timeout)
                streams[caller] = Stream(connection, caller, timeout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return streams


def _watch_link(connection: socket.socket, timeout: float) -> None:
    """Makes a TCP connection send at once, and break when the other machine is silent too long."""
    patience = max(4, int(min(timeout, _LONGEST_SILENCE)))
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": patience // 4, "TCP_KEEPINTVL": patience // 4}
    options |= {"TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": patience * 1000}
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _exchange(mine: Any, size: int, group: dist.ProcessGroup | None) -> list[Any]:
    """Tells all ranks of the group something that JSON can hold, and returns what all say."""
    text = json.dumps(mine).encode()
    sent = torch.zeros(_NOTE_BYTES, dtype=torch.uint8)
    sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(received, sent, group=group)
    return [json.loads(bytes(note.tolist()).rstrip(b"\0")) for note in received]


def _listen(
    near: socket.socket, far: socket.socket, folder: Path, size: int, host: str
) -> _Listening:
    path = folder / "rank"
    near.bind(str(path))
    near.listen(size)
    far.bind((host, 0))  # the job's network only
    far.listen(size)
    port: int = far.getsockname()[1]
    return _Listening(_machine(), str(path), host, port, secrets.token_bytes(32))


def _call(
    there: _Listening, mine: _Listening, rank: int, peer: int, timeout: float
) -> socket.socket:
    try:
        if there.machine == mine.machine:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(there.path)
        else:
            connection = socket.create_connection((there.host, there.port), timeout)
        connection.sendall(_HELLO.pack(there.secret, rank))
    except OSError as error:
        raise PeerError(f"rank {peer} at {there.host} can't be reached: {error}", peer) from error
    return connection


def _answer(door: socket.socket, secret: bytes, timeout: float) -> tuple[int, socket.socket]:
    """Waits for a caller that knows the secret; anyone else is turned away."""
    deadline = time.monotonic() + timeout
    while True:
        door.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = door.accept()
        except TimeoutError:
            raise WaitTimeoutError(
                f"a rank did not connect within {timeout:g} s (setting `timeout`)"
            ) from None
        connection.settimeout(_PATIENCE)
        try:
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:  # said nothing, or hung up
            hello = b""
        if len(hello) == _HELLO.size:
            shown, caller = _HELLO.unpack(hello)
            if secrets.compare_digest(shown, secret):
                return caller, connection
        connection.close()


def _machine() -> str:
    """Names the running system; equal for two processes that see the same files and sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    booted = boot.read_text().strip() if boot.exists() else socket.gethostname()
    network = Path("/proc/self/ns/net")
    # Containers on one machine don't share their temporary files, or have networks of their own.
    place = Path(tempfile.gettempdir()).stat()
    net = str(network.readlink()) if network.is_symlink() else ""
    return f"{booted}:{net}:{place.st_dev}:{place.st_ino}"


def _own_address(group: dist.ProcessGroup | None, size: int) -> str:
    """Finds the address under which the other machines of the group see this one.

    It is that of the way to MASTER_ADDR. On the master that name may stand for the machine itself
    (Debian's /etc/hosts says 127.0.1.1); then it is that of the way to another machine.
    """
    machine, address = _machine(), _source_of(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    for other, reached in _exchange([machine, address], size, group):
        if _is_loopback(address) and other != machine and not _is_loopback(reached):
            return _source_of(reached)
    return address


def _source_of(target: str) -> str:
    """Returns the address that this machine has on the way to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing: it only picks the route
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
