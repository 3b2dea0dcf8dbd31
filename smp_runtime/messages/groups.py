"""Process groups from a placement; the beginning and the end of torch.distributed."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from .. import device
from ..planning.placement import Axis, Placement
from .attempt import fresh_store

_AXES: tuple[Axis, ...] = ("world", "pp", "tp", "rdp", "dp", "mp")


def start_distributed(timeout: float, port: int | None) -> Store:
    """Starts torch.distributed from the environment, unless it runs already.

    Without a launcher's variables this process is a world of its own.

    Args:
        timeout: seconds that a collective may take.
        port: where ranks meet, in place of MASTER_PORT.

    Returns:
        A store that all ranks share, without anything of ranks that were there before a restart.
    """
    if dist.is_initialized():
        return fresh_store(_get_default_store(), dist.get_rank(), dist.get_world_size(), timeout)
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        own = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=own, rank=0, world_size=1)
        return _get_default_store()
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    patience = datetime.timedelta(seconds=max(timeout, 1.0))
    met, rank, size = next(rendezvous("env://", timeout=patience))
    met.set_timeout(patience)
    store = fresh_store(met, rank, size, patience.total_seconds())
    dist.init_process_group(
        device.default_backend(), timeout=patience, store=store, rank=rank, world_size=size
    )
    return _get_default_store()


class Groups:
    """The process groups of this rank, one per axis.

    Groups with the same ranks are one process group.

    Attributes:
        replicas: a data parallel group of the runtime's own, None if it would hold one rank only.
            Reductions during a backward pass must not mix with collectives of the script.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        world = tuple(range(placement.world_size))
        self._made[world] = dist.group.WORLD
        # Every rank makes every group, in one order: torch demands it.
        for axis in _AXES:
            for ranks in placement.groups(axis):
                if ranks not in self._made:
                    self._made[ranks] = dist.new_group(list(ranks))
        self.replicas: dist.ProcessGroup | None = None
        for ranks in placement.groups("dp"):
            if len(ranks) > 1:
                made = dist.new_group(list(ranks))
                self.replicas = made if dist.get_rank() in ranks else self.replicas

    def of(self, axis: Axis) -> dist.ProcessGroup | None:
        """Returns this rank's group on an axis."""
        return self._made[self._placement.group(axis, dist.get_rank())]
