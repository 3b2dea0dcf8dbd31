"""Heats: where memory is too short for all contestants at once, they run in parts.

Every heat has the references in it, which the others are compared with, so that each ratio comes
from turns next to each other. The references' ranks stay alive from heat to heat; the others end
with their heat, and leave their memory to those of the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import psutil
from team import Team

Teams = Mapping[str, Team]


def run_heats(
    references: Teams,
    groups: Sequence[Sequence[str]],
    start: Callable[[str, Teams], Team],
    race: Callable[[Teams], None],
    limit: float = math.inf,
) -> tuple[list[Teams], list[str]]:
    """Runs as many heats as memory makes necessary; one where it suffices for all.

    Args:
        references: those that run in every heat.
        groups: the names of the others. Those of one group share a heat.
        start: starts a contestant, given those of its heat so far.
        race: lets the contestants of a heat take their turns.
        limit: bytes that a heat may take, if fewer than there are.

    Returns:
        The heats, each with the turns of that heat only, and the names of those that were left out:
        there was no room for them beside the references and what is before them in their group.
    """
    heats: list[Teams] = []
    left_out: list[str] = []
    waiting = list(groups)
    while waiting or not heats:
        teams = {name: team.for_another_heat() for name, team in references.items()}
        later = []
        for group in waiting:
            is_first = len(teams) == len(references)
            if not is_first and not has_room(len(group), teams, limit):
                later.append(group)
                continue
            for name in group:
                if is_first and not has_room(1, teams, limit):
                    left_out.append(name)
                else:
                    teams[name] = start(name, teams)
        if len(teams) > len(references) or not heats:
            race(teams)
            heats.append(teams)
        for name in teams.keys() - references.keys():
            teams[name].close()
        waiting = later
    return heats, left_out


def has_room(num: int, teams: Teams, limit: float = math.inf) -> bool:
    """Says whether there is memory for so many more beside these teams.

    Each may need half as much again as any so far; and those grow by a tenth in later steps.
    """
    sizes = [team.resident_bytes() for team in teams.values()]
    left = min(psutil.virtual_memory().available, limit - sum(sizes))
    return left > 1.5 * num * max(sizes, default=0) + sum(sizes) / 10
