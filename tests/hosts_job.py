"""A job for several machines, as a script: `hosts_job.py --config CONFIG [NUM_STEPS]`."""

import sys
import time

import torch
from torch import Tensor, nn

import smp_runtime as smp


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh())


@smp.step
def train(model: smp.DistributedModel, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    model.backward(loss)
    return loss


def main() -> None:
    smp.init(sys.argv[2])
    num_steps = int(sys.argv[3])
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*[layer() for _ in range(4)]))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(1, num_steps + 1):
        x = torch.randn(512, 64, generator=torch.Generator().manual_seed(step))
        loss = train(model, x).reduce_mean()
        optimizer.step()
        optimizer.zero_grad()
        if smp.rank() == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
            time.sleep(0.1)  # leaves time to do something to the network


if __name__ == "__main__":
    main()
