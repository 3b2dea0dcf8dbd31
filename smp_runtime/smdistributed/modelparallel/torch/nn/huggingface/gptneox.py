"""SMP's names for state dicts of GPT-NeoX."""

from .translation import from_hf, to_hf

translate_state_dict_to_hf_gptneox = to_hf
translate_hf_state_dict_to_smdistributed_gptneox = from_hf
translate_hf_gptneox_state_dict_to_smdistributed = from_hf
translate_hf_state_dict_to_smdistributed = from_hf
