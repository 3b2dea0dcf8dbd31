"""Replicas may take different numbers of steps, and go on as one."""

from typing import Any

import pytest
import torch
from torch import Tensor

import smp_runtime as smp
from tests.replica_subjects import CHAIN
from tests.replicated_chain import (
    TIMEOUT,
    TINY,
    assert_close,
    batch,
    evaluate,
    gradients,
    mean_gradients,
    start,
    train,
)
from tests.sixteen_bit import BF16
from tests.transparency import build
from tests.worlds import run_world, run_world_expecting_failure


def uneven(degree: int, **options: Any) -> Any:
    """Replica 0 has one batch, replica 1 three."""
    model = start(degree, m=1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with model.join(**options):
        for step in range(1 + 2 * smp.dp_rank()):
            optimizer.zero_grad()
            with torch.no_grad():
                evaluate(model, batch(7))
            train(model, batch(10 * smp.dp_rank() + step))
            optimizer.step()
    return {name: held.detach().clone() for name, held in model.local_named_parameters()}


def uneven_by_hand(scales: tuple[float, ...]) -> dict[str, Tensor]:
    model = build(CHAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, scale in enumerate(scales):
        optimizer.zero_grad()
        for seed in (0, 10) if step == 0 else (10 + step,):
            torch.autograd.backward(scale * model(batch(seed)).square().mean())
        optimizer.step()
    return {name: held.detach() for name, held in model.named_parameters()}


@pytest.mark.world
@pytest.mark.parametrize("degree", [1, 2])
def test_join_lets_replicas_end_early(degree: int) -> None:
    def body() -> Any:
        found = []
        for options in ({}, {"divide_by_initial_world_size": False}):
            found.append(uneven(degree, **options))
            smp.shutdown()
        return found

    by_rank = run_world(2 * degree, body)
    for index, scales in enumerate([(0.5, 0.5, 0.5), (0.5, 1.0, 1.0)]):
        expected = uneven_by_hand(scales)
        for found in by_rank:
            for name, tensor in found[index].items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.world
@pytest.mark.parametrize("settings", [{}, BF16], ids=["float32", "bf16"])
def test_replicas_go_on_as_one_after_a_join(settings: dict[str, bool]) -> None:
    def body() -> Any:
        smp.init({"ddp": True, "timeout": TIMEOUT, **settings})
        model = smp.DistributedModel(build(CHAIN), bucket_cap_mb=TINY)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

        def step(seed: int) -> None:
            optimizer.zero_grad()
            train(model, batch(seed))
            optimizer.step()

        with model.join():
            for seed in range(1 + 2 * smp.dp_rank()):
                step(seed)
        after_join = [p.tolist() for p in model.parameters()]
        step(7 + smp.dp_rank())
        return after_join, [p.tolist() for p in model.parameters()]

    first, second = run_world(2, body)
    assert first == second
    assert first[0] != first[1]


@pytest.mark.world
def test_join_can_tell_instead() -> None:
    def body() -> None:
        model = start(m=1)
        with model.join(throw_on_early_termination=True):
            for step in range(1 + 2 * smp.dp_rank()):
                train(model, batch(step))

    for outcome in run_world_expecting_failure(2, body):
        assert "replicas [0] have no more batches" in outcome.stderr_text


@pytest.mark.world
def test_join_without_effect() -> None:
    def body() -> Any:
        model = start(m=1)
        with model.join():
            train(model, batch(smp.dp_rank()))
        with model.join(enable=False):
            train(model, batch(smp.dp_rank()))
        return gradients(model)

    for found in run_world(2, body):
        assert_close(found, mean_gradients(2.0, 0, 1))
