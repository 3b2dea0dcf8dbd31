"""Ranks of one machine see each other's memory and hear how far they are, or learn why not."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_runtime.errors import ConnectionLostError, PeerError, WaitTimeoutError
from smp_runtime.messages.shared_memory import Neighbours
from smp_runtime.messages.wire import Stream

NAMES = (4, 7, 9)


def neighbours(size: int, timeout: float = 5.0, **settings: Any) -> list[Neighbours]:
    """Returns those of all ranks, in one process."""
    streams: list[list[Stream | None]] = [[None] * size for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            ends = socket.socketpair()
            streams[low][high] = Stream(ends[0], NAMES[high], timeout)
            streams[high][low] = Stream(ends[1], NAMES[low], timeout)
    return [Neighbours(streams[rank], rank, NAMES, timeout, **settings) for rank in range(size)]


def on_all(made: list[Neighbours], call: Callable[[Neighbours], Any]) -> list[Any]:
    """Calls something on all ranks at once."""
    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(call, made))


@pytest.fixture
def three() -> Iterator[list[Neighbours]]:
    made = neighbours(3)
    yield made
    for each in made:
        each.close()


@pytest.fixture
def impatient() -> Iterator[list[Neighbours]]:
    made = neighbours(2, timeout=0.2, explain=lambda: "what all are doing")
    yield made
    for each in made:
        each.close()


def test_each_rank_writes_its_part_and_all_read_it(three: list[Neighbours]) -> None:
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    parts = on_all(three, lambda each: each.share(100))
    for rank in range(3):
        parts[rank][rank].fill_(rank + 1)
    for seen in parts:
        assert [part.tolist() for part in seen] == [[rank + 1] * 100 for rank in range(3)]
    assert parts[0][1].data_ptr() != parts[1][1].data_ptr()
    del parts, seen
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open  # nothing keeps the memory


def test_where_one_system_refuses_none_has_it(
    three: list[Neighbours], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.memfd_create, iter([True, False, True])

    def sometimes(*args: Any) -> int:
        if next(calls):
            return real(*args)
        raise OSError("no such system call")

    monkeypatch.setattr(os, "memfd_create", sometimes)
    assert on_all(three, lambda each: each.share(100)) == [None] * 3


def test_the_last_counts_are_heard(three: list[Neighbours]) -> None:
    assert three[0].listen() == {}
    three[1].tell((1, 0, 0))
    three[1].tell((2**40, 1, 0))
    assert three[0].listen() == {1: (2**40, 1, 0)}
    assert three[0].listen() == {}
    three[2].tell((3, 2, 1))
    assert three[0].wait(lambda: [1, 2]) == {2: (3, 2, 1)}
    assert three[2].listen() == {1: (2**40, 1, 0)}
    for number in range(1000):  # more than is read at once
        three[0].tell((number, number, number))
    while (heard := three[1].listen()) != {0: (999, 999, 999)}:
        assert 0 in heard


def test_last_counts_are_heard_before_a_rank_is_missed(three: list[Neighbours]) -> None:
    three[1].tell((5, 0, 0))
    three[1].close()
    three[0].tell((6, 0, 0))  # to one who is gone, too: no error here
    assert three[2].wait(lambda: [1])[1] == (5, 0, 0)
    three[2].listen()
    with pytest.raises(ConnectionLostError, match=r"rank 7 closed its connection to rank 9"):
        three[2].wait(lambda: [1])
    three[0].tell((7, 0, 0))
    assert three[2].wait(lambda: [0]) == {0: (7, 0, 0)}  # the others are still there


def test_who_has_ended_is_not_waited_for() -> None:
    ended: list[int] = []
    made = neighbours(3, ended=lambda: ended)
    made[1].tell((5, 0, 0))
    ended.append(7)
    assert made[0].wait(lambda: [1]) == {1: (5, 0, 0)}  # its last word
    with pytest.raises(ConnectionLostError, match=r"rank 7 closed its connection to rank 4"):
        made[0].wait(lambda: [1])
    made[2].tell((1, 0, 0))
    assert made[0].wait(lambda: [2]) == {2: (1, 0, 0)}
    for each in made:
        each.close()


def test_a_wait_ends_at_the_timeout(impatient: list[Neighbours]) -> None:
    match = r"(?s)rank 4 waited 0.2 s \(setting `timeout`\) for the gradients of rank 7.what all"
    with pytest.raises(WaitTimeoutError, match=match):
        impatient[0].wait(lambda: [1])
    with pytest.raises(WaitTimeoutError, match=r"rank 7 sent nothing for 0.2 s"):
        impatient[0].share(100)


def test_a_failure_elsewhere_ends_a_wait() -> None:
    def check() -> None:
        raise PeerError("rank 1 has no more memory", 1)

    made = neighbours(2, check=check)
    with pytest.raises(PeerError, match="no more memory"):
        made[0].wait(lambda: [1])
    for each in made:
        each.close()


def test_a_rank_that_is_gone_shares_nothing(three: list[Neighbours]) -> None:
    three[1].close()
    with pytest.raises(ConnectionLostError, match="is gone"):
        three[0].share(100)


def test_memory_outlives_the_streams(three: list[Neighbours]) -> None:
    parts = on_all(three, lambda each: each.share(64))
    for each in three:
        each.close()
    parts[0][0][:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert parts[2][0][:5].tolist() == [1, 2, 3, 4, 0]
