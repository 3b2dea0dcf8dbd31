"""A training job that goes on where it was: `soak_job.py --config CONFIG FOLDER NUM_STEPS`.

Rank 0 appends a line to FOLDER/losses for every step. Every rank appends its resident memory to
FOLDER/memory.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import smp_runtime as smp
from tests.soak import SAVE_EVERY


@smp.step
def train(model: smp.DistributedModel, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    model.backward(loss)
    return loss


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh())


def resident_kilobytes() -> int:
    """Returns the memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def main() -> None:
    smp.init(sys.argv[2])
    folder, num_steps = Path(sys.argv[3]), int(sys.argv[4])
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*[layer() for _ in range(8)]))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    done = 0
    if (folder / "checkpoints" / "newest").exists():
        done = smp.resume_from_checkpoint(folder / "checkpoints")["step"]
    for step in range(done + 1, num_steps + 1):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = train(model, x).reduce_mean().item()
        optimizer.step()
        optimizer.zero_grad()
        if smp.rank() == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{step} {loss!r}\n")
        with (folder / "memory").open("a") as file:
            file.write(f"{smp.rank()} {os.getpid()} {step} {resident_kilobytes()} {time.time()}\n")
        if step % SAVE_EVERY == 0:
            smp.save_checkpoint(
                folder / "checkpoints",
                f"step{step}",
                user_content={"step": step},
                num_kept_partial_checkpoints=2,
                async_save=True,
            )


if __name__ == "__main__":
    main()
