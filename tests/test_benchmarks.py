"""The benchmarks run, and their emulation of other schedules agrees with the simulation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smp_runtime.planning.schedule import Kind, plan
from smp_runtime.planning.simulation import simulate

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("rank_of", "m"), [((0, 1), 4), ((0, 1, 2), 5), ((0, 1, 0, 1), 4), ((0, 1, 0, 1), 8)]
)
def test_emulated_seconds_are_those_of_the_simulation(
    rank_of: tuple[int, ...], m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    from emulation import emulated_seconds

    order = plan(rank_of, m, active=m, policy="interleaved")
    costs = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.5}
    details = []
    for rank in sorted(set(rank_of)):
        cpu = 100.0 * rank  # where a rank's CPU time begins says nothing
        actions = [("", 0, 0, cpu)]
        for action in order.actions(rank):
            cpu += costs[action.kind]
            actions.append((str(action.kind), action.stage, action.microbatch, cpu))
        details.append({"actions": [*actions, ("", 0, 0, cpu + 0.5)]})
    timeline = simulate(order, forward_cost=1.0, backward_cost=2.5)
    assert emulated_seconds(details) == pytest.approx(timeline.makespan + 0.5)


def test_who_may_not_fit_into_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    from contestants import has_room

    assert has_room([], 1)
    assert has_room([40, 20], 91)
    assert not has_room([40, 20], 90)


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.timeout(240)
def test_the_benchmark_compares_itself_with_the_others() -> None:
    options = (
        "--sections pipeline --preset tiny --pairs 1 --steps 1 --microbatches 4 --vocabularies 64"
    )
    done = subprocess.run(
        [sys.executable, "examples/benchmarks", *options.split(), "--only", "this,torch 1F1B"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal losses" in done.stdout
    assert "this runtime against torch 1F1B" in done.stdout
    assert "this runtime, looped: where the time goes" in done.stdout


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.timeout(240)
def test_replicas_are_compared_with_torchs() -> None:
    options = "--sections few-tokens --only overlapped --preset tiny --pairs 1 --steps 1"
    done = subprocess.run(
        [sys.executable, "examples/benchmarks", *options.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of the reductions' time lies within the backward pass") == 2
    assert "this runtime, never" in done.stdout
