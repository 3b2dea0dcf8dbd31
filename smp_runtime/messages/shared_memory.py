"""Memory that several ranks of one machine see, and what they tell each other about it.

Each rank has a part of its own, to which it alone writes; all others read it. How far a rank has
come is said over a stream, in counts that only grow: who hears them sees what their sender wrote
before, since the kernel stands between the two.

The memory has no name in any file system. It is gone when the last process that maps it is.
"""

from __future__ import annotations

import mmap
import os
import selectors
import struct
import time
from collections.abc import Callable, Collection, Sequence

import torch

from ..errors import ConnectionLostError, WaitTimeoutError
from .wire import Stream

Counts = tuple[int, int, int]
"""How far a rank has come; whoever counts knows in what."""

_COUNTS = struct.Struct("<3Q")
_GLANCE = 0.05
_MARGIN = 1.0  # seconds; a late replica's own waits in its pipeline end first: they know more


class Neighbours:
    """Ranks that all run on one machine, with a stream from this one to each other.

    Args:
        streams: the connection to each, None at this rank's own place.
        rank: this rank's position among them.
        names: their global ranks.
        timeout: seconds that a wait for the others may take.
        check: raises what is known of a failure anywhere in the job; called while waiting.
        explain: says what every rank of the job is doing, where a wait took too long.
        ended: returns the global ranks whose programs have ended: they say nothing more.

    Attributes:
        peers: the positions of the others.
    """

    def __init__(
        self,
        streams: Sequence[Stream | None],
        rank: int,
        names: Sequence[int],
        timeout: float,
        check: Callable[[], None] = lambda: None,
        explain: Callable[[], str] = lambda: "",
        ended: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._streams = {peer: stream for peer, stream in enumerate(streams) if stream is not None}
        self._names = names
        self._timeout = timeout
        self._check = check
        self._explain = explain
        self._ended = ended
        self._unread = {peer: bytearray() for peer in self._streams}
        self._selector = selectors.DefaultSelector()
        for peer, stream in self._streams.items():
            self._selector.register(stream, selectors.EVENT_READ, peer)
        self.rank = rank
        self.peers = list(self._streams)

    def share(self, num_bytes: int) -> list[torch.Tensor] | None:
        """Maps memory of all ranks; all of them call it.

        Args:
            num_bytes: the size of each part, equal on all ranks.

        Returns:
            Each rank's part, a tensor of bytes; None if this system, or one that said so, has no
            such memory. Only all of them together know whether all have it.

        Raises:
            ConnectionLostError: a rank is gone.
            WaitTimeoutError: a rank did not come in time.
        """
        num_bytes = max(num_bytes, 1)  # nothing can't be mapped
        files: dict[int, int | None] = {self.rank: _make(num_bytes)}
        try:
            for stream in self._streams.values():
                stream.send_file(files[self.rank])
            for peer, stream in self._streams.items():
                files[peer] = stream.receive_file()
            found = [_map(files[rank], num_bytes) for rank in sorted(files)]
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise ConnectionLostError(f"a rank of this machine is gone: {error}") from error
        finally:
            for file in files.values():
                if file is not None:
                    os.close(file)
        parts = [part for part in found if part is not None]
        return parts if len(parts) == len(files) else None

    def tell(self, counts: Sequence[int]) -> None:
        """Says all others how far this rank is. One that is gone is noticed in `wait`."""
        for stream in self._streams.values():
            try:
                stream.send(_COUNTS.pack(*counts))
            except OSError as error:
                if isinstance(error, TimeoutError):
                    raise

    def listen(self, patience: float = 0.0) -> dict[int, Counts]:
        """Returns the last counts of those who have said some meanwhile.

        Args:
            patience: seconds to wait for the first of them.
        """
        if not patience:
            return self._hear(list(self._streams))
        return self._hear([key.data for key, _ in self._selector.select(patience)])

    def wait(self, speakers: Callable[[], Sequence[int]]) -> dict[int, Counts]:
        """Waits until anyone says counts, and returns them as `listen` does.

        Args:
            speakers: the positions from which news are needed.

        Raises:
            PeerError: a rank of the job failed.
            ConnectionLostError: one that is needed is gone.
            WaitTimeoutError: nothing came in time.
        """
        deadline = time.monotonic() + self._timeout + _MARGIN
        while True:
            ended = list(self._ended())  # before what they said last is heard
            heard = self.listen(_GLANCE)
            if heard:
                return heard
            self._check()
            needed = speakers()
            for peer in needed:
                if peer not in self._streams or self._names[peer] in ended:
                    raise ConnectionLostError(
                        f"rank {self._names[peer]} closed its connection to rank "
                        f"{self._names[self.rank]}, which needs its gradients"
                    )
            if time.monotonic() > deadline:
                late = ", ".join(f"rank {self._names[peer]}" for peer in needed)
                raise WaitTimeoutError(
                    f"rank {self._names[self.rank]} waited {self._timeout:g} s (setting `timeout`) "
                    f"for the gradients of {late}\n{self._explain()}"
                )

    def close(self) -> None:
        """Closes the streams. What was shared stays."""
        self._selector.close()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _hear(self, peers: Sequence[int]) -> dict[int, Counts]:
        heard = {}
        for peer in peers:
            stream, unread = self._streams[peer], self._unread[peer]
            try:
                unread += stream.receive_ready()
            except (EOFError, OSError):
                self._selector.unregister(stream)
                self._streams.pop(peer).close()
                continue
            whole = len(unread) // _COUNTS.size * _COUNTS.size
            if whole:
                first, second, third = _COUNTS.unpack_from(unread, whole - _COUNTS.size)
                heard[peer] = first, second, third
                del unread[:whole]
        return heard


def is_available() -> bool:
    """Says whether this system has memory that can be handed from process to process."""
    return hasattr(os, "memfd_create")


def _make(num_bytes: int) -> int | None:
    """Returns a file in memory, None where the system refuses."""
    try:
        file = os.memfd_create("smp", os.MFD_CLOEXEC)
    except OSError:
        return None
    try:
        os.ftruncate(file, num_bytes)
    except OSError:  # a limit on the size of files, say
        os.close(file)
        return None
    return file


def _map(file: int | None, num_bytes: int) -> torch.Tensor | None:
    """Returns what is in a file; None if there is none, or no room for it in this process."""
    if file is None:
        return None
    try:
        return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
    except OSError:
        return None
