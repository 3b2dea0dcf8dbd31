"""The result of partitioning: which rank holds which module, as data and as the printed table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

__all__ = ["Partition", "RankShare", "Row", "in_ranges", "in_units"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Args:
        path: dotted path of the module or directly held parameter, ``""`` for the root.
        ranks: the ranks that hold a part of it.
        num_parameters: elements of its parameters, a shared one counted once.
        bytes: size of its parameters and persistent buffers.
        cost: its share of the compute of the whole model.
        is_assumed: whether a part of it was not called in the trace, so that its cost is assumed.
    """

    path: str
    ranks: tuple[int, ...]
    num_parameters: int
    bytes: int
    cost: float
    is_assumed: bool = False


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank holds and computes.

    Args:
        num_parameters: elements of its parameters, shared ones included.
        num_trainable: those of them that require grad.
        num_buffers: number of persistent buffers.
        parameter_bytes: parameters and persistent buffers.
        gradient_bytes: gradients.
        optimizer_bytes: two Adam moments, and the masters of 16-bit parameters.
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
        slowest: the largest cost of a rank that was reached, in blended shares of the model.
        notes: what the table says about shared parameters.
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
    notes: tuple[str, ...] = field(default=(), repr=False)
    rows: tuple[Row, ...] = field(default=(), repr=False)
    ranks: tuple[RankShare, ...] = field(default=(), repr=False)

    def table(self) -> str:
        """Returns what follows the log line ``Partition assignments:``."""
        header = ("module: partitions", "parameters", "size", "compute")
        text = _aligned([header, *map(_row_cells, self.rows)], str.ljust)
        if any(row.is_assumed for row in self.rows):
            text.append("~ not called when traced, at least in part: the compute is assumed")
        text.extend(self.notes)
        shares = [_share_cells(rank, share) for rank, share in enumerate(self.ranks)]
        text.extend(_aligned([SHARE_HEADER, *shares], str.rjust))
        text.extend(self._stage_lines())
        return "\n".join(text)

    def _stage_lines(self) -> list[str]:
        """Returns the order of the stages, with their modules where partitions take turns."""
        if len(self.rank_of) == len(set(self.rank_of)):
            return ["stages in order: partitions " + " -> ".join(map(str, self.rank_of))]
        modules: list[list[str]] = [[] for _ in self.rank_of]
        for path, stage in self.stage_of.items():
            modules[stage].append(_slashed(path))
        lines = [f"{len(self.rank_of)} stages in order:"]
        for stage, (rank, paths) in enumerate(zip(self.rank_of, modules, strict=True)):
            held = " to ".join(dict.fromkeys([paths[0], paths[-1]])) if paths else "modules again"
            lines.append(f"  stage {stage} on partition {rank}: {held}")
        return lines

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
            **{**raw, "rank_of": tuple(raw["rank_of"]), "notes": tuple(raw["notes"])},
            holders=holders,
            rows=rows,
            ranks=ranks,
        )


SHARE_HEADER = (
    "partition",
    "parameters",
    "require grads",
    "buffers",
    "compute",
    "memory",
    "= parameters",
    "+ gradients",
    "+ Adam",
    "+ activations",
)


def _row_cells(row: Row) -> tuple[str, ...]:
    compute = f"{'~' * row.is_assumed}{row.cost:.1%}"
    module = f"{_slashed(row.path)}: {in_ranges(row.ranks)}"
    return module, f"{row.num_parameters:,}", in_units(row.bytes), compute


def _share_cells(rank: int, share: RankShare) -> tuple[str, ...]:
    counts = (share.num_parameters, share.num_trainable, share.num_buffers)
    sizes = (
        share.total_bytes,
        share.parameter_bytes,
        share.gradient_bytes,
        share.optimizer_bytes,
        share.activation_bytes,
    )
    return (
        str(rank),
        *(f"{count:,}" for count in counts),
        f"{share.cost:.1%}",
        *map(in_units, sizes),
    )


def _slashed(path: str) -> str:
    return "/".join(["main", *filter(None, path.split("."))])


def _aligned(
    lines: Sequence[tuple[str, ...]], adjust_first: Callable[[str, int], str]
) -> list[str]:
    """Returns lines of aligned columns, all to the right but for the first one."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            (adjust_first if i == 0 else str.rjust)(cell, width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def in_ranges(ranks: Sequence[int]) -> str:
    """Returns ascending ranks for people: ``0, 1`` or ``0-3, 7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def in_units(num_bytes: int) -> str:
    """Returns a number of bytes for people: ``1.5 GiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{num_bytes} B"
        value /= 1024
    return f"{value:.1f} TiB"
