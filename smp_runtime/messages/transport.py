"""Messages between the ranks of one pipeline group.

A message is addressed: kind, step, microbatch and number say what it is, and the receiver finds
it in its mailbox under that address, in whatever order messages come. One thread per peer does
nothing but receive, so a send never waits for the peer's program, only for its thread, and no
order of sends can block. A message is a prefix of fixed size with the address, a head (`heads`)
and the bytes of its tensors.

Failures travel the same way: a rank that fails tells all others why, and a peer that vanishes is
noticed by the thread that listens to it.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from ..errors import PeerError
from ..tensors import as_bytes, from_bytes, meta_of
from .heads import Heads
from .standing import Standing
from .wire import Stream

# Magic, length of head, length of body, sender's clock, address.
_PREFIX = struct.Struct("<IIqdBqqqi")
_MAGIC = 0x534D5031
_ALIGNMENT = 64
_SMALL = 65536


class Topic(IntEnum):
    """What a message is about."""

    DATA = 1  # a tensor that another rank needs, or the result of a step
    GRADIENT = 2  # its gradient, or the news that none came
    STRUCTURE = 3  # what a module's result looks like
    ANSWER = 4  # a value that the glue asked for
    INPUTS = 5  # the arguments of a step
    PLAN = 6  # the partition
    SHARED = 7  # gradients and values of parameters that several ranks hold
    STATE = 8  # an entry of a state dict
    EXCHANGE = 9  # the sender has begun an exchange outside the steps
    END = 10  # the sender has done everything it had to do in a step
    FAILURE = 11  # the sender failed
    GOODBYE = 12  # the sender leaves
    STANDING = 13  # what the sender waits for


class Address(NamedTuple):
    """Where a message belongs."""

    topic: Topic
    step: int
    microbatch: int
    number: int
    source: int


class Message(NamedTuple):
    """What arrived: Python content, tensors, and the sender's clock when it was sent."""

    content: Any
    tensors: list[torch.Tensor]
    clock: float
    num_bytes: int


