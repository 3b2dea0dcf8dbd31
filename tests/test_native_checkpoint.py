"""torch's own checkpointing in glue: around one rank's modules ours, around several ranks' none."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import smp_runtime as smp
from tests.subjects import WIDTH
from tests.test_checkpointing_limits import Logged
from tests.worlds import run_world

num_forwards = 0


class Counted(nn.Module):
    """Saves its input, and the four times wider result of its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        global num_forwards
        num_forwards += 1
        return x + self.dropout(self.narrow(torch.tanh(self.widen(x))))


class Four(nn.Module):
    """The first two blocks are on rank 0, the others on rank 1."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Counted() for _ in range(4)])
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.blocks, x)


class Found(NamedTuple):
    """What one rank saw of some steps."""

    losses: list[float]
    gradients: dict[str, Tensor]
    num_forwards: int
    saved_bytes: int
    warnings: list[str]


def plain(blocks: nn.Sequential, x: Tensor) -> Tensor:
    return blocks(x)


def around_all(blocks: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint(lambda h: blocks(h) * 1, x, use_reentrant=False)


def reentrant_around_all(blocks: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint(blocks, x.requires_grad_(), use_reentrant=True)


def around_the_middle(blocks: nn.Sequential, x: Tensor) -> Tensor:
    first, second, third, fourth = blocks
    h = checkpoint(lambda h: third(second(h)), first(x), use_reentrant=False)
    return fourth(h)


def around_each_half(blocks: nn.Sequential, x: Tensor) -> Tensor:
    h = checkpoint(lambda h: blocks[1](blocks[0](h)), x, use_reentrant=False)
    return checkpoint(lambda h: blocks[3](blocks[2](h)), h, use_reentrant=True)


def inner_half(blocks: nn.Sequential, x: Tensor) -> Tensor:
    def half(h: Tensor) -> Tensor:
        return blocks[1](blocks[0](h))

    return checkpoint(
        lambda h: blocks[3](blocks[2](checkpoint(half, h, use_reentrant=False))),
        x,
        use_reentrant=False,
    )


def in_segments(blocks: nn.Sequential, x: Tensor) -> Tensor:
    return checkpoint_sequential(blocks, 2, x, use_reentrant=False)


def around_nothing(blocks: nn.Sequential, x: Tensor) -> Tensor:
    return blocks(checkpoint(torch.tanh, checkpoint(torch.tanh, x, use_reentrant=False),
                             use_reentrant=False))  # fmt: skip


def train(way: Callable[..., Tensor]) -> Found:
    """Takes three steps of two microbatches; counts forwards and bytes of the last one."""
    global num_forwards
    logged = Logged()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "timeout": 20.0,
              "auto_partition": False, "default_partition": 0})  # fmt: skip
    torch.manual_seed(0)
    model = smp.DistributedModel(Four(way))
    for block in model.get_module().blocks[2:]:
        smp.set_partition(block, 1)
    model.count_saved_bytes()

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x.clone()).square().mean()
        model.backward(loss)
        return loss

    losses: list[float] = []
    for _ in range(3):
        num_forwards = 0
        losses += [loss.item() for loss in step(model, torch.full((8, WIDTH), 0.5)).outputs]
    found = Found(
        losses,
        {name: held.grad.clone() for name, held in model.local_named_parameters()},
        num_forwards,
        model.step_report().saved_bytes,
        [line for line in logged.lines if "torch.utils" in line],
    )
    smp.shutdown()
    logging.getLogger("smp_runtime").removeHandler(logged)
    return found


def warning(around: str) -> str:
    return (
        f"torch.utils.checkpoint was called around {around}: it runs without activation "
        "checkpointing; call it around modules of one rank"
    )


ALL = "blocks.0 on 0, blocks.1 on 0, blocks.2 on 1, blocks.3 on 1"
WAYS = {
    around_all: f"modules of several pipeline ranks ({ALL})",
    reentrant_around_all: "",  # the same modules: the one warning was before
    around_the_middle: "modules of several pipeline ranks (blocks.1 on 0, blocks.2 on 1)",
    around_nothing: "no module that is placed on a pipeline rank",
}


@pytest.mark.world
def test_around_several_ranks_it_warns_once_and_runs_without() -> None:
    def body() -> list[Found]:
        return [train(way) for way in (plain, *WAYS)]

    for rank, (expected, *found) in enumerate(run_world(2, body)):
        assert expected.num_forwards == 4
        for (way, around), run in zip(WAYS.items(), found, strict=True):
            name = way.__name__
            assert run.warnings == ([warning(around)] if around and rank == 0 else []), name
            assert run.num_forwards == 4, name
            if way is around_nothing:
                continue
            assert run.losses == expected.losses, name
            assert run.saved_bytes == expected.saved_bytes, name
            for parameter, gradient in run.gradients.items():
                assert torch.equal(gradient, expected.gradients[parameter]), (name, parameter)


@pytest.mark.world
def test_around_one_rank_it_is_checkpointed() -> None:
    def body() -> list[Found]:
        return [train(way) for way in (plain, around_each_half, in_segments, inner_half)]

    for rank, (expected, halves, segments, inner) in enumerate(run_world(2, body)):
        for run in (halves, segments, inner):
            assert run.losses == expected.losses
            for parameter, gradient in run.gradients.items():
                assert torch.equal(gradient, expected.gradients[parameter])
        # On the last rank the block before the backward is held, and not run again.
        assert halves.num_forwards == (8 if rank == 0 else 6)
        assert halves.saved_bytes < expected.saved_bytes * (0.6 if rank == 0 else 1.0)
        # torch leaves the last segment without; and the outer function is of both ranks.
        assert segments.num_forwards == inner.num_forwards == (8 if rank == 0 else 4)
        assert halves.warnings == segments.warnings == []
        split = warning(f"modules of several pipeline ranks ({ALL})")
        assert inner.warnings == [split] * (rank == 0)
