"""Activation checkpointing changes no bit: strategies, schedules, degrees, dropout, replicas."""

import itertools
from typing import Any

import pytest
import torch

from tests.checkpointing_cases import Stack, assert_equal, checkpoint_as, run_steps
from tests.subjects import WIDTH
from tests.worlds import run_world

pytestmark = pytest.mark.world

WAYS = ("each", "contiguous", "group_2", "native", "native reentrant")


def build(rate: float, way: str = "") -> Stack:
    torch.manual_seed(0)
    return Stack(rate, way)


def compare_ways(degree: int, rate: float, **settings: Any) -> list[float]:
    """Runs every way on this rank and returns the losses, which are the same."""
    settings |= {"pipeline_parallel_degree": degree}
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = run_steps(build(rate), x, checkpoint_as(""), **settings)
    for way in WAYS:
        found = run_steps(build(rate, way), x, checkpoint_as(way), **settings)
        assert_equal(expected, found, f"{way}, {settings}")
    return expected.losses


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_no_strategy_changes_a_bit(degree: int, rate: float) -> None:
    def body() -> list[list[float]]:
        return [
            compare_ways(degree, rate, pipeline=pipeline, microbatches=m)
            for pipeline, m in itertools.product(("interleaved", "simple"), (1, 4))
        ]

    results = run_world(degree, body)
    assert all(losses == results[0] for losses in results)


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
def test_loops_and_more_ahead_change_nothing_either(pipeline: str) -> None:
    def body() -> None:
        x = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1))
        settings = {"pipeline_parallel_degree": 2, "pipeline": pipeline, "microbatches": 5}
        for stages in (1, 2):
            expected = run_steps(
                build(0.2), x, checkpoint_as(""), stages_per_rank=stages, **settings
            )
            for ahead, modules in ((0, 1), (1, 4), (2, 1), (3, 9)):
                found = run_steps(
                    build(0.2),
                    x,
                    checkpoint_as("each"),
                    num_steps=2,
                    stages_per_rank=stages,
                    recompute_ahead=ahead,
                    recompute_ahead_modules=modules,
                    **settings,
                )
                assert_equal(expected, found, f"{stages} stages, {ahead} ahead, {modules}")

    run_world(2, body)
