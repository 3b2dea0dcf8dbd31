"""Buckets take gradients in, look like DistributedDataParallel's to hooks, and give them back."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from smp_runtime.errors import NotSupportedError
from smp_runtime.replication.buckets import Bucket, lay_out
from smp_runtime.tensors import gradient_type
from tests.sixteen_bit import needs_float32_sums


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def sizes(given: list[nn.Parameter], limit: int) -> list[list[int]]:
    return [[p.numel() for p in bucket.parameters()] for bucket in lay_out(given, limit)]


def test_buckets_are_filled_to_their_limit_in_order_and_the_last_ones_are_small() -> None:
    many = parameters(*[1] * 40)
    # Limits of 2, 4 and 8 numbers at the end, 16 before.
    assert [len(bucket) for bucket in sizes(many, 64)] == [10, 16, 8, 4, 2]
    assert sizes(parameters(1, 2, 30, 1, 1), 64) == [[1, 2], [30], [1, 1]]
    assert sizes(parameters(1, 2, 3, 10, 1), 10**6) == [[1, 2, 3, 10, 1]]
    assert sizes([], 24) == []


def test_shared_parameters_have_buckets_of_their_own_at_the_end() -> None:
    own, shared = parameters(1, 2), parameters(3, 4, 5)
    made = lay_out(own, 28, shared)
    assert [[p.numel() for p in bucket.parameters()] for bucket in made] == [[1], [2], [3, 4], [5]]
    assert [bucket.index() for bucket in made] == [0, 1, 2, 3]


def test_buckets_have_one_type() -> None:
    mixed = [*parameters(1), *parameters(1, dtype=torch.bfloat16), *parameters(2)]
    assert sizes(mixed, 10**6) == [[1], [1], [2]]


@needs_float32_sums
def test_the_type_is_that_of_the_gradient() -> None:
    (low,) = parameters(2, dtype=torch.bfloat16)
    assert gradient_type(low) == torch.bfloat16
    low.grad_dtype = torch.float32  # type: ignore[attr-defined]
    assert gradient_type(low) == torch.float32
    assert lay_out([low], 100)[0].buffer().dtype == torch.float32


def test_it_looks_like_a_grad_bucket() -> None:
    first, second = lay_out(parameters(3, 2), 12)
    assert (first.index(), first.is_last()) == (0, False)
    assert (second.index(), second.is_last()) == (1, True)
    first.parameters()[0].grad = torch.tensor([1.0, 2.0, 3.0])
    assert first.take_in(2.0) == [True]
    assert first.buffer().tolist() == [0.5, 1.0, 1.5]
    assert [gradient.tolist() for gradient in first.gradients()] == [[0.5, 1.0, 1.5]]
    first.set_buffer(torch.zeros(3))
    assert first.buffer().tolist() == [0.0, 0.0, 0.0]


def filled(*, as_views: bool = False) -> tuple[Bucket, list[nn.Parameter], Tensor]:
    made = parameters(2, 1)
    made[0].grad = gradient = torch.tensor([2.0, 4.0])
    (bucket,) = lay_out(made, 100, as_views=as_views)
    return bucket, made, gradient


def test_parameters_have_no_gradient_while_it_is_under_way() -> None:
    bucket, made, _ = filled()
    assert bucket.take_in(2.0) == [True, False]
    assert [p.grad for p in made] == [None, None]


def test_gradients_come_back_into_the_same_tensors() -> None:
    bucket, made, gradient = filled()
    bucket.take_in(1.0)
    late = bucket.give_out(torch.tensor([7.0, 8.0, 9.0]), [True, True])
    assert late == [None, None]
    assert made[0].grad is gradient
    assert gradient.tolist() == [7.0, 8.0]
    assert made[1].grad is not None
    assert made[1].grad.tolist() == [9.0]


def test_gradients_come_back_as_views() -> None:
    bucket, made, gradient = filled(as_views=True)
    original = weakref.ref(gradient)
    del gradient
    bucket.take_in(1.0)
    assert original() is None  # its memory is free already
    bucket.give_out(bucket.buffer(), [True, False])
    assert made[0].grad is not None
    assert made[0].grad.data_ptr() == bucket.buffer().data_ptr()
    assert made[1].grad is None
    bucket.take_in(2.0)  # once more, without a copy
    assert bucket.buffer().tolist() == [1.0, 2.0, 0.0]


def test_what_comes_late_is_told() -> None:
    bucket, made, _ = filled()
    bucket.take_in(1.0)
    made[1].grad = torch.tensor([5.0])
    nothing, late = bucket.give_out(bucket.buffer(), [True, True])
    assert nothing is None
    assert late is not None
    assert late.tolist() == [5.0]


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    (bucket,) = lay_out([embedding.weight], 100)
    with pytest.raises(NotSupportedError, match="sparse=False"):
        bucket.take_in(2.0)
