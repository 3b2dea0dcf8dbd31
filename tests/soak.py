"""Trains on four ranks and kills one at random now and then: nothing may be lost, or leak.

    python -m tests.soak [--seconds 1800] [--every 45] [--ranks 4]

torchrun starts all ranks again after each kill, and the job goes on from its newest checkpoint.
Compared are the losses of every step, those that were taken again included, with a job that
nobody disturbed; looked at are the memory of every process over its steps, and the files that are
left. `test_soak.py` runs a minute of it.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent
JOB = str(CHECKOUT / "tests" / "soak_job.py")
GROWTH = 1.05  # of resident memory over a process's later steps; what allocators round up
WARM_UP = 30  # steps


def write_config(folder: Path, ranks: int) -> Path:
    """Writes the settings of the job, which may also go on with half as many ranks."""
    path = folder / "config.yaml"
    path.write_text(
        f"pipeline_parallel_degree: {ranks}\nmicrobatches: 4\ntimeout: 20\nseed: 7\n"
        f"layouts:\n  {ranks // 2}: {{pipeline_parallel_degree: {ranks // 2}}}\n"
    )
    return path


def command(ranks: int, restarts: int, folder: Path, num_steps: int) -> list[str]:
    """Returns a command line of torchrun."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), "--max-restarts", str(restarts)),
        *(JOB, "--config", str(folder / "config.yaml"), str(folder), str(num_steps)),
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}


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


def growth(folder: Path) -> float:
    """Returns how much the memory of a process grew at most after its first steps."""
    sizes: dict[int, list[int]] = defaultdict(list)
    for line in (folder / "memory").read_text().splitlines():
        _, process, _, kilobytes = map(int, line.split())
        sizes[process].append(kilobytes)
    ratios = [
        max(steps[-10:]) / max(steps[WARM_UP : WARM_UP + 10])
        for steps in sizes.values()
        if len(steps) > 2 * WARM_UP
    ]
    return max(ratios, default=1.0)


def soak(
    folder: Path, ranks: int, seconds: float, every: float, num_steps: int, most_kills: int = 10**6
) -> int:
    """Trains until time is over or the steps are done; returns how many ranks were killed."""
    draw, num_kills = random.Random(0), 0
    begun = time.monotonic()
    next_kill = begun + every
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            command(ranks, 1000, folder, num_steps),
            **{"env": environment(), "stdout": output, "stderr": subprocess.STDOUT},
        )
        num_seen = 0
        while job.poll() is None and time.monotonic() < begun + seconds:
            time.sleep(0.2)
            num_lines = len(read_losses(folder))
            is_training = num_lines > num_seen  # not while it starts
            num_seen = max(num_seen, num_lines)
            if is_training and num_kills < most_kills and time.monotonic() > next_kill:
                victim = draw.choice(ranks_of(job.pid) or [0])
                if victim:
                    os.kill(victim, draw.choice([signal.SIGKILL, signal.SIGABRT]))
                    num_kills += 1
                    next_kill = time.monotonic() + every * (0.5 + draw.random())
        if job.poll() is None:
            job.terminate()
        job.wait()
    return num_kills


def finish(folder: Path, ranks: int, num_steps: int) -> None:
    """Lets a job of this many ranks, none of which is killed, go on from where the files say."""
    subprocess.run(
        command(ranks, 0, folder, num_steps), env=environment(), check=True, capture_output=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--every", type=float, default=45.0, help="seconds between kills")
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, reference = Path(name, "soak"), Path(name, "reference")
        for each in (folder, reference):
            each.mkdir()
            write_config(each, arguments.ranks)
        kills = soak(folder, arguments.ranks, arguments.seconds, arguments.every, 10**9)
        losses = read_losses(folder)
        finish(reference, arguments.ranks, max(losses))
        expected = read_losses(reference)
        differing = [step for step in losses if losses[step] != expected[step]]
        missing = set(range(1, max(losses) + 1)) - set(losses)
        print(f"{max(losses)} steps, {kills} ranks killed, memory grew by {growth(folder):.3f}")
        print(f"steps with other losses: {differing}, steps without: {sorted(missing)}")
        print("files:", sorted(path.name for path in (folder / "checkpoints").iterdir()))
        sys.exit(bool(differing or missing or growth(folder) > GROWTH))


if __name__ == "__main__":
    main()
