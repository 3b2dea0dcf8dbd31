"""The fewest modules that fit are chosen, and the predicted bytes are those that are saved."""

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import smp_runtime as smp
from smp_runtime.errors import UsageError
from smp_runtime.recomputing.checkpointing_choice import Part, choose, peak
from tests.test_checkpointing_limits import Logged
from tests.transformer_subjects import GPT2, tiny
from tests.worlds import run_world

BLOCKS = [Part(f"h.{i}", 2, 100, 10) for i in range(4)]


def test_the_peak_is_where_a_backward_rebuilds_most() -> None:
    parts = [Part("", 2, 7), *BLOCKS, Part("", 2, 200)]
    assert peak(parts, (), is_ahead=True) == 2 * (7 + 400 + 200)
    everything = {part.path for part in BLOCKS}
    # One microbatch waits with its stash; the other has freed the last part when it rebuilds.
    stash = 7 + 40 + 200
    assert peak(parts, everything, is_ahead=False) == stash + max(stash, 7 + 40 + 90)
    assert peak(parts, everything, is_ahead=True) == stash + stash + 90
    assert peak(BLOCKS, everything, is_ahead=False) == 40 + 40 + 90


@pytest.mark.parametrize(
    ("budget", "num_chosen", "saved"),
    [(1800, 0, 800), (1799, 1, 620), (1620, 1, 620), (1619, 2, 440), (1439, 3, 260),
     (1259, 4, 170), (1000, 4, 170)],
)  # fmt: skip
def test_the_fewest_that_fit_are_chosen(budget: int, num_chosen: int, saved: int) -> None:
    choice = choose(0, BLOCKS, state=1000, budget=budget, is_ahead=False)
    assert (len(choice.paths), choice.saved, choice.total) == (num_chosen, saved, 1000 + saved)
    assert list(choice.paths) == [f"h.{i}" for i in range(num_chosen)]
    assert ("too little" in str(choice)) == (budget < 1170)


def test_the_largest_gains_come_first() -> None:
    parts = [Part("a", 1, 50, 10), Part("b", 3, 80, 10)]
    assert choose(1, parts, 0, budget=200, is_ahead=True).paths == ("b",)
    assert choose(1, parts, 0, budget=1, is_ahead=True).paths == ("a", "b")


def test_a_budget_is_for_auto() -> None:
    with pytest.raises(UsageError, match="memory_budget=5 is for strategy='auto'"):
        smp.set_activation_checkpointing(torch.nn.Linear(1, 1), memory_budget=5)


SIZES = {**GPT2, "n_embd": 64, "n_layer": 8, "n_positions": 64, "vocab_size": 64}


@pytest.mark.world
@pytest.mark.parametrize("degree", [1, 2])
def test_the_prediction_is_what_is_saved(degree: int) -> None:
    def train(budget: int | None) -> tuple[int, list[str], list[str]]:
        logged = Logged()
        settings = {"microbatches": 4, "active_microbatches": 4}
        smp.init({"pipeline_parallel_degree": degree, "timeout": 30.0, **settings})
        torch.manual_seed(0)
        model = smp.DistributedModel(tiny("GPT2", "LMHeadModel", **SIZES, use_cache=False)())
        if budget is not None:
            smp.set_activation_checkpointing(model, strategy="auto", memory_budget=budget)
        model.count_saved_bytes()

        @smp.step
        def step(model: Any, tokens: Tensor) -> None:
            model.backward(model(input_ids=tokens, labels=tokens).loss)

        # How early a rank recomputes depends on when gradients come: the most of some steps counts.
        peak = 0
        for _ in range(6):
            step(model, torch.zeros(16, 64, dtype=torch.int64))
            peak = max(peak, model.step_report().saved_bytes)
        with pytest.raises(UsageError, match="after the first step"):
            smp.set_activation_checkpointing(model, strategy="auto")
        found = peak, list(smp.list_activation_checkpointing())
        smp.shutdown()
        logging.getLogger("smp_runtime").removeHandler(logged)
        return *found, [line for line in logged.lines if "auto: partition" in line]

    def body() -> list[tuple[int, list[str], list[str]]]:
        return [train(1 << 40), train(mib << 20), train(1)]

    mib = 13 if degree == 1 else 12
    by_rank = run_world(degree, body)
    numbers = []
    for number in range(3):
        lines = by_rank[0][number][2]
        assert len(lines) == degree
        for rank in range(degree):
            saved, chosen, _ = by_rank[rank][number]
            text = lines[rank]
            value, unit = re.search(r"predicted: ([\d.]+) (\w+) saved", text).groups()
            predicted = float(value) * {"KiB": 2**10, "MiB": 2**20}[unit]
            assert saved == pytest.approx(predicted, rel=0.1), text
            numbers.append(int(re.search(r"checkpoints (\d+) of", text)[1]))
        assert len(chosen) == sum(numbers[-degree:])
    assert numbers[:degree] == [0] * degree
    assert sum(numbers[-degree:]) == 8
    assert 0 < sum(numbers[degree : 2 * degree]) < 8
    if degree == 2:  # the first stage holds more microbatches
        assert numbers[2] > numbers[3]
