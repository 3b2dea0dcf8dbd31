"""Scripts written for SMP find the blocks of a transformer under SMP's names."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from smp_runtime.recomputing.seq_layers import offer_seq_layers


def gpt2() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=16, n_embd=8, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=3,
                    num_attention_heads=2, num_key_value_heads=2)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "blocks"), [(gpt2, "transformer.h"), (llama, "model.layers")], ids=["gpt2", "llama"]
)
def test_all_paths_lead_to_the_blocks(make: Any, blocks: str) -> None:
    model = make()
    names = list(model.state_dict())
    modules = [name for name, _ in model.named_modules()]
    offer_seq_layers(model)
    found = model.get_submodule(blocks)
    assert model.module.transformer.seq_layers is found
    assert model.transformer.seq_layers is found
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == modules
    copied = copy.deepcopy(model)
    assert copied.transformer.seq_layers is copied.get_submodule(blocks)


def test_a_model_without_blocks_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    offer_seq_layers(model)
    assert not hasattr(model, "transformer")
    assert torch.equal(model(torch.zeros(1, 2)), model[0].bias[None])
