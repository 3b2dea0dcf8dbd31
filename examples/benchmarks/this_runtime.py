"""The same model, untouched, over two pipeline ranks of this runtime."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from job import Job, Trainer
from shape import make_batch, make_model, make_optimizer

import smp_runtime as smp

logging.getLogger("smp_runtime").setLevel(logging.WARNING)


@smp.step
def train(model: smp.DistributedModel, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    model.backward(loss)
    return loss


def build(job: Job) -> Trainer:
    options = dict(job.options)
    checkpoints = options.pop("checkpoints", False)
    smp.init(
        {
            "pipeline_parallel_degree": job.num_ranks,
            "microbatches": job.num_microbatches,
            "emulate_clock": True,  # beside the wall clock
            **options,
        }
    )
    model = smp.DistributedModel(make_model(job.shape))
    optimizer = smp.DistributedOptimizer(make_optimizer(job.shape, model.parameters()))
    batch = make_batch(job.shape)
    if checkpoints:
        smp.set_activation_checkpointing(model.get_module().transformer.h)
    model.count_saved_bytes()  # in the steps before the first turn, as it takes time
    seconds: dict[str, float] = {}
    saved: list[int] = []

    def step() -> float:
        began, began_cpu = time.perf_counter(), time.thread_time()
        optimizer.zero_grad()
        loss = train(model, batch).reduce_mean()
        seconds["step"] = time.perf_counter() - began
        optimizer.step()
        seconds["optimizer"] = time.perf_counter() - began - seconds["step"]
        # Bodies have threads of their own, so this is what happens around them.
        seconds["around"] = time.thread_time() - began_cpu
        return float(loss)

    def details() -> dict[str, Any]:
        report = model.step_report()
        if report.saved_bytes:
            saved.append(report.saved_bytes)
        model.count_saved_bytes(len(saved) < 2)
        return {
            **seconds,
            "wall": report.wall,
            "busy": report.busy,
            "emulated": report.clock + seconds["around"],
            "compute": report.compute,
            "recomputed": report.recomputed,
            "recomputed_ahead": report.recomputed_ahead,
            "saved_bytes": saved[-1],
            "num_layers": layers_by_stage(model, job.shape.num_layers),
        }

    return Trainer(step, details)


def layers_by_stage(model: smp.DistributedModel, num_layers: int) -> list[int]:
    """Returns how many blocks end in each stage, so that others can use the same split."""
    partition = model.partition
    assert partition is not None
    counts = [0] * len(partition.rank_of)
    for layer in range(num_layers):
        path = f"transformer.h.{layer}"
        stages = [
            stage
            for placed, stage in partition.stage_of.items()
            if f"{placed}.".startswith(f"{path}.") or f"{path}.".startswith(f"{placed}.")
        ]
        counts[max(stages)] += 1
    return counts
