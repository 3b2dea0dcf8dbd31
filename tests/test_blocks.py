"""Buckets are cut into blocks, and blocks into shares, without a gap."""

import torch
from torch import nn

from smp_runtime.replication.blocks import Block, Piece, cut
from smp_runtime.replication.buckets import Bucket


def bucket(index: int, *sizes: int, dtype: torch.dtype = torch.float32) -> Bucket:
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    return Bucket(index, parameters, is_last=True)


def test_shares_begin_at_cache_lines() -> None:
    assert list(cut([bucket(0, 10, 30)], 2, 1000)) == [
        Block(
            bucket=0,
            dtype=torch.float32,
            starts=[0, 32],
            shares=[[Piece(0, 0, 10, 0), Piece(1, 0, 22, 10)], [Piece(1, 22, 30, 32)]],
            is_last=True,
        )
    ]


def test_long_buckets_have_several_blocks() -> None:
    first, second, third = cut([bucket(0, 3), bucket(1, 40, dtype=torch.float64)], 2, 256)
    assert first == Block(0, torch.float32, [0, 3], [[Piece(0, 0, 3, 0)], []], True)
    assert second.shares == [[Piece(1, 0, 16, 0)], [Piece(1, 16, 32, 16)]]
    assert third.shares == [[Piece(1, 32, 40, 0)], []]  # numbered over all buckets
    assert [second.is_last, third.is_last] == [False, True]


def test_a_bucket_without_elements_has_a_block() -> None:
    assert list(cut([bucket(0, 0, 0)], 3, 64)) == [
        Block(0, torch.float32, [0, 0, 0], [[], [], []], True)
    ]
