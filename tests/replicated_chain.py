"""A stack of layers on replicas, and what one process makes of their batches together."""

from typing import Any

import torch
from torch import Tensor, nn

import smp_runtime as smp
from tests.replica_subjects import CHAIN
from tests.subjects import WIDTH
from tests.transparency import build

TINY = 0.0005
TIMEOUT = 15.0


def start(degree: int = 1, m: int = 2, module: nn.Module | None = None, **options: Any) -> Any:
    smp.init({"pipeline_parallel_degree": degree, "microbatches": m, "ddp": True,
              "timeout": TIMEOUT})  # fmt: skip
    options = {"bucket_cap_mb": TINY, **options}
    return smp.DistributedModel(module or build(CHAIN), **options)


@smp.step
def train(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@smp.step
def evaluate(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batch(seed: int, size: int = 4) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model: Any) -> dict[str, Any]:
    return {
        name: None if held.grad is None else held.grad.tolist()
        for name, held in model.local_named_parameters()
    }


def mean_gradients(scale: float = 1.0, *seeds: int) -> dict[str, Any]:
    """Returns the plain model's gradients, averaged over batches, times `scale`."""
    model = build(CHAIN)
    for seed in seeds:
        torch.autograd.backward(scale / len(seeds) * model(batch(seed)).square().mean())
    return {name: held.grad for name, held in model.named_parameters()}


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, values in found.items():
        torch.testing.assert_close(torch.tensor(values), expected[name], rtol=1e-4, atol=1e-7)
