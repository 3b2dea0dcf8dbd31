"""Ranks that are killed are started again and go on, also fewer of them, as if nothing had been."""

import re
import subprocess
from pathlib import Path

import pytest

from tests import soak

LEAST_KILLS = 2  # of ranks; a busy machine has time for few


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_with_killed_ranks_has_the_losses_of_an_undisturbed_one(
    soak_job: subprocess.Popen[str],
) -> None:
    """Three minutes of training, which began with the first test."""
    printed, _ = soak_job.communicate()
    print(printed)
    assert soak_job.returncode == 0, printed
    num_steps, num_kills = re.findall(r"(\d+) steps, (\d+) ranks killed", printed)[0]
    assert int(num_kills) >= LEAST_KILLS
    assert int(num_steps) > int(num_kills) * soak.MOST_AGAIN


def test_the_command_line_has_a_soak_by_hand_as_its_default() -> None:
    assert vars(soak.parse([])) == {"seconds": 1800.0, "every": 600, "ranks": 4}
    line = soak.parse(["--seconds", "2.5", "--every", "10", "--ranks", "2"])
    assert vars(line) == {"seconds": 2.5, "every": 10, "ranks": 2}


def write_memory(folder: Path, kilobytes_per_step: float) -> None:
    """Writes what two processes of each of two ranks would, of which one leaks."""
    lines = [
        f"{rank} {10 * life + rank} {step} {300_000 + int(leak * step)} {200 * life + step}"
        for life in range(2)
        for step in range(1, 200)
        for rank, leak in ((0, 0.0), (1, kilobytes_per_step))
    ]
    (folder / "memory").write_text("\n".join(lines))


def test_a_leak_is_seen_though_processes_start_again(tmp_path: Path) -> None:
    write_memory(tmp_path, 100.0)
    samples = soak.read_memory(tmp_path)
    grown = soak.growth(samples)
    assert grown[0] == 1.0
    assert grown[1] > soak.GROWTH
    header, *rows = soak.memory_table(samples, 4).splitlines()
    assert header.split() == ["seconds", "rank", "0", "rank", "1"]
    assert len(rows) == 4


def test_ranks_whose_processes_were_short_are_not_called_flat(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("0 1 1 300000 0.5\n0 1 2 300000 0.6")
    assert soak.growth(soak.read_memory(tmp_path)) == {}


def test_steps_that_were_taken_again_are_counted(tmp_path: Path) -> None:
    (tmp_path / "losses").write_text("1 a\n2 b\n3 c\n4 d\n3 c\n4 d\n5 e\n5 e\n")
    assert soak.most_steps_again(tmp_path) == 2
    assert soak.read_losses(tmp_path)[3] == {"c"}


def test_what_is_no_part_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    whole = tmp_path / "checkpoints" / "step5_partial"
    whole.mkdir(parents=True)
    for name in ("index.json", "run_state.pt", "model_0_0_0.safetensors"):
        (whole / name).touch()
    (tmp_path / "checkpoints" / "newest").touch()
    assert soak.leftovers(tmp_path) == []
    (whole / ".index.json.new").touch()
    (tmp_path / "checkpoints" / "step10_partial.incomplete").mkdir()
    assert sorted(soak.leftovers(tmp_path)) == [
        "step10_partial.incomplete",
        "step5_partial/.index.json.new",
    ]
