"""A Trainer over ranks that are forked: cases that need no script, beside those of the example."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    set_seed,
)

import smp_runtime as smp
import smp_runtime.hf
from tests.worlds import run_world

pytestmark = pytest.mark.world

SEQUENCES = torch.randint(1, 30, (23, 8), generator=torch.Generator().manual_seed(5))


def run(ranks: int, degree: int, body: Callable[[], Any]) -> list[Any]:
    """Runs a body over so many pipeline ranks and their replicas; in a plain Trainer for 0."""

    def start() -> Any:
        for name in ("transformers.trainer", "transformers.training_args"):
            sys.modules.pop(name, None)
        if ranks:
            settings = {"pipeline_parallel_degree": degree, "microbatches": 2}
            smp_runtime.hf.enable({**settings, "ddp": ranks > degree})
        result = body()
        if ranks:
            smp.shutdown()
        return result

    return run_world(max(ranks, 1), start)


def trainer(folder: Path, model: Any, data: list[Any], **arguments: Any) -> Any:
    """Returns a Trainer of both forms; batches are those of all replicas together."""
    from transformers.trainer import Trainer
    from transformers.training_args import TrainingArguments

    replicas = smp.dp_size() if smp.is_initialized() else 1
    common = {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "learning_rate": 1e-2}
    common["dataloader_pin_memory"] = False
    common["use_cpu"] = not smp.is_initialized()
    options: dict[str, Any] = {"train_dataset": data[:-9], "eval_dataset": data[-9:]}
    if "compute_metrics" in arguments:
        options["compute_metrics"] = arguments.pop("compute_metrics")
    size = 4 // replicas
    arguments |= {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    return Trainer(model, TrainingArguments(str(folder), **common, **arguments), **options)


def losses(made: Any) -> list[float]:
    log = made.state.log_history
    return [line[key] for line in log for key in ("loss", "grad_norm", "eval_loss") if key in line]


def test_a_classifier_ends_with_its_best_weights_and_predicts(tmp_path: Path) -> None:
    """Neither the 14 samples for training nor the 9 others fill their last batch."""
    data = [
        {"input_ids": sequence, "labels": sequence.sum() % 3, "attention_mask": sequence.ne(7)}
        for sequence in SEQUENCES
    ]

    def body(folder: Path) -> Any:
        set_seed(1)
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = BertConfig(
            vocab_size=30, intermediate_size=32, num_labels=3, **shape, **no_dropout
        )
        made = trainer(
            folder, BertForSequenceClassification(config), data, num_train_epochs=3,
            eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
        )  # fmt: skip
        made.train()
        predicted = made.predict(data[-9:])
        best = Path(made.state.best_model_checkpoint).name
        return losses(made), best, predicted.metrics["test_loss"], predicted.predictions.tolist()

    ((expected, best, loss, logits),) = run(0, 1, lambda: body(tmp_path / "plain"))
    assert len(expected) == 2 * 12 + 3 and len(logits) == 9
    for found in run(4, 2, lambda: body(tmp_path / "ranks")):
        assert found[0] == pytest.approx(expected, rel=2e-4)
        assert found[1] == best and found[2] == pytest.approx(loss, rel=2e-4)
        torch.testing.assert_close(
            torch.tensor(found[3]), torch.tensor(logits), rtol=1e-3, atol=1e-4
        )


def language_model(**settings: float) -> GPT2LMHeadModel:
    set_seed(1)
    shape = {"vocab_size": 30, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, **settings, bos_token_id=0, eos_token_id=0))


def test_smoothed_labels_of_a_language_model_are_shifted(tmp_path: Path) -> None:
    labels = SEQUENCES.clone()
    labels[::3, :5] = -100
    data = [
        {"input_ids": pair[0], "labels": pair[1]} for pair in zip(SEQUENCES, labels, strict=True)
    ]

    def body() -> list[float]:
        model = language_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        options = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}
        made = trainer(tmp_path, model, data, max_steps=2, **options)
        made.train()
        return losses(made)

    (expected,) = run(0, 1, body)
    for found in run(2, 2, body):
        assert found == pytest.approx(expected, rel=2e-4)


def test_dropout_goes_on_where_it_stopped(tmp_path: Path) -> None:
    data = [{"input_ids": sequence, "labels": sequence} for sequence in SEQUENCES]

    def body(resumes: bool) -> list[float]:
        model = language_model()
        assert model.config.resid_pdrop == 0.1
        made = trainer(tmp_path, model, data, max_steps=6, save_steps=3)
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3") if resumes else None)
        return losses(made)

    expected = run(2, 2, lambda: body(False))
    assert len(expected[0]) == 12 and expected[0] == expected[1]
    assert run(2, 2, lambda: body(True)) == expected
