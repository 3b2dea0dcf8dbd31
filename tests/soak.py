"""Trains on four ranks and kills one at random now and then: nothing may be lost, or leak.

    python -m tests.soak [--seconds 1800] [--every 600] [--ranks 4]

torchrun starts all ranks again after each kill, and the job goes on from its newest checkpoint.
Compared are the losses of every step, those that were taken again included, with those of a single
process that nobody disturbed; looked at are how many steps a kill cost, the memory of every rank
over its steps, and the files and processes that are left.
`test_soak.py` waits for three minutes of it, which run beside the other tests.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

CHECKOUT = Path(__file__).parent.parent
JOB = str(CHECKOUT / "tests" / "soak_job.py")
GROWTH = 1.02  # of resident memory over a process's later steps; what allocators round up
WARM_UP = 50  # steps of a process until its memory has settled
SAVE_EVERY = 5  # steps
MOST_AGAIN = 2 * SAVE_EVERY  # a checkpoint is complete when the next begins
KILLS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSTOP)
FOR_EVER = 10**9  # steps


def write_config(folder: Path, ranks: int) -> Path:
    """Writes the settings of the job, which may also go on with half as many ranks, or one."""
    path = folder / "config.yaml"
    path.write_text(
        f"pipeline_parallel_degree: {ranks}\nmicrobatches: 4\ntimeout: 20\nseed: 7\n"
        "layouts:\n"
        + "".join(
            f"  {fewer}: {{pipeline_parallel_degree: {fewer}}}\n"
            for fewer in sorted({1, ranks // 2})
        )
    )
    return path


def command(ranks: int, restarts: int, folder: Path, num_steps: int) -> list[str]:
    """Returns a command line of torchrun."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), "--max-restarts", str(restarts)),
        *(JOB, "--config", str(folder / "config.yaml"), str(folder), str(num_steps)),
    ]


@contextmanager
def running(
    ranks: int, restarts: int, folder: Path, num_steps: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a job that goes on from where the files of its folder say, and ends it after."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "OMP_NUM_THREADS": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",  # a stopped rank does not end when it is told to
    }
    with (folder / "output").open("a") as output:
        job = subprocess.Popen(
            command(ranks, restarts, folder, num_steps),
            **{"env": environment, "stdout": output, "stderr": subprocess.STDOUT},
        )
        try:
            yield job
        finally:
            job.terminate()
            job.wait()


