"""torch.distributed.pipelining with a manual split of the very same modules."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from job import Job, Trainer
from shape import Shape, make_batch, make_model, make_optimizer
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.utils.checkpoint import checkpoint

SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
}


class FirstStage(nn.Module):
    """The embedding and the first blocks."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.wte, self.wpe = model.transformer.wte, model.transformer.wpe
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class MiddleStage(nn.Module):
    """Some blocks."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class LastStage(MiddleStage):
    """The last blocks and the head."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.ln_f, self.lm_head = model.transformer.ln_f, model.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.ln_f(super().forward(hidden)))


def make_stages(shape: Shape, num_layers: list[int], rank: int, size: int) -> dict[int, nn.Module]:
    """Returns this rank's stages by index; `num_layers` says how many blocks each stage has."""
    model = make_model(shape)
    ends = list(accumulate(num_layers))
    stages: dict[int, nn.Module] = {}
    for index in range(rank, len(num_layers), size):
        blocks = list(model.transformer.h)[ends[index] - num_layers[index] : ends[index]]
        if index == 0:
            stages[index] = FirstStage(model, blocks)
        elif index == len(num_layers) - 1:
            stages[index] = LastStage(model, blocks)
        else:
            stages[index] = MiddleStage(blocks)
    return stages


class Checkpointed(nn.Module):
    """A block with torch's own activation checkpointing."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, hidden, use_reentrant=False)


class TimedStage(PipelineStage):
    """A stage that notes how much CPU time its rank has used at the end of each action."""

    actions: list[tuple[str, int, int, float]] = []  # of all stages of this rank, in order

    def forward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> Any:
        result = super().forward_one_chunk(index, *args, **kwargs)
        self.actions.append(("F", self.stage_index, index, time.thread_time()))
        return result

    def backward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> Any:
        result = super().backward_one_chunk(index, *args, **kwargs)
        self.actions.append(("B", self.stage_index, index, time.thread_time()))
        return result


def build(job: Job) -> Trainer:
    dist.init_process_group("gloo")
    rank, size, shape = dist.get_rank(), dist.get_world_size(), job.shape
    modules = make_stages(shape, job.options["num_layers"], rank, size)
    num_stages = len(job.options["num_layers"])
    device = torch.device("cpu")
    if job.options["checkpoints"]:
        for module in modules.values():
            module.blocks = nn.ModuleList(map(Checkpointed, module.blocks))
    stages = [TimedStage(m, index, num_stages, device) for index, m in modules.items()]
    parameters = [p for module in modules.values() for p in module.parameters()]
    optimizer = make_optimizer(shape, parameters)
    batch = make_batch(shape)
    actions = TimedStage.actions
    is_first, is_last = 0 in modules, num_stages - 1 in modules

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # As transformers has it: labels move, not logits, whose copy would cost more.
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), shifted)

    kind = SCHEDULES[job.options["schedule"]]
    several = issubclass(kind, ScheduleInterleaved1F1B)
    schedule = kind(stages if several else stages[0], job.num_microbatches, loss_fn=loss_of)
    # The head and the embedding are one parameter; where they part, their gradients must meet.
    tied = None
    if shape.is_tied and is_first != is_last:
        tied = modules[0].wte.weight if is_first else modules[num_stages - 1].lm_head.weight

    def step() -> float | None:
        actions.clear()
        actions.append(("", 0, 0, time.thread_time()))
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(
            *([batch] if is_first else []),
            target=batch if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,  # the logits of all microbatches together would need memory
        )
        if tied is not None:
            dist.all_reduce(tied.grad)
        optimizer.step()
        actions.append(("", 0, 0, time.thread_time()))
        return torch.stack(losses).mean().item() if is_last else None

    return Trainer(step, lambda: {"actions": list(actions)})
