"""Whatever is combined, training is that of one plain process.

Each example draws how a small model is trained: degrees, schedule, microbatches, reduction, tied
weights, activation checkpointing, types, accumulation, sharded state. hypothesis prints the example
that fails, and how to run it again. To look longer than CI does::

    SMP_RANDOM_EXAMPLES=500 python -m pytest tests/test_random_training.py
"""

import functools
import os
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import smp_runtime as smp
from tests.replica_subjects import SUBJECTS, TIED
from tests.sixteen_bit import ADDS_IN_FLOAT32
from tests.subjects import Block
from tests.transparency import build, make_batch, microbatch_of
from tests.worlds import run_world

EXAMPLES = int(os.environ.get("SMP_RANDOM_EXAMPLES", "16"))
STEPS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What sums in another order may differ by, relative to the largest change of a parameter.
TOLERANCES = {"fp32": 2e-5, "bf16": 5e-3, "fp16": 2e-3}
BY_NAME = {str(subject): subject for subject in SUBJECTS}


class Training(NamedTuple):
    """How a subject is trained."""

    subject: str
    degree: int
    num_replicas: int
    pipeline: str
    microbatches: int
    passes: int
    dtype: str
    is_overlapped: bool
    as_views: bool
    is_sharded: bool
    is_gather_overlapped: bool
    checkpointing: bool
    tied: str
    bucket_cap_mb: float
    momentum: bool

    @property
    def parts(self) -> int:
        """Microbatches of all replicas and passes of one update."""
        return self.microbatches * self.num_replicas * self.passes


def degrees() -> st.SearchStrategy[tuple[int, int]]:
    return st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (4, 1), (1, 4)])


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    degree, num_replicas = draw(degrees())
    return Training(
        draw(st.sampled_from(sorted(BY_NAME))),
        degree,
        num_replicas,
        draw(st.sampled_from(["interleaved", "simple"])),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from(sorted(DTYPES) if ADDS_IN_FLOAT32 else ["fp32"])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(["auto", "copy", "together"])),
        draw(st.sampled_from([25, 0.0005, 1e-6])),
        draw(st.booleans()),
    )


def make_optimizer(parameters: Any, momentum: bool) -> torch.optim.Optimizer:
    if momentum:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2)


@functools.cache
def plain(subject: str, parts: int, dtype: str, momentum: bool) -> dict[str, Tensor]:
    """Trains in one process: parameters of a type, float32 masters and sums of gradients."""
    kind, it = DTYPES[dtype], BY_NAME[subject]
    model = build(it).to(kind)
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = {p: p.detach().float().clone() for p in model.parameters()}
    optimizer = make_optimizer([masters[p] for p in trained], momentum)
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(parts):
            batch = microbatch_of(make_batch(it, parts, step), parts, index)
            x = batch["x"].to(kind) if batch["x"].is_floating_point() else batch["x"]
            loss = it.loss(lambda x: model(x).float(), {**batch, "x": x})
            torch.autograd.backward(loss / parts)
            for parameter in trained:
                if parameter.grad is not None:
                    master, mine = masters[parameter], parameter.grad.float()
                    master.grad = mine if master.grad is None else master.grad + mine
                    parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
    named = model.named_parameters(remove_duplicate=False)
    return {name: masters[held] for name, held in named}


def train_on_ranks(training: Training) -> dict[str, Tensor]:
    subject = BY_NAME[training.subject]
    smp.init(
        {
            "pipeline_parallel_degree": training.degree,
            "microbatches": training.microbatches,
            "pipeline": training.pipeline,
            "tied_weights": training.tied if subject is TIED else "auto",
            "shard_optimizer_state": training.is_sharded,
            "overlap_parameter_gather": training.is_sharded and training.is_gather_overlapped,
            **({} if training.dtype == "fp32" else {training.dtype: True}),
            "ddp": True,
            "timeout": 20.0,
        }
    )
    model = smp.DistributedModel(
        build(subject),
        overlapping_allreduce=training.is_overlapped,
        gradient_as_bucket_view=training.as_views,
        bucket_cap_mb=training.bucket_cap_mb,
        backward_passes_per_step=training.passes,
    )
    if training.checkpointing:
        for module in model.get_module().modules():
            if isinstance(module, Block):
                smp.set_activation_checkpointing(module)
    optimizer = smp.DistributedOptimizer(
        make_optimizer(model.parameters(), training.momentum), static_loss_scale=256.0
    )

    @smp.step
    def step(model: Any, batch: Any) -> Tensor:
        loss = subject.loss(model, batch)
        model.backward(loss / training.passes)
        return loss

    for index in range(STEPS):
        optimizer.zero_grad()
        whole = make_batch(subject, training.parts, index)
        for one_pass in range(training.passes):
            share = microbatch_of(whole, training.passes, one_pass)
            step(model, microbatch_of(share, smp.dp_size(), smp.dp_rank()))
        optimizer.step()
        assert not optimizer.overflow
    named = dict(model.local_named_parameters())
    found = {name: held.detach().clone() for name, held in named.items()}
    smp.shutdown()
    return found


def check(training: Training) -> None:
    found = run_world(
        training.degree * training.num_replicas, functools.partial(train_on_ranks, training)
    )
    kind = DTYPES[training.dtype]
    expected = plain(training.subject, training.parts, training.dtype, training.momentum)
    first: dict[str, Tensor] = {}
    for by_rank in found:
        for name, tensor in by_rank.items():
            assert tensor.dtype == kind
            same = first.setdefault(name, tensor)
            assert torch.equal(tensor, same), f"copies of {name} differ"
            torch.testing.assert_close(
                tensor.float(),
                expected[name],
                rtol=max(1e-5, torch.finfo(kind).eps),
                atol=TOLERANCES[training.dtype],
                msg=lambda text, name=name: f"{name}: {text}",
            )
    tied = {"head.weight", "embedding.weight"}
    assert first.keys() | tied == expected.keys() | tied


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * EXAMPLES)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(trainings())
def test_any_combination_trains_as_one_process(training: Training) -> None:
    check(training)


def test_the_reference_is_plain_training() -> None:
    """What examples are compared with in float32 is what torch does with the whole batch."""
    subject = BY_NAME["chain"]
    model = build(subject)
    optimizer = make_optimizer(model.parameters(), True)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(subject.loss(model, make_batch(subject, 4, step)))
        optimizer.step()
    expected = plain("chain", 4, "fp32", True)
    for name, held in model.named_parameters():
        torch.testing.assert_close(held.detach(), expected[name], rtol=1e-5, atol=1e-6)
    assert isinstance(model, nn.Module)
