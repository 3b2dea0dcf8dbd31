"""Autocast inside and around a step, and a scaler with one mind on all ranks."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_runtime as smp
from tests.subjects import WIDTH, Block
from tests.transparency import microbatch_of
from tests.worlds import run_world

STEPS = 4


class Net(nn.Module):
    """A stack whose middle may make gradients overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x = x * factor.mean()
        return x


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, torch.full((size, 1), 1e38 if step == 1 else 1.0)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@functools.cache
def by_hand(parts: int, is_double: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Trains in one process with torch's own scaler."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(parts):
            x, factor = (microbatch_of(part, parts, index) for part in batch(step, 2 * parts))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x, factor).float().square().mean() / parts
            torch.autograd.backward(scaler.scale(loss))
        if is_double:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, {name: held.detach() for name, held in model.named_parameters()}


def on_ranks(degree: int, place: str, clips: bool, fused: bool, torchs: bool) -> Any:
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 2, "ddp": True,
              "timeout": 15.0})  # fmt: skip
    model = smp.DistributedModel(make())
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, fused=fused or None)
    )
    options: dict[str, Any] = {"init_scale": 256.0, "growth_interval": 2}
    scaler = torch.amp.GradScaler("cpu", **options) if torchs else smp.GradScaler(**options)

    @smp.step
    def train(model: Any, x: Tensor, factor: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=place == "inside"
                            or torch.is_autocast_enabled("cpu")):  # fmt: skip
            loss = model(x, factor).float().square().mean()
        model.backward(scaler.scale(loss))
        return loss

    scales, parts = [], 2 * smp.dp_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = [microbatch_of(p, smp.dp_size(), smp.dp_rank()) for p in batch(step, 2 * parts)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=place == "around"):
            train(model, *mine)
        if clips:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(0.05)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    parameters = {name: p.detach().clone() for name, p in model.local_named_parameters()}
    smp.shutdown()
    return scales, parameters


@pytest.mark.world
@pytest.mark.parametrize(("degree", "num_replicas"), [(1, 1), (2, 1), (2, 2)])
def test_a_scaled_run_is_that_of_one_process(degree: int, num_replicas: int) -> None:
    cases = [
        ("inside", False, False, False),
        ("around", True, False, False),
        ("inside", False, True, False),
        ("around", True, False, True),  # torch's own scaler is as right
    ]
    results = run_world(degree * num_replicas, lambda: [on_ranks(degree, *case) for case in cases])
    for index, (_, clips, *_) in enumerate(cases):
        scales, parameters = by_hand(2 * num_replicas, clips)
        assert scales == [256.0, 128.0, 128.0, 256.0]
        for by_case in results:
            found, mine = by_case[index]
            assert found == scales
            for name, tensor in mine.items():
                torch.testing.assert_close(tensor, parameters[name], rtol=1e-3, atol=1e-4)


@pytest.mark.world
def test_a_rank_without_trained_parameters_follows_the_others() -> None:
    def body() -> Any:
        smp.init({"pipeline_parallel_degree": 2, "timeout": 15.0})
        model = smp.DistributedModel(make())
        last = list(model.get_module().layers[3].parameters())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(last, lr=0.1))
        scaler = smp.GradScaler(init_scale=4.0)

        @smp.step
        def train(model: Any, x: Tensor, factor: Tensor) -> Tensor:
            loss = model(x, factor).square().mean()
            model.backward(scaler.scale(loss))
            return loss

        scales = []
        for step in range(2):
            optimizer.zero_grad()
            train(model, *batch(step, 2))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    assert run_world(2, body) == [[4.0, 2.0]] * 2
