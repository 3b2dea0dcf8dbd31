"""The benchmarks run, and their emulation of other schedules agrees with the simulation."""

import io
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

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


class Contestant:
    """Takes memory, without any ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_running = True

    def resident_bytes(self) -> int:
        return self.size

    def for_another_heat(self) -> "Contestant":
        return self

    def close(self) -> None:
        self.is_running = False


def heats_of(
    monkeypatch: pytest.MonkeyPatch, groups: list[list[str]], limit: int, **sizes: int
) -> tuple[list[list[str]], list[str]]:
    """Returns who runs in each heat, and who is left out; all take 10 bytes, or `sizes`."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    from heats import run_heats

    references = {"one": Contestant(10), "two": Contestant(10)}
    heats, left_out = run_heats(
        references,
        groups,
        start=lambda name, teams: Contestant(sizes.get(name, 10)),
        race=lambda teams: None,
        limit=limit,
    )
    for teams in heats:
        running = [name for name, team in teams.items() if team.is_running]
        assert running == ["one", "two"]
    return [list(teams) for teams in heats], left_out


def test_all_that_fit_into_memory_share_a_heat(monkeypatch: pytest.MonkeyPatch) -> None:
    # e needs 15. The six before it have taken 60 and grow by 6.
    groups = [["a"], ["b", "c"], ["d"], ["e"]]
    assert heats_of(monkeypatch, groups, 82) == (
        [["one", "two", "a", "b", "c", "d", "e"]],
        [],
    )
    assert heats_of(monkeypatch, groups, 81) == (
        [["one", "two", "a", "b", "c", "d"], ["one", "two", "e"]],
        [],
    )
    assert heats_of(monkeypatch, [], 50) == ([["one", "two"]], [])


def test_a_group_waits_for_a_heat_with_room_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # b and c need 30. The three before them have taken 30 and grow by 3. d alone needs 15.
    groups = [["a"], ["b", "c"], ["d"]]
    assert heats_of(monkeypatch, groups, 64) == (
        [["one", "two", "a", "b", "c"], ["one", "two", "d"]],
        [],
    )
    assert heats_of(monkeypatch, groups, 63) == (
        [["one", "two", "a", "d"], ["one", "two", "b", "c"]],
        [],
    )


def test_what_has_no_room_beside_the_references_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # b is larger than guessed, and leaves no room for c.
    groups = [["a"], ["b", "c"], ["d"]]
    assert heats_of(monkeypatch, groups, 63, b=30) == (
        [["one", "two", "a", "d"], ["one", "two", "b"]],
        ["c"],
    )
    # The references leave 17. Any other needs 15, and they grow by 2.
    assert heats_of(monkeypatch, groups, 37) == (
        [["one", "two"]],
        ["a", "b", "c", "d"],
    )


def test_memory_that_others_use_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    import heats

    teams = {"one": Contestant(40), "two": Contestant(20)}
    for available, is_enough in ((67, True), (66, False)):
        machine = SimpleNamespace(available=available)
        monkeypatch.setattr(heats.psutil, "virtual_memory", lambda machine=machine: machine)
        assert heats.has_room(1, teams) == is_enough


def test_ratios_come_from_turns_of_the_same_heat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    import report
    from job import Job
    from shape import Shape
    from team import Step

    def team(subject: str, num_ranks: int, seconds: float) -> SimpleNamespace:
        details = [[{"num_layers": [4, 4], "saved_bytes": 1, "recomputed": 0.0}]] * num_ranks
        steps = [Step(seconds, seconds, seconds, 0.0, [2**20] * num_ranks, [3.0], details)]
        job = Job(subject, Shape(), 4, num_ranks)
        return SimpleNamespace(job=job, steps=steps, first_losses=[4.0], seconds_to_first_step=1.0)

    def references(slowness: float) -> dict[str, SimpleNamespace]:
        return {
            "one process": team("one_process", 1, 2.0 * slowness),
            "two processes at once": team("one_process", 2, 4.0 * slowness),
        }

    # The machine is three times as slow in the second heat.
    heats = [
        {**references(1.0), "data parallel": team("replicated", 2, 1.0)},
        {**references(3.0), "torch GPipe": team("torch_pipelining", 2, 3.0)},
    ]
    said = console_output(lambda console: report.show(heats, 4, console))
    rows = {
        cells[0]: cells[1:4]
        for line in said.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│┃").split("│")]) > 4
    }
    assert rows["one process"] == ["1", "2.000", "1.000"]
    assert rows["data parallel"] == ["1", "1.000", "2.000"]
    assert rows["torch GPipe"] == ["2", "3.000", "2.000"]
    assert "one process, two processes at once run in every heat" in said
    alone = console_output(lambda console: report.show(heats[:1], 4, console))
    assert "heat" not in alone


def console_output(show: Callable[[Console], None]) -> str:
    console = Console(file=io.StringIO(), width=190)
    show(console)
    return console.file.getvalue()


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.timeout(240)
def test_the_benchmark_compares_itself_with_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    import heats

    # As if memory were too short for more than three beside the three references.
    monkeypatch.setattr(heats, "has_room", lambda num, teams, limit: len(teams) + num <= 6)
    options = (
        "--sections pipeline --preset tiny --pairs 1 --steps 1 --microbatches 4 --vocabularies 64"
    )
    monkeypatch.setattr(sys, "argv", ["", *options.split(), "--only", "this,torch 1F1B"])
    runpy.run_path(str(ROOT / "examples" / "benchmarks"), run_name="__main__")
    said = capsys.readouterr().out
    assert "equal losses" in said
    assert "this runtime against torch 1F1B" in said
    assert "this runtime, looped: where the time goes" in said
    assert "turns: 1 in each heat" in said
    assert "left out" not in said


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
