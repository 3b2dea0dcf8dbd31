"""`smp.save` and `smp.load`, and state dicts that come in parts."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import smp_runtime as smp
from smp_runtime.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsafeContentError,
    UsageError,
)
from tests.saving_job import Job, Layout, on_every_rank, same_everywhere

pytestmark = pytest.mark.world


def test_parts_are_named_by_rank_and_found_again(tmp_path: Path) -> None:
    file = str(tmp_path / "model.pt")

    def body(_: Job) -> list[Any]:
        loaded = []
        for v3 in (False, True):
            if v3 or smp.dp_rank() == 0:
                smp.save({"rank": torch.tensor(smp.rank())}, file, v3=v3)
            smp.barrier()
            loaded.append(smp.load(file)["rank"].item())
            by_hand = f"{file}_{smp.pp_rank()}_0" + (f"_{smp.rdp_rank()}" if v3 else "")
            assert torch.load(by_hand)["rank"] == loaded[-1]
        return loaded

    assert on_every_rank(Layout(2, 2), body) == [[0, 0], [1, 1], [0, 2], [1, 3]]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("model.pt_0_0", "model.pt_1_0"),
        *("model.pt_0_0_0", "model.pt_1_0_0", "model.pt_0_0_1", "model.pt_1_0_1"),
    }


def test_state_that_was_saved_in_parts_is_loaded_whole_before_the_partitioning(
    tmp_path: Path,
) -> None:
    file = str(tmp_path / "model.pt")

    def save(job: Job) -> list[float]:
        job.train(2)
        smp.save(job.model.local_state_dict(), file)
        smp.save(job.model.state_dict(), str(tmp_path / f"full{smp.rank()}"), partial=False)
        return job.train(1)

    def load(job: Job) -> list[float]:
        job.model.load_state_dict(smp.load(file))
        job.step = 2
        return job.train(1)

    def load_at_once(job: Job) -> list[float]:
        job.train(1)
        job.model.load_state_dict(smp.load(file), same_partition_load=True)
        job.step = 2
        return job.train(1)

    def load_full(job: Job) -> list[float]:
        job.model.load_state_dict(smp.load(str(tmp_path / "full1"), partial=False))
        job.step = 2
        return job.train(1)

    expected = same_everywhere(on_every_rank(Layout(2), save, dropout=0.0))
    for resume in (load, load_at_once, load_full):
        assert same_everywhere(on_every_rank(Layout(2), resume, dropout=0.0, seed=9)) == expected
    (alone,) = on_every_rank(Layout(1), load_full, dropout=0.0, seed=9)
    assert alone == pytest.approx(expected, rel=1e-5)


class Code:
    def __reduce__(self) -> Any:
        return (print, ("this must not run",))


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    def body(_: Job) -> None:
        file = str(tmp_path / "model.pt")
        with pytest.raises(
            CheckpointNotFoundError, match="there are no files .*model.pt_<pp_rank>"
        ):
            smp.load(file)
        with pytest.raises(CheckpointNotFoundError, match="there is no file .*model.pt"):
            smp.load(file, partial=False)
        smp.save({"weight": torch.ones(3)}, file)
        whole = (tmp_path / "model.pt_0_0").read_bytes()
        for name in ("model.pt_1_0", "model.pt_0_0_0"):
            (tmp_path / name).write_bytes(whole)
        with pytest.raises(CheckpointMismatchError, match="pipeline degree 2, and this job has 1"):
            smp.load(file)
        (tmp_path / "cut").write_bytes(whole[:-40])
        with pytest.raises(CheckpointDamagedError, match="cut is truncated"):
            smp.load(str(tmp_path / "cut"), partial=False)
        smp.save(Code(), str(tmp_path / "code"), partial=False)
        with pytest.raises(UnsafeContentError, match="code holds pickled objects.*weights_only"):
            smp.load(str(tmp_path / "code"), partial=False)
        (tmp_path / "bare").write_bytes(pickle.dumps(Code(), protocol=2))
        with pytest.raises(UnsafeContentError):
            smp.load(str(tmp_path / "bare"), partial=False)
        with pytest.raises(UsageError, match="must be a string"):
            smp.save({}, tmp_path)  # type: ignore[arg-type]

    on_every_rank(Layout(1), body)
