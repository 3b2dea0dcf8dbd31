"""Data parallelism: this runtime against DistributedDataParallel, with and without overlap.

Every contestant is a set of replicas that train the same shape. "never" reduces nothing, so what
the others take longer is what their reduction costs; the plainest is one all-reduce of all
gradients after the backward pass. A timeline shows when it happens.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median
from typing import Any

from job import Job
from rich.console import Console
from rich.table import Table
from shape import Shape
from team import Team

NEVER, OVERLAPPED, AFTER = "this runtime, never", "this runtime, overlapped", "this runtime, after"
DDP, DDP_NEVER, DDP_AFTER = "torch DDP", "torch DDP, never", "torch, one all-reduce after"
WAYS = {
    NEVER: "never",
    OVERLAPPED: "overlapped",
    AFTER: "after",
    DDP: "ddp",
    DDP_NEVER: "ddp never",
    DDP_AFTER: "ddp after",
}
WIDTH = 72


SECTIONS = ("replicas", "few-tokens", "replicated-pipelines")


def run(shape: Shape, args: argparse.Namespace, console: Console) -> None:
    """Compares replicas on a usual shape, on one whose gradients are heavy, and in pipelines."""
    heavy = replace(
        shape.with_vocabulary(2048),
        width=2 * shape.width,  # 100 MB of gradients with the small preset
        # So long that one all-reduce after the backward pass adds some 40 % to a step of torch's.
        sequence_length=shape.sequence_length * 7 // 16,
        batch_size=4,
        optimizer="sgd",
    )
    for section, chosen, m, degree in zip(
        SECTIONS, (shape, heavy, heavy), (4, 1, 2), (1, 1, 2), strict=True
    ):
        if section in args.sections:
            compare(section, chosen, m, degree, args, console)


def compare(
    title: str, shape: Shape, m: int, degree: int, args: argparse.Namespace, console: Console
) -> None:
    console.rule(
        f"{title}: {shape.num_layers} layers x {shape.width}, sequence {shape.sequence_length}, "
        f"batch {shape.batch_size}, {m} microbatches, {shape.optimizer}"
    )
    names = [
        name
        for name in WAYS
        if (degree == 1 or not name.startswith("torch"))
        and (name in (NEVER, OVERLAPPED) or not args.only or any(w in name for w in args.only))
    ]
    teams = {
        name: Team(name, Job("replicated", shape, m, 2 * degree,
                             options={"way": WAYS[name], "degree": degree}))
        for name in names
    }  # fmt: skip
    for team in teams.values():
        team.turn(2)  # the second step has buckets
    for turn in range(args.pairs):
        order = list(teams.values())
        for team in order if turn % 2 == 0 else reversed(order):
            team.compete(args.steps)
    for team in teams.values():
        team.close()
    show(teams, console)
    show_timeline(teams[OVERLAPPED], console)


def show(teams: dict[str, Team], console: Console) -> None:
    table = Table(caption_justify="left", caption="ratios: medians over turns next to each other")
    table.add_column(no_wrap=True)
    heads = ("s/step", "above its own never", "over torch DDP", "user s", "system s", "peak MiB")
    for head in heads:
        table.add_column(head, justify="right")
    for name, team in teams.items():
        never = DDP_NEVER if name.startswith("torch") and DDP_NEVER in teams else NEVER
        table.add_row(
            name,
            f"{median(step.seconds for step in team.steps):.3f}",
            f"{ratio(team, teams[never]) - 1:+.1%}",
            f"x {ratio(team, teams[DDP]):.3f}" if DDP in teams else "",
            f"{median(step.user for step in team.steps):.2f}",
            f"{median(step.system for step in team.steps):.2f}",
            " ".join(f"{peak / 2**20:.0f}" for peak in team.steps[-1].peak_bytes),
        )
    console.print(table)


def ratio(above: Team, below: Team) -> float:
    return median(a.seconds / b.seconds for a, b in zip(above.steps, below.steps, strict=True))


def show_timeline(team: Team, console: Console) -> None:
    """Draws when each bucket was under way in the last step, on each rank."""
    for rank in range(team.job.num_ranks):
        detail: dict[str, Any] = team.steps[-1].details[rank][-1]
        scale = WIDTH / detail["step"]
        wall, reductions = detail["wall"], sorted(detail["reductions"])
        if not reductions:
            continue
        hidden = sum(max(0.0, min(end, wall) - begin) for begin, end in reductions)
        total = sum(end - begin for begin, end in reductions)
        console.print(
            f"rank {rank}: forward and backward passes, then the buckets", highlight=False
        )
        console.print("  " + "=" * round(wall * scale), highlight=False)
        for begin, end in reductions:
            length = max(1, round((end - begin) * scale))
            console.print("  " + " " * round(begin * scale) + "#" * length, highlight=False)
        console.print(
            f"  {hidden / total:.0%} of the reductions' time lies within the backward pass; "
            f"{sum(begin < wall for begin, _ in reductions)} of {len(reductions)} buckets began "
            f"there; the last one ended {1000 * (reductions[-1][1] - wall):+.1f} ms after it",
            highlight=False,
        )
