"""What comes out: tables of medians and ratios.

A contestant's numbers come from its heat; those of the references from the first one, except where
they are compared with another contestant: then from that one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from contestants import CHECKPOINTED, LOOPED, ONE, OURS, TOGETHER, TORCH, TORCH_LOOPED, WHOLE
from heats import Teams
from rich.console import Console
from rich.table import Table
from team import Step, Team

Heats = Sequence[Teams]

WALL_COLUMNS = ("s/step", "x one", "of ideal", "of reachable", "ours is")
CLOCK_COLUMNS = ("emulated s", "x one", "of ideal")
OTHER_COLUMNS = ("peak MiB", "user s", "system s", "extra ms", "first step s", "loss")


def middle(team: Team, value: Callable[[Step], float]) -> float:
    return median(value(step) for step in team.steps)


def seconds(team: Team) -> float:
    return middle(team, lambda step: step.seconds)


def ratio(teams: Teams, above: str, below: str) -> float:
    """Returns how long `above` takes over `below`: the median over turns next to each other."""
    pairs = zip(teams[above].steps, teams[below].steps, strict=True)
    return median(a.seconds / b.seconds for a, b in pairs)


def once(heats: Heats) -> Iterator[tuple[int, str]]:
    """Yields the name of each contestant after the number of the first heat that it runs in."""
    for number, teams in enumerate(heats):
        yield from ((number, name) for name in teams if number == 0 or name not in heats[0])


def heat_of(heats: Heats, *names: str) -> Teams | None:
    """Returns the first heat in which all of these run."""
    return next((teams for teams in heats if set(names) <= teams.keys()), None)


def show(heats: Heats, m: int, console: Console) -> None:
    show_contestants(heats, m, console)
    for name in (OURS, LOOPED):
        if teams := heat_of(heats, name):
            show_breakdown(teams[name], console)
    show_checkpointing(heats, console)


def show_contestants(heats: Heats, m: int, console: Console) -> None:
    table = Table(caption_justify="left")
    table.add_column(no_wrap=True, overflow="fold")
    heads = (*WALL_COLUMNS, *CLOCK_COLUMNS, *OTHER_COLUMNS)
    for head in heads if len(heats) == 1 else ("heat", *heads):
        table.add_column(head, justify="right")
    for number, name in once(heats):
        title = f"{name} {heats[number][name].job.options.get('num_layers', '')}"
        heat = [str(number + 1)] if len(heats) > 1 else []
        table.add_row(title, *heat, *cells(heats[number], name, m))
    table.caption = explain(heats, m)
    console.print(table)


def ideal_gain(m: int) -> float:
    return 2 * m / (m + 1)


def of_both(teams: Teams) -> float:
    """Returns the throughput of two processes at once over that of one."""
    return 2 * ratio(teams, ONE, TOGETHER)


def cells(teams: Teams, name: str, m: int) -> list[str]:
    """Returns what the table of contestants says about one of them."""
    team, ideal, both = teams[name], ideal_gain(m), of_both(teams)
    gain = ratio(teams, ONE, name)
    pipeline = team.job.num_ranks == 2 and name != TOGETHER
    rival = LOOPED if name == TORCH_LOOPED else OURS
    emulated = middle(team, lambda step: step.emulated)
    clock = middle(teams[ONE], lambda step: step.emulated)
    extra = (middle(team, cpu) - middle(teams[TOGETHER], cpu) / 2) / (2 * m) * 1000
    return [
        f"{seconds(team):.3f}",
        f"{gain:.3f}" if name != TOGETHER else f"{both:.3f}",
        f"{gain / ideal:.1%}" if pipeline else "",
        f"{gain / (ideal * both / 2):.1%}" if pipeline else "",
        f"x {ratio(teams, name, rival):.3f}" if pipeline and rival in teams else "",
        f"{emulated:.3f}",
        f"{clock / emulated:.3f}" if pipeline else "",
        f"{clock / emulated / ideal:.1%}" if pipeline else "",
        " ".join(f"{peak / 2**20:.0f}" for peak in team.steps[-1].peak_bytes),
        f"{middle(team, lambda step: step.user):.2f}",
        f"{middle(team, lambda step: step.system):.2f}",
        f"{extra:.1f}" if pipeline else "",
        f"{team.seconds_to_first_step:.1f}",
        f"{team.steps[-1].losses[-1]:.6f}",
    ]


def explain(heats: Heats, m: int) -> str:
    ideal, both = ideal_gain(m), of_both(heats[0])
    text = (
        f"x one: throughput over {ONE} with the same microbatch size; its ideal: 2m/(m+1) = "
        f"{ideal:.3f}\nreachable: ideal x what two processes reach together, {both:.3f} of 2 = "
        f"{ideal * both / 2:.3f}"
    )
    if teams := heat_of(heats, WHOLE):
        small = ratio(teams, WHOLE, ONE)
        text += (
            f"; x {small:.3f} for the smaller microbatch = {ideal * both / 2 * small:.3f} over "
            "one process with the whole batch"
        )
    text += (
        "\nours is: so many times faster than this one, turn by turn\nemulated: by CPU "
        "time, as if each rank had a core of its own and transfers were free\nextra: CPU time "
        f"above that of {TOGETHER}, per microbatch and rank"
    )
    if len(heats) > 1:
        again = ", ".join(name for name in heats[0] if name in heats[1])
        text += (
            f"\nheat: memory is too short for all at once; {again} run in every heat, and ratios "
            "come from turns of the same heat;\ntheir own rows, and what two processes reach "
            "together as given above, are those of the first heat"
        )
    turns = f"{len(heats[0][ONE].steps)}{' in each heat' if len(heats) > 1 else ''}"
    return f"{text}\nturns: {turns}; load of the machine: {load()}"


def cpu(step: Step) -> float:
    return step.user + step.system


def show_breakdown(team: Team, console: Console) -> None:
    """Shows where the time of this runtime's step goes, on each rank, in milliseconds."""
    m = team.job.num_microbatches
    table = Table(title=f"{team.name}: where the time goes, ms", title_justify="left")
    for head in ("rank", "step", "compute", "glue", "waiting", "bubble", "transfer wait"):
        table.add_column(head, justify="right")
    for head in ("glue per microbatch", "around the bodies", "optimizer", "emulated step"):
        table.add_column(head, justify="right")
    for rank in range(team.job.num_ranks):
        details = [detail for turn in team.steps for detail in turn.details[rank]]

        def ms(value: Callable[[dict[str, float]], float], details: list = details) -> float:
            return median(value(detail) for detail in details) * 1000

        compute = ms(lambda d: d["compute"])
        glue = ms(lambda d: d["busy"] - d["compute"])
        waiting = ms(lambda d: d["wall"] - d["busy"])
        # The bubble of equal stages; what is beyond it comes from transfers and from imbalance.
        bubble = ms(lambda d: d["busy"]) / m
        table.add_row(
            str(rank),
            f"{ms(lambda d: d['step']):.1f}",
            f"{compute:.1f}",
            f"{glue:.1f}",
            f"{waiting:.1f}",
            f"{bubble:.1f}",
            f"{waiting - bubble:.1f}",
            f"{glue / m:.2f}",
            f"{ms(lambda d: d['step'] - d['wall']):.1f}",
            f"{ms(lambda d: d['optimizer']):.1f}",
            f"{ms(lambda d: d['emulated']):.1f}",
        )
    console.print(table)


