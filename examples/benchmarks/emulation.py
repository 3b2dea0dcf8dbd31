"""What a step would take if every rank had a core of its own: from CPU time alone.

This runtime has an emulated clock for that. torch's schedules get the same treatment here: an
action takes the CPU time that its rank used since the action before, and begins when the actions
that it needs are over; transfers cost nothing, as on this runtime's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Action = tuple[str, int, int]  # "F" or "B", stage, microbatch


def emulated_seconds(details: Sequence[dict[str, Any]]) -> float:
    """Returns the seconds of one step, from what each rank told about it."""
    if all("actions" in detail for detail in details):
        return longest_path([detail["actions"] for detail in details])
    return max(float(detail["emulated"]) for detail in details)


def longest_path(ranks: Sequence[Sequence[tuple[str, int, int, float]]]) -> float:
    """Returns when the last rank is done; each action comes with its rank's CPU time at its end."""
    num_stages = 1 + max(stage for actions in ranks for _, stage, _, _ in actions)
    ended: dict[Action, float] = {}
    now = [0.0] * len(ranks)
    done = [1] * len(ranks)  # the first entry is the beginning of the step
    while any(done[rank] < len(actions) - 1 for rank, actions in enumerate(ranks)):
        before = list(done)
        for rank, actions in enumerate(ranks):
            while done[rank] < len(actions) - 1:
                kind, stage, microbatch, cpu = actions[done[rank]]
                source = needed(kind, stage, microbatch, num_stages)
                if source is not None and source not in ended:
                    break
                used = cpu - actions[done[rank] - 1][3]
                now[rank] = max(now[rank], ended[source] if source else 0.0) + used
                ended[kind, stage, microbatch] = now[rank]
                done[rank] += 1
        assert done != before, "the actions wait for each other"
    # The last entry is the end of the step. Where a parameter is shared, all ranks meet there.
    return max(now) + max(actions[-1][3] - actions[-2][3] for actions in ranks)


def needed(kind: str, stage: int, microbatch: int, num_stages: int) -> Action | None:
    """Returns the action whose result this one needs from another stage."""
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage > 0 else None
    return ("B", stage + 1, microbatch) if stage < num_stages - 1 else None
