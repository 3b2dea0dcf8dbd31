import pytest
from trees_of_modules import language_model

from smp_runtime.errors import PartitionError
from smp_runtime.planning.partitioning import partition


def test_the_innermost_pin_wins():
    pins = {"transformer.h": 1, "transformer.h.0": 0, "lm_head": 1}
    result = partition(language_model(2, tied=False), 2, pinned=pins, default_partition=0)
    assert result.assignment == {
        "transformer.wte": 0,
        "transformer.h.0": 0,
        "transformer.h.1": 1,
        "transformer.ln_f": 0,
        "lm_head": 1,
    }
    assert result.rank_of == (0, 1, 0, 1)


def test_what_is_not_pinned_is_named():
    with pytest.raises(PartitionError, match=r"no partition is given for transformer\.wte, tran"):
        partition(language_model(2), 2, pinned={"transformer.h": 1, "lm_head": 0})


def test_an_unknown_module_gets_its_neighbours():
    with pytest.raises(PartitionError, match=r"no module 'lm_heads'; close ones: lm_head"):
        partition(language_model(2), 2, pinned={"lm_heads": 1}, default_partition=0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_an_unknown_rank_is_refused(rank):
    with pytest.raises(PartitionError, match="there are 2 partitions: use 0 to 1"):
        partition(language_model(2), 2, pinned={"lm_head": rank}, default_partition=0)
    with pytest.raises(PartitionError, match="default_partition is"):
        partition(language_model(2), 2, default_partition=rank)


def test_a_rank_left_empty_is_named():
    with pytest.raises(PartitionError, match="partition 2 holds no module"):
        partition(language_model(2), 3, pinned={"lm_head": 1}, default_partition=0)


def test_pins_that_part_a_shared_parameter():
    pins = {"lm_head": 1}
    with pytest.raises(
        PartitionError, match=r"transformer\.wte\.weight .* lm_head\.weight .* same"
    ):
        partition(language_model(2), 2, pinned=pins, default_partition=0, tied="together")
    result = partition(language_model(2), 2, pinned=pins, default_partition=0)
    assert result.holders == {"transformer.wte.weight": (0, 1)}
