"""One rank of one contestant: builds it, then runs steps whenever it is told to.

Commands come in on standard input, one number of steps per line; a `Turn` goes out for each.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401 - counts to what the imports take
from job import Job, Trainer, Turn


def memory(name: str) -> int:
    """Returns bytes from /proc/self/status: VmRSS is now, VmHWM the peak; 0 without Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def forget_peak() -> None:
    if (file := Path("/proc/self/clear_refs")).exists():
        file.write_text("5")


def run_turn(trainer: Trainer, num_steps: int, baseline: int) -> Turn:
    losses, details = [], []
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.monotonic()
    for _ in range(num_steps):
        losses.append(trainer.step())
        details.append(trainer.details())
    ended = time.monotonic()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Turn(
        began,
        ended,
        num_steps,
        after.ru_utime - before.ru_utime,
        after.ru_stime - before.ru_stime,
        memory("VmHWM") - baseline,
        losses,
        details,
    )


def main() -> None:
    job = Job.from_json(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not get between the replies
    torch.set_num_threads(1)
    subject = importlib.import_module(job.subject)
    baseline = memory("VmRSS")

    def tell(content: Any) -> None:
        print(json.dumps(content), file=replies, flush=True)

    trainer: Trainer = subject.build(job)
    is_first = True
    for line in sys.stdin:
        tell(asdict(run_turn(trainer, int(line), baseline)))
        if is_first:
            forget_peak()  # the whole model was here before it was divided
            is_first = False


if __name__ == "__main__":
    main()
