"""SMP's names for state dicts of GPT-J."""

from .translation import from_hf, to_hf

translate_state_dict_to_hf_gptj = to_hf
translate_hf_state_dict_to_smdistributed_gptj = from_hf
translate_hf_gptj_state_dict_to_smdistributed = from_hf
translate_hf_gptj_state_dict_to_smdistributed_gptj = from_hf
translate_hf_state_dict_to_smdistributed = from_hf
