"""Tries every architecture that transformers maps to a causal language model. Run by hand:

    python tests/sweep_architectures.py --ranks 2 [--only llama gpt2 ...]

Each is built tiny and random and takes one step over two microbatches, with padded input, its own
loss and its cache setting as it is: in one plain process, and on the ranks of a pipeline. Prints
for each whether losses and gradients agree, and at the end a count and the failures by cause.
"""

import argparse
import contextlib
import dataclasses
import io
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests import transparency
from tests.subjects import Subject
from tests.transformer_subjects import own_loss, padded_text, without_dropout
from tests.worlds import run_world

SECONDS = 60.0
MOST_PARAMETERS = 40_000_000

# What configurations call their sizes, and a small value for each.
SMALL: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input", "output_vocab_size"], 64),
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "embedding_size", "emb_dim"], 32),
    **dict.fromkeys(["attention_hidden_size", "input_embedding_size"], 32),
    **dict.fromkeys(["output_embedding_size", "word_embed_proj_dim", "lru_width"], 32),
    **dict.fromkeys(["dim_model_base", "feed_forward_size", "hidden_size_per_layer_input"], 32),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"], 48),
    **dict.fromkeys(["ffn_hidden_size", "d_inner", "dff", "dim_ff", "intermediate_size_mlp"], 48),
    **dict.fromkeys(["n_inner", "dense_intermediate_size"], 48),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 24),
    **dict.fromkeys(["expert_ffn_hidden_size", "shared_intermediate_size"], 24),
    **dict.fromkeys(["moe_shared_expert_intermediate_size"], 24),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 4),
    **dict.fromkeys(["decoder_layers", "num_decoder_layers"], 4),
    **dict.fromkeys(["encoder_layers", "num_encoder_layers"], 4),
    **dict.fromkeys(["num_dense_layers"], 1),
    **dict.fromkeys(["first_k_dense_replace", "num_mtp_layers", "num_nextn_predict_layers"], 1),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["num_decoder_attention_heads", "num_encoder_attention_heads"], 4),
    **dict.fromkeys(["swa_num_attention_heads", "attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "attention_head_dim", "kv_channels", "d_head"], 8),
    **dict.fromkeys(["dim_head", "attention_head_size", "swa_head_dim"], 8),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_target_positions"], 64),
    **dict.fromkeys(["max_source_positions", "max_seq_len", "n_ctx", "context_length"], 64),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"], 2),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts", "num_shared_experts"], 1),
    **dict.fromkeys(["moe_num_shared_experts"], 1),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "mamba_dt_rank", "time_step_rank"], 8),
    **dict.fromkeys(["qk_nope_head_dim", "v_head_dim", "index_head_dim", "o_lora_rank"], 8),
    **dict.fromkeys(["qk_rope_head_dim", "rotary_dim", "index_n_heads", "index_topk"], 4),
    **dict.fromkeys(["state_size", "mamba_d_state", "ssm_state_size"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 8),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"], 2),
    **dict.fromkeys(["sliding_window", "sliding_window_size", "attention_window_size"], 4),
    **dict.fromkeys(["pad_token_id"], 0),
    **dict.fromkeys(["bos_token_id", "cls_token_id"], 1),
    **dict.fromkeys(["eos_token_id", "sep_token_id", "decoder_start_token_id"], 2),
    **dict.fromkeys(["mask_token_id", "forced_eos_token_id"], None),
}

ROPE = {"rope_type": "default", "rope_theta": 1e4}
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8}
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 2,
    "split_ngram_parts": 2,
    "hc_lowrank": 8,
}
SLIDING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 8,
    "swa_kv_lora_rank": 8,
    "swa_head_dim": 12,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}

