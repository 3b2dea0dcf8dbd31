"""Scripts in the style of SMP v1's public ones run unmodified, with the numbers of one process."""

from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel  # noqa: F401 - so that forked ranks have it

from tests.clients.runner import run_client

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


def test_gpt() -> None:
    (expected,) = gpt(1, 1, 8)
    for pp, dp in LAYOUTS:
        results = gpt(pp, dp, 8 // dp)
        close(mean_over_replicas(results), expected["history"])
        sums, wanted = results[0]["final"]["sums"], expected["final"]["sums"]
        assert sums.keys() == wanted.keys()
        close(list(sums.values()), list(wanted.values()), atol=1e-4)
