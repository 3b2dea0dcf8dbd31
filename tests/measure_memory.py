"""Measures the host memory of ranks that make, read and save a model of about 2 GB. By hand:

python -m tests.measure_memory 4
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import smp_runtime as smp
from tests.worlds import run_world

CONFIG = LlamaConfig(
    hidden_size=1536,
    intermediate_size=4096,
    num_hidden_layers=16,
    num_attention_heads=12,
    num_key_value_heads=12,
    vocab_size=16000,
)
MIB = 2**20


def resident(kind: str) -> int:
    """Returns MiB of this process: "VmRSS" now, or "VmHWM" at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[kind].split()[0]) * 1024 // MIB


def measured(work: Callable[[], Any]) -> tuple[int, Any]:
    """Returns the peak of some work above what was resident before, in MiB, and its result."""
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to what is resident
    before = resident("VmRSS")
    result = work()
    return resident("VmHWM") - before, result


@smp.step
def forward(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def body(ranks: int, path: Path, make: str) -> tuple[int, int, int, int]:
    smp.init({"pipeline_parallel_degree": ranks, "timeout": 900.0})
    torch.manual_seed(0)

    def start() -> Any:
        if make == "created":
            with smp.model_creation():
                plain = AutoModelForCausalLM.from_config(CONFIG)
        else:
            plain = smp.from_pretrained(path)
        model = smp.DistributedModel(plain)
        with torch.no_grad():
            forward(model, torch.ones(1, 4, dtype=torch.int64))
        return model

    peak, model = measured(start)
    share = sum(tensor.nbytes for tensor in model.local_parameters()) // MIB
    largest = max(tensor.nbytes for tensor in model.parameters()) // MIB
    saving, _ = measured(lambda: model.save_pretrained(path, max_shard_size="500MB"))
    return peak, share, largest, saving


def main(ranks: int) -> None:
    path = Path(tempfile.mkdtemp())
    try:
        for make in ("created", "read"):
            for rank, (peak, share, largest, saving) in enumerate(
                run_world(ranks, body, ranks, path, make, timeout=1800.0)
            ):
                bound = 1.3 * share + largest
                print(
                    f"{make}, rank {rank}: peak {peak} MiB, share {share} MiB, largest tensor "
                    f"{largest} MiB, share x 1.3 + largest {bound:.0f} MiB; saving: {saving} MiB"
                )
    finally:
        shutil.rmtree(path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
