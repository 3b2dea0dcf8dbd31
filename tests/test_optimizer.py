"""An optimizer steps on this rank's parameters and is otherwise the user's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import smp_runtime as smp
from smp_runtime.errors import UsageError
from smp_runtime.optimizer import keep_local
from tests.subjects import Subject, TiedHead, chain, token_prediction, tokens
from tests.transparency import build, make_batch, make_optimizer, plain
from tests.worlds import run_world

SUBJECT = Subject("chain", chain)


class Part:
    """The local part of a model on a rank that holds some tensors."""

    def __init__(self, *local: Tensor) -> None:
        self.local = local

    def is_local(self, tensor: Tensor) -> bool:
        return any(tensor is mine for mine in self.local)


def keep(optimizer: torch.optim.Optimizer, *local: Tensor) -> None:
    part: Any = Part(*local)
    keep_local(optimizer, part)


def test_groups_keep_their_settings_and_this_ranks_parameters() -> None:
    a, b, c = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizer = torch.optim.AdamW(
        [{"params": [a, b], "lr": 0.5}, {"params": [c], "weight_decay": 0.0}], lr=0.1
    )
    keep(optimizer, b)
    assert [group["params"] for group in optimizer.param_groups] == [[b], []]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert optimizer.param_groups[1]["weight_decay"] == 0.0


def test_state_of_other_ranks_parameters_is_dropped() -> None:
    a, b = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([a, b], lr=0.1, momentum=0.9)
    a.grad, b.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    keep(optimizer, a)
    assert list(optimizer.state) == [a]


def test_it_needs_a_runtime() -> None:
    with pytest.raises(UsageError, match=r"smp\.init\(\)"):
        smp.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


@smp.step
def train(model: Any, batch: Any) -> Tensor:
    loss = SUBJECT.loss(model, batch)
    model.backward(loss)
    return loss


def start() -> Any:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    return smp.DistributedModel(build(SUBJECT))


def trained(model: Any, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> dict[str, Tensor]:
    for index in range(num_steps):
        optimizer.zero_grad()
        train(model, make_batch(SUBJECT, 2, index))
        optimizer.step()
    return {name: held.detach().clone() for name, held in model.local_named_parameters()}


@pytest.mark.world
def test_wrapped_at_any_time_it_trains_as_in_one_process() -> None:
    def wrapped_late() -> dict[str, Tensor]:
        model = start()
        optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
        return trained(model, optimizer)

    def wrapped_first() -> dict[str, Tensor]:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        module = build(SUBJECT)
        optimizer = smp.DistributedOptimizer(make_optimizer(module.parameters()))
        return trained(smp.DistributedModel(module), optimizer)

    def wrapped_after_the_first_step() -> dict[str, Tensor]:
        model = start()
        with torch.no_grad():
            evaluate(model, make_batch(SUBJECT, 2, 0))
        optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
        return trained(model, optimizer)

    def body() -> list[dict[str, Tensor]]:
        results = []
        for run in (wrapped_late, wrapped_first, wrapped_after_the_first_step):
            results.append(run())
            smp.shutdown()
        return results

    expected = plain(SUBJECT, 2).parameters
    for by_run in zip(*run_world(2, body), strict=True):
        assert {name for found in by_run for name in found} == set(expected)
        for found in by_run:
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=2e-6)


@smp.step
def evaluate(model: Any, batch: Any) -> Tensor:
    return SUBJECT.loss(model, batch)


@pytest.mark.world
def test_it_is_still_the_users_optimizer() -> None:
    def body() -> Any:
        model = start()
        given = torch.optim.AdamW(model.parameters(), lr=1.0)
        optimizer = smp.DistributedOptimizer(given)
        assert optimizer is given
        assert smp.DistributedOptimizer(optimizer) is given
        assert isinstance(optimizer, torch.optim.AdamW)
        assert type(optimizer).__name__ == "AdamW"
        assert type(optimizer).__module__ == torch.optim.AdamW.__module__
        scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        rates = []
        for index in range(3):
            train(model, make_batch(SUBJECT, 2, index))
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        later = LambdaLR(optimizer, lambda epoch: 0.25)
        assert all(model_holds(model, held) for held in optimizer.state)
        return rates, later.get_last_lr(), len(optimizer.state)

    first, second = run_world(2, body)
    assert first[:2] == second[:2] == ([0.5, 0.25, 0.125], [0.25])
    assert first[2] > 0
    assert second[2] > 0
    assert first[2] + second[2] == len(list(build(SUBJECT).parameters()))


def model_holds(model: Any, tensor: Tensor) -> bool:
    return any(tensor is held for held in model.local_parameters())


@pytest.mark.world
def test_a_rank_without_parameters_steps_harmlessly() -> None:
    def body() -> Any:
        model = start()
        last = model.get_module()[-1].bias
        optimizer = smp.DistributedOptimizer(torch.optim.SGD([last], lr=0.1, momentum=0.9))
        scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        train(model, make_batch(SUBJECT, 2, 0))
        closed = optimizer.step(lambda: 3.5)
        optimizer.zero_grad()
        scheduler.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        return [len(group["params"]) for group in optimizer.param_groups], closed, len(
            state["state"])  # fmt: skip

    assert run_world(2, body) == [([0], 3.5, 1), ([1], 3.5, 1)]  # the whole state on each


@pytest.mark.world
@pytest.mark.parametrize("size", [1, 2])
def test_it_has_what_scripts_of_16_bit_training_ask_of_any_optimizer(size: int) -> None:
    def body() -> tuple[bool, bool, bool, float]:
        smp.init({"pipeline_parallel_degree": size})
        torch.manual_seed(1)
        model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
        optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @smp.step
        def step(model: Any, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(x).square().sum()
            model.backward(loss)
            return loss

        step(model, torch.ones(2, 4))
        optimizer.clip_master_grads(0.01)
        norm = model.clip_grad_norm_(1.0).item()
        prepared = optimizer._is_accelerate_prepared
        return prepared, optimizer.overflow, optimizer.step_was_skipped, round(norm, 6)

    assert run_world(size, body) == [(True, False, False, 0.01)] * size


# -- parameter groups of tied weights, and the variants of torch's updates ----------------------

TIED = Subject("tied", TiedHead, tokens, token_prediction)


def grouped(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Decays matrices but the embedding, which is the head too."""
    named = dict(module.named_parameters())
    decayed = [p for name, p in named.items() if p.dim() > 1 and name != "embedding.weight"]
    others = [p for name, p in named.items() if p.dim() < 2 or name == "embedding.weight"]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        eps=1e-3,
        **options,
    )


