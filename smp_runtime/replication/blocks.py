"""Gradients in blocks: what passes through the shared memory of replicas at one time.

A block is a run of the elements of one bucket, cut into one share for each replica, which averages
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .buckets import Bucket

_ALIGNMENT = 64  # bytes: no cache line has two writers


class Piece(NamedTuple):
    """A run of the elements of one parameter's gradient.

    Attributes:
        parameter: its number.
        first: where in the flattened gradient the run begins.
        last: where it ends.
        place: where in the block it begins.
    """

    parameter: int
    first: int
    last: int
    place: int


class Block(NamedTuple):
    """A run of the elements of one bucket.

    Attributes:
        bucket: its number.
        dtype: its type.
        starts: where in the block each replica's share begins.
        shares: for each replica what it averages.
        is_last: the bucket has no other after it.
    """

    bucket: int
    dtype: torch.dtype
    starts: Sequence[int]
    shares: Sequence[Sequence[Piece]]
    is_last: bool


def cut(buckets: Sequence[Bucket], num_replicas: int, num_bytes: int) -> Iterator[Block]:
    """Cuts buckets into blocks. Each bucket has one at least.

    Args:
        buckets: in the order in which they are reduced; parameters are numbered in this order.
        num_replicas: among which each block is divided.
        num_bytes: most bytes of a block.
    """
    num_before = 0
    for index, bucket in enumerate(buckets):
        sizes = [parameter.numel() for parameter in bucket.parameters()]
        limit = num_bytes // bucket.dtype.itemsize
        unit = _ALIGNMENT // bucket.dtype.itemsize
        size = sum(sizes)
        for begin in range(0, max(size, 1), limit):
            end = min(begin + limit, size)
            length = -(-(end - begin) // (num_replicas * unit)) * unit
            edges = [min(begin + replica * length, end) for replica in range(num_replicas + 1)]
            shares = [
                [
                    piece._replace(
                        parameter=num_before + piece.parameter, place=piece.place - begin
                    )
                    for piece in _pieces(sizes, first, last)
                ]
                for first, last in zip(edges[:-1], edges[1:], strict=True)
            ]
            starts = [edge - begin for edge in edges[:-1]]
            yield Block(index, bucket.dtype, starts, shares, is_last=end == size)
        num_before += len(sizes)


def _pieces(sizes: Sequence[int], begin: int, end: int) -> Iterator[Piece]:
    """Yields what the elements from `begin` to `end` of tensors in a row are of each."""
    start = 0
    for index, size in enumerate(sizes):
        first, last = max(begin, start), min(end, start + size)
        if first < last:
            yield Piece(index, first - start, last - start, first)
        start += size
