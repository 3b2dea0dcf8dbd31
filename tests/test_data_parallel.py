"""Replicas begin equal, train on the whole batch together, and stay equal."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import smp_runtime as smp
from smp_runtime.errors import ConfigError
from tests.replica_subjects import CHAIN, SUBJECTS, TIED
from tests.subjects import Subject
from tests.transparency import build, copies, microbatch_of
from tests.worlds import run_world

STEPS = 3
MICROBATCHES = 2
TINY = 0.0005  # megabytes of a bucket: many buckets even here
SETTINGS: dict[str, Any] = {"microbatches": MICROBATCHES, "ddp": True, "timeout": 30.0}


@pytest.mark.world
def test_replicas_without_ddp_are_refused() -> None:
    def body() -> str:
        with pytest.raises(
            ConfigError, match="2 replicas: set ddp to True, or start 1 ranks"
        ) as it:
            smp.init({})
        return str(it.value)

    first, second = run_world(2, body)
    assert first == second


class Trained(NamedTuple):
    """What came out of some steps: mean losses, gradients of each step, parameters at the end."""

    losses: list[float]
    gradients: list[dict[str, Any]]
    parameters: dict[str, Any]


def batch_of(subject: Subject, step: int, parts: int) -> Any:
    torch.manual_seed(50 + step)
    return subject.make_batch(2 * parts)


@functools.cache
def by_hand(subject: Subject, num_replicas: int) -> Trained:
    """Trains on whole batches in one process."""
    model = build(subject)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    parts = num_replicas * MICROBATCHES
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for index in range(parts):
            part = microbatch_of(batch_of(subject, step, parts), parts, index)
            loss = subject.loss(model, part) / parts
            torch.autograd.backward(loss)
            total += loss.item()
        losses.append(total)
        named = list(model.named_parameters(remove_duplicate=False))
        gradients.append(copies((name, held.grad) for name, held in named))
        optimizer.step()
    return Trained(losses, gradients, copies(named))


def on_ranks(subject: Subject, degree: int, tied: str = "auto", **options: Any) -> Trained:
    smp.init({"pipeline_parallel_degree": degree, "tied_weights": tied, **SETTINGS})
    torch.manual_seed(smp.dp_rank())  # replicas begin different, and are made equal
    module = build(subject) if smp.dp_rank() == 0 else subject.build()
    model = smp.DistributedModel(module, bucket_cap_mb=TINY, **options)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, batch: Any) -> Tensor:
        loss = subject.loss(model, batch)
        model.backward(loss)
        return loss

    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = batch_of(subject, step, smp.dp_size() * MICROBATCHES)
        mine = microbatch_of(whole, smp.dp_size(), smp.dp_rank())
        losses.append(train_step(model, mine).reduce_mean().item())
        gradients.append(copies((name, held.grad) for name, held in model.local_named_parameters()))
        optimizer.step()
    parameters = copies(model.local_named_parameters())
    smp.shutdown()
    return Trained(losses, gradients, parameters)


def assert_same(what: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts equality bit for bit."""
    assert found.keys() == expected.keys(), what
    for name, tensor in found.items():
        other = expected[name]
        same = tensor is other if other is None or tensor is None else torch.equal(tensor, other)
        assert same, f"{what}: {name}"


def check(subject: Subject, num_replicas: int, found: list[Trained]) -> None:
    """Asserts that what the ranks did is what one process does with the whole batch."""
    expected = by_hand(subject, num_replicas)
    for step in range(STEPS):
        mean = sum({each.losses[step] for each in found}) / num_replicas
        assert mean == pytest.approx(expected.losses[step], rel=1e-5)
    seen: dict[str, Trained] = {}
    for each in found:
        for name in each.parameters:
            for step in range(STEPS):
                close(
                    f"{subject} {name}", each.gradients[step][name], expected.gradients[step][name]
                )
            close(f"{subject} {name}", each.parameters[name], expected.parameters[name])
        first = seen.setdefault(",".join(sorted(each.parameters)), each)
        assert_same(f"{subject}: parameters", each.parameters, first.parameters)
        for step in range(STEPS):
            assert_same(f"{subject}: step {step}", each.gradients[step], first.gradients[step])
    held = {name.replace("head.weight", "embedding.weight") for each in found
            for name in each.parameters}  # fmt: skip
    assert held == {name.replace("head.weight", "embedding.weight") for name in expected.parameters}


def close(what: str, found: Tensor | None, expected: Tensor | None) -> None:
    assert (found is None) == (expected is None), f"{what}: {found} but {expected}"
    if found is not None:
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}: {text}"
        )


def tied_choices(subject: Subject, degree: int) -> tuple[str, ...]:
    return ("copy", "together") if subject is TIED and degree > 1 else ("auto",)


@pytest.mark.world
@pytest.mark.parametrize(("degree", "num_replicas"), [(1, 2), (2, 1), (2, 2)])
def test_ranks_train_on_the_whole_batch(degree: int, num_replicas: int) -> None:
    cases = [(s, tied) for s in SUBJECTS for tied in tied_choices(s, degree)]

    def body() -> Any:
        return [
            (on_ranks(subject, degree, tied),
             on_ranks(subject, degree, tied, overlapping_allreduce=False),
             on_ranks(subject, degree, tied, gradient_as_bucket_view=True))
            for subject, tied in cases
        ]  # fmt: skip

    results = run_world(degree * num_replicas, body, timeout=100.0)
    for index, (subject, tied) in enumerate(cases):
        check(subject, num_replicas, [by_case[index][0] for by_case in results])
        for by_case in results:
            overlapped, after, as_views = by_case[index]
            for other in (after, as_views):
                assert other.losses == overlapped.losses
                assert_same(f"{subject} {tied}", other.parameters, overlapped.parameters)
                for mine, theirs in zip(other.gradients, overlapped.gradients, strict=True):
                    assert_same(f"{subject} {tied}", mine, theirs)


@pytest.mark.world
@pytest.mark.parametrize(("degree", "num_replicas"), [(1, 4), (4, 1)])
def test_four_of_a_kind_train_on_the_whole_batch(degree: int, num_replicas: int) -> None:
    chosen = (CHAIN, TIED)
    results = run_world(4, lambda: [on_ranks(subject, degree) for subject in chosen])
    for index, subject in enumerate(chosen):
        check(subject, num_replicas, [by_case[index] for by_case in results])


@pytest.mark.world
def test_replicas_share_buffers_after_each_step() -> None:
    def body() -> Any:
        smp.init(SETTINGS)
        torch.manual_seed(smp.dp_rank())
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = smp.DistributedModel(module)
        means = [module[1].running_mean.tolist()]
        for _ in range(2):
            train_one(model, torch.randn(8, 4))
            means.append(module[1].running_mean.tolist())
        smp.shutdown()
        alone = smp.init(SETTINGS) or smp.DistributedModel(
            nn.BatchNorm1d(4), broadcast_buffers=False
        )
        train_one(alone, torch.randn(8, 4))
        return means, alone.get_module().running_mean.tolist()

    (first, own), (second, other) = run_world(2, body)
    assert first == second
    assert first[0] != first[1] != first[2]
    assert own != other


@smp.step
def train_one(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().sum()
    model.backward(loss)
    return loss
