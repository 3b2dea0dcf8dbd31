"""How many bytes autograd saves between forwards and backwards, counted as they come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes:
    """Counts saved tensors by their memory: each once, however many operations save it.

    Args:
        excluded: parameters and buffers, which are there in any case.

    Attributes:
        now: bytes that are saved now.
        peak: most of them at once so far.
    """

    def __init__(self, excluded: Iterable[torch.Tensor] = ()) -> None:
        self.now = 0
        self.peak = 0
        self._excluded = {_place(tensor) for tensor in excluded if not tensor.is_meta}
        self._num_saved: Counter[int] = Counter()

    def hooks(self) -> saved_tensors_hooks:
        """Returns the context in which operations are counted."""
        return saved_tensors_hooks(self.count, _tensor_of)

    def count(self, tensor: torch.Tensor) -> Counted:
        """Counts a tensor for as long as the result lives, which holds it."""
        place, size = _place(tensor), tensor.untyped_storage().nbytes()
        if place == 0 or place in self._excluded:
            size = 0
        self._num_saved[place] += 1
        if self._num_saved[place] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)
        return Counted(self, tensor.detach(), place, size)

    def release(self, place: int, size: int) -> None:
        """Counts a tensor no longer."""
        self._num_saved[place] -= 1
        if self._num_saved[place] == 0:
            self.now -= size


class Counted:
    """Holds a tensor that is counted."""

    __slots__ = ("_meter", "_place", "_size", "tensor")

    def __init__(self, meter: SavedBytes, tensor: torch.Tensor, place: int, size: int) -> None:
        self.tensor = tensor
        self._meter, self._place, self._size = meter, place, size

    def __del__(self) -> None:
        self._meter.release(self._place, self._size)


def _tensor_of(counted: Counted) -> torch.Tensor:
    return counted.tensor


def _place(tensor: torch.Tensor) -> int:
    """Returns where a tensor is; 0 for those of a trace, which have no memory."""
    return 0 if isinstance(tensor, FakeTensor) else tensor.untyped_storage().data_ptr()
