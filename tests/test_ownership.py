"""Owners of parameters, buffers and modules."""

import pytest
import torch
from torch import nn

from smp_runtime.errors import NotSupportedError
from smp_runtime.execution.ownership import Ownership, keeps_nothing, placed_module


class Own(nn.Linear):
    """A module of the user's."""


def test_owners_are_known_by_identity() -> None:
    ownership = Ownership(2)
    weight, twin = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    ownership.own(weight, 1)
    assert ownership.owner_of(weight) == 1
    assert ownership.owner_of(twin) is None
    assert [(id(tensor), owner) for tensor, owner in ownership.tensors()] == [(id(weight), 1)]


def test_the_first_word_counts() -> None:
    ownership = Ownership(2)
    weight = torch.zeros(2)
    ownership.own(weight, 1)
    ownership.own(weight, 0)
    assert ownership.owner_of(weight) == 1


def test_what_is_on_meta_looks_as_on_its_owner() -> None:
    meta = Ownership(2).meta_of(torch.empty(2, 3, device="meta", dtype=torch.bfloat16))
    assert meta.device.type != "meta"
    assert meta.describe() == "bfloat16[2, 3]"


def test_hooks_of_a_placed_module_or_inside_it_are_seen() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    placed = placed_module(module, "x", 0, 0)
    assert not placed.has_hooks
    handle = module[0].register_forward_hook(lambda *args: None)
    assert placed.has_hooks
    handle.remove()
    module.register_forward_pre_hook(lambda *args: None)
    assert placed.has_hooks


def test_torchs_own_modules_keep_nothing() -> None:
    assert keeps_nothing(nn.Linear(1, 1))
    assert not keeps_nothing(Own(1, 1))


def owning(module: nn.Module) -> Ownership:
    ownership = Ownership(2)
    ownership.placed["x"] = placed_module(module, "x", 0, 0)
    return ownership


def test_a_change_that_comes_too_late_is_refused() -> None:
    """Microbatch 1 has used what microbatch 0 changes; one process changes it first."""
    linear = nn.Linear(1, 1)
    ownership = owning(linear)
    ownership.note_call(ownership.placed["x"], 5, 1)
    ownership.note_write(linear.weight, 5, 1)
    with pytest.raises(NotSupportedError, match="microbatch 0 changes .* microbatch 1 has used"):
        ownership.note_write(linear.bias, 5, 0)
    ownership.note_write(linear.bias, 6, 0)  # another step
    buffer = torch.zeros(1)
    ownership.note_read(buffer, 6, 1)
    ownership.note_read(buffer, 6, 0)
    with pytest.raises(NotSupportedError, match="microbatch 0 changes .* microbatch 1 has used"):
        ownership.note_write(buffer, 6, 0)


def test_a_use_that_comes_too_late_is_refused() -> None:
    linear = nn.Linear(1, 1)
    ownership = owning(linear)
    ownership.note_write(linear.weight, 5, 1)
    ownership.note_call(ownership.placed["x"], 5, 1)
    for use in (
        lambda: ownership.note_call(ownership.placed["x"], 5, 0),
        lambda: ownership.check_written(linear.weight, 5, 0),
    ):
        with pytest.raises(NotSupportedError, match="changed in place by microbatch 1 before"):
            use()
    ownership.note_call(ownership.placed["x"], 6, 0)
