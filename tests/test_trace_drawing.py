"""A trace in training mode: with dropout, with layers left out, the same at every random state."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from smp_runtime.planning.partitioning import Partition, partition
from smp_runtime.tracing.trace import Trace, trace_model

X = torch.zeros(2, 4)


def calls_by_path(trace: Trace) -> dict[str, tuple[int, ...]]:
    return {node.path: node.calls for node in trace.root.walk()}


class Skipping(nn.Module):
    """Leaves blocks out at random."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.draw() < 0.5:
                x = block(x)
        return x


DRAWS = {
    "torch": lambda: torch.rand([]),
    "torch_item": lambda: torch.rand(1).item(),
    "torch_integer": lambda: torch.randint(2, ()) / 2,
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_random_skipping_is_traced_and_does_not_depend_on_the_random_state(draw, device):
    with torch.device(device):
        model = Skipping(draw)
    seed_all(1)
    trace = trace_model(model, (X.to(device),))
    after_first = torch.initial_seed(), torch.rand([]), random.random(), np.random.rand()
    seed_all(1)
    assert after_first == (1, torch.rand([]), random.random(), np.random.rand())
    assert trace.source == "fake"
    calls = calls_by_path(trace)
    skipped = {i for i in range(8) if not calls[f"blocks.{i}"]}
    assert 0 < len(skipped) < 8
    seed_all(2)
    assert trace_model(model, (X.to(device),)) == trace
    # Who decides draws; and what was skipped, down to its last module, may draw.
    expected = {"", *(f"blocks.{i}.1" for i in range(8))}
    expected |= {f"blocks.{i}{part}" for i in skipped for part in ("", ".0")}
    assert trace.drawing_modules == expected


def test_what_was_skipped_is_placed_once_and_shown():
    model = Skipping(random.random)
    result = partition(trace_model(model, (X,)).root, 4)
    assert result.assignment == {f"blocks.{i}": i // 2 for i in range(8)}
    for i in range(8):
        assert f"main/blocks/{i}: {i // 2} " in result.table()


def test_what_a_flag_leaves_out_is_placed():
    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
            self.extra = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
            self.last = nn.Linear(4, 4)
            self.uses_all = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers if self.uses_all else self.layers[:1]:
                x = layer(x)
            return self.last(self.extra(x) if self.uses_all else x)

    model = Flagged()
    with_all_called = Flagged()
    with_all_called.uses_all = True
    for degree in (2, 4, 8):
        mine, theirs = (
            partition(trace_model(each, (X,)).root, degree) for each in (model, with_all_called)
        )
        assert mine.rank_of == theirs.rank_of == tuple(range(degree))
        assert covered(model, mine) == dict(model.named_parameters()).keys()


def covered(model: nn.Module, made: Partition) -> set[str]:
    """The parameters of the placed modules; fails where one is placed twice."""
    names = [
        f"{path}.{name}"
        for path in made.assignment
        for name, _ in model.get_submodule(path).named_parameters()
    ]
    assert len(names) == len(set(names))
    return set(names)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def test_measured_runs_skip_the_same_layers():
    model = Skipping(random.random)
    measured = trace_model(model, (X,), measure_times=True)
    once = trace_model(model, (X,))
    assert calls_by_path(measured) == calls_by_path(once)


def test_all_kinds_of_dropout_are_traced_without_data():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(4, 4, 2, dropout=0.3)
            self.attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3)
            self.others = nn.Sequential(
                nn.RReLU(), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.Dropout1d()
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.others(self.attention(self.recurrent(x)[0]))
            x = functional.dropout(x) * torch.empty(len(x), 1, 1).bernoulli_(0.5)
            return functional.gumbel_softmax(x + torch.randn(x.shape))

    trace = trace_model(Dropping().train(), (torch.zeros(3, 2, 4),))
    assert trace.source == "fake"
    assert trace.drawing_modules >= {"", "recurrent", "others.0", "others.1", "others.3"}
    assert trace.drawing_modules >= {"attention.self_attn", "attention.dropout1"}