def show_checkpointing(heats: Heats, console: Console) -> None:
    """Shows what checkpointing every block costs in time and saves in memory."""
    pairs = {
        name: teams
        for name in (OURS, TORCH)
        if (teams := heat_of(heats, name, name + CHECKPOINTED))
    }
    if not pairs:
        return
    table = Table(title="every block checkpointed", title_justify="left", caption_justify="left")
    for head in (
        "",
        "s/step without",
        "with",
        "ratio",
        "emulated ratio",
        "peak MiB without",
        "with",
    ):
        table.add_column(head, justify="right")
    for head in ("saved MiB without", "with", "recomputing ms", "while idle"):
        table.add_column(head, justify="right")
    for name, teams in pairs.items():
        before, after = teams[name], teams[name + CHECKPOINTED]
        emulated = [middle(team, lambda step: step.emulated) for team in (before, after)]
        table.add_row(
            name,
            f"{seconds(before):.3f}",
            f"{seconds(after):.3f}",
            f"{ratio(teams, name + CHECKPOINTED, name):.3f}",
            f"{emulated[1] / emulated[0]:.3f}",
            *(mebibytes(team.steps[-1].peak_bytes) for team in (before, after)),
            *(mebibytes(of_ranks(team, "saved_bytes")) for team in (before, after)),
            per_rank(after, "recomputed", 1000),
            per_rank(after, "recomputed_ahead", 1000),
        )
    table.caption = (
        "ratio: the median over turns next to each other; saved: counted at the peak of a step by "
        "saved-tensor hooks\nwhile idle: the part of the recomputing that a rank did while it "
        "waited for an output gradient"
    )
    console.print(table)


def of_ranks(team: Team, key: str) -> list[float]:
    """Returns the median of a detail on each rank; nothing where it isn't known."""
    ranks = range(team.job.num_ranks)
    details = [[d for turn in team.steps for d in turn.details[rank]] for rank in ranks]
    return [median(d[key] for d in rank) for rank in details if key in rank[0]]


def mebibytes(sizes: list[float]) -> str:
    return " ".join(f"{size / 2**20:.0f}" for size in sizes)


def per_rank(team: Team, key: str, scale: float) -> str:
    return " ".join(f"{scale * value:.0f}" for value in of_ranks(team, key))


def show_bars(heats: Heats, console: Console) -> None:
    """Says which bars are met."""
    for name, rival in ((OURS, TORCH), (LOOPED, TORCH_LOOPED)):
        if teams := heat_of(heats, name, rival):
            speed = ratio(teams, rival, name)
            emulated = middle(teams[rival], lambda step: step.emulated) / middle(
                teams[name], lambda step: step.emulated
            )
            mine, theirs = (max(teams[n].steps[-1].peak_bytes) for n in (name, rival))
            console.print(
                f"{name} against {rival}: {speed:.3f} x the throughput "
                f"({emulated:.3f} x on the emulated clock), "
                f"{mine / theirs:.3f} x the memory",
                highlight=False,
            )


def check_losses(heats: Heats, console: Console) -> None:
    """Says whether all contestants train the same: equal losses after the same steps.

    In their first heat all have run the same number of steps, whichever heat that is.
    """
    teams = {name: heats[number][name] for number, name in once(heats)}
    for name, team in teams.items():
        difference = max(
            abs(a - b) / abs(b)
            for a, b in zip(team.first_losses, teams[ONE].first_losses, strict=True)
        )
        if difference > 1e-5:
            raise SystemExit(f"{name} trains something else: its loss is off by {difference:.1e}")
    last = {team.steps[-1].losses[-1] for team in teams.values()}
    spread = (max(last) - min(last)) / min(last)
    console.print(f"equal losses: the first to 1e-5, the last to {spread:.0e}", highlight=False)


def load() -> str:
    file = Path("/proc/loadavg")
    return " ".join(file.read_text().split()[:3]) if file.exists() else "unknown"
