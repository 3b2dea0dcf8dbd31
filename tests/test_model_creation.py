"""A model that is made on meta and filled by each rank is the one that is made at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import smp_runtime as smp
from smp_runtime.creation import delayed_values
from smp_runtime.creation.delayed_values import Recording
from smp_runtime.creation.pending_values import recording
from smp_runtime.errors import UsageError
from tests.worlds import run_world

LARGE = 64  # in these tests


@pytest.fixture(autouse=True)
def small_tensors_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_values, "LEAST_ELEMENTS", LARGE)


class Odd(nn.Module):
    """Initialises its parameters in every way that torch offers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        nn.init.orthogonal_(self.linear.weight)
        with torch.no_grad():
            self.linear.weight[2:4, 0] = 7.0
        self.embedding = nn.Embedding(10, 8, padding_idx=1)
        self.recurrent = nn.LSTM(8, 8)
        self.prompt = nn.Parameter(torch.randn(9, 8) * 0.02)
        self.norm = nn.BatchNorm1d(80)
        self.attention = nn.MultiheadAttention(8, 2)
        nn.init.trunc_normal_(self.prompt, std=0.1)  # draws again until nothing is outside
        nn.init.sparse_(self.attention.out_proj.weight, 0.3)
        self.convolution = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3))
        nn.init.dirac_(nn.Conv1d(8, 8, 3).weight)
        self.spectral = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.half = nn.Linear(8, 8).to(torch.bfloat16)
        self.register_buffer("mask", torch.full((9, 9), float("-inf")).triu(1), persistent=False)
        self.scale = float(self.linear.weight.detach().norm())  # looks at values
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 99)]


def causal(config: Any) -> Callable[[], nn.Module]:
    return lambda: AutoModelForCausalLM.from_config(config)


EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 50}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "gpt2": causal(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)),
    "llama": causal(LlamaConfig(**SIZES, num_hidden_layers=3, tie_word_embeddings=True)),
    "mixtral": causal(MixtralConfig(**SIZES, **EXPERTS, num_hidden_layers=2)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16, vocab_size=50)
    ),
}  # fmt: skip


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns all parameters and buffers, also those that are not saved."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@pytest.mark.parametrize("name", MODELS)
def test_values_and_generator_are_those_of_a_model_made_at_once(name: str) -> None:
    torch.manual_seed(5)
    expected = state_of(MODELS[name]())
    drawn = torch.rand(3)
    torch.manual_seed(5)
    mine = Recording()
    with mine.active():
        model = MODELS[name]()
    assert torch.equal(torch.rand(3), drawn)
    found = state_of(model)
    assert list(found) == list(expected)
    assert sum(tensor.is_meta for tensor in found.values()) > 4
    for key, tensor in found.items():
        value = mine.value_of(tensor) if tensor.is_meta else tensor
        assert (value.dtype, value.stride()) == (expected[key].dtype, expected[key].stride())
        assert torch.equal(value, expected[key]), key
    if name == "odd":
        assert model.scale == float(expected["linear.weight"].detach().norm())


def test_large_tensors_take_no_memory_and_small_ones_are_there() -> None:
    with Recording().active():
        linear = nn.Linear(LARGE, LARGE)
        small = nn.LayerNorm(LARGE - 1)
        assert linear.weight.device.type == "cpu"  # where it will be
    assert linear.weight.is_meta
    assert small.weight.tolist() == [1.0] * (LARGE - 1)


def test_changes_outside_are_refused() -> None:
    mine = Recording()
    with mine.active():
        linear = nn.Linear(LARGE, LARGE)
    nn.init.zeros_(linear.weight)
    with pytest.raises(UsageError, match="changed outside of smp.model_creation"):
        mine.value_of(linear.weight)
    other = nn.Linear(LARGE, LARGE, device="meta")
    with pytest.raises(UsageError, match="made outside of smp.model_creation"):
        mine.value_of(other.weight)


def tokens() -> Tensor:
    return torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1))


@smp.step
def train_step(model: Any, batch: Tensor) -> Tensor:
    loss = model(input_ids=batch, labels=batch).loss
    model.backward(loss)
    return loss


def poison() -> None:
    """Makes torch fill memory that it gives out with NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.world
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("degree", [1, 2])
def test_each_rank_makes_its_own_part(name: str, degree: int) -> None:
    torch.manual_seed(5)
    expected = {key: tensor.detach().clone() for key, tensor in state_of(MODELS[name]()).items()}

    def body() -> set[str]:
        poison()
        smp.init({"pipeline_parallel_degree": degree, "microbatches": 2})
        torch.manual_seed(5)
        with smp.model_creation():
            plain = MODELS[name]()
        assert any(tensor.is_meta for tensor in state_of(plain).values())
        model = smp.DistributedModel(plain)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        train_step(model, tokens())
        optimizer.step()
        held = {**dict(model.local_named_parameters()), **dict(model.local_named_buffers())}
        for key, tensor in held.items():
            assert torch.equal(tensor, expected[key]), key
        assert not recording._operations
        return set(held)

    names = set().union(*run_world(degree, body))
    tied = {"lm_head.weight"} if name != "mixtral" else set()
    assert names | tied == set(expected)


@pytest.mark.world
def test_a_default_type_holds_inside() -> None:
    with smp.model_creation(dtype=torch.bfloat16):
        linear = nn.Linear(LARGE, LARGE)
    assert linear.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    assert recording.value_of(linear.weight).isfinite().all()
    with smp.delay_param_initialization(enabled=False):
        assert not nn.Linear(LARGE, LARGE).weight.is_meta
    recording.clear()


@pytest.mark.world
def test_a_checkpoint_fills_a_model_that_was_never_made(tmp_path: Path) -> None:
    def save() -> float:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        torch.manual_seed(5)
        model = smp.DistributedModel(MODELS["llama"]())
        loss = train_step(model, tokens())
        smp.save_checkpoint(tmp_path, "first")
        return float(loss.reduce_mean())

    def resume() -> float:
        poison()
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        with smp.delay_param_initialization():
            plain = MODELS["llama"]()
        model = smp.DistributedModel(plain)
        smp.resume_from_checkpoint(tmp_path, load_optimizer=False)
        return float(train_step(model, tokens()).reduce_mean())

    expected = run_world(2, save)
    assert run_world(2, resume) == expected
