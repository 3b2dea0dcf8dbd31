"""`import smdistributed.modelparallel.torch as smp`: every name is there, and is the runtime's."""

import importlib
import importlib.util
import inspect
import re
from typing import Any

import pytest
import torch
from packaging import version

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import smp_runtime
from smp_runtime import errors
from smp_runtime.errors import NotSupportedError

ROOT = "smdistributed.modelparallel.torch"

# What 30 public client programs use.
NAMES = re.findall(r"\S+", """
    smp.DistributedOptimizer smp.local_rank smp.rank smp.DistributedModel smp.dp_rank
    smp.dp_size smp.init smp.step smp.barrier smp.rdp_rank smp.rdp_size smp.nn.FusedLayerNorm
    smp.tp_rank smp.tp_size smp.save smp.get_dp_process_group smp.pp_rank smp.broadcast
    smp.get_tp_group smp.pp_size smp.recv_from smp.set_activation_checkpointing smp.PP_GROUP
    smp.RankType.PP_RANK smp.set_partition smp.load smp.allgather smp.resume_from_checkpoint
    smp.model_creation smp.save_checkpoint
    smp.nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2 smp.size smp.RankType.RDP_RANK
    smp.RankType.TP_RANK smp.TP_GROUP smp.get_mp_process_group smp.get_world_process_group
    smp.send smp.state_mod.state smp.utils.get_distribution_axis smp.delay_param_initialization
    smp.tensor_parallelism smp.mp_rank
    smp.nn.huggingface.gpt2.translate_hf_state_dict_to_smdistributed smp.set_tensor_parallelism
    smp.DP_GROUP smp.CommGroup.DP_GROUP smp.amp.GradScaler smp.model.DistributedModel
    smp.nn.huggingface.gpt2.translate_hf_state_dict_to_smdistributed_gpt2
    smp.nn.huggingface.gptj.translate_hf_gptj_state_dict_to_smdistributed
    smp.nn.huggingface.gptj.translate_state_dict_to_hf_gptj smp.tp_register_with_module
    smp.state.module_manager.translate_functions smp.MP_GROUP smp.RankType.DP_RANK
    smp.RankType.WORLD_RANK smp.WORLD smp.get_dp_group smp.get_mp_group smp.is_initialized
    smp.local_size smp.mp_size smp.nn.DistributedTransformer smp.nn.DistributedTransformerLayer
    smp.nn.FlashAttentionLayer smp.nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks
    smp.nn.huggingface.gpt2.translate_hf_block_state_dict_to_smdistributed
    smp.nn.huggingface.gpt2.translate_layer_state_dict_to_hf_gpt2_block
    smp.nn.huggingface.gptj.translate_hf_state_dict_to_smdistributed_gptj
    smp.nn.huggingface.gptneo.translate_hf_gptneo_state_dict_to_smdistributed
    smp.nn.huggingface.gptneo.translate_state_dict_to_hf_gptneo smp.optimizers.FusedLAMB
    smp.optimizers.FusedNovoGrad smp.partition smp.utils.rmsg smp.is_tracing
    smp.core.initialized smp.tp_register smp.register_parameter smp.mp_barrier smp.dp_barrier
    smp.patches.checkpoint.checkpoint smp.patches.checkpoint.checkpoint_sequential
    smp.get_pp_process_group smp.get_tp_process_group smp.get_rdp_process_group smp.RDP_GROUP
    smp.nn.DistributedLinear smp.nn.DistributedEmbedding smp.nn.DistributedModule
    smp.nn.DistributedTransformerLMHead smp.nn.DistributedAttentionLayer
    smp.nn.DistributedTransformerOutputLayer smp.nn.huggingface.bert smp.nn.huggingface.roberta
    smp.nn.huggingface.gptneox
""")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_client_is_an_attribute_and_can_be_imported(name: str) -> None:
    found: Any = smp
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    path, _, leaf = name.replace("smp", ROOT, 1).rpartition(".")
    if importlib.util.find_spec(path.rpartition(".")[0]) and _is_module(path):
        assert getattr(importlib.import_module(path), leaf) is found


def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False


def test_every_public_name_of_the_runtime_is_here_and_the_same() -> None:
    for name in smp_runtime.__all__:
        assert getattr(smp, name) is getattr(smp_runtime, name), name


def test_the_package_is_found_and_its_version_opens_every_gate() -> None:
    assert importlib.util.find_spec("smdistributed") is not None
    found = version.parse(smdistributed.modelparallel.__version__)
    assert all(found >= version.parse(gate) for gate in ("1.10", "1.11.0", "1.15"))


def test_step_is_the_decorator_even_after_an_import_of_its_module() -> None:
    from smdistributed.modelparallel.torch.step import StepOutput

    assert smp.step is smp_runtime.step
    assert StepOutput is smp_runtime.StepOutput


@pytest.mark.parametrize("module", ["backend", "torch"])
def test_the_launcher_finds_the_error_classes(module: str) -> None:
    found = importlib.import_module(f"smdistributed.modelparallel.{module}.exceptions")
    names = {name for name in dir(found) if inspect.isclass(getattr(found, name))}
    assert names == {name for name, item in vars(errors).items() if inspect.isclass(item)}


def test_a_layer_norm_is_a_real_one() -> None:
    norm = smp.nn.FusedLayerNorm(8)
    assert isinstance(norm, torch.nn.LayerNorm)
    assert set(norm._parameters) == {"weight", "bias"}
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (8,)))


def test_tensor_parallelism_at_degree_one_does_nothing() -> None:
    linear = torch.nn.Linear(2, 2)
    with smp.tensor_parallelism(enabled=True, attention_in_fp32=True):
        inside = torch.nn.Linear(2, 2)
    assert type(inside) is torch.nn.Linear
    smp.set_tensor_parallelism(linear, True, fused_softmax=False)
    hooks = smp.nn.huggingface.gpt2.get_hf_gpt2_transformer_layer_hooks()
    smp.tp_register_with_module(torch.nn.Linear, smp.nn.DistributedTransformerLayer, *hooks)
    assert smp.tp_register(smp.nn.DistributedLinear)(torch.nn.Linear) is torch.nn.Linear
    assert linear(torch.ones(1, 2)).shape == (1, 2)
    assert smp.utils.get_distribution_axis(linear.weight) is None


def test_state_dicts_need_no_translation() -> None:
    state = {"transformer.wte.weight": torch.ones(1)}
    gpt2 = smp.nn.huggingface.gpt2
    assert gpt2.translate_state_dict_to_hf_gpt2(state, max_seq_len=128) is state
    assert gpt2.translate_hf_state_dict_to_smdistributed(state) is state
    assert list(smp.state.module_manager.translate_functions) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: smp.nn.DistributedLinear(4, 4),
        lambda: smp.nn.DistributedTransformerLMHead(num_layers=2),
        lambda: smp.state.param_index_to_name_tp_group,
    ],
)
def test_what_does_not_exist_says_so_at_use(make: Any) -> None:
    with pytest.raises(NotSupportedError, match="not supported yet"):
        make()


def test_a_message_has_its_rank_in_front() -> None:
    assert smp.utils.rmsg("hello") == "[0] hello"
