"""accelerate, as `transformers.Trainer` uses it, told that its processes are this job's replicas.

accelerate knows nothing of pipelines: to it the ranks of one pipeline would be processes with
data of their own. Here there are as many as replicas, and what it gathers comes from them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, PartialState  # type: ignore[import-untyped]
from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]

from .. import device
from ..messages.communication import CommGroup, allgather
from ..model import DistributedModel
from ..runtime import current
from .hf_batches import repeat_no_samples

_LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class ReplicaAccelerator(Accelerator):  # type: ignore[misc]
    """An accelerator whose processes are the data parallel ranks."""

    _is_one = False

    @property
    def num_processes(self) -> int:
        """The number of replicas."""
        return 1 if self._is_one else current().placement.size("dp")

    @contextmanager
    def counted_as_one(self) -> Iterator[None]:
        """Keeps `compute_loss` from multiplying the loss with the number of processes.

        It does so for models that divide by the number of tokens of all of them, and takes every
        model that could for one that does.
        """
        self._is_one = True
        try:
            yield
        finally:
            self._is_one = False

    @property
    def process_index(self) -> int:
        """Which replica this is."""
        return current().here.dp_rank

    @property
    def dispatch_batches(self) -> bool:
        """Never: accelerate would send the first process's batches to all ranks."""
        return False

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Gives this replica its batches, and repeats no sample to fill the last one."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        repeat_no_samples(prepared)
        return prepared

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the user's model: label smoothing tells by its class whether labels shift."""
        inner = model.get_module() if isinstance(model, DistributedModel) else model
        return super().unwrap_model(inner, *args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """Joins the tensors of all replicas along their first dimension, on all of them."""
        return recursively_apply(_gather, tensor, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Adds or averages the tensors of all replicas."""

        def reduce(one: torch.Tensor) -> torch.Tensor:
            total = torch.stack(allgather(one, CommGroup.DP_GROUP)).sum(0)
            return total * scale / (self.num_processes if reduction == "mean" else 1)

        return recursively_apply(reduce, tensor, error_on_other_type=True)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Makes the tensors of all replicas as long as the longest along a dimension."""

        def pad(one: torch.Tensor) -> torch.Tensor:
            if dim >= one.dim():
                return one
            missing = max(allgather(one.shape[dim], CommGroup.DP_GROUP)) - one.shape[dim]
            shape = list(one.shape)
            shape[dim] = missing
            padding = one.new_full(shape, pad_index)
            return torch.cat([padding, one] if pad_first else [one, padding], dim)

        return recursively_apply(pad, tensor, error_on_other_type=True)


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([one.reshape(-1) if one.dim() == 0 else one for one in _all(tensor)])


def _all(tensor: torch.Tensor) -> list[torch.Tensor]:
    return allgather(tensor, CommGroup.DP_GROUP)


@contextmanager
def alone() -> Iterator[None]:
    """Lets accelerate believe, while it sets itself up, that this process has no peers."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCHERS_VARIABLES if name in os.environ}
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        PartialState(cpu=not device.has_accelerator())
        yield
    finally:
        os.environ.update(hidden)
