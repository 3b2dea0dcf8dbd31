"""Replicas begin equal and average their gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_runtime as smp
from smp_runtime.data_parallel import _buckets, average_gradients, broadcast_state
from smp_runtime.errors import ConfigError
from smp_runtime.runtime import current
from tests.subjects import Subject, TiedHead, chain, token_prediction, tokens
from tests.transparency import build, copies, microbatch_of
from tests.worlds import run_world


def sizes(gradients: list[Tensor], limit: int) -> list[list[int]]:
    return [[gradient.numel() for gradient in bucket] for bucket in _buckets(gradients, limit)]


def test_buckets_are_filled_to_their_limit_in_order() -> None:
    gradients = [torch.zeros(count) for count in (1, 2, 3, 10, 1)]
    assert sizes(gradients, 24) == [[1, 2, 3], [10], [1]]
    assert sizes(gradients, 10**6) == [[1, 2, 3, 10, 1]]
    assert sizes([], 24) == []


def test_buckets_have_one_type() -> None:
    gradients = [torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(2)]
    assert sizes(gradients, 10**6) == [[1], [1], [2]]


@pytest.mark.world
def test_gradients_are_averaged_and_absent_ones_count_as_zero() -> None:
    def body() -> Any:
        rank = torch.distributed.get_rank()
        smp.init({"ddp": True})
        made = [nn.Parameter(torch.zeros(2)) for _ in range(5)]
        everywhere, here, nowhere, frozen, low = made
        low.data = low.data.bfloat16()
        everywhere.grad = torch.tensor([1.0, 2.0]) * (rank + 1)
        here.grad = torch.tensor([4.0, 0.0]) if rank == 1 else None
        frozen.requires_grad_(False)
        low.grad = torch.full((2,), float(rank), dtype=torch.bfloat16)
        average_gradients(made, current(), bucket_bytes=8)
        module = nn.BatchNorm1d(1)
        nn.init.constant_(module.weight, float(rank + 5))
        module.running_mean.fill_(rank + 7)
        broadcast_state(module, current())
        return [None if p.grad is None else p.grad.tolist() for p in made], (
            module.weight.item(), module.running_mean.item())  # fmt: skip

    expected = [[1.5, 3.0], [2.0, 0.0], None, None, [0.5, 0.5]]
    assert run_world(2, body) == [(expected, (5.0, 7.0))] * 2


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


SUBJECTS = (Subject("chain", chain), Subject("tied", TiedHead, tokens, token_prediction))
STEPS = 2


def batch_of(subject: Subject, step: int) -> Any:
    torch.manual_seed(50 + step)
    return subject.make_batch(8)


def by_hand(subject: Subject) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Trains on whole batches in one process: 2 replicas times 2 microbatches are 4 parts."""
    model = build(subject)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [
            subject.loss(model, microbatch_of(batch_of(subject, step), 4, index))
            for index in range(4)
        ]
        loss = torch.stack(parts).mean()
        torch.autograd.backward(loss)
        losses.append(loss.item())
        named = list(model.named_parameters(remove_duplicate=False))
        gradients = copies((name, held.grad) for name, held in named)
        optimizer.step()
    return losses, gradients, copies(named)


def on_ranks(subject: Subject, tied: str) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "tied_weights": tied})
    torch.manual_seed(smp.dp_rank())  # replicas begin different, and are made equal
    module = build(subject) if smp.dp_rank() == 0 else subject.build()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, batch: Any) -> Tensor:
        loss = subject.loss(model, batch)
        model.backward(loss)
        return loss

    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = microbatch_of(batch_of(subject, step), 2, smp.dp_rank())
        losses.append(train(model, mine).reduce_mean().item())
        gradients = copies((name, held.grad) for name, held in model.local_named_parameters())
        optimizer.step()
    parameters = copies(model.local_named_parameters())
    smp.shutdown()
    return losses, gradients, parameters


@pytest.mark.world
def test_two_replicas_of_two_ranks_train_on_the_whole_batch() -> None:
    cases = [(SUBJECTS[0], "auto"), (SUBJECTS[1], "copy"), (SUBJECTS[1], "together")]
    results = run_world(4, lambda: [on_ranks(*case) for case in cases])
    for index, (subject, _) in enumerate(cases):
        losses, gradients, parameters = by_hand(subject)
        found = [by_case[index] for by_case in results]
        # Ranks 0 and 1 are the replicas of one stage under the placement "cluster".
        for step in range(STEPS):
            mean = sum({each[0][step] for each in found}) / 2
            assert mean == pytest.approx(losses[step], rel=1e-5)
        seen = set()
        for _, mine, held in found:
            for name in mine:
                torch.testing.assert_close(mine[name], gradients[name], rtol=1e-4, atol=1e-6)
                torch.testing.assert_close(held[name], parameters[name], rtol=1e-4, atol=1e-6)
                seen.add(name)
        assert {name.replace("head.weight", "embedding.weight") for name in seen} == {
            name.replace("head.weight", "embedding.weight") for name in gradients
        }
