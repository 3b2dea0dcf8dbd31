"""Scripts in the style of SMP v1's public ones run unmodified, with the numbers of one process."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from tests.clients.runner import run_client
from tests.sixteen_bit import needs_float32_sums

pytestmark = pytest.mark.world

# (pipeline degree, data parallel degree)
LAYOUTS = [(1, 2), (2, 1), (2, 2)]


def close(found: list[float], expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=atol)


def mean_over_replicas(results: list[dict[str, Any]]) -> list[float]:
    return torch.tensor([result["history"] for result in results]).double().mean(0).tolist()


def mnist(pp: int, dp: int, batch: int, *more: object) -> list[dict[str, Any]]:
    return run_client(
        "mnist.py", pp * dp, "--num-partitions", pp, "--ddp", int(dp > 1), "--batch-size", batch,
        *more,
    )  # fmt: skip


def gpt(pp: int, dp: int, batch: int, *more: object) -> list[dict[str, Any]]:
    return run_client(
        "gpt.py", pp * dp, "--pipeline_parallel_degree", pp, "--train_batch_size", batch, *more
    )


def test_mnist() -> None:
    (expected,) = mnist(1, 1, 16)
    for pp, dp in [(2, 1), (2, 2)]:
        results = mnist(pp, dp, 16 // dp, *(["--pipeline", "simple"] if dp > 1 else []))
        if dp == 1:
            assert results[0]["history"] == results[1]["history"]
            close(results[0]["history"], expected["history"])


def plain_gpt(steps: int = 4, batch: int = 8) -> list[float]:
    """Does what the client does without evaluation, in plain PyTorch."""
    set_seed(12345)
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**shape, **no_dropout, bos_token_id=1, eos_token_id=1))
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    kept = {id(p) for m in norms for p in m.parameters()}
    kept |= {id(p) for name, p in model.named_parameters() if name.endswith(".bias")}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in kept]},
        {"params": [p for p in model.parameters() if id(p) in kept], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), lr=1e-2, weight_decay=0.1)
    rows = np.random.RandomState(0).randint(0, 64, (96, 1)) + np.arange(16)
    tokens = torch.tensor(rows % 64)
    losses = []
    for step in range(steps):
        lr = 1e-2 * (step + 1) / 3 if step <= 2 else 5e-3 * (math.cos(math.pi / 18) + 1)
        for group in optimizer.param_groups:
            group["lr"] = lr
        rows_of_step = tokens[step * batch : (step + 1) * batch]
        optimizer.zero_grad()
        loss = model(input_ids=rows_of_step, labels=rows_of_step).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_gpt() -> None:
    (expected,) = gpt(1, 1, 8)
    first, second, _, third, fourth, _ = expected["history"]  # the others are of evaluations
    close([first, second, third, fourth], plain_gpt())
    for pp, dp in LAYOUTS:
        results = gpt(pp, dp, 8 // dp)
        close(mean_over_replicas(results), expected["history"])
        sums, wanted = results[0]["final"]["sums"], expected["final"]["sums"]
        assert sums.keys() == wanted.keys()
        close(list(sums.values()), list(wanted.values()), atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--fp16", 1], marks=needs_float32_sums),
        ["--drop", 0.1, "--logits_output", 1, "--active_microbatches", 1],
        ["--manual_partition", 1, "--activation_checkpointing", 1, "--delayed_param", 1],
        ["--use_distributed_transformer", 1, "--skip_tracing", 1, "--prescaled_batch", 1],
    ],
    ids=lambda options: str(options[0]).strip("-"),
)
def test_gpt_with_options(options: list[object]) -> None:
    (expected,) = gpt(1, 1, 4, "--max_steps", 2, *options)
    first, second = gpt(2, 1, 4, "--max_steps", 2, *options)
    assert first["history"] == second["history"]
    close(first["history"], expected["history"])


def test_gpt_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    folder = ["--checkpoint_dir", tmp_path, "--save_final_full_model", 0]
    whole = gpt(2, 1, 8, "--checkpoint_freq", 2, "--max_steps", 3, *folder)
    for pp, dp in [(2, 1), (1, 2)]:
        resumed = gpt(pp, dp, 8 // dp, "--load_partial", 1, "--max_steps", 3, *folder)
        assert resumed[0]["final"]["resumed_at"] == 2
        close(mean_over_replicas(resumed), whole[0]["history"][-1:])


def test_the_environment_wins_over_the_script() -> None:
    settings = json.dumps({"partitions": 2, "microbatches": 4})
    results = run_client("class_trainer.py", 2, "--microbatches", 4, settings=settings)
    (expected,) = run_client("class_trainer.py", 1, "--microbatches", 4)
    close(results[0]["history"], expected["history"])
    assert results[0]["final"]["local"] < expected["final"]["local"]


def test_bert() -> None:
    (expected,) = run_client("bert.py", 1, "--train_batch_size", 8)
    for pp, dp in [(2, 1), (2, 2)]:
        results = run_client(
            "bert.py", pp * dp, "--partitions", pp, "--train_batch_size", 8 // dp, "--ddp", dp - 1
        )
        for result in results:
            close(result["history"], expected["history"])


@needs_float32_sums
def test_bert_in_mixed_precision() -> None:
    (expected,) = run_client("bert.py", 1, "--fp16", 1)
    for result in run_client("bert.py", 2, "--fp16", 1, "--partitions", 2):
        assert result["history"] == expected["history"]


def test_a_trainer_class() -> None:
    (expected,) = run_client("class_trainer.py", 1)
    assert expected["final"]["hooks"] == [("partition", True), ("step", True)]
    for pp, dp in LAYOUTS:
        results = run_client(
            "class_trainer.py", pp * dp, "--partitions", pp, "--batch_size", 8, "--microbatches", 2
        )
        close(mean_over_replicas(results), expected["history"])
        for result in results:
            assert result["final"]["hooks"] == expected["final"]["hooks"]
            close(result["final"]["norms"], expected["final"]["norms"], atol=1e-5)
        held = [result["final"]["local"] for result in results[:pp]]
        assert sum(held) >= expected["final"]["local"]


def test_a_detector_placed_by_hand() -> None:
    (expected,) = run_client("vision.py", 1)
    first, second = run_client("vision.py", 2, "--partitions", 2)
    assert first["history"] == second["history"]
    close(first["history"], expected["history"])
    alone, other = run_client("vision.py", 2)  # two replicas
    of_pipelines = run_client("vision.py", 4, "--partitions", 2)
    for result, wanted in zip(of_pipelines, [alone, alone, other, other], strict=True):
        close(result["history"], wanted["history"])
