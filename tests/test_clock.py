"""The emulated clock against known answers: alone, and over chains of modules that spin."""

import time
from typing import Any

import pytest
import torch
from torch import nn

import smp_runtime as smp
from smp_runtime.execution.clock import Clock
from smp_runtime.planning.schedule import plan
from smp_runtime.planning.simulation import simulate
from tests.worlds import run_world

SPIN = 0.03  # CPU seconds of a stage's forward, and of its backward
MICROBATCHES = 4
SLACK = 1.15  # glue costs CPU time too, and a busy machine makes it cost more


def spin(seconds: float) -> None:
    """Uses so much CPU time, however long that takes on a busy machine."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Work(torch.autograd.Function):
    """Takes the time that it is told to take, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spinning: float, sleeping: float) -> torch.Tensor:
        ctx.times = spinning, sleeping
        spin(spinning)
        time.sleep(sleeping)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        spinning, sleeping = ctx.times
        spin(spinning)
        time.sleep(sleeping)
        return gradients[0], None, None


class Stage(nn.Module):
    """A module that the planner places, and whose time is known."""

    def __init__(self, spinning: float, sleeping: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.times = spinning, sleeping

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Work.apply(x * self.weight, *self.times)  # type: ignore[no-untyped-call]


def emulated_step(n: int, pipeline: str, spinning: float, sleeping: float, link: dict) -> float:
    """Returns the shortest of three steps over `n` equal stages on the emulated clock."""

    def body() -> float:
        config = {"pipeline_parallel_degree": n, "microbatches": MICROBATCHES, "timeout": 30.0}
        smp.init({**config, "pipeline": pipeline, "emulate_clock": True, **link})
        model = smp.DistributedModel(nn.Sequential(*(Stage(spinning, sleeping) for _ in range(n))))

        @smp.step
        def step(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
            loss = model(x).sum()
            model.backward(loss)
            return loss

        clocks = []
        for _ in range(4):
            step(model, torch.ones(MICROBATCHES, 8))
            clocks.append(model.step_report().clock)
        return min(clocks[1:])  # the first one partitions

    return max(run_world(n, body))


def test_a_clock_that_is_off_stands_still() -> None:
    clock = Clock()
    clock.resume()
    spin(0.001)
    clock.receive(1.0, 8)
    assert clock.read() == 0.0


def test_work_moves_the_clock_and_sleep_does_not() -> None:
    clock = Clock(is_on=True)
    clock.resume()
    spin(0.02)
    time.sleep(0.05)
    assert 0.02 <= clock.read() < 0.03


def test_what_a_thread_did_before_it_resumed_does_not_count() -> None:
    clock = Clock(is_on=True)
    clock.resume()
    clock.pause()
    spin(0.02)
    clock.resume()
    assert clock.read() < 0.01


def test_a_receive_moves_the_clock_to_the_arrival_if_that_is_later() -> None:
    clock = Clock(is_on=True, latency=0.5, bandwidth=1000.0)
    clock.receive(10.0, 250)
    assert clock.now == pytest.approx(10.75)
    clock.receive(3.0, 250)
    assert clock.now == pytest.approx(10.75, abs=0.01)


@pytest.mark.world
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
def test_a_chain_of_spins_takes_the_textbook_time(n: int, pipeline: str) -> None:
    known = (MICROBATCHES + n - 1) * 2 * SPIN
    assert known <= emulated_step(n, pipeline, SPIN, 0.0, {}) < SLACK * known


@pytest.mark.world
def test_sleeps_cost_nothing() -> None:
    known = (MICROBATCHES + 1) * 2 * SPIN
    assert known <= emulated_step(2, "interleaved", SPIN, SPIN, {}) < SLACK * known


@pytest.mark.world
@pytest.mark.parametrize("n", [2, 4])
def test_a_slow_link_costs_what_the_plan_says(n: int) -> None:
    latency = 0.02
    order = plan(tuple(range(n)), MICROBATCHES, active=MICROBATCHES, policy="interleaved")
    timeline = simulate(order, forward_cost=SPIN, backward_cost=SPIN, transfer_cost=latency)
    link = {"emulated_latency_us": latency * 1e6}
    known = timeline.makespan
    assert known > (MICROBATCHES + n - 1) * 2 * SPIN
    assert known <= emulated_step(n, "interleaved", SPIN, 0.0, link) < SLACK * known
