"""How long a plan takes: the same order of actions, with costs instead of clocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smp_runtime.planning.schedule import Action, Kind, Plan, starts

Cost = float | Sequence[float]  # of every stage, or of each


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each action of a plan runs. All times count from the start of the step.

    Attributes:
        spans: start and end of each action.
        makespan: the end of the last one.
        busy: for each rank, the time it computes.
    """

    spans: Mapping[Action, tuple[float, float]]
    makespan: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> tuple[float, ...]:
        """For each rank, the share of the whole step, with warmup and cooldown, that it idles."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)


def simulate(
    plan: Plan,
    *,
    forward_cost: Cost,
    backward_cost: Cost,
    recompute_cost: Cost = 0.0,
    transfer_cost: float = 0,
) -> Timeline:
    """Times a plan in which every action starts as soon as its rank and its input are there.

    Args:
        plan: what to compute, and in which order.
        forward_cost: the time of one microbatch's forward, one number or one for each stage.
        backward_cost: the time of its backward.
        recompute_cost: the time of its recomputation, where the plan has one.
        transfer_cost: how long a value travels between two ranks; it keeps neither of them busy.
    """
    costs = {
        Kind.FORWARD: _per_stage(forward_cost, plan.num_stages),
        Kind.RECOMPUTE: _per_stage(recompute_cost, plan.num_stages),
        Kind.BACKWARD: _per_stage(backward_cost, plan.num_stages),
    }

    def cost(action: Action) -> float:
        return costs[action.kind][action.stage]

    spans = {
        action: (start, start + cost(action))
        for action, start in starts(plan, cost, transfer_cost).items()
    }
    busy = tuple(sum(map(cost, order)) for order in plan.orders)
    return Timeline(spans, max(end for _, end in spans.values()), busy)


def _per_stage(cost: Cost, num_stages: int) -> Sequence[float]:
    if isinstance(cost, Sequence):
        if len(cost) != num_stages:
            raise ValueError(f"{len(cost)} costs given for {num_stages} stages")
        return cost
    return (cost,) * num_stages
