"""Models that branch on values, change their inputs, and pass objects around."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.subjects import WIDTH, Batch, Block, Subject, linear, vectors


class BranchOnValue(nn.Module):
    """Goes one of two ways, depending on what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.warm, self.cold, self.last = (Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.warm(h) if h.mean() > 0 else self.cold(h)
        if h.abs().max().item() > 2.0:
            h = h / 2
        return self.last(h)


class LoopOnValue(nn.Module):
    """Repeats a module until a value is small, at most three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = (Block() for _ in range(3))
        self.experts = nn.ModuleList([linear() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        num_rounds = 0
        while num_rounds < 3 and h.square().mean().item() < 4.0:
            h = 1.3 * self.again(h)
            num_rounds += 1
        for index in h.sum(-1).mul(3).long().remainder(3).unique().tolist():
            h = h + self.experts[index](h)
        return self.last(h)


class Identity(nn.Module):
    """Returns its input unchanged, the very object."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x


class Mutating(nn.Module):
    """Changes its input in place and returns something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x.clone()))
        x.mul_(0.5)
        return y


class InputUnchanged(nn.Module):
    """Has a block that returns its input, whose consumers are elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.same = nn.ModuleList([Identity(), Identity()])

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.same[0](x))
        return self.last(self.same[1](h)) + h


class InputMutated(nn.Module):
    """Goes on to use a tensor that a block has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.mutating = Mutating()
        self.other = Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h * 1.5
        y = self.mutating(h)
        return self.last(self.other(h) + y)


class InPlaceGlue(nn.Module):
    """Writes into tensors between its children."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        kept = torch.zeros(x.shape[0], 2, WIDTH)
        kept[:, 0] = h
        h = self.second(h).clone()
        h += x
        h[:, : WIDTH // 2] *= 2
        kept[:, 1] = self.third(h)
        mask = torch.ones_like(x)
        mask[:, 0] = 0
        return self.last(kept.sum(1).masked_fill(mask == 0, 1.0))


class UnusedInputs(nn.Module):
    """Ignores some of what it gets, and so do its children."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.last = Block(), Block(), Block()
        self.loose = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, extra: Tensor, flag: bool = False, **options: Any) -> Tensor:
        if flag:
            return self.never(x)
        return self.last(self.first(x))


def with_unused_inputs(size: int) -> Batch:
    """Returns vectors and what nobody reads."""
    return vectors(size) | {"extra": torch.randn(size, 3)}


def unused_inputs_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the error of a model that is given too much."""
    out = model(batch["x"], batch["extra"], unknown=[None, 1])
    loss: Tensor = (out - batch["target"]).square().mean()
    return loss


@dataclass
class Cache:
    """An object that layers write to."""

    entries: dict[int, Tensor]
    length: int = 0

    def update(self, index: int, value: Tensor) -> Tensor:
        """Adds an entry and returns the sum of all."""
        self.entries[index] = value
        self.length += 1
        return torch.stack(list(self.entries.values())).sum(0)


class CachedLayer(nn.Module):
    """A layer that writes to a cache that it is given."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.layer = linear()

    def forward(self, x: Tensor, cache: Cache | None = None, **options: Any) -> Tensor:
        h = torch.tanh(self.layer(x))
        if cache is not None and options.get("use_cache", True):
            h = cache.update(self.index, h)
        return h


class WithCache(nn.Module):
    """Passes a cache through its layers, makes constants, and reads its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"scaled": True}
        self.layers = nn.ModuleList([CachedLayer(index) for index in range(4)])

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        cache = Cache({})
        if self.config["scaled"]:
            x = x * torch.tensor(WIDTH**0.5, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, cache=cache, **options)
        assert cache.length == len(self.layers)
        return x + cache.entries[0]


class StraightThrough(torch.autograd.Function):
    """Rounds, with the gradient of not rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Gradients(nn.Module):
    """Stops, rounds and reuses gradients between its children."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.teacher, self.middle, self.last = (Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = StraightThrough.apply(self.online(x), 8)
        with torch.no_grad():
            target = self.teacher(x)
        h = self.middle(h) + (h - target).square()
        with grad_mode(True):
            return self.last(h) + self.last(h.detach())


@contextmanager
def grad_mode(enabled: bool) -> Iterator[None]:
    """Sets the grad mode in a generator, as decorators of libraries do."""
    with torch.set_grad_enabled(enabled):
        yield


class RunningStatistic(nn.Module):
    """Keeps a statistic of its children's results in a buffer, and uses it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + self.mean


class Counting(nn.Module):
    """Counts its calls, at both ends of children on several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.register_buffer("begun", torch.zeros(()))
        self.register_buffer("ended", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.begun += 1
        for block in self.blocks:
            x = block(x)
        self.ended -= 1
        return x


class Context:
    """What a parent tells its children beside their arguments."""

    mask: Tensor | None = None


class Told(nn.Module):
    """Uses what stands in a context."""

    def __init__(self, context: Context, options: dict[str, Any]) -> None:
        super().__init__()
        self.block = Block()
        self.context, self.options = context, options

    def forward(self, x: Tensor) -> Tensor:
        assert self.context.mask is not None
        return self.block(x) * self.context.mask + self.options["shift"]


class SharedContext(nn.Module):
    """Fills an object and a dict in each call, for children on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.context, self.options = Context(), {}
        self.blocks = nn.ModuleList([Told(self.context, self.options) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        self.context.mask = (x > 0).to(x.dtype)
        self.options["shift"] = x.detach().mean()
        for block in self.blocks:
            x = block(x)
        self.context.mask = None
        return x + self.options.pop("shift")


class MomentumEncoder(nn.Module):
    """Moves a frozen copy of its encoder towards it in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())
        self.teacher = nn.Sequential(Block(), Block()).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for taught, own in zip(
                self.teacher.parameters(), self.encoder.parameters(), strict=True
            ):
                taught.mul_(0.5).add_(own, alpha=0.5)
            target = self.teacher(x)
        return self.encoder(x) - target


class LateStatistic(nn.Module):
    """Uses a buffer first, and changes it when its children are done."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        self.scale.mul_(0.9)
        return x


class OneMemory(nn.Module):
    """Has two parameters that are one memory, not one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight.data = self.first.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


class Recomputed(torch.autograd.Function):
    """Runs layers without a graph, and again with one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            start = out = x.detach().requires_grad_()
            for layer in ctx.layers:
                out = layer(out)
            torch.autograd.backward(out, gradients[0])
        return start.grad, None


class LayersInFunction(nn.Module):
    """Runs some of its layers inside an autograd function, as reversible networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(), Block()
        self.encoder = Reversible()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(self.first(x)))


class Reversible(nn.Module):
    """The part of it that can't be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(x, self.layers)


UNRULY_SUBJECTS = (
    Subject("branch_on_value", BranchOnValue),
    Subject("loop_on_value", LoopOnValue),
    Subject("input_returned_unchanged", InputUnchanged, degrees=(2, 3)),
    Subject("input_mutated", InputMutated),
    Subject("in_place_glue", InPlaceGlue),
    Subject("unused_inputs", UnusedInputs, with_unused_inputs, unused_inputs_loss, degrees=(2,)),
    Subject("cache_and_options", WithCache),
    Subject("stopped_gradients", Gradients),
    Subject("shared_context", SharedContext),
    Subject("counting", Counting),
)
