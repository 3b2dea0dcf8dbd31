"""Communication hooks of DistributedDataParallel work here as they do there."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import smp_runtime as smp
from smp_runtime.errors import UsageError
from tests.replicated_chain import (
    batch,
    gradients,
    mean_gradients,
    start,
    train,
)
from tests.worlds import run_world


@pytest.mark.world
def test_torchs_hooks_compress() -> None:
    def body() -> Any:
        found = []
        for hook, state in (
            (default_hooks.fp16_compress_hook, None),
            (default_hooks.bf16_compress_hook, None),
            (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), "group"),
            (powerSGD_hook.powerSGD_hook, "power"),
        ):
            model = start()
            if state == "group":
                state = smp.get_dp_process_group()
            elif state == "power":
                group = smp.get_dp_process_group()
                state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=1000)
            model.register_comm_hook(state, hook)
            for _ in range(2):
                model.zero_grad()
                train(model, batch(smp.dp_rank()))
            found.append(gradients(model))
            smp.shutdown()
        return found

    first, second = run_world(2, body)
    assert first == second
    expected = mean_gradients(1.0, 0, 1)
    for found in first:
        for name, values in found.items():
            torch.testing.assert_close(torch.tensor(values), expected[name], rtol=2e-2, atol=1e-3)
    assert first[0] != first[3]


@pytest.mark.world
def test_hooks_need_overlap_and_data_parallelism() -> None:
    def body() -> None:
        model = start(overlapping_allreduce=False)
        with pytest.raises(UsageError, match="overlapping_allreduce=True"):
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        smp.shutdown()
        smp.init({})
        with pytest.raises(UsageError, match="set ddp to True"):
            smp.DistributedModel(nn.Linear(1, 1)).register_comm_hook(
                None, default_hooks.allreduce_hook
            )
        smp.shutdown()
        smp.init({})
        with pytest.raises(UsageError, match="must be positive"):
            smp.DistributedModel(nn.Linear(1, 1), backward_passes_per_step=0)

    run_world(1, body)
