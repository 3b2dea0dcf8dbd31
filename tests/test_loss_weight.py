"""A mean over all tokens, however they are spread over microbatches and replicas (UR-64, UR-65)."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import smp_runtime as smp
from smp_runtime.errors import UsageError
from tests.subjects import TiedHead
from tests.worlds import run_world

LENGTH = 8
# Valid tokens of each row; two rows are a microbatch. Replicas have 3 and 29, or 1, 2, 29 and 0.
VALID = (1, 0, 2, 0, 8, 8, 8, 5)
UNEVEN = (1, 0, 2, 0, 8, 8, 0, 0)


def make() -> nn.Module:
    torch.manual_seed(3)
    return TiedHead()


def data(valid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(16, (len(valid), LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    for row, count in enumerate(valid):
        labels[row, count:] = -100
    return tokens, labels


def loss_of(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def count(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return (labels != -100).sum()


@smp.step(loss_weight=count)
def train(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    loss = loss_of(model, tokens, labels)
    model.backward(loss)
    return loss


@smp.step(loss_weight=lambda *arguments: -1)  # nobody asks it: an evaluation weighs nothing
def evaluate(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss_of(model, tokens, labels)


@functools.cache
def full_batch(valid: tuple[int, ...]) -> dict[str, Tensor]:
    model = make()
    torch.autograd.backward(loss_of(model, *data(valid)))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients_on_ranks(degree: int, valid: tuple[int, ...], times: int = 1) -> dict[str, Any]:
    smp.init({"pipeline_parallel_degree": degree, "ddp": True, "timeout": 15.0,
              "microbatches": 4 // (torch.distributed.get_world_size() // degree)})  # fmt: skip
    model = smp.DistributedModel(make())
    mine = [part.chunk(smp.dp_size())[smp.dp_rank()] for part in data(valid)]
    for _ in range(times):
        train(model, *mine)
    found = {
        name: None if p.grad is None else p.grad.clone()
        for name, p in model.local_named_parameters()
    }
    with torch.no_grad():
        evaluate(model, *mine)
    smp.shutdown()
    return found


@pytest.mark.world
@pytest.mark.parametrize(("degree", "num_replicas"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_gradients_are_those_of_the_mean_over_all_tokens(degree: int, num_replicas: int) -> None:
    def body() -> Any:
        return [gradients_on_ranks(degree, VALID), gradients_on_ranks(degree, UNEVEN),
                gradients_on_ranks(degree, VALID, times=3)]  # fmt: skip

    for by_case in run_world(degree * num_replicas, body):
        for found, valid, times in zip(by_case, (VALID, UNEVEN, VALID), (1, 1, 3), strict=True):
            for name, gradient in found.items():
                key = name.replace("head.weight", "embedding.weight")
                expected = times * full_batch(valid)[key]
                torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.world
def test_without_any_token_there_is_no_gradient() -> None:
    def body() -> Any:
        return gradients_on_ranks(1, (0,) * 8)

    for found in run_world(2, body):
        assert set(found.values()) == {None}


@pytest.mark.world
def test_wrong_weights_are_refused() -> None:
    @smp.step(loss_weight=lambda model, x: -1.0)
    def negative(model: Any, x: Tensor) -> None:
        model.backward(model(x).sum())

    @smp.step(loss_weight=lambda model, x: len(x))
    def fine(model: Any, x: Tensor) -> None:
        model.backward(model(x).sum())

    def body() -> None:
        smp.init({})
        model = smp.DistributedModel(nn.Linear(1, 1), average_grads_across_microbatches=False)
        with pytest.raises(UsageError, match=r"loss_weight gave \[-1.0\]"):
            negative(model, torch.ones(1, 1))
        smp.shutdown()
        smp.init({})
        model = smp.DistributedModel(nn.Linear(1, 1), average_grads_across_microbatches=False)
        with pytest.raises(UsageError, match="average_grads_across_microbatches at True"):
            fine(model, torch.ones(1, 1))

    run_world(1, body)


@pytest.mark.world
def test_each_replica_samples_its_own_share_and_pipelines_agree() -> None:
    def body() -> Any:
        smp.init({"pipeline_parallel_degree": 2, "ddp": True, "seed": 5})
        dataset = TensorDataset(torch.arange(10))
        sampler = smp.replica_sampler(dataset)
        loader = DataLoader(dataset, batch_size=2, sampler=sampler, drop_last=True)
        epochs = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append([int(i) for (batch,) in loader for i in batch])
        plain = list(smp.replica_sampler(dataset, shuffle=False))
        return smp.dp_rank(), epochs, plain

    by_rank = run_world(4, body)
    shares = {dp_rank: (epochs, plain) for dp_rank, epochs, plain in by_rank}
    for dp_rank, epochs, plain in by_rank:  # ranks of one pipeline agree
        assert shares[dp_rank] == (epochs, plain)
    (first, in_order), (second, odd) = shares[0], shares[1]
    assert (in_order, odd) == ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])
    for epoch in range(2):
        assert len(set(first[epoch]) | set(second[epoch])) == 8
    assert first[0] != first[1]
