"""Runs a script as Python or a launcher would, in forks that have torch imported already.

What a script prints and saves is the same as in processes of its own, some seconds sooner.
"""

import os
import runpy
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from tests.worlds import run_world

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Ended(NamedTuple):
    """How a script ended on a rank: its exit code, and all that it printed."""

    code: int
    text: str


def run_script(
    path: Path, *arguments: object, ranks: int = 0, timeout: float = 100.0
) -> list[Ended]:
    """Runs a script and returns how it ended on each rank.

    Args:
        path: of the script.
        arguments: its command line.
        ranks: how many; 0 for one process that no launcher has started.
        timeout: seconds for all of it.
    """
    line = [str(path), *map(str, arguments)]
    return run_world(max(ranks, 1), _run, line, ranks == 0, timeout=timeout)


def _run(line: list[str], is_alone: bool) -> Ended:
    if is_alone:
        dist.destroy_process_group()
        for name in VARIABLES:
            os.environ.pop(name)
    warnings.simplefilter("default")  # what a script is warned of does not end it
    sys.argv[:] = line
    sys.path.insert(0, str(Path(line[0]).parent))
    printed, code = StringIO(), 0
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            runpy.run_path(line[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if code and not isinstance(ended.code, int):
                print(ended.code)
    return Ended(code, printed.getvalue())
