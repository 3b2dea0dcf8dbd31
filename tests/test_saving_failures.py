"""What can go wrong while saving and resuming is an error of its own, on every rank."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smp_runtime as smp
from smp_runtime.errors import SMPError
from smp_runtime.saving import checkpoint_writer, durable_files
from tests.killed_saves import kill_and_look
from tests.saving_job import Job, Layout, on_every_rank

pytestmark = pytest.mark.world

TWO = Layout(2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints, saved on two ranks."""
    path = tmp_path_factory.mktemp("saved")

    def body(job: Job) -> None:
        for _ in range(2):
            job.train(1)
            job.save(path)

    on_every_rank(TWO, body)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(saved, tmp_path / "copy")


def errors_of(call: Callable[[Job], Any], layout: Layout = TWO) -> list[tuple[str, str]]:
    """Returns kind and text of the error that a call raises on each rank."""

    def body(job: Job) -> tuple[str, str]:
        try:
            call(job)
        except SMPError as error:
            return type(error).__name__, str(error)
        return "", ""

    return on_every_rank(layout, body)


def check(call: Callable[[Job], Any], kind: str, *texts: str) -> None:
    """Asserts that a call raises an error of a kind on every rank, whose text has some parts."""
    for found, text in errors_of(call):
        assert found == kind, text
        assert all(part in text for part in texts), text


def part(path: Path, kind: str) -> Path:
    return sorted((path / "step2_partial").glob(f"{kind}*.safetensors"))[-1]


def test_a_folder_that_is_not_there_or_empty(tmp_path: Path) -> None:
    absent, empty = tmp_path / "absent", tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/step1_partial").mkdir()
    check(lambda job: job.resume(absent), "CheckpointNotFoundError", "there is no folder")
    check(lambda job: job.resume(empty), "CheckpointNotFoundError", "is empty")
    check(lambda job: job.resume(tmp_path / "odd"), "CheckpointNotFoundError", "no file `newest`")
    check(
        lambda job: job.resume(tmp_path / "odd", "step1"),
        "CheckpointIncompleteError",
        "step1_partial is empty",
    )


def test_a_tag_that_is_not_there(saved: Path) -> None:
    check(
        lambda job: job.resume(saved, "step9"),
        "CheckpointNotFoundError",
        "no checkpoint 'step9'",
        "'step1', 'step2'",
    )


def test_an_interrupted_save(copy: Path) -> None:
    (copy / "step2_partial").rename(copy / "step2_partial.incomplete")
    check(
        lambda job: job.resume(copy, "step2"),
        "CheckpointIncompleteError",
        "saving the checkpoint 'step2'",
        "was interrupted",
        "oldest first: 'step1'",
    )


def test_a_missing_part(copy: Path) -> None:
    file = part(copy, "optimizer")
    file.unlink()
    check(lambda job: job.resume(copy), "CheckpointIncompleteError", "lacks", file.name)
    (copy / "step2_partial/index.json").unlink()
    check(lambda job: job.resume(copy), "CheckpointIncompleteError", "has no index.json", "'step1'")


def test_a_truncated_part(copy: Path) -> None:
    file = part(copy, "model")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-10])
    check(
        lambda job: job.resume(copy),
        "CheckpointDamagedError",
        f"{file.name} has {size - 10} bytes and should have {size}",
    )
    (copy / "step2_partial/index.json").write_text("{")
    check(lambda job: job.resume(copy), "CheckpointDamagedError", "is no index")


def test_parts_of_two_checkpoints(copy: Path) -> None:
    file = part(copy, "model")
    shutil.copy(copy / "step1_partial" / file.name, file)
    check(lambda job: job.resume(copy), "CheckpointDamagedError", "belongs to another checkpoint")


def test_another_format(copy: Path) -> None:
    index = copy / "step2_partial/index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "format": 9}))
    check(lambda job: job.resume(copy), "CheckpointDamagedError", "has format 9")


