"""Ranks that are killed are started again and go on, also fewer of them, as if nothing had been."""

from pathlib import Path

import pytest

from tests import soak

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.timeout(400)]

RANKS = 2
NUM_STEPS = 60


def test_a_job_with_killed_ranks_has_the_losses_of_an_undisturbed_one(tmp_path: Path) -> None:
    folder, reference = tmp_path / "soak", tmp_path / "reference"
    for each in (folder, reference):
        each.mkdir()
        soak.write_config(each, RANKS)
    soak.finish(reference, RANKS, NUM_STEPS)
    expected = soak.read_losses(reference)
    assert sorted(expected) == list(range(1, NUM_STEPS + 1))

    num_kills = soak.soak(folder, RANKS, 60.0, 0.5, NUM_STEPS // 2, 1)
    assert num_kills == 1
    soak.finish(folder, RANKS // 2, NUM_STEPS)  # on one rank, which the config allows
    assert soak.read_losses(folder) == expected
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names <= {"newest", *(f"step{step}_partial" for step in range(NUM_STEPS + 1))} | {
        f"step{step}" for step in range(NUM_STEPS + 1)
    }