class Transport:
    """Sends to and receives from the other ranks of a pipeline group.

    Args:
        streams: the connection to each rank of the group, None at this rank's own place.
        rank: this rank's position in the group.
        read_clock: what every message carries as the time at which it was sent.
        names: the global ranks of the group, for messages to people; by default its positions.

    Attributes:
        arrived: notified whenever something came.
        failure: what another rank reported.
        has_raised: that report was raised here.
        gone: the ranks that have left, in peace or not.
        ended: the last step that each peer has ended.
        exchanges: the last exchange outside the steps that each peer has begun, and its call.
        sending: bytes that are being sent to a peer, and since when.
        tell_world: given the report of this rank's failure, for those outside the group.
        standings: what each peer that has waited for long said of itself last.
        is_closed: nothing more is said to the others.
    """

    def __init__(
        self,
        streams: Sequence[Stream | None],
        rank: int,
        read_clock: Callable[[], float] = lambda: 0.0,
        names: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.size = len(streams)
        self.arrived = threading.Condition()
        self.failure: PeerError | None = None
        self.has_raised = False
        self.gone: set[int] = set()
        self.ended: dict[int, int] = {}
        self.exchanges: dict[int, tuple[int, str]] = {}
        self.standings: dict[int, Standing] = {}
        self.sending: dict[int, tuple[int, float]] = {}
        self.tell_world: Callable[[str], object] = lambda report: None
        self._names = tuple(names)
        self._streams = list(streams)
        self._locks = [threading.Lock() for _ in streams]
        self._read_clock = read_clock
        self._heads = Heads()
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()
        self._mailbox: dict[Address, Message] = {}
        self.is_closed = False
        self._threads = {
            peer: threading.Thread(
                target=self._listen, args=(peer,), daemon=True, name=f"smp-recv-{peer}"
            )
            for peer in self.peers
        }
        for thread in self._threads.values():
            thread.start()

    @property
    def peers(self) -> list[int]:
        """The other ranks of the group."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def name(self, rank: int) -> int:
        """Returns the global rank of a position in the group."""
        return self._names[rank] if self._names else rank

    def counts(self) -> tuple[int, int]:
        """Returns how many messages were sent and received."""
        return self._num_sent.total(), self._num_received.total()

    def send(
        self, peer: int, address: Address, content: Any = None, tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        """Sends a message; its tensors may change as soon as this returns."""
        metas = [meta_of(tensor)._replace(requires_grad=False) for tensor in tensors]
        head = self._heads.pack(content, metas)
        num_bytes = sum([_padded(meta.num_bytes) for meta in metas])
        prefix = _PREFIX.pack(_MAGIC, len(head), num_bytes, self._read_clock(), *address)
        parts: list[bytes | memoryview] = [prefix + head]
        for tensor, meta in zip(tensors, metas, strict=True):
            if meta.num_elements:
                parts.append(as_bytes(tensor).numpy().data)
            if padding := _padded(meta.num_bytes) - meta.num_bytes:
                parts.append(bytes(padding))
        if len(parts) > 1 and len(head) + num_bytes < _SMALL:
            parts = [b"".join(parts)]
        if address.topic is not Topic.STANDING:
            self._num_sent[peer] += 1
        self._post(peer, parts)

    def tell_standing(self, needed: Sequence[Sequence[Address]], text: str) -> None:
        """Says what this rank waits for, unless it has said so before and nothing changed.

        Args:
            needed: the messages that each body waits for, which may have come meanwhile.
            text: the same in words.
        """
        with self.arrived:
            needs = tuple(
                tuple(sorted({a.source for a in addresses if a not in self._mailbox}))
                for addresses in needed
            )
            mine = Standing(needs, dict(self._num_sent), dict(self._num_received), text)
        if mine != self.standings.get(self.rank):
            self.standings[self.rank] = mine
            for peer in self.peers:
                with suppress(PeerError):  # if it was needed, another look will find it gone
                    self.send(peer, Address(Topic.STANDING, -1, -1, 0, self.rank), tuple(mine))

    def has(self, address: Address) -> bool:
        """Says whether a message has arrived and was not taken."""
        return address in self._mailbox

    def take(self, address: Address) -> Message:
        """Removes and returns a message that has arrived."""
        with self.arrived:
            return self._mailbox.pop(address)

    def look(self, address: Address) -> Message:
        """Returns a message that has arrived and leaves it where it is."""
        with self.arrived:
            return self._mailbox[address]

    def put(self, address: Address, message: Message) -> None:
        """Files a message, also one that this rank leaves for itself."""
        with self.arrived:
            self._mailbox[address] = message
            self.arrived.notify_all()

    def arrived_for(self, step: int, microbatch: int) -> list[tuple[Address, Message]]:
        """Returns the messages for a body that have arrived and were not taken."""
        with self.arrived:
            return [
                (address, message)
                for address, message in self._mailbox.items()
                if (address.step, address.microbatch) == (step, microbatch)
            ]

    def drop_step(self, step: int) -> list[Address]:
        """Forgets the messages of a step that nobody took, and names them."""
        with self.arrived:
            left = [address for address in self._mailbox if 0 <= address.step <= step]
            for address in left:
                del self._mailbox[address]
        return left

    def wait_any(self, addresses: Sequence[Address], timeout: float) -> bool:
        """Waits until one of the messages is there.

        Raises:
            PeerError: another rank failed or left.
        """
        deadline = time.monotonic() + timeout
        with self.arrived:
            while not any(address in self._mailbox for address in addresses):
                self.check()
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self.arrived.wait(left)
        return True

    def check(self) -> None:
        """Raises what another rank reported, if any."""
        if self.failure is not None:
            self.has_raised = True
            raise self.failure

    def fail(self, report: str) -> None:
        """Tells every other rank why this one fails. Never raises."""
        if self.is_closed:
            return
        self.is_closed = True
        with suppress(Exception):
            self.tell_world(report)
        if not self.peers:
            return
        for peer in self.peers:
            with suppress(Exception):  # the first failure must not be covered by this one
                self.send(peer, Address(Topic.FAILURE, -1, -1, 0, self.rank), report)
        # A process that ends at once resets its connections, and what peers did not read is lost.
        time.sleep(0.2)

    def leave(self) -> None:
        """Takes leave of the other ranks."""
        if not self.is_closed:
            self.is_closed = True
            for peer in self.peers:
                with suppress(Exception):  # a peer that is gone needs no goodbye
                    self.send(peer, Address(Topic.GOODBYE, -1, -1, 0, self.rank))

    def close(self, patience: float = 5.0) -> None:
        """Takes leave of the other ranks and waits a little for theirs."""
        self.leave()
        deadline = time.monotonic() + patience
        for peer, thread in self._threads.items():
            self._stream(peer).end()
            thread.join(max(0.0, deadline - time.monotonic()))
            self._stream(peer).close()

    def _stream(self, peer: int) -> Stream:
        stream = self._streams[peer]
        assert stream is not None
        return stream

    def _post(self, peer: int, parts: Sequence[bytes | memoryview]) -> None:
        stream = self._stream(peer)
        try:
            with self._locks[peer]:
                self.sending[peer] = sum(map(len, parts)), time.monotonic()
                for part in parts:
                    stream.send(part)
                del self.sending[peer]
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            # The peer is gone. What it said before it went is better news than a broken pipe.
            self._threads[peer].join(1.0)
            self.check()
            if peer in self.gone:
                return  # it has left in peace, and needs nothing any more
            raise PeerError(
                f"rank {self.name(peer)} is gone: nothing can be sent to it ({error})",
                rank=self.name(peer),
            ) from error

    def _listen(self, peer: int) -> None:
        stream = self._stream(peer)
        prefix = bytearray(_PREFIX.size)
        while True:
            try:
                stream.receive_into(memoryview(prefix))
                address, message = self._read(peer, stream, prefix)
            except Exception as error:  # noqa: BLE001 - whatever it is, the peer is lost
                # After this rank's own goodbye a broken connection is no news. A failure is.
                reason = (
                    f"rank {self.name(peer)} is gone without a word: it was killed, or its machine "
                    f"or the network is lost ({error})"
                )
                self._lose(peer, None if self.is_closed else PeerError(reason, self.name(peer)))
                return
            if address.topic is Topic.GOODBYE:
                self._lose(peer, None)
                return
            if address.topic is Topic.FAILURE:
                self._lose(peer, PeerError(message.content, self.name(peer), is_told=True))
                return
            with self.arrived:
                if address.topic is Topic.STANDING:
                    self.standings[peer] = Standing(*message.content)
                    continue
                self._num_received[peer] += 1
                if address.topic is Topic.EXCHANGE:
                    self.exchanges[peer] = (address.number, message.content)
                    continue
                if address.topic is Topic.END:
                    self.ended[peer] = address.step
                self.put(address, message)

    def _read(self, peer: int, stream: Stream, prefix: bytearray) -> tuple[Address, Message]:
        magic, head_bytes, body_bytes, clock, topic, *numbers = _PREFIX.unpack(prefix)
        if magic != _MAGIC:
            raise ValueError("it sent something that is no message")
        head = bytearray(head_bytes)
        stream.receive_into(memoryview(head))
        content, metas = self._heads.unpack(bytes(head))
        body = torch.empty(body_bytes, dtype=torch.uint8)
        if body_bytes:
            stream.receive_into(body.numpy().data)
        tensors, offset = [], 0
        for meta in metas:
            tensors.append(from_bytes(body, offset, meta))
            offset += _padded(meta.num_bytes)
        return Address(Topic(topic), *numbers), Message(content, tensors, clock, body_bytes)

    def hear(self, failure: PeerError) -> bool:
        """Notes a failure; waits raise the first one that was noted.

        Returns:
            Whether the program knows of a failure already: one was raised, or is its own.
        """
        with self.arrived:
            if self.failure is None:
                self.failure = failure
            self.arrived.notify_all()
            return self.has_raised or self.is_closed

    def _lose(self, peer: int, failure: PeerError | None) -> None:
        """Notes that a peer is gone, and why if that is a failure."""
        with self.arrived:
            self.gone.add(peer)
            if failure is not None:
                self.hear(failure)
            self.arrived.notify_all()


def _padded(num_bytes: int) -> int:
    """Bytes that a tensor takes in a message, so that each begins aligned."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
