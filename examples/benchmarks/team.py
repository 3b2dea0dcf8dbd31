"""The ranks of one contestant, as seen from the process that compares them."""

from __future__ import annotations

import copy
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from emulation import emulated_seconds
from job import Job, Turn

from smp_runtime.launch.processes import rank_environment


@dataclass(frozen=True)
class Step:
    """One turn of all ranks, per step."""

    seconds: float  # from the first rank's begin to the last one's end
    emulated: float  # the same if each rank had a core of its own
    user: float  # CPU seconds of all ranks together
    system: float
    peak_bytes: list[int]  # of each rank
    losses: list[float]
    details: list[list[dict[str, Any]]]  # by rank, then by step


class Team:
    """Started ranks that wait for their turn without using the CPU."""

    def __init__(self, name: str, job: Job) -> None:
        self.name = name
        self.job = job
        self.steps: list[Step] = []
        self.logs = [tempfile.TemporaryFile("w+") for _ in range(job.num_ranks)]  # noqa: SIM115
        started = time.monotonic()
        port = free_port()
        self.ranks = [self.start(rank, port) for rank in range(job.num_ranks)]
        first, turns = self.turn(1)
        self.first_losses = first.losses
        self.seconds_to_first_step = max(turn.ended for turn in turns) - started
        self.details = [turn.details[-1] for turn in turns]

    def start(self, rank: int, port: int) -> subprocess.Popen[str]:
        """Starts a rank with the settings that the launcher gives to ranks."""
        environment = {**os.environ, **rank_environment(os.environ)}
        if self.job.is_one_world:
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(self.job.num_ranks)}
            environment |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.job.num_ranks)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                Path(__file__).with_name("rank.py"),
                self.job.to_json(),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.logs[rank],
            text=True,
            env=environment,
        )

    def turn(self, num_steps: int) -> tuple[Step, list[Turn]]:
        """Lets all ranks run some steps and waits for them."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{num_steps}\n")
            rank.stdin.flush()
        turns = [Turn(**json.loads(self.reply(rank))) for rank in self.ranks]
        if self.job.is_one_world:
            seconds = max(turn.ended for turn in turns) - min(turn.began for turn in turns)
        else:
            seconds = statistics.mean(turn.ended - turn.began for turn in turns)
        known = next(turn.losses for turn in turns if turn.losses[-1] is not None)
        step = Step(
            seconds / num_steps,
            statistics.mean(
                emulated_seconds([turn.details[step] for turn in turns])
                for step in range(num_steps)
            ),
            sum(turn.user for turn in turns) / num_steps,
            sum(turn.system for turn in turns) / num_steps,
            [turn.peak_bytes for turn in turns],
            [loss for loss in known if loss is not None],
            [turn.details for turn in turns],
        )
        return step, turns

    def reply(self, rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            self.end_ranks()
            for log in self.logs:
                log.seek(0)
            said = "\n".join(f"rank {i}: {log.read()[-4000:]}" for i, log in enumerate(self.logs))
            raise SystemExit(f"{self.name}: a rank ended\n{said}")
        return line

    def compete(self, num_steps: int) -> None:
        """Takes one measured turn."""
        self.steps.append(self.turn(num_steps)[0])

    def resident_bytes(self) -> int:
        return sum(psutil.Process(rank.pid).memory_info().rss for rank in self.ranks)

    def for_another_heat(self) -> Team:
        """Returns a team of the same ranks that has no measured turns yet."""
        again = copy.copy(self)
        again.steps = []
        return again

    def close(self) -> None:
        self.end_ranks()
        for log in self.logs:
            log.close()

    def end_ranks(self) -> None:
        """Ends the ranks: they leave when their input ends."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(10)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
