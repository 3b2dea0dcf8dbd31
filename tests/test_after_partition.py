"""What users do with a wrapped model of transformers beside training it."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import smp_runtime as smp
from smp_runtime.creation import delayed_values
from smp_runtime.errors import UsageError
from tests.worlds import run_world

pytestmark = pytest.mark.world

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
)
TOKENS = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1))


@smp.step
def train_step(model: Any, tokens: Tensor) -> Tensor:
    loss = model(input_ids=tokens, labels=tokens).loss
    model.backward(loss)
    return loss


def plain(size: int = 50) -> Any:
    torch.manual_seed(5)
    model = LlamaForCausalLM(copy.deepcopy(CONFIG))
    if size != 50:
        model.resize_token_embeddings(size)
    return model


def start(module: Any) -> Any:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "timeout": 30.0})
    return smp.DistributedModel(module)


def test_names_signature_and_configuration_stay() -> None:
    def body() -> None:
        module = plain()
        names = [(name, tuple(tensor.shape)) for name, tensor in module.named_parameters()]
        model = start(module)
        for _ in range(2):
            assert inspect.signature(model.forward) == inspect.signature(
                type(module).forward
            ).replace(
                parameters=list(inspect.signature(type(module).forward).parameters.values())[1:]
            )
            assert model.config is module.config
            assert model.generation_config is module.generation_config
            found = [(name, tuple(tensor.shape)) for name, tensor in model.named_parameters()]
            assert found == names
            train_step(model, TOKENS)

    run_world(2, body)


@pytest.mark.parametrize("is_delayed", [False, True])
def test_embeddings_are_resized_before_wrapping_and_not_after(
    is_delayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delayed_values, "LEAST_ELEMENTS", 64)
    larger = plain(60)
    expected = dict(larger.named_parameters())
    loss = larger(input_ids=TOKENS, labels=TOKENS).loss.item()

    def body() -> float:
        with smp.delay_param_initialization(is_delayed):
            module = plain(60)
        model = start(module)
        for each in (model, model.get_module()):
            with pytest.raises(UsageError, match="on the plain model before smp.DistributedModel"):
                each.resize_token_embeddings(70)
        found = train_step(model, TOKENS).reduce_mean().item()
        for name, parameter in model.local_named_parameters():
            assert torch.equal(parameter, expected[name]), name
        return found

    assert run_world(2, body) == [pytest.approx(loss, rel=1e-5)] * 2


@pytest.mark.parametrize("is_early", [True, False])
def test_types_devices_and_modes_reach_the_local_part(is_early: bool) -> None:
    def body() -> None:
        model = start(plain())
        if not is_early:
            train_step(model, TOKENS)
        objects = list(model.parameters())
        assert model.to("cpu") is model and model.bfloat16() is model
        assert model.eval() is model and not any(part.training for part in model.modules())
        assert model.train() is model and all(part.training for part in model.modules())
        model.zero_grad()
        loss = train_step(model, TOKENS).reduce_mean()
        assert loss.isfinite() and loss.dtype in (torch.bfloat16, torch.float32)
        assert all(now is before for now, before in zip(model.parameters(), objects, strict=True))
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.bfloat16, name
        for _, parameter in model.local_named_parameters():
            assert parameter.device.type == "cpu" and parameter.grad.dtype == torch.bfloat16

    run_world(2, body)


def test_a_model_that_has_no_values_yet_may_be_sent_to_a_device() -> None:
    def body() -> float:
        with smp.model_creation():
            module = plain()
        model = start(module).to("cpu")
        return train_step(model, TOKENS).reduce_mean().item()

    loss = plain()(input_ids=TOKENS, labels=TOKENS).loss.item()
    assert run_world(2, body) == [pytest.approx(loss, rel=1e-5)] * 2


def test_apply_calls_with_the_modules_whose_parameters_are_here() -> None:
    def body() -> tuple[set[str], bool]:
        model = start(plain())
        train_step(model, TOKENS)
        names = {id(part): name for name, part in model.named_modules()}
        seen = set()

        def fill(part: nn.Module) -> None:
            seen.add(names[id(part)])
            if isinstance(part, nn.Linear):
                with torch.no_grad():
                    part.weight.fill_(part.weight.shape[0])

        assert model.apply(fill) is model
        filled = all(
            bool((tensor == tensor.shape[0]).all())
            for name, tensor in model.local_named_parameters()
            if "proj" in name or "lm_head" in name
        )
        return {name for name in seen if "proj" in name or name in ("", "lm_head")}, filled

    (first, all_first), (second, all_second) = run_world(2, body)
    assert all_first and all_second
    assert first & second == {""}  # which has no parameters of its own
    assert len(first | second) == 1 + 1 + 2 * 7
