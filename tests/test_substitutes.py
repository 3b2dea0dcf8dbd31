"""What an optimizer steps on in place of parameters is cut, kept and given back rightly."""

from typing import Any

import pytest
import torch
from torch import nn

from smp_runtime.optimization.substitutes import Substitute, Substitutes
from smp_runtime.saving.optimizer_state import Piece


def parameter(values: list[float], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def test_a_slice_in_float32_shares_the_parameters_memory() -> None:
    held = parameter([1.0, 2.0, 3.0, 4.0])
    held.grad = torch.tensor([10.0, 20.0, 30.0, 40.0])
    substitute = Substitute(held, 1, 3)
    substitute.take_gradient()
    assert substitute.tensor.tolist() == [2.0, 3.0]
    assert substitute.tensor.grad is not None
    assert substitute.tensor.grad.tolist() == [20.0, 30.0]
    substitute.tensor.mul_(2)
    substitute.write_back()
    assert held.tolist() == [1.0, 4.0, 6.0, 4.0]
    assert substitute.tensor.grad is None


def test_a_master_is_wider_and_rounded_back() -> None:
    held = parameter([1.0, 2.0], torch.bfloat16)
    held.grad = torch.ones(2, dtype=torch.bfloat16)
    substitute = Substitute(held, 0, 2)
    substitute.take_gradient()
    assert substitute.tensor.grad is not None
    assert substitute.tensor.grad.dtype == torch.float32
    with torch.no_grad():
        substitute.tensor.add_(1e-4)
        substitute.write_back()
        substitute.note()
        substitute.follow()
    assert held.tolist() == [1.0, 2.0]
    assert substitute.tensor[0].item() == pytest.approx(1.0001)


def test_a_parameter_that_others_changed_is_followed() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        held = parameter([1.0, 2.0, 3.0], dtype)
        substitute = Substitute(held, 1, 3)
        with torch.no_grad():
            held.copy_(torch.tensor([4.0, 5.0, 6.0]))
            substitute.follow()
        assert substitute.tensor.tolist() == [5.0, 6.0]
    held = parameter([1.0, 2.0])
    substitute = Substitute(held, 1, 2)
    held.data = torch.tensor([7.0, 8.0])  # other memory: a conversion, or a move
    with torch.no_grad():
        substitute.follow()
        substitute.tensor.add_(1)
    assert held.tolist() == [7.0, 9.0]


class TwoReplicas:
    size = 2
    group = None

    def __init__(self, rank: int) -> None:
        self.rank = rank


def sharded(optimizer: torch.optim.Optimizer, rank: int) -> Substitutes:
    replicas: Any = TwoReplicas(rank)
    return Substitutes(optimizer, replicas)


def test_slices_cover_each_parameter_once() -> None:
    sizes = [parameter([0.0] * count) for count in (1, 2, 5, 8)]
    optimizer = torch.optim.SGD(sizes, lr=0.1)
    for held in sizes:
        cuts = [sharded(optimizer, 0).slice_of(held, replica) for replica in range(2)]
        assert cuts[0][0] == 0
        assert cuts[0][1] == cuts[1][0]
        assert cuts[1][1] == held.numel()
        assert cuts[0][1] - (cuts[1][1] - cuts[1][0]) in (0, 1)
    assert list(sharded(optimizer, 0).held()) == sizes
    assert list(sharded(optimizer, 1).held()) == sizes[1:]


def test_state_that_exists_already_is_cut() -> None:
    held = parameter([1.0, 2.0, 3.0])
    optimizer = torch.optim.AdamW([held], lr=0.1)
    held.grad = torch.ones(3)
    optimizer.step()
    whole = optimizer.state[held]["exp_avg"].clone()
    state = sharded(optimizer, 1).state(held)
    assert isinstance(state["exp_avg"], Piece)
    assert state["exp_avg"].start == 2
    assert torch.equal(state["exp_avg"].values, whole[2:])
    assert state["step"].item() == 1.0
    assert held not in optimizer.state


def test_state_of_a_whole_parameter_is_loaded_by_slices_with_its_master() -> None:
    held = parameter([1.0, 2.0, 3.0], torch.bfloat16)
    optimizer = torch.optim.AdamW([held], lr=0.1)
    substitutes = sharded(optimizer, 0)
    master = torch.tensor([1.001, 2.001, 3.001])
    given = {"step": torch.tensor(5.0), "exp_avg": torch.tensor([0.1, 0.2, 0.3]),
             "master": master}  # fmt: skip
    substitutes.load(held, given)
    state = substitutes.state(held)
    assert state["step"].item() == 5.0
    assert torch.equal(state["exp_avg"].values, torch.tensor([0.1, 0.2]))
    assert torch.equal(state["master"].values, master[:2])
    assert state["master"].start == 0
