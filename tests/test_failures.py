"""A failure anywhere ends every rank soon, and says on every rank what happened where.

Each test lets the ranks of one world run a step that goes wrong, and looks at how each ended.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_runtime as smp
from tests.subjects import Block
from tests.worlds import RankOutcome, run_world_expecting_failure

pytestmark = pytest.mark.world

SECONDS = 10.0
BAD = 100.0  # a value that the modules below choke on


class Fragile(nn.Module):
    """Fails when it sees the bad value."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.detach().abs() > BAD / 2).any()):
            raise ValueError("boom in forward")
        return self.block(x)


class FailsInBackward(torch.autograd.Function):
    """Fails when the gradient of the bad value is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if bool((x.abs() > BAD / 2).any()):
            raise ValueError("boom in backward")
        return gradients[0]


class FragileBackward(nn.Module):
    """Fails in the backward pass of the bad value."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(FailsInBackward.apply(x))


def stack(fragile: nn.Module, position: int, length: int = 4) -> nn.Sequential:
    """Returns a stack of blocks with one that fails."""
    blocks: list[nn.Module] = [Block() for _ in range(length)]
    blocks[position] = fragile
    return nn.Sequential(*blocks)


def batch(bad_microbatch: int | None = 2, num_microbatches: int = 4) -> Tensor:
    """Returns two samples per microbatch, those of one microbatch bad."""
    x = torch.zeros(2 * num_microbatches, 8)
    if bad_microbatch is not None:
        x[2 * bad_microbatch : 2 * bad_microbatch + 2] = BAD
    return x


