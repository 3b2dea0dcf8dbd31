"""SMP's names for state dicts of GPT-Neo."""

from .translation import from_hf, to_hf

translate_state_dict_to_hf_gptneo = to_hf
translate_hf_state_dict_to_smdistributed_gptneo = from_hf
translate_hf_gptneo_state_dict_to_smdistributed = from_hf
translate_hf_state_dict_to_smdistributed = from_hf
