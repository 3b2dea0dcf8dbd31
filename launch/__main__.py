"""Starts a script on N ranks of this machine, or shows what a run would do without starting it."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smp_runtime.config import ENVIRONMENT_VARIABLE, Config, load_config
from smp_runtime.errors import SMPError, UsageError

from . import overview, processes

USAGE = """
  %(prog)s [--ranks N] [--max-restarts N] CONFIG SCRIPT [ARGUMENT ...]
  %(prog)s --nodes N --rendezvous HOST:PORT --job NAME [--ranks N] CONFIG SCRIPT [ARGUMENT ...]
  %(prog)s --sagemaker [--emulate-cuda] [--ranks N] CONFIG SCRIPT [ARGUMENT ...]
  %(prog)s --dry-run [--ranks N] CONFIG
  %(prog)s --plan [--model NAME_OR_PATH] [--sequence-length N] [--batch N] CONFIG"""

EPILOG = """Options come before CONFIG. SCRIPT is started as `SCRIPT --config CONFIG ARGUMENT ...`,
as torchrun would; with --sagemaker or --emulate-cuda, which are for SMP v1 scripts, as `SCRIPT
ARGUMENT ...`, with the settings in SM_HP_MP_PARAMETERS. Ranks compute with one thread unless
OMP_NUM_THREADS is set."""


@dataclass(frozen=True)
class CommandLine:
    """What the user asked for.

    Args:
        config: path of a YAML or JSON file.
        script: what to run, "" to show something instead.
        arguments: of the script.
        ranks: how many on this machine, None for the pipeline degree of the config.
        meeting: where several machines meet.
        max_restarts: how often all ranks are started again when one has failed.
        is_sagemaker: whether to set the variables of a SageMaker job.
        emulates_cuda: whether the script is written for CUDA and runs on the CPU.
        shows_plan: show the partition of a model, else placement and schedule.
        model: whose partition.
        sequence_length: of the batch that the model is traced with.
        batch: its size, None for one sample per microbatch.
    """

    config: str
    script: str
    arguments: tuple[str, ...]
    ranks: int | None
    meeting: processes.Meeting
    max_restarts: int
    is_sagemaker: bool
    emulates_cuda: bool
    recomputes: bool
    shows_plan: bool
    model: str
    sequence_length: int
    batch: int | None


def options(program: str) -> argparse.ArgumentParser:
    """Returns the parser of everything before SCRIPT."""
    parser = argparse.ArgumentParser(
        prog=program, usage=USAGE, description=__doc__, epilog=EPILOG, allow_abbrev=False
    )
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="default: the config's pipeline_parallel_degree")
    add("--nodes", type=int, default=1, metavar="N", help="how many machines, --ranks on each")
    add("--rendezvous", default="localhost:0", metavar="HOST:PORT", help="where they meet")
    add("--job", default="", metavar="NAME", help="tells apart the runs that meet at one place")
    add("--max-restarts", type=int, default=0, metavar="N", help="start again after a failure")
    add("--sagemaker", action="store_true", help="set the variables of a SageMaker SMP job")
    add("--emulate-cuda", action="store_true", help="run a script for CUDA devices on the CPU")
    add("--dry-run", action="store_true", help="print the placement and draw the schedule")
    add("--recompute", action="store_true", help="draw it with activation checkpointing")
    add("--plan", action="store_true", help="print a model's partition and memory, by rank")
    add("--model", default="", metavar="NAME_OR_PATH", help="of the model that --plan divides")
    add("--sequence-length", type=int, default=128, metavar="N", help="default: 128")
    add("--batch", type=int, metavar="N", help="default: one sample per microbatch")
    add("config", metavar="CONFIG", help="YAML or JSON file, see configs/")
    return parser


def parse(arguments: Sequence[str], program: str) -> CommandLine:
    """Reads the command line; ends the process where it is wrong, as argparse does."""
    parser = options(program)
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="SCRIPT")
    found = parser.parse_args(arguments)
    if found.plan or found.dry_run:
        found = options(program).parse_args(arguments)
        script, *rest = [""]
    else:
        if not found.rest or found.rest[0].startswith("-"):
            parser.error("SCRIPT is missing after CONFIG (options come before CONFIG)")
        script, *rest = found.rest
    return CommandLine(
        config=found.config,
        script=script,
        arguments=tuple(rest),
        ranks=found.ranks,
        meeting=processes.Meeting(found.nodes, found.rendezvous, found.job),
        max_restarts=found.max_restarts,
        is_sagemaker=found.sagemaker,
        emulates_cuda=found.emulate_cuda,
        recomputes=found.recompute,
        shows_plan=found.plan,
        model=found.model,
        sequence_length=found.sequence_length,
        batch=found.batch,
    )


def show(line: CommandLine) -> str:
    """Returns what --dry-run or --plan print."""
    config = load_config(line.config, os.environ)
    if line.shows_plan:
        # Imported here because transformers takes seconds, and a start does not need it.
        from .model_plan import model_plan

        return model_plan(config, line.model, line.sequence_length, line.batch)
    ranks = line.ranks or config.pipeline_parallel_degree
    num_ranks = ranks * line.meeting.num_nodes
    return overview.dry_run(config, num_ranks, recomputes=line.recomputes)


def start(line: CommandLine) -> int:
    """Runs the script on every rank and returns the exit code."""
    if not Path(line.script).is_file():
        raise UsageError(f"there is no script {line.script!r}")
    config = load_config(line.config, os.environ)
    ranks = line.ranks or config.pipeline_parallel_degree
    if not (line.is_sagemaker or line.emulates_cuda):
        arguments = (line.script, "--config", line.config, *line.arguments)
        return processes.run_ranks(ranks, arguments, line.meeting, line.max_restarts)
    os.environ.update(job_environment(config, line.is_sagemaker))
    # A module of this package, whose name differs between the checkout and an installation.
    prefix = ("-m", f"{__package__}.cuda_emulation") if line.emulates_cuda else ()
    arguments = (*prefix, line.script, *line.arguments)
    return processes.run_ranks(ranks, arguments, line.meeting, line.max_restarts)


def job_environment(config: Config, is_sagemaker: bool) -> dict[str, str]:
    """Returns the variables by which an SMP v1 script is told its settings.

    Args:
        config: the settings.
        is_sagemaker: whether to switch on the SageMaker path of transformers, too.
    """
    settings = config.model_dump(exclude_unset=True)
    settings["partitions"] = config.pipeline_parallel_degree  # transformers asks for this name
    variables = {ENVIRONMENT_VARIABLE: json.dumps(settings)}
    if is_sagemaker:
        variables["SM_FRAMEWORK_PARAMS"] = json.dumps({"sagemaker_mpi_enabled": True})
    return variables


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line says; returns the exit code."""
    name = Path(sys.argv[0]).name
    program = "python -m launch" if name == "__main__.py" else name
    line = parse(sys.argv[1:] if arguments is None else arguments, program)
    try:
        if line.script:
            return start(line)
        print(show(line))
    except SMPError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
