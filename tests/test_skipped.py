from collections.abc import Sequence

import pytest
from trees_of_modules import TreeMaker

from smp_runtime.planning.module_tree import ModuleNode, OwnCost, ParameterFact
from smp_runtime.planning.partitioning import partition
from smp_runtime.planning.skipped import SECONDS_PER_ELEMENT, with_skipped_modules


def block(make: TreeMaker, path: str, *, called: bool = True, size: int = 4) -> ModuleNode:
    """A block of attention and MLP; the MLP works on what the attention returned."""
    calls = [(make.call(),) if called else () for _ in range(3)]
    costs = [(OwnCost(call[0], 1.0, 8),) if call else () for call in calls]
    parts = tuple(
        ModuleNode(f"{path}.{name}", "Linear", calls[i], (make.parameter(size),), costs[i])
        for i, name in enumerate(("attn", "mlp"), start=1)
    )
    return ModuleNode(path, "Block", calls[0], (), (), children=parts)


def stack(called: Sequence[bool], *others: ModuleNode, make: TreeMaker | None = None) -> ModuleNode:
    make = make or TreeMaker()
    root_call = make.call()
    blocks = tuple(block(make, f"h.{i}", called=each) for i, each in enumerate(called))
    h = ModuleNode(
        "h", "ModuleList", (), children=blocks, is_repeated_container=True, is_callable=False
    )
    return ModuleNode("", "Model", (root_call,), children=(h, *others))


def calls(root: ModuleNode) -> dict[str, tuple[int, ...]]:
    return {node.path: node.calls for node in root.walk()}


def assumed(root: ModuleNode) -> set[str]:
    return {node.path for node in root.walk() if node.is_assumed}


def test_a_tree_in_which_all_is_called_stays_as_it_is():
    root = stack([True, True])
    assert with_skipped_modules(root) is root


@pytest.mark.parametrize(
    "called",
    [
        [True, False, True, False],
        [False, False, True, True],
        [False, True, False, False],
        [True, True, False, False],
    ],
)
def test_skipped_blocks_are_as_if_they_had_been_called(called):
    filled, full = with_skipped_modules(stack(called)), stack([True] * 4)
    assert calls(filled) == calls(full)
    assert [node.own_costs for node in filled.walk()] == [node.own_costs for node in full.walk()]
    skipped = [f"h.{i}{part}" for i in range(4) for part in ("", ".attn", ".mlp") if not called[i]]
    assert assumed(filled) == set(skipped)
    for num_partitions in (2, 4):
        mine, theirs = (partition(tree, num_partitions) for tree in (stack(called), full))
        assert (mine.assignment, mine.rank_of) == (theirs.assignment, theirs.rank_of)
        assert mine.ranks == theirs.ranks


def test_where_every_block_was_skipped_the_parameters_tell():
    filled = with_skipped_modules(stack([False] * 4))
    assert calls(filled) == calls(stack([True] * 4))
    assert filled.children[0].children[0].children[0].compute == 4 * SECONDS_PER_ELEMENT
    result = partition(stack([False] * 4), 4)
    assert result.assignment == {f"h.{i}": i for i in range(4)}


def test_a_container_is_not_called_and_not_placed_even_where_all_of_it_was_skipped():
    make = TreeMaker()
    make.call()
    other = make.leaf("other", 9.0)
    result = partition(stack([False] * 4, other), 2)
    assert set(result.assignment) == {"h.0", "h.1", "h.2", "h.3", "other"}


def test_without_an_equal_module_the_cost_is_that_of_other_parameters():
    make = TreeMaker()
    call = make.call()
    layers = (make.leaf("a", 2.0, 10), ModuleNode("b", "Other", (), (make.parameter(5),)))
    filled = with_skipped_modules(ModuleNode("", "Model", (call,), children=layers))
    assert [node.compute for node in filled.children] == [2.0, 1.0]
    assert filled.children[1].calls == (2,)


def test_equal_means_of_equal_size():
    make = TreeMaker()
    call = make.call()
    layers = (make.leaf("a", 2.0, 10), ModuleNode("b", "Linear", (), (make.parameter(20),)))
    filled = with_skipped_modules(ModuleNode("", "Model", (call,), children=layers))
    assert filled.children[1].compute == 4.0


def test_the_order_is_that_of_definition_next_to_what_was_called():
    make = TreeMaker()
    call = make.call()
    second, first = make.leaf("c"), make.leaf("a")  # called in another order than defined
    before, after, last = (
        ModuleNode(path, "Linear", (), (make.parameter(),)) for path in ("0", "b", "d")
    )
    children = (before, first, after, second, last)
    filled = with_skipped_modules(ModuleNode("", "Model", (call,), children=children))
    in_order = sorted(filled.children, key=lambda node: node.calls)
    assert [node.path for node in in_order] == ["c", "d", "0", "a", "b"]


def test_between_two_rounds_of_siblings_the_first_round_counts():
    make = TreeMaker()
    call = make.call()
    a = ModuleNode("a", "Linear", (1, 3), (make.parameter(),), (OwnCost(1, 1.0), OwnCost(3, 1.0)))
    b = ModuleNode("b", "Linear", (), (make.parameter(),))
    c = ModuleNode("c", "Linear", (2, 4), (make.parameter(),), (OwnCost(2, 1.0), OwnCost(4, 1.0)))
    filled = with_skipped_modules(ModuleNode("", "Model", (call,), children=(a, b, c)))
    assert calls(filled) == {"": (0,), "a": (1, 4), "b": (2,), "c": (3, 5)}


def test_origins_and_first_uses_follow_the_new_numbers():
    make = TreeMaker()
    call = make.call()
    a = make.leaf("a")
    skipped = ModuleNode("b", "Linear", (), (make.parameter(),))
    c = make.leaf("c")
    own = make.parameter(name="late", first_use=3)
    loss = OwnCost(c.calls[0], 5.0)
    root = ModuleNode("", "Model", (call,), (own,), (loss,), children=(a, skipped, c))
    filled = with_skipped_modules(root)
    assert filled.own_costs == (OwnCost(3, 5.0),)
    assert filled.own_parameters[0].first_use == 4
    assert calls(filled)["c"] == (3,)


def test_a_module_that_lends_its_parameters_stays_uncalled():
    make = TreeMaker()
    call = make.call()
    lender = ModuleNode("shared", "Embedding", (), (make.parameter(group=77),))
    used = ModuleNode("used", "Linear", (), (ParameterFact("weight", 78, 1, 4, first_use=2),))
    layers = (make.leaf("embed", group=77), make.leaf("b"))
    root = ModuleNode("", "Model", (call,), children=(lender, used, *layers))
    assert with_skipped_modules(root) is root


def test_a_skipped_module_with_a_tied_parameter_is_called():
    make = TreeMaker()
    call = make.call()
    wte = make.leaf("wte", group=77)
    parts = (
        ModuleNode("decoder.wte", "Embedding", (), (make.parameter(group=77),)),
        ModuleNode("decoder.layer", "Linear", (), (make.parameter(),)),
    )
    decoder = ModuleNode("decoder", "Decoder", (), children=parts)
    filled = with_skipped_modules(ModuleNode("", "Model", (call,), children=(wte, decoder)))
    assert assumed(filled) == {"decoder", "decoder.wte", "decoder.layer"}
    result = partition(ModuleNode("", "Model", (call,), children=(wte, decoder)), 2, tied="copy")
    assert set(result.assignment.values()) == {0, 1}
