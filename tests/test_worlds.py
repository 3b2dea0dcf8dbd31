"""Tests of the ranks that other tests run on."""

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from smp_runtime.errors import PeerError
from tests.worlds import RankFailedError, run_world, run_world_expecting_failure

pytestmark = pytest.mark.world


def test_returns_results_in_the_order_of_ranks() -> None:
    offset = torch.tensor([100.0])

    def body(factor: int) -> torch.Tensor:
        time.sleep(0.05 * (2 - dist.get_rank()))
        return offset + factor * dist.get_rank()

    assert [value.item() for value in run_world(3, body, 10)] == [100.0, 110.0, 120.0]


def test_sets_the_environment_of_a_launcher() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    world = run_world(2, lambda: [os.environ[name] for name in names])
    assert world == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]
    assert "RANK" not in os.environ


def test_ranks_talk_and_differentiate() -> None:
    def body() -> list[float]:
        weight = torch.ones(3, requires_grad=True)
        torch.autograd.backward((weight * (dist.get_rank() + 1)).sum())
        assert weight.grad is not None
        dist.all_reduce(weight.grad)
        return weight.grad.tolist()

    # A backward in this process does not spoil theirs.
    torch.autograd.backward(torch.ones(1, requires_grad=True).sum())
    assert run_world(2, body) == [[3.0] * 3] * 2


def test_a_rank_that_ends_early_takes_no_message_with_it() -> None:
    def body() -> float:
        if dist.get_rank() == 0:
            dist.send(torch.full((1 << 20,), 2.0), 1)
            return 0.0
        dist.isend(torch.ones(1), 0)  # stays unread
        time.sleep(0.2)
        received = torch.empty(1 << 20)
        dist.recv(received, 0)
        return received.mean().item()

    assert run_world(2, body) == [0.0, 2.0]


def test_carries_a_large_result() -> None:
    results = run_world(2, lambda: torch.arange(1 << 20))
    assert all(torch.equal(result, torch.arange(1 << 20)) for result in results)


def test_raises_the_first_failure_with_its_rank() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            raise KeyError("the cause")
        dist.recv(torch.empty(1), 1)

    with pytest.raises(KeyError, match="the cause") as caught:
        run_world(2, body)
    (note,) = caught.value.__notes__
    assert note.startswith("On rank 1 of 2:")
    assert "in body" in note


def test_prefers_the_cause_to_its_echo() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            raise PeerError("rank 1 failed", rank=1)
        time.sleep(0.3)
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        run_world(2, body)


def test_an_exception_that_cannot_travel_is_told_in_words() -> None:
    class LocalError(Exception):
        pass

    def body() -> None:
        raise LocalError("only known there")

    with pytest.raises(RankFailedError, match="LocalError: only known there"):
        run_world(1, body)


def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        run_world(1, lambda: lambda: None)


def test_names_a_rank_that_dies() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    start = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 of 2 ended with code -9"):
        run_world(2, body)
    assert time.monotonic() - start < 10


def test_shows_what_the_ranks_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run_world(2, lambda: print("hello from", dist.get_rank()))
    assert capsys.readouterr().out == "[0] hello from 0\n[1] hello from 1\n"


def wait_for_ever() -> None:
    """Has a name that is found in a stack."""
    dist.recv(torch.empty(1), 0)


def test_a_timeout_shows_the_stacks_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pid_file = tmp_path / "pid"

    def body() -> None:
        if dist.get_rank() == 1:
            pid_file.write_text(str(os.getpid()))
            wait_for_ever()

    with pytest.raises(TimeoutError, match="not finished after 0.5 s: rank 1 of 2") as caught:
        run_world(2, body, timeout=0.5)
    assert "in wait_for_ever" in str(caught.value)
    pid = int(pid_file.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(tmp_path.iterdir()) == [pid_file]


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")")[-1].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tie processes")
def test_a_killed_session_leaves_no_rank_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # what a killed session cannot tidy up
    pid_file = tmp_path / "pid"

    def body() -> None:
        (tmp_path / "new").write_text(str(os.getpid()))
        (tmp_path / "new").rename(pid_file)
        time.sleep(30)

    session = get_context("fork").Process(target=run_world, args=(1, body))
    session.start()
    try:
        wait_until(pid_file.exists)
    finally:
        session.kill()
        session.join()
    wait_until(lambda: not is_running(int(pid_file.read_text())))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_expected_failures_are_described() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            raise ValueError("no good")
        if dist.get_rank() == 1:
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    first, second, third = run_world_expecting_failure(3, body, timeout=20)
    assert (first.exit_code, second.exit_code, third.exit_code) == (1, 3, -9)
    assert first.exception_text == "ValueError: no good"
    assert "Traceback" in first.stderr_text
    assert "ValueError: no good" in first.stderr_text
    assert second.exception_text == "SystemExit: 3"
    assert third.exception_text == ""
    assert 0 < first.seconds < 20


def test_an_expected_failure_that_does_not_come_is_one() -> None:
    with pytest.raises(AssertionError, match="none of 2 ranks failed"):
        run_world_expecting_failure(2, lambda: None)


def test_an_expected_failure_that_hangs_is_a_timeout() -> None:
    with pytest.raises(TimeoutError, match="rank 0, 1 of 2"):
        run_world_expecting_failure(2, lambda: time.sleep(30), timeout=0.5)
