"""Byte streams: all arrives, in order; strangers are turned away; nothing waits for ever."""

import fcntl
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from smp_runtime.errors import PeerError, WaitTimeoutError
from smp_runtime.messages import wire
from smp_runtime.messages.wire import Stream, connect
from tests.worlds import run_world

SECRET = b"s" * 32


@pytest.fixture
def pair() -> Iterator[tuple[Stream, Stream]]:
    near, far = socket.socketpair()
    streams = Stream(near, 1, 0.3), Stream(far, 0, 0.3)
    yield streams
    for stream in streams:
        stream.close()


def received(stream: Stream, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    stream.receive_into(memoryview(buffer))
    return bytes(buffer)


def test_what_is_sent_arrives_in_order(pair: tuple[Stream, Stream]) -> None:
    near, far = pair
    near.send(b"one")
    near.send(memoryview(b"two"))
    assert (received(far, 2), received(far, 4)) == (b"on", b"etwo")
    assert received(far, 0) == b""


def test_both_may_send_much_at_once(pair: tuple[Stream, Stream]) -> None:
    near, far = pair
    much = bytes(range(256)) * 100_000  # 25 MB, more than any buffer
    got: list[bytes] = []
    threads = [threading.Thread(target=stream.send, args=(much,)) for stream in pair]
    threads += [
        threading.Thread(target=lambda stream=stream: got.append(received(stream, len(much))))
        for stream in pair
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert [each == much for each in got] == [True, True]


def test_a_peer_that_takes_nothing_is_given_up(pair: tuple[Stream, Stream]) -> None:
    near, _ = pair
    with pytest.raises(WaitTimeoutError, match=r"rank 1 took no data for 0\.3 s \(setting `timeo"):
        near.send(bytes(64 * 1024 * 1024))


def test_a_process_may_have_many_files_open(pair: tuple[Stream, Stream]) -> None:
    near, far = pair
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2000, hard), hard))
    with socket.socket(fileno=fcntl.fcntl(far, fcntl.F_DUPFD_CLOEXEC, 1100)) as high:
        near.send_file(None)
        assert Stream(high, 0, 0.3).receive_file() is None
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_end_of_a_stream_is_told(pair: tuple[Stream, Stream]) -> None:
    near, far = pair
    near.send(b"last")
    near.end()
    assert received(far, 4) == b"last"
    with pytest.raises(EOFError, match="closed the connection"):
        received(far, 1)
    far.send(b"still")  # the other direction goes on
    assert received(near, 5) == b"still"


def test_closing_wakes_who_waits(pair: tuple[Stream, Stream]) -> None:
    near, _ = pair
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises((EOFError, OSError)):
            received(near, 1)
        ended.set()

    threading.Thread(target=wait).start()
    assert not ended.wait(0.05)
    near.close()
    assert ended.wait(10.0)
    near.close()  # twice is harmless


def greet_everyone() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    streams = connect(dist.group.WORLD, rank, size, 20.0)
    assert streams[rank] is None
    families = set()
    for stream in filter(None, streams):
        stream.send(f"hello from {rank}".encode())
        families.add(stream._socket.family.name)
    heard = [received(stream, 12).decode() for stream in streams if stream is not None]
    dist.barrier()
    for stream in filter(None, streams):
        stream.close()
    return heard, families


@pytest.mark.world
@pytest.mark.parametrize(("kind", "is_one_machine"), [("AF_UNIX", True), ("AF_INET", False)])
def test_every_two_ranks_are_connected(kind: str, is_one_machine: bool) -> None:
    def body() -> Any:
        if not is_one_machine:
            wire._machine = lambda: f"machine {dist.get_rank()}"  # type: ignore[assignment]
        return greet_everyone()

    for rank, (heard, families) in enumerate(run_world(3, body)):
        assert heard == [f"hello from {other}" for other in range(3) if other != rank]
        assert families == {kind}


def test_a_rank_alone_has_no_connections() -> None:
    assert connect(None, 0, 1, 1.0) == [None]


def answered(door: socket.socket, *hellos: bytes, timeout: float = 5.0) -> Any:
    """Lets callers say something one after the other, and returns what `_answer` returned."""
    callers = [socket.create_connection(door.getsockname()) for _ in hellos]
    for caller, hello in zip(callers, hellos, strict=True):
        caller.sendall(hello)
        if hello and len(hello) != wire._HELLO.size:
            caller.shutdown(socket.SHUT_WR)
    try:
        rank, connection = wire._answer(door, SECRET, timeout)
        with closing(connection):
            return rank
    finally:
        for caller in callers:
            caller.close()


@pytest.fixture
def door() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def test_who_knows_the_secret_is_let_in(door: socket.socket) -> None:
    assert answered(door, wire._HELLO.pack(SECRET, 3)) == 3


def test_strangers_are_turned_away(door: socket.socket) -> None:
    stranger, short = wire._HELLO.pack(b"x" * 32, 1), b"GET / HTTP/1.1"
    assert answered(door, stranger, short, wire._HELLO.pack(SECRET, 3)) == 3


def test_a_stranger_who_says_nothing_does_not_keep_others_out(door: socket.socket) -> None:
    assert answered(door, b"", wire._HELLO.pack(SECRET, 3), timeout=4.0) == 3


def test_waiting_for_a_caller_ends(door: socket.socket) -> None:
    with pytest.raises(WaitTimeoutError, match=r"did not connect within 0\.1 s"):
        wire._answer(door, SECRET, 0.1)


def test_a_rank_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    there = wire._Listening("elsewhere", "", "127.0.0.1", port, SECRET)
    here = wire._Listening("here", str(tmp_path), "127.0.0.1", 1, SECRET)
    with pytest.raises(PeerError, match=r"rank 2 at 127\.0\.0\.1 can't be reached") as caught:
        wire._call(there, here, 0, 2, 5.0)
    assert caught.value.rank == 2
