from dataclasses import replace

from trees_of_modules import TreeMaker, language_model, row_of_layers

from smp_runtime.planning.module_tree import ModuleNode
from smp_runtime.planning.partition_table import Partition, in_ranges
from smp_runtime.planning.partitioning import partition


def test_the_table_goes_down_to_what_is_on_one_partition():
    assert partition(language_model(2, head=0.1), 2, tied="copy").table() == (
        "module: partitions        parameters   size  compute\n"
        "main: 0, 1                       105  420 B   100.0%\n"
        "main/transformer: 0, 1           105  420 B    95.6%\n"
        "main/lm_head: 1                  100  400 B     4.4%\n"
        "main/transformer/wte: 0          100  400 B     4.4%\n"
        "main/transformer/h: 0, 1           4   16 B    88.9%\n"
        "main/transformer/ln_f: 1           1    4 B     2.2%\n"
        "main/transformer/h/0: 0            2    8 B    44.4%\n"
        "main/transformer/h/1: 1            2    8 B    44.4%\n"
        "shared parameter transformer.wte.weight = lm_head.weight (400 B): a copy on each of "
        "partitions 0, 1, gradients summed once per step; with gradient and Adam 1.6 KiB per copy\n"
        "partition  parameters  require grads  buffers  compute"
        "   memory  = parameters  + gradients  + Adam  + activations\n"
        "        0         102            102        0    48.9%"
        "  1.6 KiB         408 B        408 B   816 B            0 B\n"
        "        1         103            103        0    51.1%"
        "  1.6 KiB         412 B        412 B   824 B            0 B\n"
        "stages in order: partitions 0 -> 1"
    )


def test_one_partition_is_one_line():
    lines = partition(language_model(2, tied=False), 1).table().splitlines()
    assert lines[1].startswith("main: 0 ")
    assert lines[2].startswith("partition ")


def test_partitions_that_are_not_neighbours_are_not_a_range():
    assert in_ranges([0, 2]) == "0, 2"
    assert in_ranges([0, 1]) == "0, 1"
    assert in_ranges([0, 1, 2, 3, 7]) == "0-3, 7"


def test_partitions_that_take_turns_show_what_they_run_when():
    looped = partition(row_of_layers([1.0] * 6), 2, stages_per_rank=2).table()
    assert looped.endswith(
        "4 stages in order:\n"
        "  stage 0 on partition 0: main/0\n"
        "  stage 1 on partition 1: main/1\n"
        "  stage 2 on partition 0: main/2 to main/3\n"
        "  stage 3 on partition 1: main/4 to main/5"
    )
    ring = partition(language_model(2), 2, tied="together").table()
    assert "(400 B): held once, on partition 0\n" in ring
    assert "  stage 2 on partition 0: " in ring


def test_assumed_costs_are_marked():
    make = TreeMaker()
    call = make.call()
    layers = (make.leaf("0"), replace(make.leaf("1"), calls=(), own_costs=()))
    table = partition(ModuleNode("", "Model", (call,), children=layers), 2).table()
    assert table.startswith(
        "module: partitions  parameters  size  compute\n"
        "main: 0, 1                   2   8 B  ~100.0%\n"
        "main/0: 0                    1   4 B    50.0%\n"
        "main/1: 1                    1   4 B   ~50.0%\n"
        "~ not called when traced, at least in part: the compute is assumed\n"
    )


def test_many_shared_parameters_are_not_all_described():
    make = TreeMaker()
    call = make.call()
    layers = tuple(make.leaf(str(i), group=1000 + i // 2) for i in range(14))
    root = ModuleNode("", "Model", (call,), children=layers)
    table = partition(root, 2, tied="copy").table()
    assert table.count("shared parameter ") == 4
    assert "and 3 more shared parameters\n" in table


# Why shared parameters are copied or not.


def reason(**settings: object) -> list[str]:
    result = partition(language_model(4), 2, **settings)
    return [note for note in result.notes if note.startswith("tied_weights")]


def test_the_reason_for_the_choice_is_one_line():
    assert reason() == [
        "tied_weights auto: copy, as the slowest partition takes 51.5% of the compute with copies "
        "(gradient exchange included) and 56.6% together (bubbles of the second visit included)"
    ]
    assert reason(memory_limit=102 * 16) == [
        "tied_weights auto: together, as no cut has room for copies"
    ]
    assert reason(tied="copy") == reason(tied="together") == []


def test_notes_travel_along():
    result = partition(language_model(4), 2)
    assert len(result.notes) == 2
    assert Partition.from_json(result.to_json()) == result