class Other(nn.Module):
    """Has one layer of another width, lacks a frozen parameter's module, and has one more."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.more = nn.Linear(8, 8)

    def forward(self, tokens: Any) -> Any:
        return self.more(self.norm(self.embedding(tokens)))


def test_another_model(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.saving_job.Language", Other)
    check(
        lambda job: job.resume(saved),
        "CheckpointMismatchError",
        "embedding.weight has shape (11, 8) in the checkpoint and (12, 8) in the model",
        "missing in the checkpoint: more.bias, more.weight",
        "not in the model: blocks.0.calls",
    )
    check(lambda job: job.resume(saved, strict=False), "CheckpointMismatchError", "has shape")


def test_another_optimizer(saved: Path) -> None:
    def one_group(job: Job) -> None:
        smp.DistributedOptimizer(torch.optim.AdamW(job.model.parameters()))
        job.resume(saved)

    def other_groups(job: Job) -> None:
        first, *others = job.model.parameters()
        smp.DistributedOptimizer(torch.optim.AdamW([{"params": [first]}, {"params": others}]))
        job.resume(saved)

    check(one_group, "CheckpointMismatchError", "has 1 parameter groups and the checkpoint 2")
    check(other_groups, "CheckpointMismatchError", "is in parameter group 1 and was in parameter")


class Code:
    def __reduce__(self) -> Any:
        return (print, ("this must not run",))


def test_pickled_code_is_refused_unless_allowed(tmp_path: Path, capfd: Any) -> None:
    def save(job: Job) -> None:
        smp.save_checkpoint(tmp_path, "code", user_content=Code())

    on_every_rank(TWO, save)
    check(
        lambda job: smp.resume_from_checkpoint(tmp_path),
        "UnsafeContentError",
        "user_content.pt holds pickled objects",
        "weights_only=False",
    )
    assert (
        errors_of(lambda job: smp.resume_from_checkpoint(tmp_path, weights_only=False))
        == [("", "")] * 2
    )


def test_ranks_that_do_not_call(tmp_path: Path) -> None:
    layout = Layout(1, 3, (("timeout", 1.0),))

    def call(job: Job) -> None:
        if smp.rank() == 0:
            job.save(tmp_path)
        else:
            time.sleep(2.0)

    (kind, text), *_ = errors_of(call, layout)
    assert kind == "WaitTimeoutError"
    assert "smp.save_checkpoint" in text and "ranks 1, 2 to call it" in text


def test_ranks_that_make_other_calls(saved: Path, tmp_path: Path) -> None:
    def call(job: Job) -> None:
        if smp.rank() == 0:
            job.save(tmp_path)
        else:
            job.resume(saved)

    check(call, "UsageError", "every rank must make the same calls")


def test_a_rank_in_a_step_learns_that_another_one_saves(tmp_path: Path) -> None:
    def call(job: Job) -> None:
        job.train(1)
        if smp.rank() == 0:
            job.save(tmp_path)
        else:
            job.train(1)

    (_, first), (kind, second) = errors_of(call)
    assert kind == "UsageError" and "rank 0 called smp.save_checkpoint, while rank 1" in second
    assert "rank 0 called smp.save_checkpoint" in first


def test_ranks_with_different_tags(tmp_path: Path) -> None:
    check(lambda job: job.save(tmp_path, f"tag{smp.rank()}"), "UsageError", "'tag1' on rank 1")
    assert not list(tmp_path.iterdir())
    check(lambda job: job.save(tmp_path, "a/b"), "UsageError", "has to be the name of one folder")


def full_disk() -> None:
    """Lets this process find the disk full from now on."""

    def flush(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    durable_files.os.fsync = flush


@pytest.mark.parametrize("full_rank", [0, 1])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk(tmp_path: Path, full_rank: int, in_background: bool) -> None:
    def call(job: Job) -> None:
        job.train(1)
        job.save(tmp_path)
        if smp.rank() == full_rank:
            full_disk()
        job.train(1)
        future = job.save(tmp_path, async_save=in_background)
        if future is not None:
            future.result()

    for rank, (kind, text) in enumerate(errors_of(call)):
        assert kind == "CheckpointWriteError", text
        assert "No space left on device" in text and "free space" in text
        assert (rank == full_rank) != (f"failed on rank {full_rank}" in text)
    assert {path.name for path in tmp_path.iterdir()} == {"step1_partial", "newest"}
    assert errors_of(lambda job: job.resume(tmp_path)) == [("", "")] * 2


def test_saving_in_the_background_saves_the_state_of_the_call(tmp_path: Path) -> None:
    def save(job: Job) -> list[float]:
        job.train(2)
        go = threading.Event()
        native = checkpoint_writer._write_part

        def held_up(*args: Any) -> Any:
            go.wait(20)
            return native(*args)

        checkpoint_writer._write_part = held_up
        future = job.save(tmp_path, async_save=True)
        losses = job.train(2)
        assert not future.done() and not (tmp_path / "newest").exists()
        go.set()
        assert future.result(20) is None
        return losses

    def resume(job: Job) -> list[float]:
        job.resume(tmp_path)
        return job.train(2)

    expected = on_every_rank(TWO, save)
    assert on_every_rank(TWO, resume) == expected


def test_a_failure_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    def call(job: Job) -> None:
        job.train(1)
        full_disk()
        job.save(tmp_path, async_save=True)
        job.save(tmp_path)

    check(call, "CheckpointWriteError", "could not be written")


def test_a_job_that_is_killed_while_it_saves_can_always_resume(tmp_path: Path) -> None:
    numbers = kill_and_look(tmp_path / "saved", num_kills=3, seed=1)
    assert numbers[-1] > 0
