"""Makes every test start from the same state."""

import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # `worlds.py` says why

# A busy machine is no reason to fail, and what fails here must fail everywhere.
settings.register_profile("here", deadline=None, derandomize=True)
settings.load_profile("here")


def pytest_report_header() -> str:
    """Names the version of torch at the top of the test report."""
    return f"torch: {torch.__version__}, {torch.get_num_threads()} thread"


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seeds every generator that a test may draw from."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
