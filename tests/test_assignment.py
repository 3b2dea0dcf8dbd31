"""Nothing is lost and nothing is assigned twice, whatever the tree."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from trees_of_modules import TreeMaker, homes

from smp_runtime.errors import PartitionError
from smp_runtime.planning.module_tree import ModuleNode, OwnCost, is_below
from smp_runtime.planning.partitioning import Partition, partition


@st.composite
def trees(draw: st.DrawFn) -> ModuleNode:
    make = TreeMaker()

    def module(path: str, depth: int, *, in_called: bool = True) -> ModuleNode:
        is_called = in_called and draw(st.integers(0, 9)) > 1
        calls = (make.call(),) if is_called or not path else ()
        own = tuple(
            make.parameter(
                draw(st.integers(1, 9)),
                group=draw(st.none() | st.sampled_from([1001, 1002])),
                name=f"p{i}",
            )
            for i in range(draw(st.integers(0, 2)))
        )
        costs = (OwnCost(calls[0], float(draw(st.integers(0, 9)))),) if calls else ()
        children = tuple(
            # What an uncalled parent holds may be called all the same, by another method.
            module(
                f"{path}.{i}" if path else str(i),
                depth - 1,
                in_called=is_called or not path or draw(st.booleans()),
            )
            for i in range(draw(st.integers(0, 3)) if depth else 0)
        )
        return ModuleNode(
            path,
            "Module",
            calls,
            own,
            costs,
            children=children,
            is_closed=draw(st.integers(0, 9)) > 0 or not path,
            is_repeated_container=draw(st.booleans()),
            is_opaque=draw(st.booleans()),
            is_indivisible=bool(calls) and bool(path) and draw(st.integers(0, 4)) == 0,
            is_callable=bool(calls) or draw(st.booleans()),
        )

    return module("", 3)


@given(trees(), st.integers(1, 4), st.sampled_from(["auto", "together", "copy"]))
def test_everything_is_assigned_exactly_once(root, num_partitions, tied):
    check_invariants(root, num_partitions, lambda: partition(root, num_partitions, tied=tied), tied)


@given(trees(), st.integers(1, 4), st.data())
def test_manual_placement_assigns_everything_exactly_once(root, num_partitions, data):
    paths = [node.path for node in root.walk()]
    ranks = st.integers(0, num_partitions - 1)
    pinned = data.draw(st.dictionaries(st.sampled_from(paths), ranks))
    check_invariants(
        root,
        num_partitions,
        lambda: partition(root, num_partitions, pinned=pinned, default_partition=0),
        "copy",
    )


def check_invariants(
    root: ModuleNode, num_partitions: int, make: Callable[[], Partition], tied: str
) -> None:
    try:
        result = make()
    except PartitionError:
        return
    names = [name for name, _ in root.facts()]
    assert all(len(homes(result, name)) == 1 for name in names)
    assert set(result.parameters) <= set(names)
    for path in result.assignment:
        assert not any(is_below(path, other) for other in result.assignment if other != path)
    held = {*result.assignment.values(), *result.parameters.values()}
    assert held == set(range(num_partitions)) or not names
    assert set(result.stage_of) == set(result.assignment)
    assert Partition.from_json(result.to_json()) == result
    assert all(a != b for a, b in zip(result.rank_of, result.rank_of[1:], strict=False))
    if tied == "together":
        assert result.holders == {}
