"""SMP's names for state dicts of BERT."""

from .translation import from_hf, to_hf

translate_state_dict_to_hf_bert = to_hf
translate_hf_state_dict_to_smdistributed_bert = from_hf
translate_hf_state_dict_to_smdistributed = from_hf
