"""The planner against brute force, on the shapes of real models."""

import time
from itertools import combinations
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from smp_runtime.planning.atoms import atoms_at_level, charge
from smp_runtime.planning.module_tree import ModuleNode, is_below
from smp_runtime.planning.partitioning import Partition, partition
from smp_runtime.tracing.trace import trace_model


def model_tree(name: str, vocabulary: int, **sizes: Any) -> ModuleNode:
    shapes = {
        "gpt2": {"n_embd": 256, "n_layer": 8, "n_head": 8},
        "llama": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
        | {"num_attention_heads": 8},
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    config = AutoConfig.for_model(name, vocab_size=vocabulary, **tokens | shapes[name] | sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(4, 128, dtype=torch.long)
    trace = trace_model(model, (), {"input_ids": ids, "labels": ids})
    assert trace.source == "fake"
    return trace.root


@pytest.mark.parametrize("vocabulary", [2048, 50257, 128000])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_slowest_stage_equals_brute_force(name, vocabulary):
    root = model_tree(name, vocabulary)
    for num_partitions in (2, 3, 4, 8):
        best, result = brute_force(root, 0, num_partitions), partition(root, num_partitions)
        slowest = max(share.cost for share in result.ranks)
        # What depends on the inputs only counts for a module once that is placed as a whole.
        assert slowest == pytest.approx(result.slowest, rel=1e-4)
        level = next(n for n in (0, 1, 2, 3) if is_cut_at(root, n, result))
        if level:  # Opening the blocks paid.
            assert result.slowest < best
        if level == 0 or num_partitions <= 3:
            best = brute_force(root, level, num_partitions)
            assert result.slowest == pytest.approx(best, rel=1e-9)


def brute_force(root: ModuleNode, level: int, num_stages: int) -> float:
    """The smallest slowest stage over all contiguous cuts, as a share of the whole."""
    atoms = atoms_at_level(root, level)
    charges = charge(root, [atom.node for atom in atoms])
    costs = [charges[atom.node.path].compute for atom in atoms]
    sums = [sum(costs[:i]) for i in range(len(costs) + 1)]
    return min(
        max(sums[b] - sums[a] for a, b in zip((0, *cut), (*cut, len(costs)), strict=True))
        for cut in combinations(range(1, len(costs)), num_stages - 1)
    ) / sum(costs)


def is_cut_at(root: ModuleNode, level: int, result: Partition) -> bool:
    """Whether atoms of this level are fine enough for the cut."""
    paths = [atom.node.path for atom in atoms_at_level(root, level)]
    return all(any(is_below(path, top) for top in result.assignment) for path in paths)


@pytest.mark.parametrize("num_partitions", [8, 64])
def test_a_70b_model_is_planned_in_seconds(num_partitions, llama_70b):
    start = time.monotonic()
    result = partition(llama_70b, num_partitions)
    assert time.monotonic() - start < 10
    # 69.5 billion parameters, 81 costs of about one block: an even cut is within a fifth.
    assert sum(share.num_parameters for share in result.ranks) == 70_553_706_496
    assert result.slowest * num_partitions < 1.2


@pytest.fixture(scope="module")
def llama_70b() -> ModuleNode:
    return model_tree(
        "llama",
        128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )


def test_the_result_does_not_vary():
    first, second = (partition(model_tree("gpt2", 2048), 3) for _ in range(2))
    assert first.to_json() == second.to_json()


def test_the_table_has_the_names_of_the_model():
    root = model_tree("gpt2", 2048)
    paths = {node.path for node in root.walk()}
    assert {row.path for row in partition(root, 4).rows} <= paths


@pytest.mark.parametrize("num_partitions", [2, 4])
def test_a_tied_head_that_is_most_of_the_model_is_copied(num_partitions):
    root = model_tree("gpt2", 50257, tie_word_embeddings=True)
    chosen, copied, together = (
        partition(root, num_partitions, tied=tied) for tied in ("auto", "copy", "together")
    )
    assert chosen.assignment == copied.assignment
    slowest = [max(share.cost for share in each.ranks) for each in (copied, together)]
    assert 0.5 < slowest[0] < slowest[1]
    assert chosen.notes[-1].startswith("tied_weights auto: copy")
