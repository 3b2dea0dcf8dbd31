"""The whole model on each rank, with a part of the batch: what a pipeline is measured against."""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist
from job import Job, Trainer
from shape import make_batch, make_model, make_optimizer
from torch.nn.parallel import DistributedDataParallel


def build(job: Job) -> Trainer:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model(job.shape), gradient_as_bucket_view=True)
    optimizer = make_optimizer(job.shape, model.parameters())
    # Microbatches of the same size as a pipeline's, so each rank has a share of their number.
    size = job.shape.batch_size // job.num_microbatches
    microbatches = make_batch(job.shape).chunk(dist.get_world_size())[dist.get_rank()].split(size)

    cpu = [0.0, 0.0]

    def step() -> float:
        cpu[0] = time.thread_time()
        optimizer.zero_grad()
        total = torch.zeros(())
        for i, tokens in enumerate(microbatches):
            is_last = i == len(microbatches) - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(input_ids=tokens, labels=tokens).loss / len(microbatches)
                loss.backward()
            total += loss.detach()
        optimizer.step()
        cpu[1] = time.thread_time()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    return Trainer(step, lambda: {"emulated": cpu[1] - cpu[0]})
