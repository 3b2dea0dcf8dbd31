"""Messages between the ranks of one pipeline group. The only file that knows the wire.

A message is addressed: kind, step, microbatch and number say what it is, and the receiver finds
it in its mailbox under that address, in whatever order messages come. One thread per peer does
nothing but receive, so a send never waits for the peer's program, only for its thread, and no
order of sends can block. A message is one frame of fixed size that holds everything if it fits;
otherwise the frame says how much follows in a second transfer.

Failures travel the same way: a rank that fails tells all others why, and a peer that vanishes is
noticed by the thread that listens to it.
"""

from __future__ import annotations

import pickle
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .errors import PeerError
from .tensors import TensorMeta, as_bytes, from_bytes, meta_of

_FRAME_BYTES = 2048
_LAYOUT = struct.Struct("<IIqd")  # magic, length of head, length of body, sender's clock
_MAGIC = 0x534D5031
_ALIGNMENT = 64
_MAX_UNSENT = 4


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
    END = 9  # the sender has done everything it had to do in a step
    FAILURE = 10  # the sender failed
    GOODBYE = 11  # the sender leaves


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
        group: a process group of its own; nothing else may be sent over it.
        rank: this rank's position in the group.
        size: number of ranks in the group.
        read_clock: what every message carries as the time at which it was sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        read_clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self._read_clock = read_clock
        self.arrived = threading.Condition()
        self.failure: PeerError | None = None
        self.has_raised = False
        self.gone: set[int] = set()
        self._lost: set[int] = set()
        self.ended: dict[int, int] = {}
        self._group = group
        self._mailbox: dict[Address, Message] = {}
        self._unsent: dict[int, deque[tuple[Any, torch.Tensor]]] = {
            peer: deque() for peer in self.peers
        }
        self._closed = False
        self._threads = [
            threading.Thread(
                target=self._listen, args=(peer,), daemon=True, name=f"smp-recv-{peer}"
            )
            for peer in self.peers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def peers(self) -> list[int]:
        """The other ranks of the group."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def send(
        self, peer: int, address: Address, content: Any = None, tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        """Sends a message; its tensors may change as soon as this returns."""
        metas = [meta_of(tensor)._replace(requires_grad=False) for tensor in tensors]
        head = pickle.dumps((tuple(address), content, metas), pickle.HIGHEST_PROTOCOL)
        offsets, body_bytes = _layout(metas)
        inline = _LAYOUT.size + len(head) + _ALIGNMENT + body_bytes <= _FRAME_BYTES
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        prefix = _LAYOUT.pack(_MAGIC, len(head), body_bytes, self._read_clock())
        frame[: len(prefix)] = torch.frombuffer(bytearray(prefix), dtype=torch.uint8)
        rest = frame[len(prefix) :] if inline else _buffer(len(head), body_bytes)
        rest[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        start = _body_start(len(head))
        for tensor, offset, meta in zip(tensors, offsets, metas, strict=True):
            if meta.num_elements:
                rest[start + offset : start + offset + meta.num_bytes] = as_bytes(tensor)
        self._post(peer, frame)
        if not inline:
            self._post(peer, rest)

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
        if self._closed:
            return
        self._closed = True
        for peer in self.peers:
            if peer not in self._lost:
                try:
                    self.send(peer, Address(Topic.FAILURE, -1, -1, 0, self.rank), report)
                    for work, _ in self._unsent[peer]:
                        work.wait(timedelta(seconds=2))
                except Exception:  # noqa: BLE001 - the first failure must not be covered by this one
                    continue
        # A process that ends at once resets its connections, and what peers did not read is lost.
        time.sleep(0.2)

    def close(self, patience: float = 5.0) -> None:
        """Takes leave of the other ranks and waits a little for theirs.

        A thread that still listens when the interpreter goes down would bring the process down
        with an ugly message.
        """
        if not self._closed:
            self._closed = True
            for peer in self.peers:
                if peer not in self._lost:
                    with suppress(Exception):  # a peer that is gone needs no goodbye
                        self.send(peer, Address(Topic.GOODBYE, -1, -1, 0, self.rank))
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _post(self, peer: int, buffer: torch.Tensor) -> None:
        assert self._group is not None
        unsent = self._unsent[peer]
        try:
            while len(unsent) >= _MAX_UNSENT:
                unsent.popleft()[0].wait()
            unsent.append((self._group.send([buffer], peer, 0), buffer))
        except RuntimeError:
            # The peer is gone. What it said before it went is better news than a broken pipe.
            self._threads[self.peers.index(peer)].join(1.0)
            self.check()
            raise
        while unsent and unsent[0][0].is_completed():
            unsent.popleft()

    def _listen(self, peer: int) -> None:
        assert self._group is not None
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        while True:
            try:
                self._group.recv([frame], peer, 0).wait()
                address, message = self._read(peer, frame)
            except Exception as error:  # noqa: BLE001 - whatever gloo raises, the peer is lost
                self._lost.add(peer)
                self._lose(peer, f"rank {peer} is gone: the connection to it broke ({error})")
                return
            if address.topic is Topic.FAILURE:
                self._lose(peer, message.content)
                return
            if address.topic is Topic.GOODBYE:
                with self.arrived:
                    self.gone.add(peer)
                    self.arrived.notify_all()
                return
            if address.topic is Topic.END:
                with self.arrived:
                    self.ended[peer] = address.step
            self.put(address, message)

    def _read(self, peer: int, frame: torch.Tensor) -> tuple[Address, Message]:
        magic, head_bytes, body_bytes, clock = _LAYOUT.unpack(
            frame[: _LAYOUT.size].numpy().tobytes()
        )
        if magic != _MAGIC:
            raise PeerError(f"rank {peer} sent something that is no message")
        if _LAYOUT.size + head_bytes + _ALIGNMENT + body_bytes <= _FRAME_BYTES:
            rest = frame[_LAYOUT.size :].clone()
        else:
            rest = _buffer(head_bytes, body_bytes)
            assert self._group is not None
            self._group.recv([rest], peer, 0).wait()
        # Sent by a rank of one's own job, which runs the same program: trusted.
        address, content, metas = pickle.loads(rest[:head_bytes].numpy().tobytes())
        start = _body_start(head_bytes)
        offsets, _ = _layout(metas)
        tensors = [
            from_bytes(rest, start + offset, meta)
            for offset, meta in zip(offsets, metas, strict=True)
        ]
        topic, *numbers = address
        return Address(Topic(topic), *numbers), Message(content, tensors, clock, body_bytes)

    def _lose(self, peer: int, reason: str) -> None:
        with self.arrived:
            self.gone.add(peer)
            if self.failure is None and not self._closed:
                self.failure = PeerError(reason, rank=peer)
            self.arrived.notify_all()


def _layout(metas: Sequence[TensorMeta]) -> tuple[list[int], int]:
    """Aligned offset of each tensor in the body, and the body's length."""
    offsets, end = [], 0
    for meta in metas:
        offsets.append(end)
        end += -(-meta.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _body_start(head_bytes: int) -> int:
    """Where the body begins after a head of so many bytes; aligned in the receiver's buffer."""
    return -(-head_bytes // _ALIGNMENT) * _ALIGNMENT


def _buffer(head_bytes: int, body_bytes: int) -> torch.Tensor:
    return torch.empty(head_bytes + _ALIGNMENT + body_bytes, dtype=torch.uint8)
