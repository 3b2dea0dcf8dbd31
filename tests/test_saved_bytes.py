"""What autograd saves on each rank at the peak, counted over real steps."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_runtime as smp
from smp_runtime.recomputing.saved_bytes import SavedBytes
from tests.worlds import run_world

WIDTH, SIZE, NUM_BLOCKS = 32, 16, 8
INPUT = SIZE * WIDTH * 4  # bytes of what goes into a block
INTERMEDIATE = 4 * INPUT


class Wide(nn.Module):
    """Saves its input, and the four times wider result of its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.widen(x)))


class Late(Wide):
    """Takes its time before it passes a gradient back."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(0.03))  # type: ignore[no-untyped-call]
        return y


def test_memory_counts_once_and_as_long_as_it_is_saved() -> None:
    parameter, x = nn.Parameter(torch.ones(4)), torch.ones(4, requires_grad=True)
    meter = SavedBytes([parameter])
    with meter.hooks():
        y = (x * parameter).exp()
        assert meter.now == 2 * 16  # x and the result; the product is not needed
        z = y.view(2, 2).square() + y.view(2, 2).square()
        assert meter.now == 2 * 16
    z.sum().backward()
    assert (meter.now, meter.peak) == (0, 32)


def peaks(
    degree: int, strategy: str | None, last: type[Wide] = Wide, **settings: Any
) -> list[tuple[int, int]]:
    """Returns for each rank its blocks and the bytes that it saved at the peak."""

    def body() -> tuple[int, int]:
        smp.init({"pipeline_parallel_degree": degree, "timeout": 20.0, **settings})
        torch.manual_seed(0)
        blocks = [*(Wide() for _ in range(NUM_BLOCKS - 1)), last()]
        model = smp.DistributedModel(nn.Sequential(*blocks))
        if strategy:
            smp.set_activation_checkpointing(model.get_module(), strategy=strategy)
        model.count_saved_bytes()

        @smp.step
        def step(model: Any, x: Tensor) -> None:
            model.backward(model(x.clone()).sum())  # x is a view of all microbatches

        x = torch.randn(settings["microbatches"] * SIZE, WIDTH)
        for _ in range(3):
            step(model, x)
        num_blocks = len({name.split(".")[0] for name, _ in model.local_named_parameters()})
        return num_blocks, model.step_report().saved_bytes

    found: list[tuple[int, int]] = run_world(degree, body)
    return found


@pytest.mark.world
@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_each_keeps_inputs_in_flight_and_the_intermediates_of_one_block(
    degree: int, pipeline: str
) -> None:
    settings = {"microbatches": 4, "active_microbatches": 4, "pipeline": pipeline}
    for rank, (num_blocks, saved) in enumerate(peaks(degree, "each", **settings)):
        in_flight = 1 if degree == 1 else 4 if pipeline == "simple" else degree - rank
        expected = num_blocks * in_flight * INPUT + INTERMEDIATE
        assert expected * 0.95 <= saved <= expected * 1.05, (rank, saved, expected)


@pytest.mark.world
def test_without_checkpointing_all_of_it_is_kept_and_a_group_keeps_one_input() -> None:
    settings = {"microbatches": 4, "active_microbatches": 4}
    for rank, (num_blocks, saved) in enumerate(peaks(2, None, **settings)):
        assert saved == (2 - rank) * num_blocks * (INPUT + INTERMEDIATE)
    for rank, (num_blocks, saved) in enumerate(peaks(2, "contiguous", **settings)):
        expected = (2 - rank) * INPUT + num_blocks * INTERMEDIATE + (num_blocks - 1) * INPUT
        assert saved == expected, rank


@pytest.mark.world
def test_more_may_be_recomputed_ahead() -> None:
    settings = {"microbatches": 4, "active_microbatches": 4, "recompute_ahead_modules": 8}
    (num_blocks, saved), _ = peaks(2, "each", Late, **settings)
    least = num_blocks * 2 * INPUT + INTERMEDIATE
    assert least < saved <= num_blocks * (2 * INPUT + INTERMEDIATE)
