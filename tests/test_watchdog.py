"""The watchdog says what every rank does, whenever asked, also when the main thread is stuck."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import smp_runtime as smp
from smp_runtime.errors import ConfigError, WaitTimeoutError
from smp_runtime.execution.situation import Situation, table
from smp_runtime.execution.watchdog import Watchdog
from smp_runtime.messages.agreement import check_settings
from smp_runtime.messages.bulletin import FAILURE, ROLL_CALL, Bulletin
from tests.subjects import Block
from tests.worlds import run_world


def written() -> str:
    """Returns what this rank has written to its standard error so far."""
    return Path("/proc/self/fd/2").read_text()


def ask_soon() -> None:
    """Sends this process SIGUSR1 in a moment, when its main thread waits."""
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()


class Slow(Block):
    seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


@pytest.mark.world
def test_sigusr1_prints_a_table_and_ends_nothing() -> None:
    def body() -> tuple[str, float]:
        smp.init({"partitions": 2, "auto_partition": False, "default_partition": 0})
        model = smp.DistributedModel(nn.Sequential(Block(), Slow()))
        smp.set_partition(model.get_module()[1], 1)

        @smp.step
        def train(model: Any, x: Tensor) -> Tensor:
            loss: Tensor = model(x).mean()
            model.backward(loss)
            return loss

        train(model, torch.ones(2, 8))
        model.get_module()[1].seconds = 2.5
        if smp.rank() == 0:
            ask_soon()
        loss = train(model, torch.ones(2, 8)).reduce_mean().item()
        return written(), loss

    (first, loss), (second, same) = run_world(2, body)
    assert loss == same
    assert "smp_runtime: SIGUSR1\nrank  pp_rank  in      idle" in first
    assert "\n0     0        step 2  " in first
    assert "from rank 1, after" in first
    assert "test_watchdog.py:" in first  # the line at which the body is
    assert "\n1     1        step 2  " in first
    assert "<-- here" in first
    assert "SIGUSR1" not in second


@pytest.mark.world
def test_the_main_thread_may_be_stuck_in_a_collective() -> None:
    def body() -> str:
        smp.init({"partitions": 2})
        if smp.rank() == 0:
            ask_soon()
        else:
            time.sleep(2.5)
        smp.barrier()
        return written()

    first, _ = run_world(2, body)
    assert "\n0     0        smp.barrier of WORLD  " in first
    assert "no step (after 0)" in first
    assert "in barrier" in first  # the stack


def store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def test_news_come_in_order_to_everybody() -> None:
    shared = store()
    boards = [Bulletin(shared, "a", rank) for rank in range(2)]
    other = Bulletin(shared, "b", 0)
    boards[0].post(FAILURE, "broken")
    boards[1].post(ROLL_CALL, "")
    for board in boards:
        assert [(news.kind, news.rank, news.text) for news in board.read()] == [
            (FAILURE, 0, "broken"),
            (ROLL_CALL, 1, ""),
        ]
        assert board.read() == []
    assert other.read() == []


def test_answers_are_of_those_that_answer() -> None:
    boards = [Bulletin(store_, "a", rank) for store_ in [store()] for rank in range(3)]
    call = boards[0].post(ROLL_CALL, "")
    boards[1].answer(call, ["one"])
    boards[2].answer(call, ["two"])
    assert boards[0].answers(call, 3, 0.1) == {1: ["one"], 2: ["two"]}


def test_the_table_names_ranks_that_do_not_answer() -> None:
    here = Situation(0, 0, 3, "step 3", 1.5, ["data 4 (2.0 MiB)"], ["8 B to rank 1"], "", "")
    text = table({0: here}, {2: "after step 2"}, 3)
    assert text.splitlines() == [
        "rank  pp_rank  in         idle   waits for / sends",
        "0     0        step 3     1.5 s  data 4 (2.0 MiB)",
        "                                 sends 8 B to rank 1",
        "1              no answer         stopped, killed, or its machine is lost",
        "2              has ended         after step 2",
    ]


def test_settings_that_differ_are_an_error_on_every_rank() -> None:
    shared, errors = store(), []

    def check(rank: int) -> None:
        try:
            check_settings(shared, "a", rank, 3, {"microbatches": 1 + (rank == 2)}, 5.0)
        except ConfigError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    assert errors[0].startswith(
        "ranks 0 and 2 were given different settings: microbatches=1 and microbatches=2. "
    )


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(WaitTimeoutError, match="rank 1 did not come to smp.init within 0.1 s"):
        check_settings(store(), "a", 0, 2, {}, 0.1)


def test_its_thread_is_not_in_the_store_any_more_when_the_interpreter_ends() -> None:
    class SlowBulletin:
        is_inside = False

        def read(self) -> list[object]:
            self.is_inside = True
            time.sleep(0.3)
            self.is_inside = False
            return []

    observer = SimpleNamespace(idle_seconds=lambda: 0.0, activity="", step=1)
    bulletin = SlowBulletin()
    watchdog = Watchdog(bulletin, observer, 1, 60.0, lambda failure: False)  # type: ignore[arg-type]
    watchdog.start()
    while not bulletin.is_inside:
        time.sleep(0.01)
    watchdog.stop()
    assert not bulletin.is_inside
    assert "smp-watchdog" not in [thread.name for thread in threading.enumerate()]
