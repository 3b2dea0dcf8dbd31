"""The trace on Hugging Face models."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from smp_runtime.tracing.trace import trace_model

TINY = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
BLOCK = {"intermediate_size": 32, "num_attention_heads": 2}
SUBJECTS = {
    "gpt2": {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    | {"bos_token_id": 0, "eos_token_id": 0},
    "llama": TINY | BLOCK,
    "mixtral": TINY | BLOCK | {"num_key_value_heads": 1, "num_local_experts": 2},
    "t5": {"vocab_size": 64, "d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    | {"d_kv": 8, "decoder_start_token_id": 0},
    "mamba": TINY | {"state_size": 4},
    "bert": TINY | BLOCK,
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_hugging_face_models_are_traced_on_fake_tensors(name, device):
    auto = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModelForMaskedLM}.get(
        name, AutoModelForCausalLM
    )
    with torch.device(device):
        model = auto.from_config(AutoConfig.for_model(name, **SUBJECTS[name]))
    model.train()
    ids = torch.randint(0, 64, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    trace = trace_model(model, (), {"input_ids": ids, "attention_mask": mask, "labels": ids})
    assert trace.source == "fake"
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert {p.device.type for p in model.parameters()} == {device}
    names = [name for name, _ in trace.root.facts()]
    persistent = model.state_dict(keep_vars=True)
    assert set(names) == set(persistent)
    called = [node for node in trace.root.walk() if node.calls]
    assert len(called) > 6
    assert all(node.compute > 0 for node in called if node.own_parameters and not node.children)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_collecting_hidden_states_leaves_no_hooks(name):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SUBJECTS[name]))
    ids = torch.randint(0, 64, (2, 8))
    trace = trace_model(model, (), {"input_ids": ids, "output_hidden_states": True})
    assert trace.source == "fake"
    assert not any(module._forward_hooks for module in model.modules())
    # What transformers installs at the first such call is then missing for nobody.
    assert len(model(input_ids=ids, output_hidden_states=True).hidden_states) == 3
    trace = trace_model(model, (), {"input_ids": ids, "output_hidden_states": True})
    assert trace.source == "fake"
    assert len(model(input_ids=ids, output_hidden_states=True).hidden_states) == 3


def test_router_logits_of_a_mixture_of_experts():
    config = AutoConfig.for_model("mixtral", **SUBJECTS["mixtral"], output_router_logits=True)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, 64, (2, 8))
    kwargs = {"input_ids": ids, "labels": ids}
    assert trace_model(model, (), kwargs).source == "fake"
    model(**kwargs)
    assert trace_model(model, (), kwargs).source == "fake"
