"""What every contestant trains: one GPT-2 shape, one batch, one optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


@dataclass(frozen=True)
class Shape:
    """A model and a batch; travels to the ranks as JSON."""

    num_layers: int = 8
    width: int = 256
    sequence_length: int = 128
    batch_size: int = 16
    vocabulary: int = 2048
    optimizer: str = "adamw"  # or "sgd"
    is_tied: bool = True  # the head and the embedding share their weight, as GPT-2's do

    def with_vocabulary(self, vocabulary: int) -> Shape:
        return replace(self, vocabulary=vocabulary)


PRESETS = {
    "small": Shape(),
    "large": Shape(width=512, sequence_length=256),
    "tiny": Shape(num_layers=4, width=32, sequence_length=16),  # shows overhead, and tries the code
}


def make_model(shape: Shape) -> GPT2LMHeadModel:
    torch.manual_seed(0)  # the same weights on every rank of every contestant
    config = GPT2Config(
        n_layer=shape.num_layers,
        n_embd=shape.width,
        n_head=shape.width // 32,
        n_positions=shape.sequence_length,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.is_tied,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,  # keys and values of earlier tokens are for generation
        loss_type="ForCausalLM",
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def make_batch(shape: Shape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    size = (shape.batch_size, shape.sequence_length)
    return torch.randint(0, shape.vocabulary, size, generator=generator)


def make_optimizer(shape: Shape, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if shape.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2)
    return torch.optim.AdamW(parameters, lr=1e-3)
