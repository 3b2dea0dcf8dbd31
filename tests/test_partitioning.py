import pytest
from trees_of_modules import TreeMaker, homes, language_model, row_of_layers

from smp_runtime.errors import PartitionError
from smp_runtime.planning.atoms import charge
from smp_runtime.planning.module_tree import ModuleNode, OwnCost
from smp_runtime.planning.partitioning import partition

# The automatic cut.


def test_equal_layers_are_dealt_evenly():
    assert partition(row_of_layers([1.0] * 6), 3).assignment == {
        "0": 0,
        "1": 0,
        "2": 1,
        "3": 1,
        "4": 2,
        "5": 2,
    }


@pytest.mark.parametrize("num_layers", [3, 5, 7])
@pytest.mark.parametrize("num_partitions", [2, 3, 4])
def test_no_layer_vanishes_when_the_count_does_not_divide(num_layers, num_partitions):
    root = language_model(num_layers)
    result = partition(root, num_partitions)
    placed = [name for name, _ in root.facts() for path in homes(result, name)]
    assert placed == [name for name, _ in root.facts()]
    assert sorted(set(result.assignment.values())) == list(range(num_partitions))


def test_stages_are_numbered_in_execution_order():
    result = partition(row_of_layers([1.0] * 4), 4)
    assert result.rank_of == (0, 1, 2, 3)
    assert result.stage_of == {"0": 0, "1": 1, "2": 2, "3": 3}


def test_one_partition_is_the_whole_model():
    result = partition(language_model(3), 1)
    assert result.assignment == {"": 0}
    assert (result.rank_of, result.stage_of, result.tied) == ((0,), {"": 0}, "none")


def test_a_large_head_stands_alone_with_its_loss():
    result = partition(language_model(4, head=8.0, tied=False), 2)
    assert result.assignment == {"transformer": 0, "lm_head": 1}
    assert [round(share.cost, 3) for share in result.ranks] == [0.342, 0.658]


def test_a_block_is_cut_inside_only_where_that_pays():
    even = partition(language_model(4, head=0.1, tied=False), 2)
    assert even.assignment["transformer.h.1"] == 0
    assert even.assignment["transformer.h.2"] == 1
    # Three blocks on two ranks: cutting the middle one helps by a quarter.
    odd = partition(language_model(3, head=0.1, tied=False), 2)
    assert odd.assignment["transformer.h.1.attn"] == 0
    assert odd.assignment["transformer.h.1.mlp"] == 1
    assert odd.assignment["transformer.h.0"] == 0


def test_blocks_are_cut_inside_where_there_are_too_few():
    result = partition(language_model(1, tied=False), 5)
    assert result.assignment == {
        "transformer.wte": 0,
        "transformer.h.0.attn": 1,
        "transformer.h.0.mlp": 2,
        "transformer.ln_f": 3,
        "lm_head": 4,
    }


def test_more_ranks_than_modules_names_both_numbers():
    with pytest.raises(PartitionError, match="8 partitions but only 3 placeable modules"):
        partition(row_of_layers([1.0] * 3), 8)


def test_more_stages_than_modules_names_both_settings():
    wanted = r"4 stages \(pipeline_parallel_degree 2 x stages_per_rank 2\) but only 3 "
    with pytest.raises(PartitionError, match=wanted + ".* their product at most 3$"):
        partition(row_of_layers([1.0] * 3), 2, stages_per_rank=2)
    with pytest.raises(PartitionError, match=r"9 stages \(.* 3 x .* 3\) but fewer .* together"):
        partition(language_model(3), 3, stages_per_rank=3, tied="together")


def test_glue_is_not_placed():
    make = TreeMaker()
    call = make.call()
    layers = (make.leaf("0"), ModuleNode("1", "ReLU", (make.call(),)), make.leaf("2"))
    root = ModuleNode("", "Sequential", (call,), children=layers, is_repeated_container=True)
    assert partition(root, 2).assignment == {"0": 0, "2": 1}


def test_glue_counts_to_the_module_whose_result_it_uses():
    make = TreeMaker()
    call = make.call()
    layers = (make.leaf("a"), make.leaf("b"), make.leaf("c"))
    glue = (OwnCost(layers[1].calls[0], 5.0), OwnCost(-1, 100.0))
    root = ModuleNode("", "Model", (call,), (), glue, children=layers)
    charges = charge(root, layers)
    # What depends on the inputs only runs on every rank and is nobody's share.
    assert {path: own.compute for path, own in charges.items()} == {"a": 1.0, "b": 6.0, "c": 1.0}


# Memory.


def test_memory_weight_moves_the_cut():
    root = row_of_layers([1.0, 1.0, 1.0, 1.0], sizes=[9, 1, 1, 1])
    assert partition(root, 2, memory_weight=0.0).assignment == {"0": 0, "1": 0, "2": 1, "3": 1}
    assert partition(root, 2, memory_weight=1.0).assignment == {"0": 0, "1": 1, "2": 1, "3": 1}


def test_the_memory_limit_is_kept():
    root = row_of_layers([1.0, 1.0, 1.0, 1.0], sizes=[9, 1, 1, 1])
    # A trainable parameter takes 16 bytes: itself, its gradient, two moments.
    assert partition(root, 2, memory_limit=9 * 16).assignment == {"0": 0, "1": 1, "2": 1, "3": 1}
    with pytest.raises(PartitionError, match="keeps every stage below 143 bytes"):
        partition(root, 2, memory_limit=9 * 16 - 1)


