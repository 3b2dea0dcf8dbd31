"""Which samples each replica trains on."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import DistributedSampler

from ..runtime import current


def replica_sampler(
    dataset: Sized, *, shuffle: bool = True, seed: int | None = None, drop_last: bool = True
) -> DistributedSampler[Any]:
    """Returns torch's sampler of a data set's share for this replica.

    All ranks of one pipeline get the same samples in one order, and each replica gets others::

        loader = DataLoader(dataset, batch_size=8, sampler=smp.replica_sampler(dataset),
                            drop_last=True)

    Call ``sampler.set_epoch(epoch)`` at the beginning of each epoch for another order.

    Args:
        dataset: has a length.
        shuffle: in an order that follows from `seed` and the epoch.
        seed: of that order; the setting `seed` if not given, or 0.
        drop_last: leave out what doesn't divide by the number of replicas; else repeat samples.

    Raises:
        UsageError: `init` was not called.
    """
    runtime = current()
    config_seed = runtime.config.seed or 0
    return DistributedSampler(
        dataset,  # type: ignore[arg-type]
        num_replicas=runtime.placement.size("rdp" if runtime.config.prescaled_batch else "dp"),
        rank=runtime.here.rdp_rank if runtime.config.prescaled_batch else runtime.here.dp_rank,
        shuffle=shuffle,
        seed=config_seed if seed is None else seed,
        drop_last=drop_last,
    )
