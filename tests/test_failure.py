"""Failures of a step: where it happened is told everywhere, and nothing is left behind."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_runtime.errors import PathMismatchError, PeerError, SMPError, WaitTimeoutError
from tests.local_ranks import LocalRank, backward, run_ranks
from tests.test_engine import WIDTH, chain, pins


class Fragile(nn.Linear):
    """Fails after some calls."""

    calls_left = 1000

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not self.calls_left:
            raise ValueError("too large")
        self.calls_left -= 1
        return super().forward(x)


def test_an_error_says_where_it_happened() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fragile()), torch.ones(2, WIDTH)
    seen: dict[int, BaseException] = {}

    def body(rank: LocalRank) -> None:
        mine: Any = rank.place(model, pins(2), x)
        mine[1].calls_left = 1
        rank.engine.module_names = {id(mine[1]): "second"}

        def step(x: Tensor) -> None:
            backward(mine(x).sum())

        try:
            rank.step(step, [x, 2 * x, x])
        except BaseException as error:
            seen[rank.index] = error
            raise

    with pytest.raises(ValueError, match="too large"):
        run_ranks(2, body)
    (note,) = seen[1].__notes__
    assert "rank 1, step 1, microbatch 1, at second" in note
    assert "[1F1]" in note
    echo = seen[0]
    assert isinstance(echo, PeerError)
    assert echo.rank == 1
    assert "ValueError: too large" in str(echo)
    assert "microbatch 1" in str(echo)


def test_a_failed_step_leaves_no_thread_behind() -> None:
    model, x = chain(2), torch.ones(2, WIDTH)

    def body(rank: LocalRank) -> None:
        mine = rank.place(model, pins(2), x)

        def step(x: Tensor) -> None:
            mine(x)
            raise KeyError("lost")

        rank.step(step, [x] * 4)

    with pytest.raises(KeyError):
        run_ranks(2, body)
    deadline = time.monotonic() + 5
    while [thread for thread in threading.enumerate() if thread.name.startswith("smp-body")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_wait_ends_with_the_setting_and_what_was_waited_for() -> None:
    model, x = chain(2), torch.ones(2, WIDTH)
    done = threading.Event()

    def body(rank: LocalRank) -> None:
        mine = rank.place(model, pins(2), x)
        if rank.index == 1:
            done.wait(20.0)
            return
        try:
            rank.step(lambda x: backward(mine(x).sum()), [x])
        finally:
            done.set()

    with pytest.raises(
        WaitTimeoutError, match=r"rank 0 waited 0\.4 s \(setting `timeout`\) for \w+ .*from rank 1"
    ):
        run_ranks(2, body, timeout=0.4)


def test_a_peer_that_ended_its_program_is_named() -> None:
    model, x = chain(2), torch.ones(2, WIDTH)

    def body(rank: LocalRank) -> None:
        mine = rank.place(model, pins(2), x)
        for _ in range(1 if rank.index == 1 else 3):
            rank.step(lambda x: backward(mine(x).sum()), [x])

    with pytest.raises(PeerError, match=r"rank 1 ended its program.*equally often"):
        run_ranks(2, body)


def test_paths_that_part_without_a_transfer_are_noticed() -> None:
    model, x = chain(2), torch.ones(2, WIDTH)

    def body(rank: LocalRank) -> None:
        mine: Any = rank.place(model, pins(2), x)

        def step(x: Tensor) -> None:
            h = mine[1](x)
            for _ in range(1 + rank.index):
                h = h + 1

        for _ in range(3):
            rank.step(step, [x])

    with pytest.raises(PathMismatchError, match="took different paths"):
        run_ranks(2, body)


def test_errors_are_this_packages() -> None:
    for kind in (PathMismatchError, PeerError, WaitTimeoutError):
        assert issubclass(kind, SMPError)
