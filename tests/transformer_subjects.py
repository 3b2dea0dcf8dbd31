"""Tiny random models of transformers, untouched: the cache at its default, the loss their own."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.subjects import Batch, Subject

VOCABULARY = 64
LENGTH = 7
IGNORED = -100

# What each family calls its sizes.
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def padded_text(size: int) -> Batch:
    """Returns token sequences, half of them padded on the right, with labels."""
    input_ids = torch.randint(3, VOCABULARY, (size, LENGTH))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[::2, LENGTH - 2 :] = 0
    labels = input_ids.masked_fill(attention_mask == 0, IGNORED)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def masked_text(size: int) -> Batch:
    """Returns padded text of which some tokens are to be guessed."""
    batch = padded_text(size)
    labels = torch.full_like(batch["labels"], IGNORED)
    labels[:, 1:4] = batch["labels"][:, 1:4]
    return batch | {"labels": labels}


def translation(size: int) -> Batch:
    """Returns padded text with other text as labels."""
    return padded_text(size) | {"labels": torch.randint(3, VOCABULARY, (size, LENGTH - 2))}


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the loss that the model computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def without_dropout(config: Any) -> Any:
    """Sets every dropout of a configuration to zero."""
    for name, value in vars(config).items():
        if isinstance(value, float) and ("drop" in name or name.endswith("_jitter_noise")):
            setattr(config, name, 0.0)
    return config


def tiny(family: str, head: str = "ForCausalLM", **sizes: Any) -> Callable[[], nn.Module]:
    """Returns what makes a model of a family that trains, without dropout."""

    def build() -> nn.Module:
        config = without_dropout(getattr(transformers, f"{family}Config")(**sizes))
        model: nn.Module = getattr(transformers, family + head)(config)
        return model.train()

    return build


def causal(name: str, build: Callable[[], nn.Module], **options: Any) -> Subject:
    """Returns a language model as a subject."""
    return Subject(name, build, padded_text, own_loss, **options)


TRANSFORMERS = (
    causal("gpt2", tiny("GPT2", "LMHeadModel", **GPT2)),
    causal("llama", tiny("Llama", **LLAMA)),
    causal("qwen2", tiny("Qwen2", **LLAMA)),
    causal("qwen3", tiny("Qwen3", **LLAMA, head_dim=4)),
    causal("mistral", tiny("Mistral", **LLAMA, sliding_window=4)),
    causal("gemma2", tiny("Gemma2", **LLAMA, head_dim=4, sliding_window=4)),
    causal(
        "opt",
        tiny("OPT", **LLAMA, ffn_dim=24, word_embed_proj_dim=16),
    ),
    causal("bloom", tiny("Bloom", vocab_size=VOCABULARY, hidden_size=16, n_layer=4, n_head=4)),
    causal("gpt_neox", tiny("GPTNeoX", **LLAMA)),
    causal("gptj", tiny("GPTJ", **GPT2, rotary_dim=4)),
    causal("phi", tiny("Phi", **LLAMA)),
    causal(
        "falcon",
        tiny(
            "Falcon",
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=4,
        ),
    ),  # fmt: skip
    causal(
        "mamba",
        tiny("Mamba", vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=4),
    ),
    causal("mixtral", tiny("Mixtral", **LLAMA, **MOE, num_local_experts=4)),
    causal(
        "qwen3_moe",
        tiny("Qwen3Moe", **LLAMA, **MOE, head_dim=4, num_experts=4, moe_intermediate_size=24),
    ),
    Subject("bert", tiny("Bert", "ForMaskedLM", **LLAMA), masked_text, own_loss),
    Subject("t5", tiny("T5", "ForConditionalGeneration", **T5), translation, own_loss),
)
