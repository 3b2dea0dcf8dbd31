"""Sharded optimizer state: the same numbers, with a share of the memory on each replica."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import smp_runtime as smp
from smp_runtime.errors import NotSupportedError
from tests.sixteen_bit import BF16
from tests.subjects import Subject, TiedHead, chain, token_prediction, tokens
from tests.transparency import build, make_batch, microbatch_of
from tests.worlds import run_world, run_world_expecting_failure

CHAIN = Subject("chain", chain)
TIED = Subject("tied", TiedHead, tokens, token_prediction)
STEPS = 3


def state_bytes(optimizer: Any) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )


def trained(
    subject: Subject, degree: int, make: Any, settings: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], int]:
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 2, "ddp": True,
              "timeout": 15.0, **settings})  # fmt: skip
    model = smp.DistributedModel(build(subject))
    optimizer = smp.DistributedOptimizer(make(model))
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)

    @smp.step
    def train(model: Any, batch: Any) -> Tensor:
        loss = subject.loss(model, batch)
        model.backward(loss)
        return loss

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = make_batch(subject, 2 * smp.dp_size(), step)
        mine = microbatch_of(whole, smp.dp_size(), smp.dp_rank())
        losses.append(train(model, mine).reduce_mean().item())
        model.clip_grad_norm_(0.5)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)
    parameters = {name: p.detach().clone() for name, p in model.local_named_parameters()}
    num_bytes = state_bytes(optimizer)
    smp.shutdown()
    return losses, parameters, num_bytes


def adamw(model: Any, **options: Any) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


MAKERS: tuple[Any, ...] = (
    adamw,
    lambda model: adamw(model, fused=True),
    lambda model: adamw(model, foreach=True),
    lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
)


@pytest.mark.world
@pytest.mark.parametrize(("degree", "num_replicas"), [(1, 2), (2, 2), (1, 4)])
def test_numbers_are_those_of_the_unsharded_optimizer(degree: int, num_replicas: int) -> None:
    is_small = (degree, num_replicas) == (1, 2)
    cases: list[tuple[Subject, Any, dict[str, Any]]] = [
        (CHAIN, make, {}) for make in (MAKERS if is_small else MAKERS[:1])
    ]
    cases += [(TIED, adamw, {"tied_weights": "copy" if degree > 1 else "auto"}),
              (CHAIN, adamw, BF16)]  # fmt: skip

    def body() -> Any:
        return [
            (trained(subject, degree, make, settings),
             trained(subject, degree, make, {**settings, "shard_optimizer_state": True}))
            for subject, make, settings in cases
        ]  # fmt: skip

    results = run_world(degree * num_replicas, body)
    for index in range(len(cases)):
        whole_bytes = shard_bytes = 0
        for by_case in results:
            (losses, parameters, whole), (same_losses, same, shard) = by_case[index]
            assert losses == pytest.approx(same_losses, rel=1e-6)
            # A fused kernel rounds what doesn't fill a vector register in another way.
            is_fused = is_small and index == 1
            for name, tensor in parameters.items():
                if is_fused:
                    torch.testing.assert_close(tensor, same[name], rtol=1e-6, atol=1e-8)
                else:
                    assert torch.equal(tensor, same[name]), f"case {index}: {name}"
            # Slices are rounded up to whole elements: one of float32 in each state of a parameter.
            assert abs(shard - whole / num_replicas) <= 8 * len(parameters)
            whole_bytes, shard_bytes = whole_bytes + whole, shard_bytes + shard
        assert shard_bytes == whole_bytes // num_replicas


@pytest.mark.world
def test_what_needs_whole_parameters_is_refused() -> None:
    def body() -> None:
        smp.init({"ddp": True, "shard_optimizer_state": True})
        model = smp.DistributedModel(nn.Linear(4, 4))
        with pytest.raises(NotSupportedError, match="Adafactor is not known to update each"):
            smp.DistributedOptimizer(torch.optim.Adafactor(model.parameters()))
        with pytest.raises(NotSupportedError, match="equally many batches"), model.join():
            pass

    run_world(2, body)


@pytest.mark.world
def test_state_is_named_by_parameter_and_loaded_at_another_degree() -> None:
    def body() -> Any:
        smp.init({"ddp": True, "shard_optimizer_state": True, "timeout": 15.0})
        model = smp.DistributedModel(build(CHAIN))
        optimizer = smp.DistributedOptimizer(adamw(model))

        @smp.step
        def train(model: Any, batch: Any) -> Tensor:
            loss = CHAIN.loss(model, batch)
            model.backward(loss)
            return loss

        train(model, make_batch(CHAIN, 1, smp.dp_rank()))
        optimizer.step()
        named = optimizer.named_local_state()
        assert sorted(named) == sorted(optimizer.state_names())
        pieces = {name: state["exp_avg"] for name, state in named.items()}
        whole = {
            name: torch.full(p.shape, 3.0) for name, p in model.get_module().named_parameters()
        }
        optimizer.load_named_local_state(
            {name: {**named[name], "exp_avg": whole[name], "exp_avg_sq": whole[name]}
             for name in named}
        )  # fmt: skip
        again = optimizer.named_local_state()
        assert all((state["exp_avg"].values == 3.0).all() for state in again.values())
        return {name: (piece.start, piece.values.numel()) for name, piece in pieces.items()}

    first, second = run_world(2, body)
    for name, held in build(CHAIN).named_parameters():
        (start, length), (start_2, length_2) = first[name], second[name]
        assert (start, start_2, length + length_2) == (0, length, held.numel())


@pytest.mark.world
def test_a_replica_that_fails_before_the_update_is_named_by_the_others() -> None:
    @smp.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    def body() -> None:
        smp.init({"ddp": True, "shard_optimizer_state": True, "timeout": 30.0})
        model = smp.DistributedModel(nn.Linear(4, 4))
        optimizer = smp.DistributedOptimizer(adamw(model))
        for step in range(2):
            train(model, torch.ones(1, 4))
            if step == 1 and smp.dp_rank() == 0:
                raise ValueError("the loader broke")
            optimizer.step()

    for outcome in run_world_expecting_failure(2, body):
        assert "the loader broke" in outcome.stderr_text
        assert outcome.seconds < 20