# Where small values alone don't make a model.
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2, "linear_head_dim": 8},
    "bamba": {**MAMBA_HEADS, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots3_note": SLIDING,
    "dots3_note_text": SLIDING,
    "fuyu": {"text_config": {"model_type": "persimmon", **TEXT}},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", **VISION}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "granitemoehybrid": {**MAMBA_HEADS, "layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2, "num_layers": 2, "head_dim": 4},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 4},
    "moshi": {"audio_vocab_size": 64},
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_embds": False,
        "local_attn_chunk_length": 7,
        "lsh_attn_chunk_length": 7,
        "num_buckets": 2,
    },
    "xlstm": {"mode": "train", "chunk_size": 7, "num_blocks": 4, "hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "chunk_size": 4, "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
}

# What needs more than text, or has no loss of its own.
SKIPPED: dict[str, str] = {
    "blt": "its cache fails in one process",
    "gemma3n": "needs the package timm",
    "gemma4_assistant": "takes the states of another model",
    "gemma4_unified_assistant": "takes the states of another model",
    "git": "needs images",
    "got_ocr2": "its vision part has no tiny form",
    "moss_transcribe_diarize": "its audio part has no tiny form",
    "musicgen": "takes audio codes",
    "musicgen_melody": "takes audio codes",
    "xlstm": "its own backward pass fails in one process",
}


def model_class(model_type: str) -> Any:
    """Returns the class of a family's language model."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def tiny_config(model_type: str) -> Any:
    """Returns a small configuration of a family, of its text part where the model is that."""
    return shrink(model_class(model_type).config_class, SPECIAL.get(model_type, {}))


def shrink(cls: type[PreTrainedConfig], special: dict[str, Any]) -> Any:
    """Makes a configuration with small values for all the sizes that it knows."""
    names = {field.name for field in dataclasses.fields(cls)}
    given = {name: value for name, value in SMALL.items() if name in names}
    if "qk_rope_head_dim" in names:
        # Latent attention: each head has its key, and `head_dim` is the rotated part.
        given.pop("head_dim", None)
        given["num_key_value_heads"] = given["num_attention_heads"]
    for name, sub in cls.sub_configs.items():
        if dataclasses.is_dataclass(sub) and name in names and name not in special:
            given[name] = shrink(sub, {}).to_dict()
    return without_dropout(cls(**(given | special)))


def make(model_type: str) -> nn.Module:
    """Builds the model of a family, tiny and random.

    Raises:
        ValueError: it would not be tiny.
    """
    config, cls = tiny_config(model_type), model_class(model_type)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in cls(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"not tiny: {num_parameters} parameters")
    torch.manual_seed(transparency.SEED)
    model: nn.Module = cls(config).train()
    return model


def compare(model_type: str, num_ranks: int) -> tuple[str, str]:
    """Returns what became of an architecture, and why."""
    if model_type in SKIPPED:
        return "skipped", SKIPPED[model_type]
    subject = Subject(model_type, lambda: make(model_type), padded_text, own_loss)
    case = transparency.Case(2)
    try:
        make(model_type)  # here, so that the ranks have all imports already
        reference = run_world(1, transparency.plain, subject, 2, timeout=SECONDS)[0]
    except Exception as error:  # noqa: BLE001 - the sweep goes on
        return "not built", brief(error)
    try:
        ranks = run_world(
            num_ranks, transparency.partitioned, subject, num_ranks, case, timeout=SECONDS
        )
        transparency.compare(model_type, reference, ranks)
    except Exception as error:  # noqa: BLE001
        return "failed", brief(error)
    return "ok", ""


def brief(error: BaseException) -> str:
    """Returns the first lines of what an exception says."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:3])}"[:240]


def main() -> None:
    """Runs the sweep and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    transparency.NUM_STEPS = 1
    results: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for model_type in options.only:
        begun = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            verdict, reason = compare(model_type, options.ranks)
        seconds = time.perf_counter() - begun
        print(f"{model_type:32} {verdict:10} {seconds:5.1f} s  {reason}", flush=True)
        results[verdict].append((model_type, reason))
        if verdict == "failed" and len(options.only) == 1:
            print(output.getvalue())
    print()
    for verdict, entries in results.items():
        print(f"{verdict}: {len(entries)}")
        for model_type, reason in entries if verdict != "ok" else []:
            print(f"    {model_type}: {reason}")


if __name__ == "__main__":
    main()
