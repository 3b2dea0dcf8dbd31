"""What a microbatch sets in dicts and objects is there again when it goes on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from smp_runtime.execution.entries import Entries, holder_of


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
