"""Hugging Face folders in and out of a partitioned model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    MixtralConfig,
)

import smp_runtime as smp
from smp_runtime.errors import (
    CheckpointDamagedError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    SMPError,
)
from tests.worlds import run_world

pytestmark = pytest.mark.world

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 50}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4}
CONFIGS = {
    "gpt2": GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16),
    "llama": LlamaConfig(**SIZES, num_hidden_layers=3, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS, num_hidden_layers=2),
}
TOKENS = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1))


def plain_folder(name: str, path: Path, max_shard_size: str = "20KB") -> Any:
    """Saves a plain model by transformers alone, and returns it."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model.eval()


def start(plain: Any, degree: int = 2, replicas: int = 1) -> Any:
    smp.init({"pipeline_parallel_degree": degree, "ddp": replicas > 1, "timeout": 30.0})
    return smp.DistributedModel(plain)


@smp.step
def forward(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens).logits
    return logits


def logits_of(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        (logits,) = forward(model, TOKENS).outputs
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_each_rank_reads_its_own_and_the_folder_that_is_saved_is_transformers_own(
    name: str, tmp_path: Path
) -> None:
    source, saved, tag = tmp_path / "source", tmp_path / "saved", tmp_path / "tags"
    plain = plain_folder(name, source)
    with torch.no_grad():
        expected = plain(input_ids=TOKENS).logits

    def body() -> Tensor:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        module = smp.from_pretrained(source)
        assert all(parameter.is_meta for parameter in module.parameters())
        model = start(module)
        logits = logits_of(model)
        model.save_pretrained(saved, max_shard_size="20KB")
        smp.save_checkpoint(tag, "whole", partial=False, user_content={"step": 3})
        return logits

    for logits in run_world(2, body):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    for folder in (saved, tag / "whole"):
        again = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            assert torch.equal(again(input_ids=TOKENS).logits, expected)
        assert again.generation_config.max_new_tokens == 7
        assert json.loads((folder / "config.json").read_text()) == json.loads(
            (source / "config.json").read_text()
        )
    kinds = {file.name.split("-")[0] for file in source.iterdir()}
    assert {file.name.split("-")[0] for file in saved.iterdir()} == kinds
    keys = [json.loads((f / "model.safetensors.index.json").read_text()) for f in (source, saved)]
    assert keys[0]["weight_map"].keys() == keys[1]["weight_map"].keys()

    def resume() -> tuple[Tensor, int]:
        torch.manual_seed(6)
        model = start(AutoModelForCausalLM.from_config(CONFIGS[name]), replicas=2)
        content = smp.resume_from_checkpoint(tag, "whole", partial=False)
        return logits_of(model), content["step"]

    for logits, step in run_world(4, resume):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
        assert step == 3


def test_weights_are_loaded_before_and_after_the_partitioning_and_from_old_files(
    tmp_path: Path,
) -> None:
    plain = plain_folder("llama", tmp_path, "1GB")
    torch.save(plain.state_dict(), tmp_path / "fullmodel.pt")
    with torch.no_grad():
        expected = plain(input_ids=TOKENS).logits

    def body(tag: str | None, is_early: bool) -> Tensor:
        with smp.model_creation():
            module = AutoModelForCausalLM.from_config(CONFIGS["llama"])
        model = start(module)
        if not is_early:
            logits_of(model)
        assert smp.resume_from_checkpoint(tmp_path, tag, partial=False).get("step") is None
        return logits_of(model)

    for tag in (None, "fullmodel.pt", "pytorch_model.bin"):  # the last falls back to safetensors
        for is_early in (True, False):
            for logits in run_world(2, body, tag, is_early):
                torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def test_a_type_can_be_chosen(tmp_path: Path) -> None:
    plain_folder("gpt2", tmp_path)
    model = smp.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training


def test_what_does_not_fit_is_named_on_every_rank(tmp_path: Path) -> None:
    plain_folder("llama", tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old/pytorch_model.bin").touch()

    def resume(path: Path) -> tuple[str, str]:
        config = LlamaConfig(**{**SIZES, "vocab_size": 60}, num_hidden_layers=4)
        start(AutoModelForCausalLM.from_config(config))
        try:
            smp.resume_from_checkpoint(path, partial=False)
        except SMPError as error:
            return type(error).__name__, str(error)
        return "", ""

    cases = {
        "nothing": (CheckpointNotFoundError, "there is no"),
        "empty": (CheckpointNotFoundError, "is empty"),
        "old": (CheckpointNotFoundError, "has pytorch_model.bin but no safetensors"),
        "good": (CheckpointMismatchError, "has shape (50, 32) there and (60, 32) in the model"),
    }
    for name, (kind, text) in cases.items():
        for found_kind, found in run_world(2, resume, tmp_path / name):
            assert (found_kind, text in found) == (kind.__name__, True), found
    *_, shard, _ = sorted((tmp_path / "good").glob("model-*"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(CheckpointDamagedError, match=f"{shard.name} is truncated"):
        smp.from_pretrained(tmp_path / "good")
    shard.unlink()
    with pytest.raises(CheckpointIncompleteError, match=f"lacks {shard.name}"):
        smp.from_pretrained(tmp_path / "good")
    with pytest.raises(CheckpointNotFoundError, match="there is no folder"):
        smp.from_pretrained(tmp_path / "absent")


def test_a_head_that_is_not_there_is_initialised_if_the_rest_is_loaded(tmp_path: Path) -> None:
    plain = plain_folder("llama", tmp_path)
    with pytest.raises(CheckpointMismatchError, match="has no values for score.weight"):
        smp.from_pretrained(tmp_path, LlamaForSequenceClassification, strict=False, pad_token_id=0)

    @smp.step
    def classify(model: Any, tokens: Tensor) -> Tensor:
        scores: Tensor = model(input_ids=tokens).logits
        return scores

    def build() -> Any:
        torch.manual_seed(5)
        config = LlamaConfig(**SIZES, num_hidden_layers=3, pad_token_id=0)
        return LlamaForSequenceClassification(config)

    def body() -> Tensor:
        with smp.model_creation():
            module = build()
        model = start(module)
        smp.resume_from_checkpoint(tmp_path, partial=False, strict=False)
        with torch.no_grad():
            return classify(model, TOKENS).outputs[0]

    expected = build()
    expected.model.load_state_dict(plain.model.state_dict())
    with torch.no_grad():
        scores = expected(input_ids=TOKENS).logits
    for found in run_world(2, body):
        torch.testing.assert_close(found, scores, rtol=1e-5, atol=1e-6)
