"""Every fault of the table ends every rank soon, and the first line that each prints names it.

The faults themselves are in `faults.py`. Ranks are forked here; launchers run the same job as a
script. Two pipelines side by side show that a failure reaches ranks that share none with it.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults import TIMEOUT, job
from tests.worlds import RankOutcome, run_world_expecting_failure, warm

pytestmark = [
    pytest.mark.world,
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),  # see `worlds.py`
]

CHECKOUT = Path(__file__).parent.parent
SECONDS = 10.0


class Fault(NamedTuple):
    """What the ranks must say of a fault.

    Attributes:
        first: pattern in the first line that the runtime prints, on every rank that lives.
        anywhere: texts in the output of every rank that lives.
        dies: the exit code of the victim where it ends without a word.
        is_silent: nobody can see it but by waiting, so it may take the timeout.
    """

    first: str
    anywhere: tuple[str, ...] = ()
    dies: int | None = None
    is_silent: bool = False


BOOM = "ValueError: boom"
AT = "rank 1, step 3, microbatch 0, at "
GONE = r"rank \d, step 3.* rank 1 is gone without a word"
SLOW = ("WaitTimeoutError", "step 3", "from rank 1", "<-- here")
TABLE = {
    "body": Fault(rf"{AT}.*{BOOM}", (BOOM, "Traceback", "<-- here")),
    "forward": Fault(rf"{AT}1: {BOOM}", (BOOM, "Traceback", "[1F0]")),
    "hook": Fault(rf"{AT}1: {BOOM}", (BOOM, "Traceback", "[1F0]")),
    "loss": Fault(rf"{AT}.*{BOOM}", (BOOM, "Traceback", "<-- here")),
    "backward": Fault(rf"{AT}.*{BOOM}", (BOOM, "Traceback", "[1B0]")),
    "memory": Fault(rf"{AT}1: .*OutOfMemoryError: tried to allocate", ("Traceback", "[1F0]")),
    "loader": Fault(rf"rank 1, after step 2: {BOOM}", (BOOM, "Traceback")),
    "optimizer": Fault(rf"rank 1, after step 3: {BOOM}", (BOOM, "Traceback")),
    "partition": Fault(r"rank \d.*PartitionError: .*", ("PartitionError",)),
    "config": Fault("", ("ConfigError: ranks 0 and 1", "microbatches=2 and microbatches=4")),
    "nan": Fault(r"rank \d, step 3, microbatch 0, .*NonFiniteLossError: .* is \[nan\]"),
    "item": Fault(r"rank \d, step 3.*PathMismatchError"),
    "path": Fault(r"rank \d, step 3.*PathMismatchError", ("Every rank must take the same path",)),
    "short loader": Fault(r"rank \d, .*rank \d ended its program"),
    "once more": Fault(r"rank \d, .*rank \d ended its program"),
    "save": Fault(r"rank \d, .*(called state_dict|state dict)"),
    "disk": Fault(
        r"rank \d, after step 3: .*model_1_0_0.safetensors could not be written \(No space left",
        ("No space left on device", "Traceback", "complete before are untouched"),
    ),
    "state": Fault(rf"rank 1, after step 3: {BOOM}", (BOOM, "Traceback")),
    "gradient hook": Fault(rf"{AT}.*{BOOM}", (BOOM, "Traceback", "[1B0]")),
    "comm hook": Fault(rf"rank 1, step 3, microbatch 1, at .*{BOOM}", (BOOM, "Traceback")),
    "after optimizer": Fault(rf"rank 1, after step 3: {BOOM}", (BOOM, "Traceback")),
    "sharded optimizer": Fault(rf"rank 1, after step 3: {BOOM}", (BOOM, "Traceback")),
    "exit": Fault(GONE, dies=7),
    "kill": Fault(GONE, dies=-signal.SIGKILL),
    "stop": Fault(r"rank \d, step \d", ("no answer",), dies=-9, is_silent=True),
    "slow": Fault(r"rank \d, step 3.*2 s \(setting `timeout`\)", SLOW, is_silent=True),
    "never": Fault(r"rank \d, step \d.*2 s \(setting `timeout`\)", ("no step",), is_silent=True),
    "barrier": Fault(r"rank \d, .*2 s \(setting `timeout`\)", ("smp.barrier",), is_silent=True),
}
OF_REPLICAS = ("comm hook", "sharded optimizer")
OF_SAVING = ("disk", "state")
WORLDS = [
    *[(fault, 1, 2) for fault in ("optimizer", "after optimizer", "sharded optimizer")],
    *[(fault, 2, 2) for fault in TABLE if fault not in OF_REPLICAS],
    *[(fault, 3, 3) for fault in ("loss", "kill")],
    *[(fault, 4, 4) for fault in ("backward", "item")],
    *[(fault, 2, 4) for fault in ("body", "backward", "loader", "optimizer", "config", "nan")],
    *[(fault, 2, 4) for fault in ("item", "short loader", "once more", "exit", "kill", "slow")],
    *[(fault, 2, 4) for fault in (*OF_SAVING, *OF_REPLICAS, "gradient hook", "after optimizer")],
]


World = tuple[str, int, int]
SILENT = [world for world in WORLDS if TABLE[world[0]].is_silent]


def run(fault: str, degree: int, size: int, folder: str = "") -> list[RankOutcome]:
    """Returns how the ranks of a world ended."""
    return run_world_expecting_failure(size, job, degree, fault, folder, timeout=30.0)


@pytest.fixture(scope="module")
def silent_worlds() -> Iterator[Mapping[World, Future[list[RankOutcome]]]]:
    """Runs the worlds that fail by waiting, each from a process of its own: all wait at once."""
    warm()
    with ProcessPoolExecutor(len(SILENT), mp_context=get_context("fork")) as pool:
        yield {world: pool.submit(run, *world) for world in SILENT}


def first_line(outcome: RankOutcome) -> str:
    """Returns the first line that the runtime itself wrote."""
    found = re.search(r"^smp_runtime: (.*)$", outcome.stderr_text, re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize(("fault", "degree", "size"), WORLDS)
def test_fault(
    fault: str, degree: int, size: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = TABLE[fault]
    limit = SECONDS + (TIMEOUT if expected.is_silent else 0.0)
    folder = str(tmp_path) if fault in OF_SAVING else ""
    if expected.is_silent:
        outcomes = request.getfixturevalue("silent_worlds")[fault, degree, size].result()
    else:
        outcomes = run(fault, degree, size, folder)
    for rank, outcome in enumerate(outcomes):
        if rank == 1 and expected.dies is not None:
            assert outcome.exit_code == expected.dies
            continue
        assert outcome.exit_code != 0, f"rank {rank} ended as if nothing had happened"
        assert outcome.seconds < limit, f"rank {rank} took {outcome.seconds} s"
        assert re.search(expected.first, first_line(outcome)), (
            f"rank {rank} begins with {first_line(outcome)!r}"
        )
        for text in expected.anywhere:
            assert text in outcome.stderr_text, f"rank {rank} does not say {text!r}"
    if folder:  # the checkpoint before it is whole, and nothing is left of the one that failed
        assert {path.name for path in tmp_path.iterdir()} == {"newest", "step2_partial"}
        assert (tmp_path / "newest").read_text().strip() == "step2_partial"


LAUNCHERS = {
    "launch": [*("-m", "launch", "--ranks", "2"), str(CHECKOUT / "configs/finetune_tiny_ci.yaml")],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("launcher", "fault"), [("launch", "forward"), ("torchrun", "loader")])
def test_under_a_launcher(launcher: str, fault: str) -> None:
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], str(CHECKOUT / "tests/faults.py"), fault, "2"],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    prefix = r"\[rank \d\] " if launcher == "launch" else ""
    found = re.search(rf"^{prefix}smp_runtime: (.*)$", done.stderr, re.MULTILINE)
    assert found is not None, done.stderr
    assert re.search(TABLE[fault].first, found[1])
    # The cause comes before whatever follows from it.
    assert found.start() < done.stderr.index("Traceback")
