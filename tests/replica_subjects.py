"""Models that make a reduction over replicas hard: what gets a gradient differs from run to run."""

import functools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.subjects import (
    WIDTH,
    Block,
    CalledTwice,
    Subject,
    TiedHead,
    chain,
    linear,
    token_prediction,
    tokens,
)


class Checkpointed(nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.layer, self.norm, self.reentrant = linear(), nn.LayerNorm(WIDTH), reentrant

    def run(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.run, x, use_reentrant=self.reentrant)
        return x + out


class CheckpointedTwice(Checkpointed):
    """A checkpointed layer used twice, next to one that is never used."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.unused = linear()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class SometimesSkipped(nn.Module):
    """A layer that leaves some inputs alone, so that its parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.layer(x) if x.detach()[0, 0].item() > 0 else 0)


class TwiceInside(nn.Module):
    """One layer used twice, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class SkipsInGlue(nn.Module):
    """A stack that leaves out layers by what the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(5)])
        self.last = linear()

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if x.detach()[0, index].item() > -0.3:
                x = layer(x)
        return self.last(x)


def checkpointed_twice() -> nn.Module:
    """Returns a stack with what trips those who count gradients: used twice, never, again."""
    return nn.Sequential(linear(), CheckpointedTwice(False), CheckpointedTwice(True), linear())


def train_only(*chosen: int) -> nn.Module:
    """Returns a stack of which only some layers are trained."""
    model = nn.Sequential(*[Block() for _ in range(4)], linear())
    model.requires_grad_(False)
    for index in chosen:
        model[index].requires_grad_(True)
    return model


def frozen_tie() -> nn.Module:
    """Returns a language model whose embedding and head are one and not trained."""
    model = TiedHead()
    model.embedding.weight.requires_grad_(False)
    return model


def frozen() -> nn.Module:
    """Returns a stack of which a part is not trained."""
    model = nn.Sequential(*[Block() for _ in range(4)], linear())
    for parameter in (*model[0].parameters(), *model[2].parameters()):
        parameter.requires_grad_(False)
    return model


def checkpointed() -> nn.Module:
    """Returns a stack with activation checkpointing of both kinds of torch's."""
    return nn.Sequential(linear(), Checkpointed(), Checkpointed(True), Checkpointed(), linear())


def skipping() -> nn.Module:
    """Returns a stack with layers that skip some inputs."""
    return nn.Sequential(linear(), SometimesSkipped(), TwiceInside(), SometimesSkipped(), linear())


CHAIN = Subject("chain", chain)
TIED = Subject("tied", TiedHead, tokens, token_prediction)
SUBJECTS = (
    CHAIN,
    TIED,
    Subject("called_twice", CalledTwice),
    Subject("skipping", skipping),
    Subject("skips_in_glue", SkipsInGlue),
    Subject("frozen", frozen),
    Subject("checkpointed", checkpointed),
    Subject("checkpointed_twice", checkpointed_twice),
    Subject("only_first", functools.partial(train_only, 0)),
    Subject("only_last", functools.partial(train_only, 4)),
    Subject("frozen_tie", frozen_tie, tokens, token_prediction),
)
