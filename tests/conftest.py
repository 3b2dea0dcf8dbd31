"""Makes every test start from the same state."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # `worlds.py` says why

# A busy machine is no reason to fail, and what fails here must fail everywhere.
settings.register_profile("here", deadline=None, derandomize=True)
settings.load_profile("here")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that make ranks talk over a worse wire, see `wires.py`."""
    parser.addoption("--wire", choices=["sockets", "ordered"], default="sockets")
    parser.addoption("--delays", type=float, default=0.0, metavar="SECONDS")


@pytest.fixture(scope="session", autouse=True)
def worse_wire(request: pytest.FixtureRequest) -> Iterator[None]:
    """Does what these options say."""
    from tests import wires

    with ExitStack() as stack:
        if request.config.getoption("--wire") == "ordered":
            stack.enter_context(wires.ordered())
        if longest := request.config.getoption("--delays"):
            stack.enter_context(wires.delays(longest))
        yield


@pytest.fixture(scope="session")
def soak_job() -> Iterator[subprocess.Popen[str]]:
    """Trains for three minutes with what the other tests leave of the CPUs, see `soak.py`."""
    command = [sys.executable, "-m", "tests.soak", "--seconds", "180", "--every", "100"]
    with subprocess.Popen(
        ["nice", "-n", "19", *command],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        yield job
        job.terminate()


@pytest.fixture(scope="session", autouse=True)
def long_jobs(request: pytest.FixtureRequest) -> None:
    """Starts with the first test what a later one waits for."""
    if any("soak_job" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("soak_job")


def pytest_report_header() -> str:
    """Names the version of torch at the top of the test report."""
    return f"torch: {torch.__version__}, {torch.get_num_threads()} thread"


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seeds every generator that a test may draw from."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