def start(degree: int, model: nn.Module, **settings: Any) -> Any:
    """Starts the runtime with the stack's blocks in equal runs on the ranks; returns the model."""
    smp.init(
        {
            "pipeline_parallel_degree": degree,
            "microbatches": 4,
            "auto_partition": False,
            "default_partition": 0,
            "timeout": 30.0,
            **settings,
        }
    )
    wrapped = smp.DistributedModel(model)
    blocks = list(model.children())
    for index, block in enumerate(blocks):
        smp.set_partition(block, index * degree // len(blocks))
    return wrapped


@smp.step
def train(model: Any, x: Tensor) -> Tensor:
    """A plain step."""
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def outcomes_of(degree: int, body: Callable[[], Any]) -> list[RankOutcome]:
    """Runs a failing world and checks what must hold of every failure."""
    outcomes = run_world_expecting_failure(degree, body)
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code != 0, f"rank {rank} ended as if nothing had happened"
        assert outcome.seconds < SECONDS, f"rank {rank} took {outcome.seconds} s"
    return outcomes


def expect_on_every_rank(outcomes: list[RankOutcome], *texts: str) -> None:
    """Asserts that the standard error of every rank holds all texts."""
    for rank, outcome in enumerate(outcomes):
        for text in texts:
            assert text in outcome.stderr_text, f"rank {rank} does not say {text!r}"


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("position", [0, 3], ids=["first", "last"])
def test_exception_in_forward(degree: int, position: int) -> None:
    def body() -> None:
        train(start(degree, stack(Fragile(), position)), batch())

    owner = position * degree // 4
    outcomes = outcomes_of(degree, body)
    expect_on_every_rank(outcomes, "ValueError: boom in forward", f"rank {owner}, step 1")
    expect_on_every_rank(outcomes, "microbatch 2", f"at {position}", f"[{owner}F2]", "<-- here")


def test_exception_in_a_later_step() -> None:
    def body() -> None:
        model = start(2, stack(Fragile(), 3))
        for _ in range(3):
            train(model, batch(None))
        train(model, batch(1))

    expect_on_every_rank(outcomes_of(2, body), "ValueError: boom in forward", "step 4", "1F1]")


@pytest.mark.parametrize("position", [1, 3], ids=["first", "last"])
def test_exception_in_backward(position: int) -> None:
    def body() -> None:
        train(start(2, stack(FragileBackward(), position)), batch())

    outcomes = outcomes_of(2, body)
    owner = position * 2 // 4
    expect_on_every_rank(outcomes, "ValueError: boom in backward", f"rank {owner}, step 1")
    modules = ["0, 1", "2, 3"][owner]
    expect_on_every_rank(outcomes, f"microbatch 2, at the backward pass of {modules}: ValueError")
    expect_on_every_rank(outcomes, f"[{owner}B2]")


def test_exception_in_the_backward_of_many_modules() -> None:
    def body() -> None:
        train(start(2, stack(FragileBackward(), 7, length=10)), batch())

    expect_on_every_rank(outcomes_of(2, body), "at the backward pass of 5 to 9, 5 modules: ")


def test_exception_in_the_backward_of_the_loss() -> None:
    @smp.step
    def step(model: Any, x: Tensor) -> None:
        h = model(x)
        h.register_hook(lambda gradient: gradient.reshape(0))
        model.backward(h.square().mean())

    def body() -> None:
        step(start(1, stack(Block(), 0)), batch())

    expect_on_every_rank(outcomes_of(1, body), "at the backward pass, after ")


def test_exception_in_the_loss() -> None:
    @smp.step
    def step(model: Any, x: Tensor) -> None:
        loss = model(x).mean()
        if bool((x > BAD / 2).any()):
            raise ValueError("boom in the loss")
        model.backward(loss)

    def body() -> None:
        step(start(2, stack(Block(), 0)), batch())

    expect_on_every_rank(outcomes_of(2, body), "ValueError: boom in the loss", "microbatch 2")


def test_exception_on_one_rank_only() -> None:
    @smp.step
    def step(model: Any, x: Tensor) -> None:
        loss = model(x).mean()
        if smp.pp_rank() == 0:
            raise ValueError("boom on rank 0")
        model.backward(loss)

    def body() -> None:
        step(start(3, stack(Block(), 0)), batch())

    expect_on_every_rank(outcomes_of(3, body), "ValueError: boom on rank 0", "rank 0, step 1")


def test_exception_in_the_loader() -> None:
    def batches() -> Any:
        yield batch(None)
        if smp.pp_rank() == 0:
            raise ValueError("boom in the loader")
        yield batch(None)

    def body() -> None:
        model = start(2, stack(Block(), 0))
        for x in batches():
            train(model, x)

    expect_on_every_rank(outcomes_of(2, body), "ValueError: boom in the loader")


def test_exit_in_the_middle() -> None:
    def body() -> None:
        model = start(2, stack(Block(), 0))
        train(model, batch(None))
        if smp.pp_rank() == 1:
            raise SystemExit(3)
        train(model, batch(None))

    outcomes = outcomes_of(2, body)
    assert outcomes[1].exit_code != 0
    assert "rank 1 ended its program" in outcomes[0].stderr_text


def test_loader_that_ends_early_on_one_rank() -> None:
    def body() -> None:
        model = start(2, stack(Block(), 0))
        for _ in range(2 if smp.pp_rank() == 0 else 1):
            train(model, batch(None))

    outcomes = run_world_expecting_failure(2, body)
    assert outcomes[0].seconds < SECONDS
    assert "every rank must call the step equally often" in outcomes[0].stderr_text


def test_ranks_that_take_different_paths() -> None:
    @smp.step
    def step(model: Any, x: Tensor) -> None:
        h = model(x) if smp.pp_rank() == 0 else model(x * 1)
        blocks = model.get_module()
        h = blocks[0](h)
        if smp.pp_rank() == 1:
            h = h * 2
        model.backward(blocks[3](h).mean())

    def body() -> None:
        step(start(2, stack(Block(), 0)), batch(None))

    outcomes = outcomes_of(2, body)
    expect_on_every_rank(outcomes, "PathMismatchError", "rank 0", "rank 1")
    assert any("Every rank must take the same path" in each.stderr_text for each in outcomes)


def test_silent_divergence_is_found_at_the_end_of_a_step() -> None:
    @smp.step
    def step(model: Any, x: Tensor) -> None:
        out = model(x)
        model.backward(out.mean())
        if smp.pp_rank() == 1:
            out * 2

    def body() -> None:
        model = start(2, stack(Block(), 0))
        for _ in range(4):
            step(model, batch(None))

    outcomes = outcomes_of(2, body)
    expect_on_every_rank(outcomes, "PathMismatchError", "took different paths")


@pytest.mark.parametrize(
    ("size", "settings", "texts"),
    [
        (5, {"microbatches": 2}, ("a batch of 5", "into 2 microbatches")),
        (8, {"microbatches": 3}, ("a batch of 8", "into 3 microbatches")),
    ],
)
def test_batch_that_does_not_divide(
    size: int, settings: Mapping[str, Any], texts: tuple[str, ...]
) -> None:
    def body() -> None:
        train(start(2, stack(Block(), 0), **settings), torch.zeros(size, 8))

    expect_on_every_rank(outcomes_of(2, body), "MicrobatchError", *texts)
