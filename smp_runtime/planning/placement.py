"""Which rank sits where on the grid of data, pipeline and tensor parallelism.

A strategy is a permutation of the letters D, P and T. From left to right they name the axes of
the grid from the slowest varying to the fastest, as the global rank counts up. Eight ranks with
pipeline degree 2 and tensor degree 2, under DPT::

    # rank                      0  1  2  3  4  5  6  7
    # D  index of the replica   0  0  0  0  1  1  1  1
    # P  index of the partition 0  0  1  1  0  0  1  1
    # T  index of the shard     0  1  0  1  0  1  0  1

The ranks of a group agree in the letters that the group's axis does not span, and a rank's place
in its group is the order of global ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Literal

from ..errors import ConfigError

Axis = Literal["world", "pp", "tp", "rdp", "dp", "mp"]

SYNONYMS: Mapping[str, str] = {"cluster": "DPT", "spread": "TPD"}

# The letters in which the ranks of a group agree.
AGREEING: Mapping[Axis, str] = {
    "world": "",
    "pp": "DT",
    "tp": "DP",
    "rdp": "PT",  # the holders of identical parameters
    "dp": "P",  # all that share a partition: the union of rdp and tp
    "mp": "D",  # one replica of the whole model
}


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The place of one rank in each of its groups."""

    pp_rank: int
    tp_rank: int
    rdp_rank: int
    dp_rank: int
    mp_rank: int


@dataclass(frozen=True)
class Placement:
    """The grid of all ranks.

    Args:
        world_size: number of ranks.
        pipeline_parallel_degree: number of partitions of a replica.
        tensor_parallel_degree: number of shards of a partition.
        strategy: ``cluster``, ``spread`` or a permutation of the letters D, P and T.

    Raises:
        ConfigError: the degrees do not fill the world, or there is no such strategy.
    """

    world_size: int
    pipeline_parallel_degree: int
    tensor_parallel_degree: int = 1
    strategy: str = "cluster"

    def __post_init__(self) -> None:
        if self.letters not in map("".join, permutations("DPT")):
            raise ConfigError(
                f"placement_strategy={self.strategy!r} does not exist: write 'cluster', 'spread' "
                "or a permutation of the letters D, P and T such as 'DPT'"
            )
        pp, tp = self.pipeline_parallel_degree, self.tensor_parallel_degree
        if min(self.world_size, pp, tp) < 1 or self.world_size % (pp * tp):
            raise ConfigError(
                f"{self.world_size} ranks cannot hold whole replicas of the model: "
                f"pipeline_parallel_degree={pp} times tensor_parallel_degree={tp} is {pp * tp} "
                f"ranks a replica. Start a multiple of {pp * tp} ranks or change the degrees"
            )

    @property
    def letters(self) -> str:
        """The strategy as a permutation of the letters D, P and T."""
        return SYNONYMS.get(self.strategy, self.strategy)

    @property
    def degrees(self) -> dict[str, int]:
        """The length of each side of the grid, by its letter."""
        pp, tp = self.pipeline_parallel_degree, self.tensor_parallel_degree
        return {"D": self.world_size // (pp * tp), "P": pp, "T": tp}

    def size(self, axis: Axis) -> int:
        """Returns the number of ranks of any group along `axis`."""
        degrees = self.degrees
        return prod(degrees[letter] for letter in "DPT" if letter not in AGREEING[axis])

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the place of a global rank in each of its groups."""
        position = self._position(rank)
        return Coordinates(
            pp_rank=position["P"],
            tp_rank=position["T"],
            rdp_rank=position["D"],
            dp_rank=self.group("dp", rank).index(rank),
            mp_rank=self.group("mp", rank).index(rank),
        )

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Returns the global ranks, in order, of the group along `axis` that holds `rank`."""
        return next(group for group in self.groups(axis) if rank in group)

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Returns all groups along `axis`, each in order and themselves by their first rank."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            position = self._position(rank)
            key = tuple(position[letter] for letter in AGREEING[axis])
            members.setdefault(key, []).append(rank)
        return tuple(map(tuple, members.values()))

    def _position(self, rank: int) -> dict[str, int]:
        """Returns the position of a global rank on the grid, by letter."""
        assert 0 <= rank < self.world_size, f"no rank {rank} among {self.world_size}"
        position = {}
        for letter in reversed(self.letters):
            rank, position[letter] = divmod(rank, self.degrees[letter])
        return position