def test_early_stages_hold_more_activations():
    make = TreeMaker()
    call = make.call()
    layers = []
    for i in range(4):
        leaf = make.leaf(str(i))
        own = (OwnCost(leaf.calls[0], 1.0, 100),)
        layers.append(ModuleNode(str(i), "Linear", leaf.calls, leaf.own_parameters, own))
    root = ModuleNode("", "S", (call,), children=tuple(layers), is_repeated_container=True)
    assert [share.activation_bytes for share in partition(root, 2).ranks] == [400, 200]
    many = partition(root, 2, num_in_flight=lambda stage: 8)
    assert [share.activation_bytes for share in many.ranks] == [1600, 1600]


def test_a_ring_has_one_stage_more_than_microbatches_in_flight_are_known_for():
    def in_flight(stage: int) -> int:
        return (3, 2)[stage]

    result = partition(language_model(4), 2, tied="together", num_in_flight=in_flight)
    assert result.rank_of == (0, 1, 0)


# Shared parameters.


def test_together_makes_a_ring():
    result = partition(language_model(4), 2, tied="together")
    assert result.rank_of == (0, 1, 0)
    assert result.assignment["transformer.wte"] == result.assignment["lm_head"] == 0
    assert (result.tied, result.holders) == ("together", {})
    # Counted once.
    assert sum(share.num_parameters for share in result.ranks) == 100 + 8 + 1


def test_copies_make_a_chain_and_are_named():
    result = partition(language_model(4), 2, tied="copy")
    assert result.rank_of == (0, 1)
    assert (result.tied, result.holders) == ("copy", {"transformer.wte.weight": (0, 1)})
    assert sum(share.num_parameters for share in result.ranks) == 2 * 100 + 8 + 1


def test_auto_takes_copies_unless_they_do_not_fit():
    root = language_model(4)
    assert partition(root, 2).tied == "copy"
    assert partition(root, 2, memory_limit=102 * 16).tied == "together"


def test_auto_keeps_together_what_is_expensive_to_exchange():
    # 8 GB of gradients a step against a model of 5.5 seconds.
    assert partition(language_model(4, vocabulary=2_000_000_000), 2).tied == "together"


def test_together_may_be_impossible():
    with pytest.raises(PartitionError, match="stay together"):
        partition(language_model(1), 5, tied="together")
    assert partition(language_model(1), 5).tied == "copy"


# Everything is assigned once.


def test_a_parameter_of_a_parent_goes_with_the_call_that_follows_its_use():
    make = TreeMaker()
    call = make.call()
    layers = tuple(make.leaf(str(i)) for i in range(4))
    own = tuple(
        make.parameter(name=name, first_use=use) for name, use in (("early", 1), ("late", 4))
    )
    after = make.parameter(name="after", first_use=5)
    root = ModuleNode("", "Model", (call,), (*own, after), children=layers)
    assert partition(root, 2).parameters == {"early": 0, "late": 1, "after": 1}


def test_a_module_that_is_never_called_is_placed_like_one_that_is():
    make = TreeMaker()
    call = make.call()
    layers = (make.leaf("a"), make.leaf("b"), make.leaf("c"))
    unused = ModuleNode("unused", "Linear", (), (make.parameter(),))
    root = ModuleNode("", "Model", (call,), children=(unused, *layers))
    assert partition(root, 4).assignment == {"unused": 0, "a": 1, "b": 2, "c": 3}


def test_a_module_that_only_lends_its_parameters_goes_with_the_first_that_borrows():
    make = TreeMaker()
    call = make.call()
    lender = ModuleNode("shared", "Embedding", (), (make.parameter(group=77),))
    layers = (make.leaf("embed", group=77), make.leaf("b"), make.leaf("c"))
    root = ModuleNode("", "Model", (call,), children=(lender, *layers))
    result = partition(root, 3)
    assert result.assignment["shared"] == result.assignment["embed"] == 0
    assert result.holders == {}


def test_a_module_called_twice_is_placed_once_and_visited_twice():
    make = TreeMaker()
    call = make.call()
    calls = (make.call(), make.call(), make.call())
    twice = ModuleNode("twice", "Linear", calls[::2], (make.parameter(),), (OwnCost(1, 1.0),))
    once = ModuleNode("once", "Linear", calls[1:2], (make.parameter(),), (OwnCost(2, 1.0),))
    root = ModuleNode("", "Model", (call,), children=(twice, once))
    result = partition(root, 2)
    assert result.assignment == {"twice": 0, "once": 1}
    assert result.rank_of == (0, 1, 0)
    assert result.stage_of == {"twice": 0, "once": 1}


def test_a_module_that_is_not_closed_is_never_placed_as_a_whole():
    make = TreeMaker()
    call = make.call()
    inner = (make.leaf("open.a"), make.leaf("open.b"))
    parent = ModuleNode("open", "Model", (make.call(),), children=inner, is_closed=False)
    root = ModuleNode("", "Model", (call,), children=(parent, make.leaf("c", 2.0)))
    assert partition(root, 2).assignment == {"open.a": 0, "open.b": 0, "c": 1}


def test_looped_placement_deals_the_stages_in_turn():
    result = partition(row_of_layers([1.0] * 8), 2, stages_per_rank=2)
    assert result.rank_of == (0, 1, 0, 1)
    assert [result.assignment[str(i)] for i in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
