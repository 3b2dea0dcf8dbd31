"""Models that do something of their own with their parameters, their classes or their gradients."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.subjects import WIDTH, Block, Subject, linear, token_prediction, tokens


class ParentWithState(nn.Module):
    """A parent that uses parameters and buffers of its own between its children."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.start = nn.Parameter(torch.randn(1, WIDTH))
        self.register_buffer("offset", torch.randn(WIDTH))
        self.register_buffer("num_calls", torch.tensor(0))
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        x = x + self.start.expand(x.shape[0], -1)
        for block in self.blocks:
            x = block(x) * self.scale + self.offset
        return x


class Projection(nn.Module):
    """Multiplies with a weight that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, self.bias)


class ParameterAsArgument(nn.Module):
    """Gives a child the embedding's weight as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.projection = Projection()

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.blocks(self.embedding(x)), self.embedding.weight)


class ChildWeightUsedByParent(nn.Module):
    """Multiplies with the embedding's weight itself; there is no head module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return h @ self.embedding.weight.t()


class Base(nn.Module):
    """A model to derive from."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


class Derived(Base):
    """Calls what it derives from; its child too."""

    def __init__(self) -> None:
        super().__init__()
        self.child = DerivedBlock()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(super().forward(x))


class DerivedBlock(Block):
    """A placed module whose forward calls `super().forward`."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OtherMethods(nn.Module):
    """Calls methods of its children that are not `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Base()
        self.middle = Block()
        self.decoder = Base()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder.encode(self.middle(self.encoder.encode(x)))


def normalised_weights() -> nn.Module:
    """Returns a stack whose weights are computed from other parameters."""
    layers = [nn.utils.parametrizations.weight_norm(linear()) for _ in range(5)]
    return nn.Sequential(*layers)


class AsksParameters(nn.Module):
    """Asks its children's parameters where they are and what they look like."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            weight = block.layer.weight
            assert not weight.is_meta and weight.device == x.device
            x = block(x.to(weight.device, weight.dtype)) * (1 + weight.shape[0] / 100)
        return x


class MakesParameters(nn.Module):
    """Makes a module in its forward and moves its layer there, as some models do at first use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        made = nn.Module()
        made.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        assert made.scale.is_leaf and made.scale.grad_fn is None
        made.layer = self.blocks[0]
        h = made.layer(x) * made.scale
        for block in self.blocks[1:]:
            h = block(h)
        return h


def frozen(*paths: str, only: bool = False) -> Callable[[], nn.Module]:
    """Returns what makes a stack in which some modules are frozen, or all `only` they are not."""

    def build() -> nn.Module:
        model = nn.Sequential(*[Block() for _ in range(6)])
        model.requires_grad_(not only)
        for path in paths:
            model.get_submodule(path).requires_grad_(only)
        return model

    return build


def pins_of_stack(model: nn.Module, num_partitions: int) -> Mapping[str, int]:
    """Places equal runs of a stack on the partitions."""
    return {str(i): i * num_partitions // 6 for i in range(6)}


PARAMETER_SUBJECTS = (
    Subject("parent_with_state", ParentWithState),
    Subject("parameter_as_argument", ParameterAsArgument, tokens, token_prediction),
    Subject("child_weight_used_by_parent", ChildWeightUsedByParent, tokens, token_prediction),
    Subject("derived_class", Derived),
    Subject("methods_other_than_forward", OtherMethods),
    Subject("normalised_weights", normalised_weights),
    Subject("asks_parameters", AsksParameters),
    Subject("makes_parameters", MakesParameters),
    Subject("frozen_prefix", frozen("0", "1", "2"), pins=pins_of_stack),
    Subject("only_first_trains", frozen("0", only=True), pins=pins_of_stack),
    Subject("only_middle_trains", frozen("3", only=True), pins=pins_of_stack),
    Subject("only_last_trains", frozen("5", only=True), pins=pins_of_stack),
)
