"""State dicts of an optimizer over several ranks are those of a plain one."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import smp_runtime as smp
from smp_runtime.errors import CheckpointMismatchError
from tests.saving_job import Job, Layout, on_every_rank, same_everywhere
from tests.sixteen_bit import FP16
from tests.worlds import run_world_expecting_failure

pytestmark = pytest.mark.world

SHARDED = (("shard_optimizer_state", True),)


def facts(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict with lists in the place of tensors."""
    state = {
        number: {kind: torch.as_tensor(value).tolist() for kind, value in values.items()}
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


@pytest.mark.parametrize("layout", [Layout(2), Layout(2, 2, SHARDED)], ids=str)
def test_the_whole_state_goes_from_any_layout_to_any_other(layout: Layout) -> None:
    def save(job: Job) -> tuple[Any, Any, list[float]]:
        job.train(2)
        states = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
        return *states, job.train(2)

    saved = on_every_rank(layout, save, dropout=0.0)
    model_state, optimizer_state, expected = saved[0]
    for _, other, losses in saved:
        assert facts(other) == facts(optimizer_state) and losses == expected

    def plain(job: Job) -> None:
        """Has the same form as torch's own."""
        job.train(2)
        mine = torch.optim.Optimizer.state_dict(job.optimizer)
        for number, values in mine["state"].items():
            assert values.keys() == optimizer_state["state"][number].keys()
            for kind, value in values.items():
                found = optimizer_state["state"][number][kind]
                torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)
        assert list(mine["state"]) == list(optimizer_state["state"])
        groups = [{**group, "lr": 0, "initial_lr": 0} for group in mine["param_groups"]]
        assert groups == [
            {**group, "lr": 0, "initial_lr": 0} for group in optimizer_state["param_groups"]
        ]

    on_every_rank(Layout(1), plain, dropout=0.0)

    def load(job: Job) -> list[float]:
        job.model.load_state_dict(model_state)
        job.optimizer.load_state_dict(optimizer_state)
        job.scheduler.last_epoch = job.step = 2
        return job.train(2)

    for other in (layout, Layout(4), Layout(1)):
        found = same_everywhere(on_every_rank(other, load, dropout=0.0, seed=8))
        assert found == pytest.approx(expected, rel=1e-5)


def test_parts_are_joined() -> None:
    def body(job: Job) -> list[float]:
        job.train(2)
        parts = copy.deepcopy((job.model.local_state_dict(), job.optimizer.local_state_dict()))
        numbers = parts[1]["state"].keys()
        assert parts[1]["_smp_is_partial"] and 0 < len(numbers) < 19
        expected = job.train(2)
        job.model.load_state_dict(parts[0])
        job.optimizer.load_state_dict(parts[1])
        job.scheduler.last_epoch = job.step = 2
        assert job.train(2) == expected
        return expected

    same_everywhere(on_every_rank(Layout(2), body, dropout=0.0))


def test_what_does_not_fit_is_refused() -> None:
    def body(job: Job) -> None:
        state = job.optimizer.state_dict()
        with pytest.raises(CheckpointMismatchError, match="other numbers of parameters"):
            job.optimizer.load_state_dict({**state, "param_groups": state["param_groups"][:1]})

    on_every_rank(Layout(2), body)
    assert smp.is_initialized() is False


@pytest.mark.parametrize(
    "layout", [Layout(2, 2, SHARDED), Layout(1, 2, (*SHARDED, *FP16.items()))], ids=str
)
def test_each_rank_saves_and_loads_its_own_shard(layout: Layout, tmp_path: Path) -> None:
    model, optimizer = str(tmp_path / "model"), str(tmp_path / "optimizer")

    def save(job: Job) -> list[float]:
        job.train(2)
        if smp.rdp_rank() == 0:
            smp.save(job.model.local_state_dict(), model)
        shard = job.optimizer.local_state_dict(gather_if_shard=False)
        whole = job.optimizer.local_state_dict()
        for number, values in shard["state"].items():
            size = whole["state"][number]["exp_avg"].numel()
            assert 0 < values["exp_avg"].numel() <= -(-size // 2)
        smp.save(shard, optimizer, v3=True)
        return job.train(3)

    def load(job: Job) -> list[float]:
        job.model.load_state_dict(smp.load(model))
        by_hand = torch.load(f"{optimizer}_{smp.pp_rank()}_0_{smp.rdp_rank()}")
        job.optimizer.load_state_dict(by_hand if smp.rank() else smp.load(optimizer))
        job.scheduler.last_epoch = job.step = 2
        return job.train(3)

    expected = same_everywhere(on_every_rank(layout, save, dropout=0.0))
    assert same_everywhere(on_every_rank(layout, load, dropout=0.0, seed=9)) == expected
    files = {f"optimizer_{pp}_0_{rdp}" for pp in range(layout.pp) for rdp in range(2)}
    assert {path.name for path in tmp_path.glob("optimizer*")} == files


def test_a_shard_of_another_rank_or_layout_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "optimizer")

    def save(job: Job) -> None:
        job.train(1)
        shard = job.optimizer.local_state_dict(gather_if_shard=False)
        smp.save(shard, file, v3=True)
        smp.save(shard, f"{file}{smp.rank()}", partial=False)
        smp.barrier()
        other = smp.load(f"{file}{1 - smp.rank()}", partial=False)
        message = f"replica {1 - smp.rank()} of 2 with .*replica {smp.rank()} of 2 with .*which wo"
        with pytest.raises(CheckpointMismatchError, match=message):
            job.optimizer.load_state_dict(other)

    on_every_rank(Layout(1, 2, SHARDED), save)

    def load(job: Job) -> None:
        shard = smp.load(file)
        message = (
            r"replica . of 2 .*and this is an optimizer that is not sharded; .*save_checkpoint"
        )
        with pytest.raises(CheckpointMismatchError, match=message):
            job.optimizer.load_state_dict(shard)

    for layout in (Layout(1), Layout(1, 2)):
        on_every_rank(layout, load)

    def load_more(_: Job) -> None:
        if smp.rdp_rank() > 1:
            with pytest.raises(CheckpointMismatchError, match="2 replicas.*save_checkpoint"):
                smp.load(file)

    on_every_rank(Layout(1, 4, SHARDED), load_more)


def test_a_shard_of_another_partition_is_refused() -> None:
    def save(job: Job) -> dict[str, Any]:
        job.train(1)
        return copy.deepcopy(job.optimizer.local_state_dict(gather_if_shard=False))

    parts = on_every_rank(Layout(2, 2, SHARDED), save, dropout=0.0)

    by_hand = (*SHARDED, ("auto_partition", False), ("default_partition", 1))

    def load() -> None:
        job = Job(Layout(2, 2, by_hand), dropout=0.0)
        smp.set_partition(job.model.get_module().blocks[0], 0)
        job.optimizer.load_state_dict(parts[smp.rank()])
        job.train(1)

    for outcome in run_world_expecting_failure(4, load):
        assert outcome.exit_code != 0
        assert "the model was partitioned in another way" in outcome.stderr_text
