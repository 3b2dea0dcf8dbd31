"""Gradients of parameters that several ranks hold are summed, the older part counted once."""

import torch
from torch import Tensor, nn

from smp_runtime.optimization.shared_parameters import SharedGradients
from tests.local_ranks import LocalRank, run_ranks

Holders = tuple[int, ...]


def summed(
    by_rank: list[float | None],
    holders: Holders = (0, 1),
    earlier: float | None = None,
    frozen: bool = False,
    adds_up: bool = True,
) -> list[float | None]:
    """Returns each rank's gradient after a step that added `by_rank` to `earlier`."""

    def body(rank: LocalRank) -> float | None:
        parameter = nn.Parameter(torch.zeros(2), requires_grad=not frozen)
        if earlier is not None:
            parameter.grad = torch.full((2,), earlier)
        shared = SharedGradients(rank.engine, [("tied.weight", parameter, holders)])
        mine = by_rank[rank.index]
        if mine is not None:
            parameter.grad = torch.full((2,), mine)
        if adds_up:
            shared.add_up()
        else:
            shared.put_back()
        return None if parameter.grad is None else parameter.grad[0].item()

    return run_ranks(len(by_rank), body)


def test_what_the_step_added_is_summed_over_the_holders() -> None:
    assert summed([1.0, 2.0]) == [3.0, 3.0]
    assert summed([1.0, 2.0, 4.0], holders=(0, 1, 2)) == [7.0] * 3


def test_others_take_no_part() -> None:
    assert summed([1.0, 2.0, 4.0], holders=(0, 2)) == [5.0, 2.0, 5.0]


def test_gradients_of_earlier_steps_count_once() -> None:
    assert summed([1.0, 2.0], earlier=10.0) == [13.0, 13.0]


def test_a_holder_without_a_gradient_gets_the_sum() -> None:
    assert summed([None, 2.0]) == [2.0, 2.0]
    assert summed([None, 2.0], earlier=10.0) == [12.0, 12.0]


def test_no_gradient_anywhere_stays_none() -> None:
    assert summed([None, None]) == [None, None]
    assert summed([None, None], earlier=10.0) == [10.0, 10.0]


def test_frozen_parameters_take_no_part() -> None:
    assert summed([None, None], frozen=True) == [None, None]


def test_without_a_backward_the_earlier_gradients_are_put_back() -> None:
    assert summed([None, None], earlier=10.0, adds_up=False) == [10.0, 10.0]


def contribution(rank: int) -> Tensor:
    return torch.randn(64, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def test_copies_get_bit_equal_sums() -> None:
    def body(rank: LocalRank) -> Tensor | None:
        parameter = nn.Parameter(torch.zeros(64))
        shared = SharedGradients(rank.engine, [("tied", parameter, (0, 1, 2))])
        parameter.grad = contribution(rank.index)
        shared.add_up()
        return parameter.grad

    first, *others = run_ranks(3, body)
    parts = [
        torch.randn(64, generator=torch.Generator().manual_seed(i)) * 10.0**i for i in range(3)
    ]
    assert torch.equal(first, (parts[0] + parts[1]) + parts[2])
    assert all(torch.equal(first, other) for other in others)


def test_in_the_step_that_partitions_nothing_is_set_aside() -> None:
    def body(rank: LocalRank) -> float:
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.ones(1)  # of this very step
        SharedGradients(rank.engine, [("tied", parameter, (0, 1))], set_aside=False).add_up()
        assert parameter.grad is not None
        return parameter.grad.item()

    assert run_ranks(2, body) == [2.0, 2.0]
