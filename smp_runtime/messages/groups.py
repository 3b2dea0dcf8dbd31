"""Process groups from a placement; the beginning and the end of torch.distributed."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist

from .. import device
from ..planning.placement import Axis, Placement

_AXES: tuple[Axis, ...] = ("world", "pp", "tp", "rdp", "dp", "mp")


def start_distributed(timeout: float, port: int | None) -> None:
    """Starts torch.distributed from the environment, unless it runs already.

    Without a launcher's variables this process is a world of its own.

    Args:
        timeout: seconds that a collective may take.
        port: where ranks meet, in place of MASTER_PORT.
    """
    if dist.is_initialized():
        return
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(
        device.default_backend(), timeout=datetime.timedelta(seconds=max(timeout, 1.0))
    )


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
