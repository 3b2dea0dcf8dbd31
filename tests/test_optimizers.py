"""LAMB and NovoGrad: their formulas by hand, and the norm over ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smp_runtime as smp
from smp_runtime.errors import NotSupportedError
from smp_runtime.optimizers import FusedLAMB, FusedNovoGrad
from tests.worlds import run_world

WEIGHTS = np.array([3.0, -4.0])
GRADIENTS = [np.array([0.6, 0.8]), np.array([-3.0, 4.0])]


def trained(make: Any) -> list[float]:
    weights = nn.Parameter(torch.tensor(WEIGHTS))
    optimizer = make([weights])
    for gradient in GRADIENTS:
        weights.grad = torch.tensor(gradient)
        optimizer.step()
    return weights.tolist()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("adam_w", [True, False])
def test_lamb(decay: float, adam_w: bool) -> None:
    w, m, v = WEIGHTS.copy(), np.zeros(2), np.zeros(2)
    for t, gradient in enumerate(GRADIENTS, start=1):
        g = gradient / max(np.linalg.norm(gradient), 1.0)  # down to a norm of 1
        g = g if adam_w else g + decay * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        update = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6)
        update = update + decay * w if adam_w else update
        ratio = np.linalg.norm(w) / np.linalg.norm(update) if decay else 1.0
        w = w - 0.01 * ratio * update
    found = trained(lambda p: FusedLAMB(p, lr=0.01, weight_decay=decay, adam_w_mode=adam_w))
    np.testing.assert_allclose(found, w, rtol=1e-9)


@pytest.mark.parametrize("inside", [True, False])
def test_novograd(inside: bool) -> None:
    w, m, norm = WEIGHTS.copy(), np.zeros(2), 1.0  # the first gradient's norm
    for t, g in enumerate(GRADIENTS, start=1):
        norm = np.sqrt(0.98 * norm**2 + 0.02 * (g @ g))
        scale = norm / np.sqrt(1 - 0.98**t) + 1e-8
        m = 0.95 * m + 0.05 * (g / scale + 0.1 * w if inside else g)
        average = m / (1 - 0.95**t)
        w = w - 0.01 * (average if inside else average / scale + 0.1 * w)
    found = trained(
        lambda p: FusedNovoGrad(
            p, lr=0.01, betas=(0.95, 0.98), weight_decay=0.1, reg_inside_moment=inside
        )
    )
    np.testing.assert_allclose(found, w, rtol=1e-9)


@pytest.mark.world
@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_two_pipeline_ranks_do_what_one_process_does(kind: Any) -> None:
    def body(degree: int) -> list[float]:
        smp.init({"pipeline_parallel_degree": degree, "microbatches": 2})
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(kind(model.parameters(), lr=0.05))

        @smp.step
        def step(model: Any, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(x).square().mean() * 50
            model.backward(loss)
            return loss

        losses = []
        for seed in range(4):
            optimizer.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
            losses.append(step(model, x).reduce_mean().item())
            optimizer.step()
        return losses

    (expected,) = run_world(1, body, 1)
    for losses in run_world(2, body, 2):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_amsgrad_is_refused(kind: Any) -> None:
    with pytest.raises(NotSupportedError, match="amsgrad=True is not supported"):
        kind([nn.Parameter(torch.ones(1))], amsgrad=True)
