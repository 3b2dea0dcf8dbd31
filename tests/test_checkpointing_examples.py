"""The three examples of activation checkpointing that scripts for SMP were written after."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import smp_runtime as smp
from smp_runtime import checkpoint, checkpoint_sequential
from tests.worlds import run_world

pytestmark = pytest.mark.world


class First(nn.Module):
    """Example 1: a model whose forward is the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)
        self.is_checkpointed = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.conv2(x)
        x = F.max_pool2d(x, 2)
        x = torch.flatten(x, 1)
        x = checkpoint(self.fc1, x) if self.is_checkpointed else self.fc1(x)
        x = self.fc2(x)
        return F.log_softmax(x, 1)


class Second(nn.Module):
    """Example 2: a model that is a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.seq = nn.Sequential(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.Conv2d(20, 64, 5), nn.ReLU())
        self.is_checkpointed = True

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint_sequential(self.seq, x) if self.is_checkpointed else self.seq(x)
        return F.log_softmax(x, 1)


GPT2 = GPT2Config(n_embd=32, n_layer=4, n_head=2, vocab_size=64, n_positions=16)
LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    vocab_size=64,
)


def train(plain: nn.Module, batch: dict[str, Tensor], degree: int, change: Any) -> dict[str, Any]:
    """Takes one step and returns its losses and this rank's gradients."""
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 2, "timeout": 20.0})
    model = smp.DistributedModel(plain)
    change(model)

    @smp.step
    def step(model: Any, batch: dict[str, Tensor]) -> Tensor:
        if "input_ids" in batch:
            loss = model(**batch).loss
        else:
            loss = F.nll_loss(
                model(batch["x"]).flatten(2).mean(-1) if model_is_second else model(batch["x"]),
                batch["y"],
            )
        model.backward(loss)
        return loss

    model_is_second = isinstance(plain, Second)
    losses = [loss.item() for _ in range(2) for loss in step(model, batch).outputs]
    found = {"losses": losses, "list": smp.list_activation_checkpointing()}
    found["gradients"] = {name: held.grad.clone() for name, held in model.local_named_parameters()}
    smp.shutdown()
    return found


def images() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(4, 1, 28, 28), "y": torch.randint(10, (4,))}


def tokens() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(64, (4, 16))
    return {"input_ids": ids, "labels": ids}


def nothing(_: Any) -> None:
    """Leaves the model as it is."""


def checkpoint_blocks(model: Any) -> None:
    """Example 3, its last lines."""
    transformer_layers = model.module.module.module.transformer.seq_layers
    smp.set_activation_checkpointing(transformer_layers, pack_args_as_tuple=True, strategy="each")


def compare(degree: int, make: Any, batch: dict[str, Tensor], change: Any = nothing) -> Any:
    """Asserts that checkpointing changes no bit of losses and gradients."""

    def body() -> list[dict[str, Any]]:
        torch.manual_seed(0)
        plain = make()
        if hasattr(plain, "is_checkpointed"):
            plain.is_checkpointed = False
        expected = train(plain, batch, degree, nothing)
        torch.manual_seed(0)
        return [expected, train(make(), batch, degree, change)]

    results = run_world(degree, body)
    for expected, found in results:
        assert found["losses"] == expected["losses"]
        assert found["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in found["gradients"].items():
            assert torch.equal(gradient, expected["gradients"][name]), name
    return results[0][1]["list"]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_first_example(degree: int) -> None:
    compare(degree, First, images())


@pytest.mark.parametrize("degree", [1, 2])
def test_second_example(degree: int) -> None:
    compare(degree, Second, images())


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_third_example(degree: int) -> None:
    found = compare(
        degree, lambda: AutoModelForCausalLM.from_config(GPT2), tokens(), checkpoint_blocks
    )
    assert set(found) <= {f"transformer.h.{i}" for i in range(4)} and len(found) >= 2
    found = compare(
        degree, lambda: AutoModelForCausalLM.from_config(LLAMA), tokens(), checkpoint_blocks
    )
    assert set(found) <= {f"model.layers.{i}" for i in range(4)} and len(found) >= 2
