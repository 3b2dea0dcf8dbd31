"""Ways to checkpoint a stack of blocks, and what must be equal with and without them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as native_checkpoint

import smp_runtime as smp
from tests.subjects import WIDTH


class DroppingBlock(nn.Module):
    """A block of two layers that drops activations in two ways."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(rate)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(torch.tanh(self.widen(self.norm(x))))
        return x + nn.functional.dropout(self.narrow(h), self.rate, self.training)


class Stack(nn.Module):
    """Blocks in a Sequential, between two layers."""

    def __init__(self, rate: float = 0.0, way: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*[DroppingBlock(rate) for _ in range(5)])
        self.last = nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if not self.way.startswith("native"):
            return self.last(self.blocks(h))
        for block in self.blocks:
            h = native_checkpoint(block, h, use_reentrant=self.way == "native reentrant")
        return self.last(h)


class Run(NamedTuple):
    """What one rank saw of some steps, and how it ran them."""

    losses: list[float]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    checkpointed: dict[str, str]
    random: float


def checkpoint_as(way: str) -> Callable[[Any], None]:
    """Returns what switches a way of checkpointing on."""

    def change(model: Any) -> None:
        if way and not way.startswith("native"):
            smp.set_activation_checkpointing(model.get_module().blocks, strategy=way)

    return change


def run_steps(
    plain: nn.Module,
    x: Tensor,
    change: Callable[[Any], None],
    num_steps: int = 2,
    overlapping: bool = True,
    **settings: Any,
) -> Run:
    """Takes some steps on this rank, without an optimizer, and returns what came out."""
    smp.init({"timeout": 20.0, **settings})
    model = smp.DistributedModel(plain, overlapping_allreduce=overlapping)
    change(model)

    @smp.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    torch.manual_seed(5)
    losses = [loss.item() for _ in range(num_steps) for loss in step(model, x).outputs]
    run = Run(
        losses,
        {name: held.grad.clone() for name, held in model.local_named_parameters()},
        {name: held.clone() for name, held in model.local_named_buffers()},
        smp.list_activation_checkpointing(),
        torch.rand([]).item(),
    )
    smp.shutdown()
    return run


def assert_equal(expected: Run, found: Run, what: str = "") -> None:
    """Asserts that two runs are equal bit for bit."""
    assert found.losses == expected.losses, what
    assert found.random == expected.random, what
    for kind in ("gradients", "buffers"):
        wanted, got = getattr(expected, kind), getattr(found, kind)
        assert got.keys() == wanted.keys(), what
        for name, tensor in got.items():
            assert torch.equal(tensor, wanted[name]), f"{what}: {kind} of {name}"
