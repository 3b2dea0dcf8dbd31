"""What a run would do, without starting it: where its ranks are and the schedule of one step."""

from smp_runtime.config import Config
from smp_runtime.planning.placement import Placement
from smp_runtime.planning.schedule import Plan, draw, plan, starts


def dry_run(config: Config, num_ranks: int, *, recomputes: bool = False) -> str:
    """Returns the placement and the drawn schedule of a config.

    Without a model there is no partition: one stage for each rank and round is assumed.

    Args:
        config: the settings.
        num_ranks: of the whole job.
        recomputes: draw a step in which every stage has checkpointed modules.
    """
    step = chain_plan(config, recomputes=recomputes)
    return "\n\n".join((placement_text(config, num_ranks), schedule_text(config, step)))


def chain_plan(config: Config, *, recomputes: bool = False) -> Plan:
    """Plans one step of stages that go over the pipeline ranks in order, as often as configured."""
    rank_of = tuple(range(config.pipeline_parallel_degree)) * config.stages_per_rank
    return plan(
        rank_of,
        config.microbatches,
        active=config.resolved_active_microbatches,
        policy=config.pipeline,
        recomputed=range(len(rank_of)) if recomputes else (),
        recompute_ahead=config.recompute_ahead,
    )


def placement_text(config: Config, num_ranks: int) -> str:
    """Returns a table of the coordinates of every rank."""
    grid = Placement(
        num_ranks,
        config.pipeline_parallel_degree,
        config.tensor_parallel_degree,
        config.placement_strategy,
    )
    replicas = num_ranks // (config.pipeline_parallel_degree * config.tensor_parallel_degree)
    lines = [
        f"{num_ranks} ranks: pipeline {config.pipeline_parallel_degree}, "
        f"tensor {config.tensor_parallel_degree}, replicas {replicas}, "
        f"placement {config.placement_strategy}",
        "rank  pp_rank  tp_rank  rdp_rank  dp_rank  mp_rank",
    ]
    for rank in range(num_ranks):
        at = grid.coordinates(rank)
        lines.append(
            f"{rank:>4}  {at.pp_rank:>7}  {at.tp_rank:>7}  {at.rdp_rank:>8}  "
            f"{at.dp_rank:>7}  {at.mp_rank:>7}"
        )
    return "\n".join(lines)


def schedule_text(config: Config, step: Plan) -> str:
    """Returns the drawing of one step, with what it keeps in flight and leaves idle."""
    degree = config.pipeline_parallel_degree
    begun = starts(step, lambda _: 1)
    num_clocks = int(max(begun.values())) + 1
    busy = [len(step.actions(rank)) / num_clocks for rank in range(degree)]
    in_flight = ", ".join(str(step.peak_in_flight(rank)) for rank in range(degree))
    return "\n".join(
        (
            f"one step: schedule {config.pipeline}, {config.microbatches} microbatches, "
            f"at most {config.resolved_active_microbatches} in flight",
            draw(step),
            f"in flight by pipeline rank: {in_flight}",
            f"bubble: {1 - sum(busy) / degree:.0%} if all actions take one clock",
        )
    )
