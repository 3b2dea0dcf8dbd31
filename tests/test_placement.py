"""Tests of the grid of ranks."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_runtime.errors import ConfigError
from smp_runtime.planning.placement import Axis, Coordinates, Placement

AXES: tuple[Axis, ...] = get_args(Axis)
STRATEGIES = ("cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD")

# Eight ranks, all degrees 2. Of each rank: its place along D, P and T. Then the groups along
#    ranks 0 to 7                    pp          tp          rdp         dp        mp
TABLE = """
DPT  000 001 010 011 100 101 110 111  02 13 46 57  01 23 45 67  04 15 26 37  0145 2367  0123 4567
DTP  000 010 001 011 100 110 101 111  01 23 45 67  02 13 46 57  04 15 26 37  0246 1357  0123 4567
PDT  000 001 100 101 010 011 110 111  04 15 26 37  01 23 45 67  02 13 46 57  0123 4567  0145 2367
PTD  000 100 001 101 010 110 011 111  04 15 26 37  02 13 46 57  01 23 45 67  0123 4567  0246 1357
TDP  000 010 100 110 001 011 101 111  01 23 45 67  04 15 26 37  02 13 46 57  0246 1357  0145 2367
TPD  000 100 010 110 001 101 011 111  02 13 46 57  04 15 26 37  01 23 45 67  0145 2367  0246 1357
"""
ROWS = [line.split() for line in TABLE.strip().splitlines()]


def digits(words: list[str]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, word)) for word in words)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_permutation(row: list[str]) -> None:
    strategy, *words = row
    placement = Placement(8, 2, 2, strategy)
    coordinates = [placement.coordinates(rank) for rank in range(8)]
    assert digits(words[:8]) == tuple((c.rdp_rank, c.pp_rank, c.tp_rank) for c in coordinates)
    for axis, start, end in (("pp", 8, 12), ("tp", 12, 16), ("rdp", 16, 20), ("dp", 20, 22)):
        assert placement.groups(axis) == digits(words[start:end])  # type: ignore[arg-type]
    assert placement.groups("mp") == digits(words[22:])
    assert placement.groups("world") == (tuple(range(8)),)


def test_cluster_and_spread_are_synonyms() -> None:
    for axis in AXES:
        assert Placement(8, 2, 2).groups(axis) == Placement(8, 2, 2, "DPT").groups(axis)
        assert Placement(8, 2, 2, "spread").groups(axis) == Placement(8, 2, 2, "TPD").groups(axis)


def test_without_tensor_parallelism() -> None:
    spread = Placement(8, 2, strategy="spread")
    assert spread.groups("mp") == spread.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert spread.groups("dp") == spread.groups("rdp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert spread.coordinates(6) == Coordinates(1, 0, 2, 2, 1)
    cluster = Placement(8, 2)
    assert cluster.groups("mp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert cluster.groups("dp") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert cluster.groups("tp") == tuple((rank,) for rank in range(8))


def test_layouts_of_published_logs() -> None:
    placement = Placement(16, 2, 8)
    assert [placement.coordinates(rank).pp_rank for rank in range(16)] == [0] * 8 + [1] * 8
    assert Placement(8, 1, 4).coordinates(7) == Coordinates(
        pp_rank=0, tp_rank=3, rdp_rank=1, dp_rank=7, mp_rank=3
    )
    sharded = Placement(32, 1, 4)
    assert sharded.groups("tp")[:2] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert sharded.group("rdp", 4) == tuple(range(0, 32, 4))


def test_one_rank() -> None:
    placement = Placement(1, 1)
    assert placement.coordinates(0) == Coordinates(0, 0, 0, 0, 0)
    assert all(placement.groups(axis) == ((0,),) for axis in AXES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((6, 4), "6 ranks .* pipeline_parallel_degree=4 .* multiple of 4 ranks"),
        ((2, 4), "2 ranks .* is 4 ranks a replica"),
        ((8, 2, 3), "8 ranks .* tensor_parallel_degree=3 is 6 ranks"),
        ((0, 1), "0 ranks"),
        ((8, 2, 2, "DP"), "placement_strategy='DP' does not exist: write 'cluster'"),
        ((8, 2, 2, "dpt"), "placement_strategy='dpt'"),
        ((8, 2, 2, "DDPT"), "placement_strategy='DDPT'"),
    ],
)
def test_refuses_impossible_grids(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement(*arguments)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    pp, tp, rdp = (draw(st.integers(1, 4)) for _ in range(3))
    return Placement(pp * tp * rdp, pp, tp, draw(st.sampled_from(STRATEGIES)))


@given(placements())
def test_sizes_multiply_to_the_world(placement: Placement) -> None:
    world, pp, tp, rdp, dp, mp = (placement.size(axis) for axis in AXES)
    assert world == placement.world_size == mp * rdp == pp * dp == pp * tp * rdp


@given(placements(), st.sampled_from(AXES))
def test_every_rank_is_in_one_group_of_each_axis(placement: Placement, axis: Axis) -> None:
    groups = placement.groups(axis)
    assert sorted(sum(groups, ())) == list(range(placement.world_size))
    assert {len(group) for group in groups} == {placement.size(axis)}
    assert list(groups) == sorted(groups)
    for group in groups:
        assert list(group) == sorted(group)
        assert all(placement.group(axis, rank) == group for rank in group)


@given(placements(), st.sampled_from(("pp", "tp", "rdp", "dp", "mp")))
def test_a_coordinate_is_the_place_in_the_group(placement: Placement, axis: Axis) -> None:
    for group in placement.groups(axis):
        places = [getattr(placement.coordinates(rank), f"{axis}_rank") for rank in group]
        assert places == list(range(len(group)))
