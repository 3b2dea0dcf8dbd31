"""Operations that fake tensors cannot run as they are, or not as a trace needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

__all__ = ["run_operation"]

FEW = 64
"""So many random numbers are drawn even where all else is fake."""


def run_operation(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Runs an operation, on fake tensors or on real ones."""
    # Torch 2.13 refuses float32 in grouped products of fake tensors, though not of real ones.
    if func._schema.name == "aten::_grouped_mm" and isinstance(args[0], FakeTensor):
        rows, weights = args[0], args[1]
        return rows.new_empty([*rows.shape[:-1], weights.shape[-1]])
    result = func(*args, **kwargs)
    if _draws_few(func, args, kwargs, result):
        # A model may decide by it which layers to run: that takes a value.
        with unset_fake_temporarily():
            drawn = func(*args, **kwargs)
        return torch.ops.aten.lift_fresh.default(drawn)
    return result


def _draws_few(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> bool:
    return (
        torch.Tag.nondeterministic_seeded in func.tags
        and isinstance(result, FakeTensor)
        and result.numel() <= FEW
        and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs)))
    )
