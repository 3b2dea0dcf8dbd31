"""Which samples of a `transformers.Trainer` each replica gets.

accelerate fills the last batch of an epoch with samples of its beginning until all replicas have
equally many, so those count twice. Here every replica gets all samples of a last batch that is not
full: the mean over replicas of their losses, gradients and metrics is then that of one process.
Where a sum is divided by a number of tokens, those of such a shared batch are counted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from accelerate.data_loader import BatchSamplerShard  # type: ignore[import-untyped]


class ReplicaBatches(BatchSamplerShard):  # type: ignore[misc]
    """Lists of the numbers of samples, of one of the processes that accelerate knows.

    Attributes:
        ends_shared: whether the last batch of the epoch that was read last is a shared one.
    """

    ends_shared = False

    def __len__(self) -> int:
        """Returns the number of batches, the same in every process."""
        batches, each = len(self.batch_sampler), 1 if self.split_batches else self.num_processes
        return batches // each if self.drop_last else -(-batches // each)

    def __iter__(self) -> Iterator[Sequence[int]]:
        """Yields this process's part of each full batch, and all of the last one if it is not."""
        each = 1 if self.split_batches else self.num_processes
        waiting: list[Sequence[int]] = []
        for batch in self.batch_sampler:
            waiting.append(batch)
            is_full = self.batch_size is None or len(batch) == self.batch_size
            if is_full and len(waiting) == each:
                yield self._part(waiting)
                waiting = []
        self.ends_shared = bool(waiting) and not self.drop_last
        if self.ends_shared:
            yield [number for batch in waiting for number in batch]

    def _part(self, batches: Sequence[Sequence[int]]) -> Sequence[int]:
        if not self.split_batches:
            return batches[self.process_index]
        length = len(batches[0]) // self.num_processes
        return batches[0][length * self.process_index :][:length]


def repeat_no_samples(loader: Any) -> None:
    """Makes a loader from accelerate give `ReplicaBatches`; iterable data has no such batches."""
    for sampler in (loader.batch_sampler, loader.sampler):
        if isinstance(sampler, BatchSamplerShard):
            sampler.__class__ = ReplicaBatches


def is_shared(accelerator: Any) -> bool:
    """Whether the batch that was read last, of the loader that is read now, is a shared one."""
    state = accelerator.gradient_state
    if not state.end_of_dataloader:
        return False
    loader = state.active_dataloader
    found: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while found is not None and not isinstance(found, ReplicaBatches):
        found = getattr(found, "batch_sampler", None)  # accelerate's, that skips batches
    return found is not None and found.ends_shared
