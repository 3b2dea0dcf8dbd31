"""What can't be checkpointed says so; what is checkpointed can be asked; replicas agree."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_runtime as smp
from smp_runtime.errors import UsageError
from smp_runtime.recomputing.layer_groups import SPLIT, layer_groups
from tests.checkpointing_cases import Stack, assert_equal, checkpoint_as, run_steps
from tests.subjects import WIDTH, Block
from tests.worlds import run_world, run_world_expecting_failure

world = pytest.mark.world


@pytest.mark.parametrize(
    ("strategy", "homes", "groups"),
    [
        ("each", [0, 0, 1], [[0], [1], [2]]),
        ("contiguous", [0, 0, 1, 1, 1], [[0, 1], [2, 3, 4]]),
        ("group_3", [0, 0, 1, 1, 1], [[0, 1], [2, 3, 4]]),
        ("group_2", [0, 0, 0, 0, 0], [[0, 1], [2, 3], [4]]),
        ("contiguous", [None, 0, None, 1, None], [[0, 1, 2], [3, 4]]),
        ("contiguous", [0, SPLIT, 0, 0], [[0], [1], [2, 3]]),
        ("contiguous", [SPLIT, None, SPLIT], [[0], [1], [2]]),
        ("contiguous", [0, 1, 0], [[0], [1], [2]]),
        ("group_2", [], []),
    ],
)
def test_groups_of_layers(strategy: str, homes: list[Any], groups: list[list[int]]) -> None:
    assert [list(group) for group in layer_groups(strategy, homes)] == groups


@pytest.mark.parametrize("strategy", ["all", "group_0", "group_", "group_x", "Each", 2, None])
def test_unknown_strategies(strategy: Any) -> None:
    with pytest.raises(UsageError, match=f"strategy={strategy!r}.*'each', 'contiguous', 'group_N'"):
        smp.set_activation_checkpointing(nn.Sequential(nn.Linear(1, 1)), strategy=strategy)
    with pytest.raises(UsageError, match="does not exist"):
        smp.checkpoint_sequential(nn.Sequential(nn.Linear(1, 1)), torch.ones(1), strategy)


def test_what_is_no_module_or_no_sequential() -> None:
    with pytest.raises(UsageError, match="checkpoint takes a module, not function"):
        smp.checkpoint(lambda x: x, torch.ones(1))
    with pytest.raises(UsageError, match="takes an nn.Sequential, not Linear"):
        smp.checkpoint_sequential(nn.Linear(1, 1), torch.ones(1))
    with pytest.raises(UsageError, match="takes a module, not int"):
        smp.set_activation_checkpointing(3)
    with pytest.raises(UsageError, match="for nn.Sequential, not for ModuleList"):
        smp.set_activation_checkpointing(nn.ModuleList([nn.Linear(1, 1)]), strategy="group_2")
    with pytest.raises(UsageError, match="for nn.Sequential, not for Linear"):
        smp.set_activation_checkpointing(nn.Linear(1, 1), strategy="contiguous")


class Halves(nn.Module):
    """Two halves of two blocks each."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(Block(), Block())
        self.right = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(x))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halves = Halves()

    def forward(self, x: Tensor) -> Tensor:
        return self.halves(x)


