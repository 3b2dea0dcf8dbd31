"""Gradients averaged over replicas of one machine, through memory that all of them see.

Between processes of one machine torch's gloo copies every byte through the kernel several times,
in threads that take the cores from the ranks that compute. Here the gradients stay where they are,
and pass block by block through a little memory that all replicas map. Each replica averages its
share of a block, one run of elements. A block is

1. *published*: the shares of the others are divided and written to shared memory;
2. *averaged*: the published values of the others are added to this replica's own share, in place,
   and the result is written to shared memory;
3. *gathered*: the shares that the others have averaged are copied into the gradient.

So all replicas get the same bits. Shared memory has room for a few blocks, and a block takes the
room of an earlier one that every replica is done with: as long as the replicas work on the same
blocks at the same time, what they share stays in the processor's cache. So they do it in turns with
the backward pass, bucket by bucket, and not in threads: a replica that has launched a bucket works
on it for as long as the others come along, waits a moment for one that is behind, and else goes on
with its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn

from ..messages.shared_memory import Counts, Neighbours
from .blocks import Block, cut
from .buckets import Bucket, check_dense

_ROOM = 4  # blocks
_PATIENCE = 0.001  # seconds

PART_BYTES = 16 << 20
"""What each replica needs of shared memory; of it, what it never writes to takes no memory."""

_PUBLISHED, _AVERAGED, _GATHERED = 0, 1, 2


class StagedReduction:
    """Averages the gradients of one rank with those of its neighbours.

    Args:
        neighbours: the replicas.
        parts: the memory of each, equally long: room for what is published and for what is
            averaged of four blocks.
        on_reduced: called with the index of each bucket that is done.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        parts: Sequence[torch.Tensor],
        on_reduced: Callable[[int], None],
    ) -> None:
        self._neighbours = neighbours
        self._on_reduced = on_reduced
        self._rooms = [part.view(2, _ROOM, -1).unbind() for part in parts]
        self._block_bytes = parts[0].numel() // (2 * _ROOM)
        # Counts of blocks since the beginning, for a replica may begin a step before another one
        # has ended the last.
        self._counts = [0, 0, 0]
        self._has_gone_on = False
        self._heard: dict[int, Counts] = dict.fromkeys(neighbours.peers, (0, 0, 0))
        self._least = [0, 0, 0]  # of what was heard
        self._begun = 0
        self.lay_out([])
        self.begin(1.0)

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Takes other buckets from the next step on, in the order in which they are launched."""
        self._buckets = buckets
        self._firsts = [0, *accumulate(len(bucket.parameters()) for bucket in buckets)]
        self._blocks = list(cut(buckets, len(self._rooms), self._block_bytes))
        self._num_launchable = [
            sum(block.bucket <= index for block in self._blocks) for index in range(len(buckets))
        ]
        dtypes = {block.dtype for block in self._blocks}
        self._published = {d: [list(room[0].view(d)) for room in self._rooms] for d in dtypes}
        self._averaged = {d: [list(room[1].view(d)) for room in self._rooms] for d in dtypes}

    def begin(self, divisor: float) -> None:
        """Begins a step whose gradients are divided by `divisor`."""
        self._begun = self._counts[_GATHERED]
        self._num_launched = 0
        self._gradients: list[torch.Tensor | None] = []
        self._values: list[torch.Tensor] = []
        self._divisor = divisor

    @torch.no_grad()
    def launch(self, index: int) -> list[bool]:
        """Takes the gradients of the next bucket.

        Returns:
            For each of its parameters whether it had a gradient.

        Raises:
            NotSupportedError: a gradient is sparse.
        """
        bucket = self._buckets[index]
        has = []
        for parameter in bucket.parameters():
            gradient = parameter.grad
            has.append(gradient is not None)
            self._gradients.append(gradient)
            self._values.append(_flat(parameter, gradient, bucket.dtype))
            parameter.grad = None
        self._num_launched = self._num_launchable[index]
        return has

    def advance(self) -> None:
        """Averages what was launched as long as the others come along."""
        while self._round() < self._num_launched:
            if not self._has_gone_on:
                heard = self._neighbours.listen(_PATIENCE)
                if not heard:
                    return
                self._hear(heard)

    def finish(self) -> None:
        """Waits until all buckets are averaged.

        Raises:
            PeerError: a rank failed.
            ConnectionLostError: a replica is gone.
            WaitTimeoutError: one did not come in time.
        """
        while self._round() < len(self._blocks):
            if not self._has_gone_on:
                self._hear(self._neighbours.wait(self._late))

    @torch.no_grad()
    def give_out(self, index: int, is_present: Sequence[bool]) -> list[torch.Tensor | None]:
        """Gives the parameters of a bucket their gradients; see `Bucket.give_out`."""
        late = []
        numbers = range(self._firsts[index], self._firsts[index + 1])
        for parameter, number, has in zip(
            self._buckets[index].parameters(), numbers, is_present, strict=True
        ):
            late.append(parameter.grad)
            given, values = self._gradients[number], self._values[number]
            if given is None:
                given = values.view(parameter.shape)
            elif given.data_ptr() != values.data_ptr():
                given.copy_(values.view(given.shape))
            parameter.grad = given if has else None
        if index == len(self._buckets) - 1:
            self._gradients, self._values = [], []  # whoever drops gradients frees their memory
        return late

    # -- blocks ------------------------------------------------------------------------------

    def _hear(self, counts: Mapping[int, Counts]) -> None:
        if counts:
            self._heard.update(counts)
            self._least = [min(column) for column in zip(*self._heard.values(), strict=True)]

    @torch.no_grad()
    def _round(self) -> int:
        """Takes one block, if possible, through each stage; returns how many are done.

        One only, so that the others hear of it at once and work at the same time.
        """
        counts = self._counts
        before = list(counts)
        for stage, do in enumerate((self._publish, self._average, self._gather)):
            if self._may(stage):
                do(self._blocks[counts[stage] - self._begun], counts[stage] % _ROOM)
                counts[stage] += 1
        self._has_gone_on = counts != before
        if self._has_gone_on:
            self._neighbours.tell(counts)
            self._hear(self._neighbours.listen())
        return counts[_GATHERED] - self._begun

    def _may(self, stage: int) -> bool:
        """Says whether the next block can enter a stage."""
        number = self._counts[stage]
        if stage == _PUBLISHED:
            is_there = number - self._begun < self._num_launched
        else:
            is_there = number < self._counts[stage - 1]
        return is_there and all(
            self._least[other] >= count for other, count in _needs(stage, number)
        )

    def _late(self) -> list[int]:
        """Returns the replicas that hold this one up, and perhaps each other."""
        for stage in (_AVERAGED, _PUBLISHED, _GATHERED):  # who has published nothing is the cause
            number = self._counts[stage]
            if number - self._begun < len(self._blocks):
                for other, count in _needs(stage, number):
                    late = [peer for peer, counts in self._heard.items() if counts[other] < count]
                    if late:
                        return late
        return []

    def _publish(self, block: Block, room: int) -> None:
        mine = self._published[block.dtype][self._neighbours.rank][room]
        for replica, share in enumerate(block.shares):
            if replica != self._neighbours.rank:
                for index, first, last, place in share:
                    values = self._values[index][first:last]
                    torch.div(values, self._divisor, out=mine[place : place + last - first])

    def _average(self, block: Block, room: int) -> None:
        rank, size = self._neighbours.rank, len(block.shares)
        published = self._published[block.dtype]
        mine, start = self._averaged[block.dtype][rank][room], block.starts[rank]
        first_peer, *more = [published[(rank + i) % size][room] for i in range(1, size)]
        for index, first, last, place in block.shares[rank]:
            values, end = self._values[index][first:last], place + last - first
            torch.add(first_peer[place:end], values, alpha=1 / self._divisor, out=values)
            for other in more:
                values.add_(other[place:end])
            mine[place - start : end - start].copy_(values)

    def _gather(self, block: Block, room: int) -> None:
        for replica in self._neighbours.peers:
            theirs, start = self._averaged[block.dtype][replica][room], block.starts[replica]
            for index, first, last, place in block.shares[replica]:
                begin = place - start
                self._values[index][first:last].copy_(theirs[begin : begin + last - first])
        if block.is_last:
            self._on_reduced(block.bucket)


def _needs(stage: int, number: int) -> list[tuple[int, int]]:
    """Returns the counts that all others must have reached before a block enters a stage."""
    if stage == _PUBLISHED:
        return [(_AVERAGED, number + 1 - _ROOM)]  # they have read what is overwritten now
    if stage == _AVERAGED:
        return [(_PUBLISHED, number + 1), (_GATHERED, number + 1 - _ROOM)]
    return [(_AVERAGED, number + 1)]


def _flat(
    parameter: nn.Parameter, gradient: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the values of a gradient in one dimension, in its own memory where that is safe."""
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=dtype)
    check_dense(gradient)
    needs_copy = _num_references(gradient) > _ALONE or gradient.is_conj() or gradient.is_neg()
    return gradient.detach().to(dtype, copy=needs_copy).reshape(-1)


def _num_references(tensor: torch.Tensor) -> int:
    """Counts who has the memory of a tensor, this question included.

    Where a gradient is a view of another one autograd hands it out without a copy: that of `p` in
    ``x + p.view(1, -1)`` lies where that of the sum does, which the backward pass still reads, and
    those of `p` and `q` in ``p.view(-1) + q.view(-1)`` lie in one place.
    """
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


_ALONE = _num_references(torch.empty(1))
