"""A wait that can't end is an error soon, long before the timeout, and says who waits for what."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_runtime.errors import NotSupportedError, PathMismatchError, UsageError
from smp_runtime.messages.transport import Address, Topic
from tests.local_ranks import LocalRank, backward, run_ranks
from tests.test_engine import WIDTH, chain, pins

SOON = 6.0  # seconds; the timeout is 20


def run_step(
    size: int, step: Callable[[Any, int], Callable[[Tensor], Any]], num_steps: int
) -> None:
    """Runs a step on some ranks; `step` makes its body from a rank's model and its number."""
    model, x = chain(size), torch.ones(2, WIDTH)

    def body(rank: LocalRank) -> None:
        mine = rank.place(model, pins(size), x)
        for _ in range(num_steps):
            rank.step(step(mine, rank.index), [x, x])

    begun = time.monotonic()
    try:
        run_ranks(size, body)
    finally:
        assert time.monotonic() - begun < SOON


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("asker", [0, 1, 2])
def test_a_value_that_one_rank_alone_asks_for(asker: int, num_steps: int) -> None:
    def step(model: Any, rank: int) -> Callable[[Tensor], Any]:
        def body(x: Tensor) -> None:
            h = model[0](x)
            h = model[1](h)
            if rank == asker:
                h.sum().item()
            backward(model[2](h).sum())

        return body

    with pytest.raises(PathMismatchError):
        run_step(3, step, num_steps)


def test_ranks_that_wait_for_each_other_are_named_with_their_lines() -> None:
    def step(model: Any, rank: int) -> Callable[[Tensor], Any]:
        def body(x: Tensor) -> None:
            h = model[1](x)
            if rank == 0:
                h.item()  # of rank 1, which goes on to wait for rank 0
            backward(model[0](h).sum())

        return body

    with pytest.raises(PathMismatchError) as caught:
        run_step(2, step, 1)
    text = str(caught.value)
    assert "these ranks wait for each other" in text or "Every rank must take" in text
    assert "rank 0" in text
    assert "rank 1" in text


class Fails(nn.Linear):
    """Fails after some calls."""

    calls_left = 0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise ValueError("too large")
        return super().forward(x)


@pytest.mark.parametrize("calls_left", [0, 3])
def test_an_exception_of_a_module_that_the_body_catches(calls_left: int) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fails()), torch.ones(2, WIDTH)
    model[1].calls_left = 1 + calls_left  # one for the trace

    def body(rank: LocalRank) -> None:
        mine: Any = rank.place(model, pins(2), x)
        mine[1].calls_left = calls_left

        def step(x: Tensor) -> None:
            h = mine[0](x)
            try:
                h = mine[1](h)
            except ValueError:
                h = h * 2
            backward(h.sum())

        for _ in range(4):
            rank.step(step, [x])

    begun = time.monotonic()
    with pytest.raises(NotSupportedError, match="caught ValueError: too large.*1.*on rank 1 only"):
        run_ranks(2, body)
    assert time.monotonic() - begun < SOON


def test_a_module_exception_passes_a_finally_block_unchanged() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fails()), torch.ones(2, WIDTH)
    model[1].calls_left = 1

    def body(rank: LocalRank) -> None:
        mine: Any = rank.place(model, pins(2), x)
        mine[1].calls_left = 0

        def step(x: Tensor) -> None:
            h = mine[0](x)
            try:
                mine[1](h)
            finally:
                h * 2

        rank.step(step, [x])

    with pytest.raises(ValueError, match="too large"):
        run_ranks(2, body)


def test_a_hook_inside_a_module_that_uses_a_tensor_of_another_rank() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH))), None
    x = torch.ones(2, WIDTH)

    def body(rank: LocalRank) -> None:
        mine: Any = rank.place(model, {"0": 0, "1": 1}, x)
        kept: list[Tensor] = []

        def hook(module: Any, args: Any, output: Tensor) -> None:
            kept.append(output + kept[0])

        mine[1][0].register_forward_hook(hook)

        def step(x: Tensor) -> None:
            kept[:] = [mine[0](x)]
            backward(mine[1](kept[0] * 2).sum())

        rank.step(step, [x])

    begun = time.monotonic()
    with pytest.raises(NotSupportedError, match="a forward hook inside 1.0 uses a tensor of anoth"):
        run_ranks(2, body)
    assert time.monotonic() - begun < SOON


def test_a_rank_that_is_only_slow_is_waited_for() -> None:
    model, x = chain(2), torch.ones(2, WIDTH)

    def body(rank: LocalRank) -> float:
        mine = rank.place(model, pins(2), x)

        def step(x: Tensor) -> Tensor:
            if rank.index == 1:
                time.sleep(1.0)
            loss = mine(x).sum()
            backward(loss)
            return loss

        return float(sum(rank.step(step, [x, x])))

    first, second = run_ranks(2, body)
    assert first == second


def test_a_collective_outside_the_steps_that_one_rank_calls() -> None:
    model, x = chain(2), torch.ones(2, WIDTH)

    def body(rank: LocalRank) -> None:
        mine = rank.place(model, pins(2), x)
        if rank.index == 0:
            rank.engine.fetch(Address(Topic.STATE, -1, rank.engine.next_exchange(), 0, 1))
        rank.step(lambda x: backward(mine(x).sum()), [x])

    with pytest.raises((UsageError, PathMismatchError), match="state_dict|different"):
        run_ranks(2, body)