class Logged(logging.Handler):
    """Collects what this package logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("smp_runtime").addHandler(self)
        logging.getLogger("smp_runtime").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def whole() -> Whole:
    torch.manual_seed(0)
    return Whole()


X = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
SETTINGS = {"pipeline_parallel_degree": 2, "microbatches": 2}


@world
@pytest.mark.parametrize("is_late", [False, True])
def test_a_module_on_two_ranks_runs_without_after_one_warning(is_late: bool) -> None:
    def change(model: Any) -> None:
        smp.set_activation_checkpointing(model.get_module().halves)
        assert smp.list_activation_checkpointing() == {"halves": "each"}

    def late(model: Any) -> None:
        model.register_post_partition_hook(lambda m, _: change_late(m))

    def change_late(model: Any) -> None:
        smp.set_activation_checkpointing(model.get_module().halves)
        smp.set_activation_checkpointing(model.get_module().halves)

    def body() -> list[str]:
        logged = Logged()
        expected = run_steps(whole(), X, checkpoint_as(""), **SETTINGS)
        found = run_steps(whole(), X, late if is_late else change, **SETTINGS)
        assert_equal(expected, found)
        assert found.checkpointed == {}
        return [line for line in logged.lines if "can't be checkpointed" in line]

    first, second = run_world(2, body)
    assert second == []
    assert first == [
        "halves can't be checkpointed, as it is not placed as a whole: ranks 0, 1 hold its parts "
        "(could be checkpointed: halves.left, halves.right); it runs without activation "
        "checkpointing"
    ]


@world
def test_by_hand_the_same_is_an_error() -> None:
    def change(model: Any) -> None:
        smp.set_partition(model.get_module().halves.right, 1)
        smp.set_activation_checkpointing(model.get_module().halves)

    def body() -> None:
        run_steps(whole(), X, change, **SETTINGS, auto_partition=False, default_partition=0)

    outcomes = run_world_expecting_failure(2, body)
    assert all(outcome.exit_code for outcome in outcomes)
    text = " ".join(outcome.exception_text for outcome in outcomes)
    assert "PartitionError" in text
    assert "halves can't be checkpointed, as it is not placed as a whole: ranks 0, 1 hold" in text
    assert "(could be checkpointed: halves.left, halves.right); place it on one rank" in text


@world
def test_the_log_of_the_partition_says_what_is_checkpointed() -> None:
    def change(model: Any) -> None:
        smp.set_activation_checkpointing(model.get_module().halves.left)
        smp.set_activation_checkpointing(model.get_module().halves.right, strategy="contiguous")

    def body() -> str:
        logged = Logged()
        run_steps(whole(), X, change, **SETTINGS)
        return next((line for line in logged.lines if line.startswith("Partition")), "")

    lines = run_world(2, body)[0].splitlines()
    assert lines[-2:] == [
        "activation checkpointing on 0: main/halves/left/0, main/halves/left/1",
        "activation checkpointing on 1: main/halves/right (contiguous)",
    ]


@world
@pytest.mark.parametrize("degree", [1, 2])
def test_checkpointing_can_be_asked_and_switched_off_and_on(degree: int) -> None:
    def body() -> None:
        num_calls = {"forward": 0}

        class Counting(Block):
            def forward(self, x: Tensor) -> Tensor:
                num_calls["forward"] += 1
                return super().forward(x)

        smp.init({"pipeline_parallel_degree": degree, "timeout": 20.0})
        torch.manual_seed(0)
        model = smp.DistributedModel(nn.Sequential(*[Counting() for _ in range(4)]))

        @smp.step
        def step(model: Any, x: Tensor) -> None:
            model.backward(model(x).sum())

        def count() -> int:
            num_calls["forward"] = 0
            step(model, X)
            return num_calls["forward"]

        blocks = model.get_module()
        count(), count()
        local = len({name.split(".")[0] for name, _ in model.local_named_parameters()})
        names = {str(i): "each" for i in range(4)}
        assert (count(), smp.list_activation_checkpointing()) == (local, {})
        smp.set_activation_checkpointing(blocks)
        count()  # the first checkpointed call of each is watched
        # What runs right before the backward, on the last rank of a pipeline, is not run again.
        is_last = 1 < degree == smp.pp_rank() + 1
        again = 2 * local - is_last
        assert (count(), smp.list_activation_checkpointing()) == (again, names)
        smp.set_activation_checkpointing(blocks, strategy="contiguous")
        assert smp.list_activation_checkpointing() == {"": "contiguous"}
        count()
        assert count() == (local if is_last else 2 * local)
        smp.set_activation_checkpointing(blocks, enabled=False)
        assert (count(), smp.list_activation_checkpointing()) == (local, {})

    run_world(degree, body)


@world
@pytest.mark.parametrize("overlaps", [True, False])
def test_replicas_reduce_the_same_gradients(overlaps: bool) -> None:
    def stack() -> Stack:
        torch.manual_seed(0)
        return Stack(0.2)

    def body() -> Any:
        settings = {**SETTINGS, "ddp": True, "overlapping": overlaps}
        expected = run_steps(stack(), X, checkpoint_as(""), **settings)
        for way in ("each", "contiguous"):
            assert_equal(expected, run_steps(stack(), X, checkpoint_as(way), **settings), way)
        return expected.losses, sum(float(g.sum()) for g in expected.gradients.values())

    results = run_world(4, body)
    assert len({gradient for _, gradient in results}) == 2
