"""The ranks that hold the same part of the model, and what they say to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import device
from ..messages.shared_memory import Neighbours
from ..messages.wire import connect
from ..runtime import Runtime


class Replicas:
    """The replicas of one rank's part of the model.

    Attributes:
        group: their process group, which the script can't use; None without other replicas.
        size: how many there are.
        rank: which of them this is.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.size = runtime.placement.size("dp")
        self.rank = runtime.here.dp_rank
        self.group = runtime.groups.replicas
        self._ranks = runtime.placement.group("dp", dist.get_rank())
        self._runtime = runtime
        self._neighbours: Neighbours | None = None

    def neighbours(self) -> Neighbours | None:
        """Returns the replicas if all run on this machine, else None. All of them call it."""
        if self._neighbours is None and self.group is not None:
            runtime = self._runtime
            streams = connect(self.group, self.rank, self.size, runtime.config.timeout)
            made = Neighbours(
                streams,
                self.rank,
                self._ranks,
                runtime.config.timeout,
                runtime.transport.check,
                lambda: runtime.engine.waits.explain(),
                lambda: runtime.watchdog.ended,
            )
            if all(stream is None or stream.is_near for stream in streams):
                self._neighbours = made
                runtime.at_end.append(made.close)
            else:
                made.close()
        return self._neighbours

    def agree(self, make: Callable[[], Any], source: int = 0) -> Any:
        """Returns what one of the replicas makes, on all of them."""
        made = [make() if self.rank == source else None]
        if self.group is not None:
            dist.broadcast_object_list(made, self._ranks[source], group=self.group)
        return made[0]

    def broadcast(self, tensors: Iterable[torch.Tensor], source: int = 0) -> None:
        """Gives every replica the values that the tensors have on one of them."""
        if self.group is None:
            return
        given = [tensor for tensor in tensors if not tensor.is_meta]
        works = [
            dist.broadcast(tensor.data, self._ranks[source], group=self.group, async_op=True)
            for tensor in given
        ]
        for work, tensor in zip(works, given, strict=True):
            assert work is not None
            work.wait()
            if self.rank != source:
                torch.autograd.graph.increment_version(tensor)  # masters follow what has a new one

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """Returns the sums of the replicas' numbers, which are those of few digits: exact."""
        total = torch.tensor(numbers, dtype=torch.float64, device=device.current_device())
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        sums: list[float] = total.tolist()
        return sums


def broadcast_state(module: nn.Module, replicas: Replicas) -> None:
    """Gives every replica the parameters and buffers of the first one."""
    replicas.broadcast([*module.parameters(), *module.buffers()])


class Buffers:
    """Notices which buffers a step has changed.

    Most never change (masks, position tables), and those need not be sent around. Kernels such as
    that of batch norm write to floating-point buffers without counting a version, so those are
    compared with a copy.
    """

    def __init__(self) -> None:
        self._known: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []

    def note(self, buffers: Sequence[torch.Tensor]) -> None:
        """Remembers the buffers as they are."""
        if any(self.changed(buffers)):
            self._known = [
                (buffer, buffer._version, buffer.clone() if buffer.is_floating_point() else None)
                for buffer in buffers
            ]

    def changed(self, buffers: Sequence[torch.Tensor]) -> list[bool]:
        """Says of each buffer whether it is another one or has another content than noted."""
        if len(buffers) != len(self._known):
            return [True] * len(buffers)
        return [
            buffer is not known
            or buffer._version != version
            or (copy is not None and not torch.equal(buffer, copy))
            for buffer, (known, version, copy) in zip(buffers, self._known, strict=True)
        ]
