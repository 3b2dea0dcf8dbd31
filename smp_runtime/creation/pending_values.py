"""Where parameters and buffers on meta get their values from, once it is known who holds them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .delayed_values import Recording

recording = Recording()
"""What was done to tensors in `smp.model_creation`."""

_readers: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}


def provide(tensor: Tensor, read: Callable[[], Tensor]) -> None:
    """Says where a tensor on meta gets its values from; the last word counts.

    Args:
        tensor: a parameter or buffer.
        read: returns a new tensor with the values, perhaps of another type.
    """
    _readers[id(tensor)] = (tensor, read)


def is_pending(tensor: Tensor) -> bool:
    """Says whether a tensor on meta has values to come."""
    return tensor.is_meta and (id(tensor) in _readers or recording.knows(tensor))


def fill(tensor: Tensor) -> None:
    """Gives a parameter or buffer on meta its values; the object stays the same.

    Raises:
        UsageError: there are none.
    """
    _, read = _readers.pop(id(tensor), (None, lambda: recording.value_of(tensor)))
    value = read().detach().to(tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    # Not `torch.utils.swap_tensors`: it refuses where weak references exist, as nn.LSTM keeps of
    # its weights. They point to the object, and that stays.
    torch._C._swap_tensor_impl(tensor, value)


def forget() -> None:
    """Forgets everything: each tensor has its values, or lives on another rank."""
    recording.clear()
    _readers.clear()
