"""Who runs against whom, in which order they are started."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
from job import Job
from shape import Shape
from team import Team

ONE, WHOLE, TOGETHER = "one process", "one process, whole batch", "two processes at once"
OURS, LOOPED = "this runtime", "this runtime, looped"
CHECKPOINTED = ", checkpointed"
TORCH, TORCH_LOOPED = "torch 1F1B", "torch Interleaved1F1B"


def start_all(shape: Shape, m: int, only: Sequence[str]) -> tuple[dict[str, Team], list[str]]:
    """Starts one process or two for each contestant, one contestant after the other.

    torch's schedules get the split that this runtime has chosen, and where that is not the one
    with equal layers, 1F1B gets that as well. All stay in memory at once, those first that matter
    most.

    Returns:
        The teams, and the names of those that were left out because memory ran short.
    """
    teams: dict[str, Team] = {}
    left_out: list[str] = []
    taken: list[int] = []

    def start(name: str, job: Job) -> None:
        if only and name not in (ONE, TOGETHER) and not any(word in name for word in only):
            return
        available = psutil.virtual_memory().available
        if has_room(taken, available):
            teams[name] = Team(name, job)
            taken.append(available - psutil.virtual_memory().available)
        else:
            left_out.append(name)

    def start_torch(
        name: str, schedule: str, num_layers: list[int], checkpoints: bool = False
    ) -> None:
        options = {"schedule": schedule, "num_layers": num_layers, "checkpoints": checkpoints}
        start(name, Job("torch_pipelining", shape, m, 2, options=options))

    start(ONE, Job("one_process", shape, m))
    start(TOGETHER, Job("one_process", shape, m, 2, is_one_world=False))
    start(OURS, Job("this_runtime", shape, m, 2))
    start(LOOPED, Job("this_runtime", shape, m, 2, options={"stages_per_rank": 2}))
    equal = [shape.num_layers // 2] * 2
    ours = split_of(teams.get(OURS)) or equal
    start_torch(TORCH, "1F1B", ours)
    if ours != equal:
        start_torch(f"{TORCH}, equal layers", "1F1B", equal)
    looped = split_of(teams.get(LOOPED)) or [shape.num_layers // 4] * 4
    start_torch(TORCH_LOOPED, "Interleaved1F1B", looped)
    start(OURS + CHECKPOINTED, Job("this_runtime", shape, m, 2, options={"checkpoints": True}))
    start_torch(TORCH + CHECKPOINTED, "1F1B", ours, checkpoints=True)
    # Microbatches of the same size as a pipeline's, so each rank has half of their number.
    start("data parallel", Job("replicated", shape, max(m // 2, 1), 2, options={"way": "ddp"}))
    start_torch("torch GPipe", "GPipe", ours)
    start(WHOLE, Job("one_process", shape, 1))
    return teams, left_out


def has_room(taken: Sequence[int], available: int) -> bool:
    """Says whether there is memory for one more.

    It may need half as much again as any so far, and those grow by a half after their first step.

    Args:
        taken: the bytes by which each of those so far has reduced what is available.
        available: bytes that are left.
    """
    return available > 1.5 * max(taken, default=0) + sum(taken) / 2


def split_of(team: Team | None) -> list[int] | None:
    """Returns how many blocks end in each stage."""
    return team.details[0]["num_layers"] if team else None
