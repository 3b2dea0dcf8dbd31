"""What is true on any replica, found out in the background."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import UsageError


class CombinedFlags:
    """Flags of all replicas, under way to each other.

    Args:
        flags: those of this replica; equally many on all.
        step: the number of the step in which they are told, which must be the same on all.
        group: the replicas.
        device: through which the group sends, None for the default.
    """

    def __init__(
        self,
        flags: Sequence[bool],
        step: int,
        group: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> None:
        self._step = step
        self._found = torch.tensor([step, -step, *flags], dtype=torch.int32, device=device)
        self._work = dist.all_reduce(self._found, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def wait(self) -> list[bool]:
        """Returns for each flag whether it is true on any replica.

        Raises:
            UsageError: the replicas are in different steps.
        """
        assert self._work is not None
        self._work.wait()
        latest, earliest, *found = self._found.tolist()
        if latest != -earliest:
            raise UsageError(
                f"replicas reduce gradients of different steps: one of training step {latest}, "
                f"another one of {-earliest} (this one of {self._step}). Call model.backward in "
                "the same steps on every replica, evaluate under torch.no_grad(), and use "
                "model.join() where replicas have different numbers of batches"
            )
        return [bool(flag) for flag in found]
