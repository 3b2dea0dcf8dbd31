"""Compares this runtime with one process, torch's pipelining and data parallelism.

    python examples/benchmarks                       # all of it, about half an hour on two cores
    python examples/benchmarks --sections replicas,few-tokens   # data parallelism only
    python examples/benchmarks --microbatches 4 --vocabularies 2048 --only 1F1B,this

Every contestant trains the same GPT-2 shape with the same weights, batch and optimizer on ranks
with one thread each. All are started before the first turn; then they take turns, a few steps
each, in one order and back, so that a slow minute of the machine hits all of them alike.
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import replace
from pathlib import Path

import replicas
import report
import torch
from contestants import start_all
from rich.console import Console
from shape import PRESETS, Shape

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
    teams, left_out = start_all(shape, m, args.only)
    if left_out:
        console.print(f"left out, for memory is short: {', '.join(left_out)}")
    for team in teams.values():
        team.turn(1)  # to warm up
    for turn in range(args.pairs):
        order = list(teams.values())
        for team in order if turn % 2 == 0 else reversed(order):
            team.compete(args.steps)
    for team in teams.values():
        team.close()
    report.show(teams, m, console)
    report.show_bars(teams, console)
    report.check_losses(teams, console)


def main() -> None:
    args = options()
    # Wide enough for the tables where the output is a file.
    console = Console(width=None if Console().is_terminal else 190)
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
