"""The result of partitioning: which rank holds which module, as data and as the printed table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

__all__ = ["Partition", "RankShare", "Row"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Args:
        path: dotted path of the module or directly held parameter, ``""`` for the root.
        ranks: the ranks that hold a part of it.
        num_parameters: elements of its parameters, a shared one counted once.
        bytes: size of its parameters and persistent buffers.
        cost: its share of the compute of the whole model.
    """

    path: str
    ranks: tuple[int, ...]
    num_parameters: int
    bytes: int
    cost: float


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank holds and computes.

    Args:
        num_parameters: elements of its parameters, shared ones included.
        num_trainable: those of them that require grad.
        num_buffers: number of persistent buffers.
        parameter_bytes: parameters and persistent buffers.
        gradient_bytes: gradients.
        optimizer_bytes: two Adam moments.
        activation_bytes: saved for backward, for all microbatches in flight.
        cost: its share of the compute of the whole model.
    """

    num_parameters: int = 0
    num_trainable: int = 0
    num_buffers: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    cost: float = 0.0

    @property
    def total_bytes(self) -> int:
        """All bytes that the rank needs at its peak."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
        )


@dataclass(frozen=True, slots=True)
class Partition:
    """The assignment of every module to a pipeline rank.

    Args:
        assignment: rank of every placed module by path; the whole subtree goes with it. Paths
            are disjoint, and ``""`` is the whole model.
        parameters: rank of every parameter and persistent buffer, by full name, that a module
            which is not placed holds directly.
        holders: ranks of every shared parameter that is copied, by its first full name.
        rank_of: rank of each stage, in execution order.
        stage_of: the stage of every placed module's first call.
        tied: how shared parameters are held: ``"none"``, ``"together"`` or ``"copy"``.
        slowest: the largest cost of a stage that was reached, in blended shares of the model.
        rows: the lines of the table.
        ranks: what each rank holds.
    """

    assignment: Mapping[str, int]
    parameters: Mapping[str, int]
    holders: Mapping[str, tuple[int, ...]]
    rank_of: tuple[int, ...]
    stage_of: Mapping[str, int]
    tied: str = "none"
    slowest: float = 0.0
    rows: tuple[Row, ...] = field(default=(), repr=False)
    ranks: tuple[RankShare, ...] = field(default=(), repr=False)

    def table(self) -> str:
        """Returns what follows the log line ``Partition assignments:``."""
        lines = [_columns(row) for row in self.rows]
        header = ("module", "parameters", "bytes", "cost")
        widths = [max(len(line[i]) for line in [header, *lines]) for i in range(4)]
        text = [_aligned(line, widths) for line in [header, *lines]]
        for name, holders in self.holders.items():
            text.append(f"shared parameter {name}: copies on {_ranges(holders)}, gradients summed")
        if self.tied == "together":
            text.append("shared parameters: the modules of each are on one rank")
        text.extend(_summary(rank, share) for rank, share in enumerate(self.ranks))
        text.append("stages on ranks " + " -> ".join(map(str, self.rank_of)))
        return "\n".join(text)

    def to_json(self) -> str:
        """Returns the partition as JSON, from which `from_json` makes an equal one."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Partition:
        """Makes a partition from what `to_json` returned."""
        raw = json.loads(text)
        rows = tuple(Row(**{**row, "ranks": tuple(row["ranks"])}) for row in raw.pop("rows"))
        ranks = tuple(RankShare(**share) for share in raw.pop("ranks"))
        holders = {name: tuple(ranks) for name, ranks in raw.pop("holders").items()}
        return cls(
            **{**raw, "rank_of": tuple(raw["rank_of"])}, holders=holders, rows=rows, ranks=ranks
        )


def _columns(row: Row) -> tuple[str, str, str, str]:
    path = "/".join(["main", *filter(None, row.path.split("."))])
    ranks = _ranges(row.ranks)
    return f"{path}: {ranks}", f"{row.num_parameters:,}", in_units(row.bytes), f"{row.cost:.1%}"


def _ranges(ranks: Sequence[int]) -> str:
    """Returns ranks for people: ``0-3, 7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _aligned(columns: tuple[str, str, str, str], widths: list[int]) -> str:
    first, *others = columns
    cells = [first.ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
    return "  ".join(cells)


def _summary(rank: int, share: RankShare) -> str:
    return (
        f"partition {rank}: {share.num_parameters:,} parameters, {share.num_trainable:,} require "
        f"grads, {share.num_buffers} buffers; {share.cost:.1%} of the compute; "
        f"{in_units(share.total_bytes)} = {in_units(share.parameter_bytes)} parameters + "
        f"{in_units(share.gradient_bytes)} gradients + {in_units(share.optimizer_bytes)} optimizer "
        f"+ {in_units(share.activation_bytes)} activations"
    )


def in_units(num_bytes: int) -> str:
    """Returns a number of bytes for people: ``1.5 GiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{num_bytes} B"
        value /= 1024
    return f"{value:.1f} TiB"
