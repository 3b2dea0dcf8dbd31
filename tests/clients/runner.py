"""Runs a client, unmodified, on forked ranks that are told that they have CUDA devices."""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch import cuda_emulation
from tests.worlds import run_world

FOLDER = Path(__file__).parent


def run_client(
    name: str,
    ranks: int,
    *arguments: object,
    settings: str = "",
    timeout: float = 100.0,
) -> list[dict[str, Any]]:
    """Runs a client and returns, for each rank, what it kept in its module.

    Args:
        name: of the script in this folder.
        ranks: how many.
        arguments: its command line.
        settings: JSON for SM_HP_MP_PARAMETERS.
        timeout: seconds for all of it.
    """
    return run_world(ranks, _run, name, [str(a) for a in arguments], settings, timeout=timeout)


def _run(name: str, arguments: Sequence[str], settings: str) -> Mapping[str, Any]:
    cuda_emulation.install()
    if settings:
        os.environ["SM_HP_MP_PARAMETERS"] = settings
    sys.argv[:] = [str(FOLDER / name), *arguments]
    found = runpy.run_path(sys.argv[0], run_name="__main__")
    return {"history": found["history"], "final": found.get("final", {})}
