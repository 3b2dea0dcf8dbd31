"""bfloat16 over two pipelines of two, with activation checkpointing, learns what float32 learns."""

import functools
from pydoc_data import topics
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import smp_runtime as smp
from tests.sixteen_bit import needs_float32_sums
from tests.worlds import run_world

STEPS = 60
BATCH = 8
LENGTH = 32


def make() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, n_positions=LENGTH, vocab_size=256,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        loss_type="ForCausalLM", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


@functools.cache
def text() -> Tensor:
    """Returns rows of bytes of what Python's ``help()`` prints."""
    joined = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    num_rows = (STEPS + 4) * BATCH
    return torch.frombuffer(bytearray(joined[: num_rows * LENGTH]), dtype=torch.uint8).view(
        num_rows, LENGTH
    )


def batch_of(step: int) -> Tensor:
    return text()[step * BATCH : (step + 1) * BATCH].long()


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def in_float32() -> list[float]:
    model = make()
    optimizer = make_optimizer(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = batch_of(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        held_out = [
            model(input_ids=batch_of(step), labels=batch_of(step)).loss.item()
            for step in range(STEPS, STEPS + 4)
        ]
    return [losses[0], sum(held_out) / len(held_out)]


@smp.step
def train(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    model.backward(loss)
    return loss


@smp.step
def evaluate(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def in_bfloat16() -> list[float]:
    smp.init({"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2, "bf16": True,
              "timeout": 30.0})  # fmt: skip
    model = smp.DistributedModel(make())
    smp.set_activation_checkpointing(model.get_module().transformer.h)
    optimizer = smp.DistributedOptimizer(make_optimizer(model))

    def mine(step: int) -> Tensor:
        return batch_of(step).chunk(smp.dp_size())[smp.dp_rank()]

    def mean(loss: Any) -> float:
        everywhere = smp.allgather(loss.reduce_mean().item(), smp.DP_GROUP)
        return sum(everywhere) / len(everywhere)

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(mean(train(model, mine(step))))
        optimizer.step()
    with torch.no_grad():
        held_out = [mean(evaluate(model, mine(step))) for step in range(STEPS, STEPS + 4)]
    return [losses[0], sum(held_out) / len(held_out)]


@pytest.mark.world
@pytest.mark.slow
@needs_float32_sums
def test_sixty_steps_on_text_end_within_two_percent() -> None:
    first, last = in_float32()
    assert last < 0.65 * first
    for found in run_world(4, in_bfloat16, timeout=100.0):
        assert found[0] == pytest.approx(first, rel=0.01)
        assert found[1] == pytest.approx(last, rel=0.02)
