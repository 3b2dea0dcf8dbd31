"""Replicas of a Trainer together get the batches of one process, and no sample twice."""

from collections.abc import Iterator

import pytest
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, skip_first_batches
from accelerate.state import GradientState, PartialState
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from smp_runtime.trainer.hf_batches import is_shared, repeat_no_samples

REPLICAS = 3


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    yield
    PartialState._reset_state()
    GradientState._reset_state()


def loaders(num_samples: int, splits: bool, drops: bool) -> list[DataLoaderShard]:
    """Returns the loaders of all replicas, of six samples in a whole batch."""
    made = []
    for replica in range(REPLICAS):
        size = 6 if splits else 6 // REPLICAS
        batches = BatchSampler(SequentialSampler(range(num_samples)), size, drops)
        shard = BatchSamplerShard(batches, REPLICAS, replica, splits)
        made.append(DataLoaderShard(range(num_samples), batch_sampler=shard))
        repeat_no_samples(made[-1])
    return made


@pytest.mark.parametrize("drops", [False, True], ids=["keeps", "drops"])
@pytest.mark.parametrize("splits", [False, True], ids=["joined", "split"])
@pytest.mark.parametrize("num_samples", [1, 5, 6, 12, 13, 16])
def test_no_sample_counts_twice(num_samples: int, splits: bool, drops: bool) -> None:
    plain = list(BatchSampler(range(num_samples), 6, drops))
    made = loaders(num_samples, splits, drops)
    found = [[batch.tolist() for batch in loader] for loader in made]
    for loader, batches in zip(made, found, strict=True):
        assert len(loader) == len(batches) == len(plain)
    for number, batch in enumerate(plain):
        parts = [batches[number] for batches in found]
        expected = [batch[i : i + 2] for i in (0, 2, 4)] if len(batch) == 6 else [batch] * 3
        assert parts == expected


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_which_batch_is_shared_is_known_when_it_is_read() -> None:
    class Accelerator:
        gradient_state = GradientState()

    for num_samples, expected in ((12, [False, False]), (14, [False, False, True])):
        for loader in loaders(num_samples, False, False):
            for skipped in (0, 1):
                rest = skip_first_batches(loader, skipped) if skipped else loader
                assert [is_shared(Accelerator) for _ in rest] == expected[skipped:]
    assert not is_shared(Accelerator)
    for size in (2, None):
        for _ in DataLoaderShard(Numbers(), batch_size=size):
            assert not is_shared(Accelerator)
