"""Replicas of one model, trained by this runtime or by torch's DistributedDataParallel.

The job's option `way` says how gradients are reduced: `overlapped` with the backward pass, `after`
it, `never` (each replica keeps its own), or by torch: `ddp`, `ddp never` without reduction, and
`ddp after`, one all-reduce of all gradients after the backward pass.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist
from job import Job, Trainer
from shape import make_batch, make_model, make_optimizer
from this_runtime import train
from torch.nn.parallel import DistributedDataParallel

import smp_runtime as smp


def build(job: Job) -> Trainer:
    return build_ddp(job) if job.options["way"].startswith("ddp") else build_ours(job)


def build_ours(job: Job) -> Trainer:
    degree = job.options.get("degree", 1)
    smp.init(
        {"pipeline_parallel_degree": degree, "microbatches": job.num_microbatches, "ddp": True}
    )
    way = job.options["way"]
    model = smp.DistributedModel(
        make_model(job.shape),
        overlapping_allreduce=way == "overlapped",
        gradient_as_bucket_view=True,
    )
    optimizer = smp.DistributedOptimizer(make_optimizer(job.shape, model.parameters()))
    tokens = make_batch(job.shape).chunk(smp.dp_size())[smp.dp_rank()]
    seconds: dict[str, Any] = {}

    def step() -> float:
        began, began_cpu = time.perf_counter(), time.thread_time()
        optimizer.zero_grad()
        with model.no_sync() if way == "never" else contextlib.nullcontext():
            loss = train(model, tokens).reduce_mean()
        seconds["step"] = time.perf_counter() - began
        optimizer.step()
        seconds["emulated"] = time.thread_time() - began_cpu
        total = loss.clone()
        dist.all_reduce(total, group=smp.get_dp_process_group())
        return float(total) / smp.dp_size()

    def details() -> dict[str, Any]:
        report = model.step_report()
        return {**seconds, "wall": report.wall, "reductions": report.reductions}

    return Trainer(step, details)


def build_ddp(job: Job) -> Trainer:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model(job.shape), gradient_as_bucket_view=True)
    optimizer = make_optimizer(job.shape, model.parameters())
    mine = make_batch(job.shape).chunk(dist.get_world_size())[dist.get_rank()]
    microbatches = mine.chunk(job.num_microbatches)
    way = job.options["way"]
    cpu = [0.0, 0.0]

    def step() -> float:
        cpu[0] = time.thread_time()
        optimizer.zero_grad()
        total = torch.zeros(())
        for i, tokens in enumerate(microbatches):
            syncs = i == len(microbatches) - 1 and way == "ddp"
            with contextlib.nullcontext() if syncs else model.no_sync():
                loss = model(input_ids=tokens, labels=tokens).loss / len(microbatches)
                loss.backward()
            total += loss.detach()
        if way == "ddp after":
            reduce_at_once([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        cpu[1] = time.thread_time()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    return Trainer(step, lambda: {"emulated": cpu[1] - cpu[0]})


def reduce_at_once(gradients: list[torch.Tensor]) -> None:
    """Averages gradients over the ranks in one all-reduce."""
    flat = torch.nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat)
    torch.nn.utils.vector_to_parameters(flat / dist.get_world_size(), gradients)
