"""A small job that saves and resumes at any layout of ranks, for the tests of saving."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import smp_runtime as smp
from tests.worlds import run_world

VOCABULARY, WIDTH, LENGTH, BATCH = 11, 8, 5, 4


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Language(nn.Module):
    """A model with a tied embedding, dropout, buffers, a frozen parameter and extra state."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.bias.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Layout(NamedTuple):
    """How the ranks of a job are arranged, and what may differ at a resume."""

    pp: int
    dp: int = 1
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def size(self) -> int:
        return self.pp * self.dp


@smp.step
def train_step(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    model.backward(loss)
    return loss


class Job:
    """The job on one rank: model, optimizer, scheduler, data."""

    def __init__(self, layout: Layout, *, dropout: float = 0.5, seed: int = 3) -> None:
        smp.init(
            {
                "pipeline_parallel_degree": layout.pp,
                "microbatches": 2,
                "ddp": layout.dp > 1,
                "timeout": 30.0,
                **dict(layout.settings),
            }
        )
        torch.manual_seed(seed)
        self.model = smp.DistributedModel(Language(dropout))
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = smp.DistributedOptimizer(
            torch.optim.AdamW(
                [{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2, eps=1e-3
            )
        )
        self.scheduler = StepLR(self.optimizer, 2, 0.7)
        self.step = 0

    def train(self, num_steps: int) -> list[float]:
        """Returns the losses, averaged over replicas."""
        losses = []
        for _ in range(num_steps):
            # The whole batch does not depend on the layout; each replica takes its rows.
            generator = torch.Generator().manual_seed(100 + self.step)
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
            tokens = tokens.chunk(smp.dp_size())[smp.dp_rank()]
            self.optimizer.zero_grad()
            loss = train_step(self.model, tokens).reduce_mean()
            self.model.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            if smp.dp_size() > 1:
                torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
                loss /= smp.dp_size()
            losses.append(loss.item())
        return losses

    def save(self, path: Path, tag: str = "", **options: Any) -> Any:
        content = {"step": self.step, "scheduler": self.scheduler.state_dict()}
        tag = tag or f"step{self.step}"
        return smp.save_checkpoint(path, tag, user_content=content, **options)

    def resume(self, path: Path, tag: str | None = None, **options: Any) -> None:
        content = smp.resume_from_checkpoint(path, tag, **options)
        self.step = content["step"]
        self.scheduler.load_state_dict(content["scheduler"])


def on_every_rank(layout: Layout, body: Callable[[Job], Any], **options: Any) -> list[Any]:
    """Runs a body with a job on every rank of a world, and returns what each returned."""

    def run() -> Any:
        result = body(Job(layout, **options))
        smp.shutdown()
        return result

    return run_world(layout.size, run)


def same_everywhere(results: Sequence[Any]) -> Any:
    """Returns the one result of all ranks."""
    assert all(result == results[0] for result in results), results
    return results[0]
