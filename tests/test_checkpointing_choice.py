"""The fewest modules that fit are chosen, and the predicted bytes are those that are saved."""

import logging
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import smp_runtime as smp
from smp_runtime import device
from smp_runtime.errors import UsageError
from smp_runtime.recomputing.checkpointing_choice import Measurement, Part, choose, peak
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


def test_counted_bytes_scale_the_prediction() -> None:
    parts = [Part("", 2, 50), *BLOCKS]
    two = frozenset({"h.0", "h.1"})
    assert peak(parts, two, is_ahead=False) == 540
    corrected, state = Measurement(saved=1080, saved_with=two).correct(parts, 7, is_ahead=False)
    assert (peak(corrected, two, is_ahead=False), state) == (1080, 7)
    assert peak(corrected, (), is_ahead=False) == 2 * peak(parts, (), is_ahead=False) == 1800
    assert Measurement().correct(parts, 7, is_ahead=True) == (parts, 7)


def test_the_peak_of_the_device_says_what_is_held_besides() -> None:
    one = frozenset({"h.0"})  # of two microbatches, 620 bytes
    for saved in (0, 620, 1240):
        measured = Measurement(saved, one, 10_000, one)
        corrected, state = measured.correct(BLOCKS, 7, is_ahead=False)
        assert state == 10_000 - (saved or 620)
        assert state + peak(corrected, one, is_ahead=False) == 10_000
    assert Measurement(total=100).correct(BLOCKS, 7, is_ahead=False)[1] == 0


def test_replicas_take_the_larger_numbers() -> None:
    a, b = frozenset({"a"}), frozenset({"b"})
    assert Measurement(1, a, 9, b) | Measurement(2, b, 8, a) == Measurement(2, b, 9, b)


def test_what_is_checkpointed_besides_is_no_choice() -> None:
    choice = choose(0, BLOCKS, 0, budget=1, is_ahead=False, among=["h.1"], fixed={"h.0"})
    assert (choice.paths, choice.num_candidates, choice.saved) == (("h.1",), 1, 440)


def test_a_budget_is_for_auto() -> None:
    with pytest.raises(UsageError, match="memory_budget=5 is for strategy='auto'"):
        smp.set_activation_checkpointing(torch.nn.Linear(1, 1), memory_budget=5)


SIZES = {**GPT2, "n_embd": 64, "n_layer": 8, "n_positions": 64, "vocab_size": 64}


def pass_gradients_late(module: torch.nn.Module, args: Any, output: Tensor) -> None:
    """Leaves the ranks before this module's the time to recompute."""
    if output.requires_grad:
        output.register_hook(lambda gradient: time.sleep(0.02))  # type: ignore[no-untyped-call]


@pytest.mark.world
@pytest.mark.parametrize("degree", [1, 2])
def test_the_prediction_is_what_is_saved(degree: int) -> None:
    def train(budget: int | None) -> tuple[int, list[str], list[str]]:
        logged = Logged()
        settings = {"microbatches": 4, "active_microbatches": 4}
        smp.init({"pipeline_parallel_degree": degree, "timeout": 30.0, **settings})
        torch.manual_seed(0)
        plain = tiny("GPT2", "LMHeadModel", **SIZES, use_cache=False)()
        plain.transformer.h[-1].register_forward_hook(pass_gradients_late)
        model = smp.DistributedModel(plain)
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


class Measured(NamedTuple):
    """What one rank saw of steps before and after a choice."""

    losses: list[float]
    grads: dict[str, Tensor]
    peaks: list[int]
    chosen: list[list[str]]
    lines: list[list[str]]


