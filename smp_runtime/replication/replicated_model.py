"""What a script may ask of a model about its replicas."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ..errors import NotSupportedError, UsageError
from ..optimization.awaited_parameters import await_all
from ..runtime import current
from .collective_reduction import CommHook
from .data_parallel import DataParallel


class ReplicatedModel:
    """The part of `DistributedModel` that is about its replicas.

    Attributes:
        data_parallel: what this rank does together with the replicas of its part.
    """

    data_parallel: DataParallel

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduces gradients over replicas by ``hook(state, bucket)`` in place of an all-reduce.

        The signature is that of DistributedDataParallel, and torch's own hooks work, such as
        ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook``. The hook
        gets gradients that are averaged over microbatches, divides by the number of replicas
        itself, and returns a future of the reduced buffer.

        Args:
            state: for the hook: for torch's default hooks a process group, or None for the
                data parallel one.
            hook: called once for each bucket and step, in the same order on all replicas.

        Raises:
            UsageError: there is no data parallelism, or `overlapping_allreduce` is False.
        """
        if not current().config.ddp:
            raise UsageError("register_comm_hook is for data parallelism: set ddp to True")
        self.data_parallel.register_comm_hook(state, hook)

    def no_sync(self) -> AbstractContextManager[None]:
        """Makes steps inside accumulate gradients without averaging them over replicas.

        The first step outside averages what was accumulated.
        """
        return self.data_parallel.no_sync()

    def wait_for_parameters(self) -> None:
        """Waits for parameters that `overlap_parameter_gather` left under way.

        The first use of a parameter does so by itself. Call this after `optimizer.step()` before
        the values are read in a way that torch does not show: see the page about optimizers.

        Raises:
            PeerError: another rank failed before it sent its slices.
        """
        await_all()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Lets replicas take different numbers of steps inside, at least one each.

        A replica that leaves early takes part in what the others reduce, with gradients of zero.
        At the end all have the parameters, and the state of the optimizer, of those that left
        last. Ranks of one pipeline must take equally many steps.

        Args:
            divide_by_initial_world_size: average over all replicas, or over those still present.
            enable: False makes it do nothing.
            throw_on_early_termination: raise on all ranks when the first replica leaves.

        Raises:
            UsageError: a replica left before its first step, or `throw_on_early_termination`.
            NotSupportedError: with `shard_optimizer_state`, where every update needs all replicas.
        """
        if enable and current().config.shard_optimizer_state:
            raise NotSupportedError(
                "join can't be used with shard_optimizer_state: give replicas equally many batches"
            )
        return self.data_parallel.join(
            divide_by_initial_world_size, enable, throw_on_early_termination
        )
