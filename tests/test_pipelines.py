"""What a pipeline does while it runs: microbatches in flight, loops, large messages, placements."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_runtime as smp
from tests.subjects import WIDTH, Batch, Block, Subject, TiedHead, token_prediction, tokens
from tests.transformer_subjects import LLAMA, causal, tiny
from tests.transparency import (
    Case,
    build,
    check,
    compare_named,
    copies,
    make_batch,
    plain,
    train_on_ranks,
)
from tests.worlds import run_world

pytestmark = pytest.mark.world

TIED = Subject("tied", TiedHead, tokens, token_prediction)
LLAMA_MODEL = causal("llama", tiny("Llama", **LLAMA))
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


class Counting(nn.Module):
    """Counts the microbatches that are between their forward and their backward here."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.now = self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        self.now += 1
        self.most = max(self.most, self.now)
        out = self.block(x)
        out.register_hook(self.end)
        return out

    def end(self, gradient: Tensor) -> None:
        """Is called when the output gradient comes."""
        self.now -= 1


@pytest.mark.parametrize(
    ("schedule", "limits"), [("interleaved", [4, 3, 2, 1]), ("simple", [6, 6, 6, 6])]
)
def test_microbatches_in_flight(schedule: str, limits: list[int]) -> None:
    def body() -> int:
        smp.init(
            {
                "pipeline_parallel_degree": 4,
                "microbatches": 6,
                "pipeline": schedule,
                "auto_partition": False,
                "default_partition": 0,
            }
        )
        model = smp.DistributedModel(nn.Sequential(*[Counting() for _ in range(4)]))
        for index, module in enumerate(model.get_module()):
            smp.set_partition(module, index)

        @smp.step
        def step(model: Any, x: Tensor) -> None:
            model.backward(model(x).sum())

        for _ in range(2):
            step(model, torch.randn(6, WIDTH))
        return model.get_module()[smp.pp_rank()].most

    assert run_world(4, body) == limits


def test_active_microbatches_is_a_cap() -> None:
    settings = (("active_microbatches", 1),)
    check(TIED, 2, [Case(4, "interleaved", settings), Case(3, "simple", settings)])


@pytest.mark.parametrize("degree", [2, 3])
def test_looped_pipeline_trains_as_one_process_does(degree: int) -> None:
    settings = (("stages_per_rank", 2),)
    cases = [Case(m, name, settings) for name in ("interleaved", "simple") for m in (1, 4)]
    check(Subject("deep", lambda: nn.Sequential(*[Block() for _ in range(8)])), degree, cases)
    check(LLAMA_MODEL, degree, cases[1:3])


def test_every_rank_may_bring_its_own_batch() -> None:
    def body() -> tuple[list[float], dict[str, Any]]:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "broadcast_inputs": False})
        model = smp.DistributedModel(build(TIED))

        @smp.step
        def step(model: Any, batch: Batch) -> Tensor:
            loss = TIED.loss(model, batch)
            model.backward(loss)
            return loss

        losses = [loss.item() for loss in step(model, make_batch(TIED, 2, 0)).outputs]
        return losses, copies((n, p.grad) for n, p in model.local_named_parameters())

    reference = plain(TIED, 2)
    for losses, gradients in run_world(2, body):
        assert losses == pytest.approx(reference.losses[0], rel=1e-6)
        compare_named("gradients", reference.gradients, gradients, TOLERANCE)


