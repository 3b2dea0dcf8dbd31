"""Gradients that replicas add up in shared memory are their mean, with equal bits on all."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from smp_runtime.errors import NotSupportedError
from smp_runtime.messages.shared_memory import Neighbours
from smp_runtime.replication.buckets import lay_out
from smp_runtime.replication.staged_reduction import PART_BYTES, StagedReduction
from tests.test_shared_memory import neighbours, on_all

SMALL = 2 * 4 * 64  # bytes of a part with blocks of 64
SHAPES = ((3, 5), (64,), (1,), (16, 33), (0,), (7,))


class Replica:
    """One replica's parameters and buckets."""

    def __init__(
        self,
        near: Neighbours,
        shapes: Sequence[Sequence[int]] = SHAPES,
        limit: int = 1000,
        *,
        part_bytes: int = PART_BYTES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.parameters = [nn.Parameter(torch.zeros(*shape, dtype=dtype)) for shape in shapes]
        self.buckets = lay_out(self.parameters, limit)
        self.reduced: list[int] = []
        parts = near.share(part_bytes)
        assert parts is not None
        self.staged = StagedReduction(near, parts, self.reduced.append)
        self.staged.lay_out(self.buckets)

    def reduce(self, gradients: Sequence[Tensor | None], divisor: float) -> list[Tensor | None]:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.staged.begin(divisor)
        had = [self.staged.launch(i) for i in range(len(self.buckets))]
        assert [has for flags in had for has in flags] == [g is not None for g in gradients]
        assert all(parameter.grad is None for parameter in self.parameters)
        self.staged.finish()
        for index, flags in enumerate(had):
            self.staged.give_out(index, [True] * len(flags))
        return [parameter.grad for parameter in self.parameters]


def draw(replica: int, step: int, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return [
        None if (i + replica + step) % 4 == 0 else torch.randn(*shape, generator=generator)
        for i, shape in enumerate(shapes)
    ]


def mean(gradients: Sequence[Tensor | None], shape: Sequence[int]) -> Tensor:
    given = [torch.zeros(*shape) if g is None else g for g in gradients]
    return torch.stack(given).sum(0) / len(gradients)


def close(made: list[Neighbours]) -> None:
    for each in made:
        each.close()


@pytest.mark.parametrize("size", [2, 3])
def test_replicas_get_the_mean(size: int) -> None:
    def run(near: Neighbours) -> Any:
        replica = Replica(near)
        assert len(replica.buckets) > 2
        found = []
        for step in range(3):
            reduced = replica.reduce(draw(near.rank, step), size)
            found.append([None if g is None else g.clone() for g in reduced])
        assert replica.reduced == list(range(len(replica.buckets))) * 3
        return found

    made = neighbours(size)
    by_rank = on_all(made, run)
    close(made)
    for step in range(3):
        drawn = [draw(rank, step) for rank in range(size)]
        for i, shape in enumerate(SHAPES):
            results = [by_rank[rank][step][i] for rank in range(size)]
            expected = mean([gradients[i] for gradients in drawn], shape)
            torch.testing.assert_close(results[0], expected)
            assert all(torch.equal(result, results[0]) for result in results)


def test_two_replicas_have_the_bits_of_a_plain_sum() -> None:
    made = neighbours(2)
    first, second = on_all(made, lambda near: Replica(near).reduce(draw(near.rank, 1), 2.0))
    close(made)
    for i, shape in enumerate(SHAPES):
        expected = mean([draw(0, 1)[i], draw(1, 1)[i]], shape)
        assert torch.equal(first[i], expected)
        assert torch.equal(second[i], expected)


def test_gradients_stay_where_they_are() -> None:
    def run(near: Neighbours) -> Any:
        replica = Replica(near)
        given = [torch.ones(*shape) * near.rank for shape in SHAPES]
        found = replica.reduce(given, 2.0)
        assert all(g is own for g, own in zip(found, given, strict=True))
        again = replica.reduce([g.add_(near.rank) for g in given], 2.0)
        return [g.unique().tolist() for g in again if g.numel()]

    made = neighbours(2)
    assert on_all(made, run) == [[[1.0]] * 5] * 2
    close(made)


def test_what_comes_after_the_launch_is_told() -> None:
    def run(near: Neighbours) -> Any:
        replica = Replica(near, [(2,), (1,)], 100)
        replica.parameters[0].grad = torch.tensor([2.0, 4.0])
        replica.staged.begin(2.0)
        assert replica.staged.launch(0) == [True, False]
        replica.parameters[1].grad = torch.tensor([5.0])
        replica.staged.finish()
        nothing, late = replica.staged.give_out(0, [True, False])
        assert nothing is None
        assert replica.parameters[1].grad is None
        return replica.parameters[0].grad.tolist(), late.tolist()

    made = neighbours(2)
    assert on_all(made, run) == [([2.0, 4.0], [5.0])] * 2
    close(made)


def test_sparse_gradients_are_refused() -> None:
    made = neighbours(2)
    replica, _ = on_all(made, lambda near: Replica(near, [(4, 2)]))
    replica.parameters[0].grad = torch.eye(4, 2).to_sparse()
    replica.staged.begin(2.0)
    with pytest.raises(NotSupportedError, match="sparse=False"):
        replica.staged.launch(0)
    close(made)


def test_transposed_gradients_and_those_of_16_bits() -> None:
    def run(near: Neighbours) -> Any:
        replica = Replica(near, [(3, 2)], dtype=torch.bfloat16)
        values = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3) * (near.rank + 1)
        given = values.t()
        (found,) = replica.reduce([given], 2.0)
        assert found is given
        return found.tolist()

    made = neighbours(2)
    expected = [[0.0, 4.5], [1.5, 6.0], [3.0, 7.5]]
    assert on_all(made, run) == [expected] * 2
    close(made)


def test_gradients_that_the_script_drops_are_gone() -> None:
    def run(near: Neighbours) -> bool:
        replica = Replica(near, [(2,), (3,)], 8)
        seen = [weakref.ref(g) for g in replica.reduce([torch.ones(2), None], 2.0)]
        for parameter in replica.parameters:
            parameter.grad = None
        return [gradient() for gradient in seen] == [None, None]

    made = neighbours(2)
    assert on_all(made, run) == [True, True]
    close(made)


def test_memory_that_others_read_stays_as_it_is_until_all_is_averaged() -> None:
    def run(near: Neighbours) -> Any:
        replica = Replica(near, [(6,), (2, 3)], 24)
        values = torch.arange(6.0) * (near.rank + 1)
        read_in_backward = values.view(3, 2)
        replica.parameters[0].grad = values.view(6)
        replica.parameters[1].grad = values.view(2, 3)
        replica.staged.begin(2.0)
        assert [replica.staged.launch(0), replica.staged.launch(1)] == [[True], [True]]
        replica.staged.finish()
        assert read_in_backward.flatten().equal(torch.arange(6.0) * (near.rank + 1))
        for index in range(2):
            replica.staged.give_out(index, [True])
        return [p.grad.flatten().tolist() for p in replica.parameters]

    made = neighbours(2)
    assert on_all(made, run) == [[[0.0, 1.5, 3.0, 4.5, 6.0, 7.5]] * 2] * 2
    close(made)


def test_conjugate_gradients() -> None:
    def run(near: Neighbours) -> Any:
        replica = Replica(near, [(2,)], dtype=torch.complex64)
        given = (torch.tensor([1 + 2j, 3j]) * (near.rank + 1)).conj()
        assert given.is_conj()
        (found,) = replica.reduce([given], 2.0)
        return found.tolist()

    made = neighbours(2)
    assert on_all(made, run) == [[1.5 - 3j, -4.5j]] * 2
    close(made)


def test_a_replica_works_on_while_its_backward_pass_goes_on() -> None:
    made = neighbours(2)
    first, second = on_all(made, Replica)
    for replica in (first, second):
        for parameter in replica.parameters:
            parameter.grad = torch.ones_like(parameter)
        replica.staged.begin(2.0)
    last = len(first.buckets) - 1

    def advance(*replicas: Replica) -> list[list[int]]:
        for replica in replicas:
            replica.staged.advance()
        return [first.reduced, second.reduced]

    for index in range(last):
        first.staged.launch(index)
    assert advance(first) == [[], []]
    second.staged.launch(0)
    assert advance(second) == [[], []]  # its share is averaged
    assert advance(first) == [[0], []]
    assert advance(second) == [[0], [0]]
    for index in range(1, last):
        second.staged.launch(index)
    assert advance(second, first, second) == [list(range(last))] * 2
    close(made)


def test_who_is_waited_for_is_who_holds_up_the_others() -> None:
    made = neighbours(3)
    replicas = on_all(made, lambda near: Replica(near, [(8,)]))
    for replica in replicas:
        replica.staged.begin(3.0)
    for replica in replicas[:2]:
        replica.staged.launch(0)
        replica.staged.advance()
    assert replicas[0].staged._late() == [1, 2]  # has not heard yet of what 1 has published
    replicas[0].staged.advance()
    assert replicas[0].staged._late() == [2]
    replicas[2].staged.launch(0)
    for replica in (replicas[2], replicas[0]):
        replica.staged.advance()
    assert replicas[0].staged._late() == [1]  # which has to average its share
    close(made)


def test_replicas_wait_for_room() -> None:
    made = neighbours(2)
    first, second = on_all(
        made, lambda near: Replica(near, [(200,), (8,)], 10_000, part_bytes=SMALL)
    )
    for replica in (first, second):
        replica.parameters[0].grad = torch.arange(200.0)
        replica.parameters[1].grad = torch.ones(8)
        replica.staged.begin(2.0)
        assert len(replica.buckets) == 1
    first.staged.launch(0)
    first.staged.advance()
    assert first.staged._counts == [4, 0, 0]  # of 13 blocks
    second.staged.launch(0)
    second.staged.advance()
    assert second.staged._counts == [4, 4, 0]
    on_all(made, lambda near: (first, second)[near.rank].staged.finish())
    for replica in (first, second):
        assert replica.staged._counts == [13, 13, 13]
        replica.staged.give_out(0, [True, True])
        assert [p.grad.tolist() for p in replica.parameters] == [list(range(200)), [1.0] * 8]
    close(made)


@given(
    size=st.integers(2, 3),
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=6),
    limit=st.integers(1, 2000),
    divisor=st.sampled_from([1.0, 2.0, 3.0]),
)
@settings(max_examples=40, deadline=None)
def test_any_buckets(size: int, sizes: list[int], limit: int, divisor: float) -> None:
    shapes = [(n,) for n in sizes]

    def run(near: Neighbours) -> Any:
        replica = Replica(near, shapes, limit, part_bytes=SMALL)
        found = [replica.reduce(draw(near.rank, step, shapes), divisor) for step in range(2)]
        return found[-1]

    made = neighbours(size)
    by_rank = on_all(made, run)
    close(made)
    drawn = [draw(rank, 1, shapes) for rank in range(size)]
    for i, shape in enumerate(shapes):
        expected = mean([gradients[i] for gradients in drawn], shape) * size / divisor
        for found in by_rank:
            torch.testing.assert_close(found[i], expected)
            assert torch.equal(found[i], by_rank[0][i])
