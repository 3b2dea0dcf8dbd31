"""What a microbatch sets in dicts and objects is there again when it goes on."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp_runtime as smp
from smp_runtime.execution.entries import Entries, holder_of
from tests.worlds import run_world


class Own:
    """An object of the script."""

    def __init__(self) -> None:
        self.mask = 1


def test_a_body_finds_what_it_has_set() -> None:
    holder: dict[str, Any] = {"mask": 0, "other": 0}
    first, second = Entries(), Entries()
    first.watch([holder])
    holder["mask"] = "first"
    first.note()
    second.watch([holder])
    holder["mask"], holder["second"] = "second", "second"
    second.note()
    first.restore()
    assert holder == {"mask": "first", "other": 0, "second": "second"}
    first.watch([holder])
    first.note()
    second.restore()
    assert holder["mask"] == "second"


def test_what_a_body_takes_out_is_not_put_back() -> None:
    holder: dict[str, Any] = {}
    body = Entries()
    body.watch([holder])
    holder["mask"] = 1
    body.note()
    body.watch([holder])
    del holder["mask"]
    body.note()
    body.restore()
    assert holder == {}


def test_what_others_set_is_not_its_own() -> None:
    holder: dict[str, Any] = {}
    body = Entries()
    body.watch([holder])
    body.note()
    holder["others"] = 1
    body.watch([holder])
    body.note()
    holder["others"] = 2
    body.restore()
    assert holder == {"others": 2}


@pytest.mark.parametrize("held", [Own(), {"mask": 1}, SimpleNamespace(mask=1)], ids=type)
def test_dicts_and_plain_objects_have_entries(held: Any) -> None:
    assert holder_of(held) == {"mask": 1}


@pytest.mark.parametrize(
    "held", [[1], (1,), torch.zeros(1), nn.ReLU(), Own, print, 1.0, None, "text"], ids=type
)
def test_nothing_else_has(held: Any) -> None:
    assert holder_of(held) is None


class Keeper(nn.Module):
    """Leaves a hidden state in an object, and knows which of them are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = Own()
        self.made: list[weakref.ref[Tensor]] = []
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.own.mask = hidden
        self.made.append(weakref.ref(hidden))
        self.most = max(self.most, sum(made() is not None for made in self.made))
        return self.last(hidden)


def keep() -> int:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 8})
    keeper = Keeper()
    model = smp.DistributedModel(keeper)

    @smp.step
    def step(model: Any, x: Tensor) -> None:
        model.backward(model(x).sum())

    step(model, torch.zeros(8, 4))
    smp.shutdown()
    return keeper.most


@pytest.mark.world
def test_what_ended_bodies_have_set_is_freed() -> None:
    most, _ = run_world(2, keep)
    assert most <= 4  # in flight on the first rank, and around a change of turns