@pytest.mark.parametrize("degree", [2, 4])
def test_large_messages_in_both_directions(degree: int) -> None:
    class Wide(nn.Module):
        """Multiplies a large tensor by a small parameter."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    def body() -> list[float]:
        smp.init({"pipeline_parallel_degree": degree, "microbatches": 4, "timeout": 30.0})
        model = smp.DistributedModel(nn.Sequential(*[Wide() for _ in range(4)]))

        @smp.step
        def step(model: Any, x: Tensor) -> Tensor:
            loss = model(x).mean()
            model.backward(loss)
            return loss

        x = torch.ones(4, 1 << 22)  # 16 MiB a microbatch
        for _ in range(3):
            loss = step(model, x).reduce_mean().item()
        return [loss, *(p.grad.item() for p in model.local_parameters())]

    for loss, *gradients in run_world(degree, body):
        assert loss == 1.0
        assert gradients == pytest.approx([3.0] * len(gradients), rel=1e-5)


def test_lengths_change_at_every_step_of_two_pipelines() -> None:
    def body() -> int:
        smp.init({"pipeline_parallel_degree": 3, "microbatches": 3, "ddp": True, "timeout": 30.0})
        model = smp.DistributedModel(build(TIED))

        @smp.step
        def step(model: Any, x: Tensor) -> Tensor:
            loss = token_prediction(model, {"x": x, "target": x})
            model.backward(loss)
            return loss

        torch.manual_seed(smp.dp_rank())
        for _ in range(30):
            length = int(torch.randint(1, 12, ()))
            assert step(model, torch.randint(16, (3, length))).reduce_mean().item() > 0
        return smp.dp_rank()

    assert Counter(run_world(6, body)) == {0: 3, 1: 3}


def test_partition_context_places_what_is_made_inside() -> None:
    def body() -> list[str]:
        smp.init(
            {
                "pipeline_parallel_degree": 3,
                "microbatches": 2,
                "auto_partition": False,
                "default_partition": 2,
            }
        )

        class Net(nn.Module):
            """Places its children while it makes them."""

            def __init__(self) -> None:
                super().__init__()
                with smp.partition(1):
                    self.first = nn.Sequential(Block(), Block())
                    with smp.partition(0):
                        self.second = Block()
                self.third = Block()

            def forward(self, x: Tensor) -> Tensor:
                return self.third(self.second(self.first(x)))

        model = smp.DistributedModel(Net())

        @smp.step
        def step(model: Any, x: Tensor) -> None:
            model.backward(model(x).sum())

        step(model, torch.randn(2, WIDTH))
        return sorted({name.split(".")[0] for name, _ in model.local_named_parameters()})

    assert run_world(3, body) == [["second"], ["first"], ["third"]]


@pytest.mark.parametrize("degree", [3, 4])
def test_more_ranks_than_modules_names_both_numbers(degree: int) -> None:
    def body() -> str:
        smp.init({"pipeline_parallel_degree": degree, "microbatches": 2})
        model = smp.DistributedModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
        step = smp.step(lambda model, x: model(x).sum())
        with pytest.raises(Exception, match="2 placeable") as caught:
            step(model, torch.randn(2, WIDTH))
        return str(caught.value)

    for message in run_world(degree, body):
        assert f"{degree} partitions" in message


def test_names_of_the_partition_are_those_of_the_model() -> None:
    names = {name for name, _ in build(LLAMA_MODEL).named_modules()}

    def body() -> dict[str, int]:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        model = smp.DistributedModel(build(LLAMA_MODEL))
        step = smp.step(lambda model, batch: LLAMA_MODEL.loss(model, batch))
        step(model, make_batch(LLAMA_MODEL, 2, 0))
        return dict(model.partition.assignment)

    first, second = run_world(2, body)
    assert first == second and set(first.values()) == {0, 1}
    assert first.keys() <= names


def test_the_plan_does_not_change_what_is_computed() -> None:
    exact = {"rtol": 0.0, "atol": 0.0}
    deep = Subject("deep", lambda: nn.Sequential(*[Block() for _ in range(8)]))
    (chain,) = train_on_ranks(deep, 2, [Case(4)])
    (looped,) = train_on_ranks(deep, 2, [Case(4, settings=(("stages_per_rank", 2),))])
    gradients = [{k: v for o in case for k, v in o.gradients.items()} for case in (chain, looped)]
    compare_named("gradients", gradients[0], gradients[1], exact)
