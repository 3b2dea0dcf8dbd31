"""Several machines: the recipe for several nodes trains there as on one, over bad links, too."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.forked_script import run_script
from tests.hosts import Host, hosts, why_not

pytestmark = [
    pytest.mark.world,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

CHECKOUT = Path(__file__).parent.parent
JOB = str(CHECKOUT / "tests" / "hosts_job.py")
NUM_STEPS = 12


def environment(**variables: str) -> dict[str, str]:
    return {"PYTHONPATH": str(CHECKOUT), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | (
        variables
    )


def config(folder: Path, degree: int, timeout: float = 60.0) -> str:
    path = folder / f"pp{degree}.yaml"
    text = f"pipeline_parallel_degree: {degree}\nmicrobatches: 4\ntimeout: {timeout}\n"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the lines of the same job in one process."""
    folder = tmp_path_factory.mktemp("plain")
    (ended,) = run_script(Path(JOB), "--config", config(folder, 1), NUM_STEPS)
    assert ended.code == 0, ended.text
    return steps(ended.text)


def steps(text: str) -> list[str]:
    """Returns what rank 0 printed of each step."""
    return [line[line.index("step ") :] for line in text.splitlines() if "loss" in line]


@contextmanager
def started(machines: list[Host], config_path: str) -> Iterator[list["subprocess.Popen[str]"]]:
    """Runs the recipe on every machine; kills what is left of it after."""
    variables = environment(
        NODES=str(len(machines)), RENDEZVOUS=f"{machines[0].name}:29400", RANKS="1"
    )
    recipe = [str(CHECKOUT / "launch" / "several_nodes.sh"), config_path, JOB, str(NUM_STEPS)]
    jobs = [host.start(recipe, variables) for host in machines]
    try:
        yield jobs
    finally:
        for job in jobs:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            assert job.stdout is not None
            job.stdout.close()


def follow(job: "subprocess.Popen[str]", events: dict[str, Callable[[], None]]) -> str:
    """Reads a job's output to its end, and does something where a step is printed."""
    assert job.stdout is not None
    lines = []
    for line in job.stdout:
        lines.append(line)
        print(line, end="")  # for a test that fails, or whose time is up
        for beginning, event in events.items():
            if beginning in line:
                event()
    return "".join(lines)


def numbers(lines: list[str]) -> list[float]:
    return [float(line.split()[-1]) for line in lines]


def test_two_machines_train_as_one_over_links_that_become_slow_and_are_cut(
    tmp_path: Path, plain: list[str]
) -> None:
    with hosts(2) as machines:
        there = machines[1]

        def slow_down() -> None:
            there.delay = 0.2

        def narrow() -> None:
            there.delay, there.rate = 0.0, 10e6 / 8

        def cut_for_a_while() -> None:
            there.is_cut = True
            time.sleep(2.0)
            there.is_cut = False

        events = {"step 3 ": slow_down, "step 5 ": narrow, "step 7 ": cut_for_a_while}
        with started(machines, config(tmp_path, 2)) as jobs:
            text = follow(jobs[0], events)
            assert jobs[0].wait(30) == 0, text
            assert jobs[1].wait(30) == 0
    assert numbers(steps(text)) == pytest.approx(numbers(plain), rel=1e-6)
    assert len(steps(text)) == NUM_STEPS


def test_four_machines_train_as_one(tmp_path: Path, plain: list[str]) -> None:
    with hosts(4) as machines, started(machines, config(tmp_path, 4)) as jobs:
        text = follow(jobs[0], {})
        assert [job.wait(30) for job in jobs] == [0] * 4, text
    assert numbers(steps(text)) == pytest.approx(numbers(plain), rel=1e-6)


def test_a_link_that_stays_cut_ends_the_job_and_says_for_whom_it_waits(tmp_path: Path) -> None:
    ends: list[float] = []
    with hosts(2) as machines:

        def cut() -> None:
            machines[1].is_cut = True
            ends.append(time.monotonic() + 20.0)

        with started(machines, config(tmp_path, 2, timeout=4.0)) as jobs:
            text = follow(jobs[0], {"step 3 ": cut})
            assert jobs[0].wait(30) != 0
            # The other rank can't reach the store any more. Its launcher, torch's, waits for that.
            while machines[1].processes() - {jobs[1].pid}:
                assert time.monotonic() < ends[0]
                time.sleep(0.1)
            assert time.monotonic() < ends[0]
    assert "smp_runtime: rank 0, step 4" in text or "smp_runtime: rank 0, step 5" in text
    assert "rank 1" in text
