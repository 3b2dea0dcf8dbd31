"""Plain models that a pipeline must train exactly as one process does.

A `Subject` is a model with its data and its loss; `transparency.py` runs it both ways. Models
that do more than pass a tensor from module to module are in `unruly_subjects.py`, those of
transformers in `transformer_subjects.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8
NUM_CLASSES = 5

Batch = dict[str, Any]


def vectors(size: int) -> Batch:
    """Returns a batch of vectors with targets of the same shape."""
    return {"x": torch.randn(size, WIDTH), "target": torch.randn(size, WIDTH)}


def images(size: int) -> Batch:
    """Returns a batch of small images of one class each."""
    return {"x": torch.randn(size, 1, 12, 12), "target": torch.randint(NUM_CLASSES, (size,))}


def tokens(size: int) -> Batch:
    """Returns a batch of token sequences, each its own target."""
    x = torch.randint(16, (size, 6))
    return {"x": x, "target": x}


def regression(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the mean squared error."""
    loss: Tensor = (model(batch["x"]) - batch["target"]).square().mean()
    return loss


def classification(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the negative log-likelihood of what the model gives as log-probabilities."""
    return F.nll_loss(model(batch["x"]), batch["target"])


def token_prediction(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the cross-entropy of the model's logits."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["target"].flatten())


def no_pins(model: nn.Module, num_partitions: int) -> Mapping[str, int]:
    """Leaves the placement to the planner."""
    return {}


@dataclass(frozen=True)
class Subject:
    """A model with its data and its loss.

    Args:
        name: what test reports call it.
        build: makes the model.
        make_batch: makes a batch of the given number of samples.
        loss: the loss of one microbatch.
        pins: the partitions of modules that are placed by hand, by path; the planner places
            everything if there are none.
        samples: number of samples of a microbatch.
        degrees: the pipeline degrees at which it runs.
    """

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch] = vectors
    loss: Callable[[nn.Module, Batch], Tensor] = regression
    pins: Callable[[nn.Module, int], Mapping[str, int]] = no_pins
    samples: int = 2
    degrees: tuple[int, ...] = (2, 3, 4)

    def __str__(self) -> str:
        return self.name


def linear() -> nn.Linear:
    """Returns a layer from vectors to vectors."""
    return nn.Linear(WIDTH, WIDTH)


class Block(nn.Module):
    """A layer with an activation, the usual unit of a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


def chain() -> nn.Module:
    """Returns a plain stack."""
    return nn.Sequential(*[Block() for _ in range(5)], linear())


class ConvNet(nn.Module):
    """The network of MNIST examples: all activations are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.fc1 = nn.Linear(128, 16)
        self.fc2 = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(x, 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), 1)


class SequentialConvNet(nn.Module):
    """A network whose layers are one `Sequential`, with a prediction for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.seq = nn.Sequential(
            nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Conv2d(4, NUM_CLASSES, 5), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.seq(x), 1).mean((2, 3))


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, in-place activations and a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """Residual blocks, and one skip that spans two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(ResidualBlock(4))
        self.layer2 = nn.Sequential(ResidualBlock(4))
        self.layer3 = nn.Sequential(ResidualBlock(4))
        self.fc = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        early = self.stem(x)
        x = self.layer2(self.layer1(early.clone()))
        x = self.layer3(x + early)
        return F.log_softmax(self.fc(x.mean((2, 3))), 1)


class SkipNet(nn.Module):
    """Like a U-Net: what comes first is used last."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([linear() for _ in range(3)])
        self.up = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            skips.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, skips.pop()], dim=-1)))
        return x


class CalledTwice(nn.Module):
    """The same module at two depths, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.between, self.last = (Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.between(self.again(self.first(x)))))


class Wrapper(nn.Module):
    """A parent of a module that may have other parents."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = linear()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(torch.tanh(self.own(x)))


def two_parents() -> nn.Module:
    """Returns a stack in which two parents hold one and the same module."""
    shared = linear()
    return nn.Sequential(Wrapper(shared), Block(), Wrapper(shared), linear())


class TiedHead(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Recurrent(nn.Module):
    """A recurrent network between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        h, (state, _) = self.lstm(self.embedding(x))
        return self.head(self.norm(h) + state[-1].unsqueeze(1))


class TorchTransformer(nn.Module):
    """torch's own encoder and decoder layers, which use parameters of their children directly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, **options), 2, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 16, **options), 2)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), diagonal=1)
        return self.head(self.decoder(h, self.encoder(h, mask=mask), tgt_mask=mask))


SUBJECTS = (
    Subject("chain", chain),
    Subject("conv_net", ConvNet, images, classification),
    Subject("sequential_conv_net", SequentialConvNet, images, classification, degrees=(2,)),
    Subject("residual_net", ResNet, images, classification),
    Subject("skip_net", SkipNet),
    Subject("module_called_twice", CalledTwice),
    Subject("module_with_two_parents", two_parents),
    Subject("tied_head", TiedHead, tokens, token_prediction),
    Subject("recurrent", Recurrent, tokens, token_prediction, degrees=(2, 3)),
    Subject("torch_transformer", TorchTransformer, tokens, token_prediction),
)
