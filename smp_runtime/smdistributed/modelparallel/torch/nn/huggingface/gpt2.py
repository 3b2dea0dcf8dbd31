"""SMP's names for state dicts of GPT-2."""

from typing import Any

from .translation import from_hf, layer_hook, to_hf

translate_state_dict_to_hf_gpt2 = to_hf
translate_layer_state_dict_to_hf_gpt2_block = to_hf
translate_hf_state_dict_to_smdistributed_gpt2 = from_hf
translate_hf_state_dict_to_smdistributed = from_hf
translate_hf_block_state_dict_to_smdistributed = from_hf


def get_hf_gpt2_transformer_layer_hooks() -> tuple[Any, Any, Any]:
    """Returns three hooks to register a distributed layer with; at tensor degree 1 none runs."""
    return layer_hook, layer_hook, layer_hook