def ranks_of(parent: int) -> list[int]:
    """Returns the ids of the rank processes that a launcher has started."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError):
            if entry.name.isdecimal():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent and JOB in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
    return found


def read_losses(folder: Path) -> dict[int, set[str]]:
    """Returns what was written of each step; more than one loss where they differ."""
    losses: dict[int, set[str]] = defaultdict(set)
    with suppress(FileNotFoundError):
        for line in (folder / "losses").read_text().splitlines():
            step, _, loss = line.partition(" ")
            losses[int(step)].add(loss)
    return losses


def steps_taken(folder: Path) -> list[int]:
    """Returns the steps in the order in which they were taken, again ones included."""
    losses = folder / "losses"
    return (
        [int(line.split()[0]) for line in losses.read_text().splitlines()]
        if losses.exists()
        else []
    )


def most_steps_again(folder: Path) -> int:
    """Returns how many steps were taken again after a restart, at most."""
    steps = steps_taken(folder)
    return max((at + 1 - next_ for at, next_ in zip(steps, steps[1:], strict=False)), default=0)


class Sample(NamedTuple):
    """Resident memory of a rank after a step."""

    rank: int
    process: int
    step: int
    kilobytes: int
    at: float  # seconds


def read_memory(folder: Path) -> list[Sample]:
    """Returns the samples of all ranks in the order of time."""
    fields = [line.split() for line in (folder / "memory").read_text().splitlines()]
    return [Sample(*map(int, numbers), at=float(at)) for *numbers, at in fields]


def growth(samples: Sequence[Sample]) -> dict[int, float]:
    """Returns for every rank by how much the memory of one of its processes grew at most.

    Compared are the medians of the first and of the last fifth of a process's steps after those
    that warm it up. Ranks whose processes all ended before that are left out.
    """
    processes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for sample in samples:
        processes[sample.rank, sample.process].append(sample.kilobytes)
    grown: dict[int, float] = {}
    for (rank, _), sizes in processes.items():
        settled = sizes[WARM_UP:]
        if fifth := len(settled) // 5:
            ratio = median(settled[-fifth:]) / median(settled[:fifth])
            grown[rank] = max(grown.get(rank, 0.0), ratio)
    return grown


def memory_table(samples: Sequence[Sample], num_rows: int = 15) -> str:
    """Returns the median MiB of every rank (columns) over the time of the run (rows)."""
    begun, ended = samples[0].at, samples[-1].at
    slices: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        row = int((sample.at - begun) / (ended - begun + 1e-6) * num_rows)
        slices[row][sample.rank].append(sample.kilobytes)
    ranks = sorted({sample.rank for sample in samples})
    lines = ["seconds " + "".join(f"rank {rank:<5}" for rank in ranks)]
    for row in sorted(slices):
        cells = [f"{median(slices[row][rank] or [0]) / 1024:<10.1f}" for rank in ranks]
        lines.append(f"{row * (ended - begun) / num_rows:<8.0f}" + "".join(cells))
    return "\n".join(lines)


def soak(folder: Path, ranks: int, seconds: float, every: int) -> int:
    """Trains until time is over; returns how many ranks were killed."""
    draw, num_kills = random.Random(0), 0
    deadline, next_kill = time.monotonic() + seconds, every
    with running(ranks, 1000, folder, FOR_EVER) as job:
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if job.poll() is not None:
                sys.exit(f"the job ended by itself\n{last_words(folder)}")
            num_taken = len(steps_taken(folder))
            if num_taken >= next_kill and (alive := ranks_of(job.pid)):
                os.kill(draw.choice(alive), draw.choice(KILLS))
                num_kills += 1
                next_kill = num_taken + int(every * (0.5 + draw.random()))
    return num_kills


def leftovers(folder: Path) -> list[str]:
    """Returns the files that are not whole checkpoints, and the processes of the job."""
    checkpoints = folder / "checkpoints"
    paths = [path.relative_to(checkpoints) for path in checkpoints.rglob("*")]
    whole = re.compile(
        r"newest|step\d+_partial(/index\.json|/\w+\.pt|/(model|optimizer)_\d_\d_\d\.safetensors)?"
    )
    found = [str(path) for path in paths if not whole.fullmatch(str(path))]
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and f"\0{folder}\0" in (entry / "cmdline").read_text():
                found.append(f"process {entry.name}")
    return found


def last_words(folder: Path) -> str:
    return (folder / "output").read_text()[-4000:]


def wait_for(job: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits for the end of a job, which must be a good one."""
    if job.wait():
        sys.exit(f"a job that nobody disturbed failed\n{last_words(folder)}")


def finish(folder: Path, ranks: int, num_steps: int) -> None:
    """Lets a job of this many ranks, none of which is killed, go on to its last step."""
    with running(ranks, 0, folder, num_steps) as job:
        wait_for(job, folder)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--every", type=int, default=600, help="steps between kills")
    parser.add_argument("--ranks", type=int, default=4)
    return parser.parse_args(arguments)


def run(folder: Path, reference: Path, line: argparse.Namespace) -> bool:
    """Soaks, prints what was seen, and returns whether all is as it must be."""
    for each in (folder, reference):
        each.mkdir()
        write_config(each, line.ranks)
    # What the soak will need of the reference, which is faster, is guessed.
    with running(1, 0, reference, int(line.seconds * 8)) as ahead:
        kills = soak(folder, line.ranks, line.seconds, line.every)
        wait_for(ahead, reference)
    samples = read_memory(folder)
    print(f"{len(read_losses(folder))} steps, {kills} ranks killed or stopped")
    print(f"resident memory in MiB:\n{memory_table(samples)}", flush=True)
    num_steps = max(read_losses(folder)) + 2 * SAVE_EVERY
    finish(folder, line.ranks // 2, num_steps)
    finish(reference, 1, num_steps)
    losses, expected = read_losses(folder), read_losses(reference)
    steps = range(1, num_steps + 1)
    differing = [step for step in steps if len(losses[step]) != 1 or losses[step] != expected[step]]
    again, grown, left = most_steps_again(folder), growth(samples), leftovers(folder)
    print(f"steps whose losses differ from a single process's: {differing}")
    print(f"steps taken again after a restart, at most: {again}")
    print(f"growth of a process's memory, by rank: {grown}")
    print(f"left behind: {left}")
    is_flat = len(grown) == line.ranks and max(grown.values()) <= GROWTH
    return bool(kills and is_flat and again <= MOST_AGAIN and not differing and not left)


def main() -> None:
    line = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # after ending its jobs
    with tempfile.TemporaryDirectory() as name:
        sys.exit(not run(Path(name, "soak"), Path(name, "reference"), line))


if __name__ == "__main__":
    main()
