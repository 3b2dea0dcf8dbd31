"""A job that is saved and resumed goes on as if nothing had happened, at any layout of ranks."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import smp_runtime as smp
from tests.saving_job import Job, Layout, on_every_rank, same_everywhere
from tests.sixteen_bit import BF16, FP16

BEFORE, AFTER = 3, 10
COPIED = (("tied_weights", "copy"),)
TOGETHER = (("tied_weights", "together"),)
SHARDED = (("shard_optimizer_state", True),)
LAYOUTS = [
    Layout(2, 1, COPIED),
    Layout(1, 2, SHARDED),
    Layout(2, 2, (*TOGETHER, *SHARDED, ("overlap_parameter_gather", True))),
    Layout(4, 1, COPIED),
]

pytestmark = pytest.mark.world


def train_and_save(layout: Layout, path: Path, dropout: float) -> list[float]:
    """Returns the losses of the steps after the checkpoint, uninterrupted."""

    def body(job: Job) -> list[float]:
        job.train(BEFORE)
        job.save(path)
        return job.train(AFTER)

    return same_everywhere(on_every_rank(layout, body, dropout=dropout))


def resume_and_train(layout: Layout, path: Path, dropout: float) -> list[float]:
    def body(job: Job) -> list[float]:
        torch.rand(5)  # the script's own draws, in other places than before
        job.resume(path)
        return job.train(AFTER)

    return same_everywhere(on_every_rank(layout, body, dropout=dropout, seed=4))


@pytest.mark.parametrize("saved_at", LAYOUTS, ids=str)
def test_any_layout_goes_on_at_any_other(saved_at: Layout, tmp_path: Path) -> None:
    expected = train_and_save(saved_at, tmp_path, dropout=0.0)
    for resumed_at in [*LAYOUTS, Layout(2, 2), Layout(1)]:
        found = resume_and_train(resumed_at, tmp_path, dropout=0.0)
        if resumed_at == saved_at:
            assert found == expected
        assert found == pytest.approx(expected, rel=1e-5), resumed_at


@pytest.mark.parametrize("settings", [(*BF16.items(),), (*FP16.items(), *SHARDED)], ids=str)
def test_master_weights_and_the_loss_scale_go_on(settings: Any, tmp_path: Path) -> None:
    layout = Layout(2, 2, settings)
    expected = train_and_save(layout, tmp_path, dropout=0.0)
    assert resume_and_train(layout, tmp_path, dropout=0.0) == expected


@pytest.mark.parametrize("saved_at", [Layout(1), Layout(4, 1, COPIED)], ids=str)
def test_random_streams_go_on_at_any_pipeline_degree(saved_at: Layout, tmp_path: Path) -> None:
    expected = train_and_save(saved_at, tmp_path, dropout=0.5)
    for resumed_at in (saved_at, Layout(2, 1, TOGETHER)):
        found = resume_and_train(resumed_at, tmp_path, dropout=0.5)
        if resumed_at == saved_at:
            assert found == expected
        assert found == pytest.approx(expected, rel=1e-5), resumed_at


def test_random_generators_of_every_rank_go_on(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(np.random.rand())]

    def save(job: Job) -> list[float]:
        torch.manual_seed(50 + smp.rank())
        random.seed(60 + smp.rank())
        np.random.seed(70 + smp.rank())
        draw()
        job.save(tmp_path)
        return draw()

    def resume(job: Job) -> list[float]:
        job.resume(tmp_path)
        return draw()

    expected = on_every_rank(Layout(2, 2), save)
    assert on_every_rank(Layout(2, 2), resume) == expected
    assert len({tuple(drawn) for drawn in expected}) == 4
    assert on_every_rank(Layout(1, 2), resume) == [expected[0], expected[2]]


def test_without_the_optimizer_the_job_goes_on_otherwise(tmp_path: Path) -> None:
    expected = train_and_save(Layout(1), tmp_path, dropout=0.0)

    def body(job: Job) -> list[float]:
        job.resume(tmp_path, load_optimizer=False)
        return job.train(AFTER)

    (found,) = on_every_rank(Layout(1), body, dropout=0.0)
    assert found[0] == expected[0]
    assert found[1:] != pytest.approx(expected[1:], rel=1e-3)


def test_a_job_can_save_before_its_first_step_and_after_its_partitioning_resume(
    tmp_path: Path,
) -> None:
    def body(job: Job) -> list[float]:
        job.save(tmp_path, "begin")
        losses = job.train(2)
        job.resume(tmp_path, "begin")
        assert job.train(2) == losses
        return losses

    same_everywhere(on_every_rank(Layout(2), body))


def test_settings_of_groups_and_the_users_content_come_back(tmp_path: Path) -> None:
    def save(job: Job) -> None:
        job.train(3)
        job.save(tmp_path)

    def resume(job: Job) -> list[float]:
        job.resume(tmp_path)
        assert job.step == 3
        return [group["lr"] for group in job.optimizer.param_groups]

    on_every_rank(Layout(2), save)
    assert on_every_rank(Layout(1), resume) == [[pytest.approx(0.007)] * 2]


@pytest.mark.parametrize("trained", ["embedding", "blocks.2", "norm"])
def test_ranks_with_nothing_to_train_save_and_resume(trained: str, tmp_path: Path) -> None:
    def freeze(job: Job) -> None:
        for name, parameter in job.model.named_parameters():
            parameter.requires_grad_(name.startswith(trained))
        few = [p for p in job.model.parameters() if p.requires_grad]
        job.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(few, lr=1e-2))
        job.scheduler = StepLR(job.optimizer, 2, 0.7)

    def save(job: Job) -> list[float]:
        freeze(job)
        job.train(2)
        job.save(tmp_path)
        return job.train(2)

    def resume(job: Job) -> list[float]:
        freeze(job)
        job.resume(tmp_path)
        return job.train(2)

    expected = same_everywhere(on_every_rank(Layout(2), save))
    assert same_everywhere(on_every_rank(Layout(2), resume, seed=9)) == expected
    assert same_everywhere(on_every_rank(Layout(4), resume, seed=9)) == pytest.approx(expected)


def test_only_so_many_checkpoints_are_kept(tmp_path: Path) -> None:
    def body(job: Job) -> None:
        for _ in range(4):
            job.train(1)
            job.save(tmp_path, num_kept_partial_checkpoints=2)
        job.save(tmp_path, "step4", num_kept_partial_checkpoints=2)

    on_every_rank(Layout(2), body)
    assert {path.name for path in tmp_path.iterdir()} == {
        "newest", "step3_partial", "step4_partial"
    }  # fmt: skip
    assert (tmp_path / "newest").read_text() == "step4_partial"