VARIANTS: tuple[dict[str, bool], ...] = ({"foreach": False}, {"foreach": True}, {"fused": True})


@pytest.mark.world
def test_copies_of_a_tied_weight_stay_in_its_group() -> None:
    def on_ranks(options: dict[str, bool], tied: str) -> dict[str, Tensor]:
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "tied_weights": tied})
        model = smp.DistributedModel(build(TIED))
        optimizer = smp.DistributedOptimizer(grouped(model.get_module(), **options))

        @smp.step
        def train_tied(model: Any, batch: Any) -> Tensor:
            loss = TIED.loss(model, batch)
            model.backward(loss)
            return loss

        for index in range(3):
            optimizer.zero_grad()
            train_tied(model, make_batch(TIED, 2, index))
            optimizer.step()
        found = {name: held.detach().clone() for name, held in model.local_named_parameters()}
        smp.shutdown()
        return found

    model = build(TIED)
    optimizer = grouped(model)
    for index in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(TIED.loss(model, make_batch(TIED, 2, index)))
        optimizer.step()
    expected = dict(model.named_parameters())
    cases = [(options, tied) for options in VARIANTS for tied in ("copy", "together")]
    for first, second in zip(*run_world(2, lambda: [on_ranks(*case) for case in cases]),
                             strict=True):  # fmt: skip
        for name in first.keys() & second.keys():
            assert torch.equal(first[name], second[name])
        for name, tensor in (*first.items(), *second.items()):
            wanted = expected[name.replace("head.weight", "embedding.weight")]
            torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=2e-6)