def train_and_choose(degree: int, budgets: Sequence[int]) -> Measured:
    """Takes four steps, and four more after a choice for each budget."""
    logged = Logged()
    smp.init({"pipeline_parallel_degree": degree, "timeout": 30.0, "microbatches": 4,
              "active_microbatches": 4})  # fmt: skip
    torch.manual_seed(0)
    sizes = {**SIZES, "n_layer": 4, "use_cache": False}
    plain = tiny("GPT2", "LMHeadModel", **sizes)()
    plain.transformer.h[-1].register_forward_hook(pass_gradients_late)
    model = smp.DistributedModel(plain)
    model.count_saved_bytes()
    tokens = torch.arange(16 * 64).reshape(16, 64) % 64

    @smp.step
    def step(model: Any, tokens: Tensor) -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        model.backward(loss)
        return loss

    found = Measured([], {}, [], [], [])
    with pytest.MonkeyPatch.context() as patch:
        # Of the first step nothing counts: the optimizer has no state yet.
        patch.setattr(
            device,
            "peak_memory_bytes",
            lambda: PEAKS[degree][smp.pp_rank()] if found.losses else 5 * MIB,
        )
        for budget in (None, *budgets):
            logged.lines.clear()
            if budget:
                smp.set_activation_checkpointing(model, strategy="auto", memory_budget=budget)
            found.lines.append([line for line in logged.lines if "auto: partition" in line])
            found.chosen.append(list(smp.list_activation_checkpointing()))
            saved = 0
            for _ in range(4):  # the most counts, see above
                found.losses.extend(loss.item() for loss in step(model, tokens).outputs)
                saved = max(saved, model.step_report().saved_bytes)
            found.peaks.append(saved)
    found.grads.update((name, held.grad) for name, held in model.local_named_parameters())
    smp.shutdown()
    logging.getLogger("smp_runtime").removeHandler(logged)
    return found


MIB = 2**20
UNITS = {"KiB": 2**10, "MiB": MIB}
# What the devices say; the first stage, which holds more microbatches, needs more.
PEAKS = {1: [40 * MIB], 2: [39 * MIB, 36 * MIB]}
BUDGETS = {1: 37 * MIB, 2: 73 * MIB // 2}
COUNTS = {1: [2], 2: [2, 0]}


def numbers_of(line: str) -> tuple[int, float, float]:
    """Returns the number of chosen modules, predicted saved bytes, and bytes in all."""
    chosen = re.search(r"checkpoints (\d+) of \d modules; predicted by measured steps: ", line)
    amounts = re.findall(r"([\d.]+) (KiB|MiB)", line)
    saved, total = [float(value) * UNITS[unit] for value, unit in amounts[:2]]
    return int(chosen[1]), saved, total


@pytest.mark.world
@pytest.mark.parametrize("degree", [1, 2])
def test_after_some_steps_their_peaks_decide(degree: int) -> None:
    def body() -> tuple[Measured, Measured]:
        plain = train_and_choose(degree, (41 * MIB, 42 * MIB))
        return plain, train_and_choose(degree, (BUDGETS[degree], 1))

    found = run_world(degree, body)
    lines, everything = found[0][1].lines[1:]
    for rank, (plain, run) in enumerate(found):
        assert plain.chosen == [[], [], []]  # it fits
        assert run.losses == plain.losses
        for name, grad in run.grads.items():
            assert torch.equal(grad, plain.grads[name]), name
        assert run.chosen == found[0][1].chosen  # on every rank the same
        _, saved, total = numbers_of(lines[rank])
        assert run.peaks[1] == pytest.approx(saved, rel=0.1), (rank, lines)
        # What is held besides is the measured peak without what was saved then.
        assert total == pytest.approx(PEAKS[degree][rank] - run.peaks[0] + saved, rel=0.003)
        assert total <= BUDGETS[degree]
        _, saved, _ = numbers_of(everything[rank])
        assert run.peaks[2] == pytest.approx(saved, rel=0.1), (rank, everything)
        assert (run.lines[2] != []) == (rank == 0)
    assert [numbers_of(line)[0] for line in lines] == COUNTS[degree]
    assert found[0][1].chosen[2] == [f"transformer.h.{i}" for i in range(4)]


@pytest.mark.world
def test_inside_a_step_it_is_too_late() -> None:
    def body() -> None:
        smp.init({"timeout": 30.0})
        model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 2)))

        @smp.step
        def step(model: Any, x: Tensor) -> None:
            model.backward(model(x).sum())
            with pytest.raises(UsageError, match="inside a step; ask for it before or after one"):
                smp.set_activation_checkpointing(model, strategy="auto")

        step(model, torch.ones(1, 2))
        smp.set_activation_checkpointing(model.get_module(), strategy="auto", memory_budget=1)
        assert list(smp.list_activation_checkpointing()) == ["0"]

    run_world(1, body)
