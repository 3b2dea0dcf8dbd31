"""Compares this runtime with one process, torch's pipelining and data parallelism.

    python examples/benchmarks                       # all of it, about half an hour on two cores
    python examples/benchmarks --sections replicas,few-tokens   # data parallelism only
    python examples/benchmarks --microbatches 4 --vocabularies 2048 --only 1F1B,this

Every contestant trains the same GPT-2 shape with the same weights, batch and optimizer on ranks
with one thread each. All are started before the first turn; then they take turns, a few steps
each, in one order and back, so that a slow minute of the machine hits all of them alike. Where
memory is too short for all pipelines at once, they run in heats, one after the other: each has the
references in it that ratios are taken against (one process, two at once, and this runtime).
"""

from __future__ import annotations

import argparse
import math
import platform
from dataclasses import replace
from pathlib import Path

import replicas
import report
import torch
from contestants import REFERENCES, groups, is_wanted, job_of
from heats import Teams, run_heats
from rich.console import Console
from shape import PRESETS, Shape
from team import Team

SECTIONS = ("pipeline", *replicas.SECTIONS)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="make bench")
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="small", help="8 layers x 256, x 512, or 4 x 32")
    add("--pairs", type=int, default=5, metavar="N", help="turns of each contestant")
    add("--steps", type=int, default=2, metavar="N", help="steps of a turn")
    add("--microbatches", type=numbers, default=[4, 8], metavar="N,N")
    add("--vocabularies", type=numbers, default=[2048, 50257], metavar="N,N")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw")
    add("--untied", action="store_true", help="head and embedding have weights of their own")
    add(
        "--sections", type=words, default=[*SECTIONS], metavar="NAME,NAME", help=", ".join(SECTIONS)
    )
    add("--only", type=words, default=[], metavar="NAME,NAME", help="contestants, by part of name")
    add(
        "--memory",
        type=float,
        default=math.inf,
        metavar="GIB",
        help="for one heat of pipelines, if less than there is",
    )
    args = parser.parse_args()
    unknown = [section for section in args.sections if section not in SECTIONS]
    if unknown:
        parser.error(f"unknown sections {unknown}; there are {', '.join(SECTIONS)}")
    return args


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def words(text: str) -> list[str]:
    return text.split(",")


def compare(shape: Shape, m: int, args: argparse.Namespace, console: Console) -> None:
    console.rule(
        f"{shape.num_layers} layers x {shape.width}, sequence {shape.sequence_length}, batch "
        f"{shape.batch_size}, vocabulary {shape.vocabulary}, {m} microbatches, {shape.optimizer}"
    )
    references: dict[str, Team] = {}

    def start(name: str, teams: Teams) -> Team:
        team = Team(name, job_of(name, shape, m, teams))
        team.turn(1)  # to warm up: memory grows until the end of the second step
        return team

    def race(teams: Teams) -> None:
        for turn in range(args.pairs):
            order = list(teams.values())
            for team in order if turn % 2 == 0 else reversed(order):
                team.compete(args.steps)

    for name in REFERENCES:
        if is_wanted(name, args.only):
            references[name] = start(name, references)
    others = groups(shape, args.only, references)
    heats, left_out = run_heats(references, others, start, race, args.memory * 2**30)
    for team in references.values():
        team.close()
    if left_out:
        console.print(f"left out, for memory is short: {', '.join(left_out)}")
    report.show(heats, m, console)
    report.show_bars(heats, console)
    report.check_losses(heats, console)


def main() -> None:
    args = options()
    # Wide enough for the tables where the output is a file.
    console = Console(width=None if Console().is_terminal else 200)
    console.print(f"{processor()}, torch {torch.__version__}, one thread per rank")
    shape = replace(PRESETS[args.preset], optimizer=args.optimizer, is_tied=not args.untied)
    replicas.run(shape, args, console)
    for vocabulary in args.vocabularies if "pipeline" in args.sections else ():
        for m in args.microbatches:
            compare(shape.with_vocabulary(vocabulary), m, args, console)


def processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
