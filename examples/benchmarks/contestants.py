"""Who runs against whom, and what each of them does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from job import Job
from shape import Shape
from team import Team

ONE, WHOLE, TOGETHER = "one process", "one process, whole batch", "two processes at once"
OURS, LOOPED = "this runtime", "this runtime, looped"
CHECKPOINTED = ", checkpointed"
TORCH, TORCH_LOOPED = "torch 1F1B", "torch Interleaved1F1B"
TORCH_EQUAL, TORCH_GPIPE = f"{TORCH}, equal layers", "torch GPipe"
REPLICAS = "data parallel"

REFERENCES = (ONE, TOGETHER, OURS)  # what all others are compared with
# Those of one group are compared with each other too.
GROUPS = (
    (TORCH, TORCH + CHECKPOINTED),
    (TORCH_EQUAL,),
    (LOOPED, TORCH_LOOPED),
    (OURS + CHECKPOINTED,),
    (REPLICAS,),
    (TORCH_GPIPE,),
    (WHOLE,),
)


def is_wanted(name: str, only: Sequence[str]) -> bool:
    """Says whether a contestant runs if the user has asked for these parts of names."""
    return not only or name in (ONE, TOGETHER) or any(word in name for word in only)


def groups(shape: Shape, only: Sequence[str], teams: Mapping[str, Team]) -> list[list[str]]:
    """Returns the groups of those that run; `teams` are the references.

    Equal layers are left out where this runtime has chosen them, for torch gets its choice anyway.
    """
    is_equal = split_of(teams, OURS, shape, 2) == equal_split(shape, 2)
    wanted = [
        [n for n in group if is_wanted(n, only) and not (n == TORCH_EQUAL and is_equal)]
        for group in GROUPS
    ]
    return [group for group in wanted if group]


def job_of(name: str, shape: Shape, m: int, teams: Mapping[str, Team]) -> Job:
    """Returns what a contestant does; torch's schedules get the split that this runtime has chosen.

    Args:
        name: the contestant's.
        shape: what it trains.
        m: number of microbatches.
        teams: those that run already.
    """
    ours, looped = split_of(teams, OURS, shape, 2), split_of(teams, LOOPED, shape, 4)

    def this_runtime(**options: Any) -> Job:
        return Job("this_runtime", shape, m, 2, options=options)

    def torch(schedule: str, num_layers: list[int], checkpoints: bool = False) -> Job:
        options = {"schedule": schedule, "num_layers": num_layers, "checkpoints": checkpoints}
        return Job("torch_pipelining", shape, m, 2, options=options)

    return {
        ONE: Job("one_process", shape, m),
        TOGETHER: Job("one_process", shape, m, 2, is_one_world=False),
        WHOLE: Job("one_process", shape, 1),
        OURS: this_runtime(),
        OURS + CHECKPOINTED: this_runtime(checkpoints=True),
        LOOPED: this_runtime(stages_per_rank=2),
        TORCH: torch("1F1B", ours),
        TORCH + CHECKPOINTED: torch("1F1B", ours, checkpoints=True),
        TORCH_EQUAL: torch("1F1B", equal_split(shape, 2)),
        TORCH_LOOPED: torch("Interleaved1F1B", looped),
        TORCH_GPIPE: torch("GPipe", ours),
        # Microbatches of the same size as a pipeline's, so each rank has half of their number.
        REPLICAS: Job("replicated", shape, max(m // 2, 1), 2, options={"way": "ddp"}),
    }[name]


def split_of(teams: Mapping[str, Team], name: str, shape: Shape, num_stages: int) -> list[int]:
    """Returns how many blocks end in each stage: as this team has it, else equal numbers."""
    if name not in teams:
        return equal_split(shape, num_stages)
    split: list[int] = teams[name].details[0]["num_layers"]
    return split


def equal_split(shape: Shape, num_stages: int) -> list[int]:
    return [shape.num_layers // num_stages] * num_stages
