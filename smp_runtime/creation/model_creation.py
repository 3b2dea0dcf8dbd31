"""`model_creation` and `delay_param_initialization`: models larger than one process.

A model that is built inside is on meta, but for small tensors. When it is partitioned, each rank
makes the parameters that it holds, with the values that a model built at once would have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .pending_values import recording


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Lets parameters that are made inside get memory and values in the partitioning.

    Seed before, equally on every rank: the values are those that the same code gives without this
    context, bit for bit, at every degree. What the constructor does must be done with torch's
    operations; values that a constructor looks at are computed for it.

    Args:
        enabled: False does nothing.
    """
    if not enabled:
        yield
        return
    with recording.active():
        yield


@contextmanager
def model_creation(
    tensor_parallelism: bool = False,
    dtype: torch.dtype | None = None,
    **tensor_parallel_config: Any,
) -> Iterator[None]:
    """Builds a model of any size: `delay_param_initialization`, and a default type.

    Args:
        tensor_parallelism: without effect at tensor degree 1.
        dtype: default type of what is made inside; None leaves it.
        tensor_parallel_config: of tensor parallelism; without effect at tensor degree 1.
    """
    with ExitStack() as stack:
        if dtype is not None:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        stack.enter_context(delay_param_initialization())
        yield
