"""The model as it is, in one process; gradients are summed over the microbatches."""

from __future__ import annotations

import time

from job import Job, Trainer
from shape import make_batch, make_model, make_optimizer


def build(job: Job) -> Trainer:
    model = make_model(job.shape)
    optimizer = make_optimizer(job.shape, model.parameters())
    batch = make_batch(job.shape)
    m = job.num_microbatches

    cpu = [0.0, 0.0]

    def step() -> float:
        cpu[0] = time.thread_time()
        optimizer.zero_grad()
        total = 0.0
        for tokens in batch.chunk(m):
            loss = model(input_ids=tokens, labels=tokens).loss / m
            loss.backward()
            total += loss.item()
        optimizer.step()
        cpu[1] = time.thread_time()
        return total

    return Trainer(step, lambda: {"emulated": cpu[1] - cpu[0]})
