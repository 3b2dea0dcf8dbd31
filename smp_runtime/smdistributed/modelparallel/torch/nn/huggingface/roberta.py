"""SMP's names for state dicts of RoBERTa."""

from .translation import from_hf, to_hf

translate_state_dict_to_hf_roberta = to_hf
translate_hf_state_dict_to_smdistributed_roberta = from_hf
translate_hf_state_dict_to_smdistributed = from_hf
