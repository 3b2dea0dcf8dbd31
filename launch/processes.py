"""Starts the ranks of one machine through torch's elastic launcher and returns how they ended."""

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .output import PrefixedOutput

# What a rank gets unless the environment says otherwise. glibc hands large blocks back to the
# kernel as soon as they are free, and every microbatch pays for them again in page faults: the heap
# is kept, and the threads of a rank, of which one runs at a time, share it.
DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    # How many seconds after SIGINT or SIGTERM a rank that has not ended is killed.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
}


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the launchers of all nodes meet, one on each node.

    Args:
        num_nodes: how many.
        endpoint: host and port of one node that all of them reach.
        job: tells apart runs that meet at one place; "" for a name of its own.
    """

    num_nodes: int = 1
    endpoint: str = "localhost:0"
    job: str = ""


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings that ranks get in addition to an environment."""
    return {name: value for name, value in DEFAULTS.items() if name not in environ}


def run_ranks(
    num_ranks: int,
    arguments: Sequence[str],
    meeting: Meeting | None = None,
    max_restarts: int = 0,
) -> int:
    """Runs a script on every rank until all have ended or one has failed too often.

    Args:
        num_ranks: how many ranks on this machine.
        arguments: Python's: the path of the script and its arguments, or a module's with -m.
        meeting: where to meet the launchers of other machines; none without it.
        max_restarts: how often all ranks are started again when one has failed.

    Returns:
        An exit code: 0, or that of the first rank that failed, or, as a shell has it, 128 plus the
        number of the signal that ended it.
    """
    os.environ.update(rank_environment(os.environ))
    with PrefixedOutput() as output:
        config = launch_config(num_ranks, meeting or Meeting(), max_restarts, output)
        try:
            elastic_launch(config, sys.executable)("-u", *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            ending = failure.signal_name() if failure.exitcode < 0 else f"code {failure.exitcode}"
            message = f"launch: rank {rank} ended with {ending}, all ranks are stopped"
            code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except SignalException as error:
            message = f"launch: {error.sigval.name}, all ranks are stopped"
            code = 128 + error.sigval
        else:
            return 0
    print(message, file=sys.stderr)
    return code


def launch_config(
    num_ranks: int, meeting: Meeting, max_restarts: int, output: PrefixedOutput
) -> LaunchConfig:
    """Returns the settings of torch's launcher."""
    return LaunchConfig(
        min_nodes=meeting.num_nodes,
        max_nodes=meeting.num_nodes,
        nproc_per_node=num_ranks,
        run_id=meeting.job or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=meeting.endpoint,
        # On one machine its name in the network does not matter, and need not be known to it.
        local_addr="localhost" if meeting.num_nodes == 1 else None,
        max_restarts=max_restarts,
        logs_specs=output,
    )
