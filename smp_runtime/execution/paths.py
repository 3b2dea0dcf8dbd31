"""Every rank must take the same path through a step; here it is noticed when one does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import PathMismatchError, PeerError, UsageError
from ..messages.transport import Address, Topic, Transport
from .runs import Run

ADVICE = (
    "Every rank must take the same path through the step; look for a branch that depends on the "
    "rank, on time, or on random numbers drawn outside the step, and for a caught exception"
)
"""What to look for where paths differ."""

_IN_ORDER = (Topic.DATA, Topic.ANSWER)


def describe(address: Address, transport: Transport) -> str:
    """Says in words what a message is."""
    source = transport.name(address.source)
    what = address.topic.name.lower()
    if address.topic is Topic.STATE:
        return f"an entry of the state dict from rank {source}, which must call it, too"
    if address.microbatch < 0:
        return f"{what} from rank {source}"
    return (
        f"{what} {address.number} of step {address.step}, microbatch {address.microbatch} "
        f"from rank {source}"
    )


class Paths:
    """Compares this rank's paths with what it hears of the other ranks'.

    Attributes:
        num_exchanges: how many exchanges outside the steps this rank has begun.
    """

    def __init__(self, transport: Transport) -> None:
        self.num_exchanges = 0
        self._transport = transport
        self._digests: dict[int, list[tuple[int, str]]] = {}

    def tell(self, step: int, runs: Sequence[Run]) -> None:
        """Tells the other ranks the paths of a step, which ends here for this rank.

        Raises:
            PathMismatchError: another rank took another path, in this step or the one before.
        """
        mine = [(run.body.digest, run.body.last_origin) for run in runs]
        self._digests[step] = mine
        for peer in self._transport.peers:
            self._transport.send(peer, Address(Topic.END, step, -1, 0, self._transport.rank), mine)
        for known in sorted(self._digests):
            self._compare(known)

    def next_exchange(self, call: str) -> int:
        """Numbers a collective outside the steps, and tells the other ranks of it.

        Args:
            call: the function that the user called, for messages.
        """
        self.num_exchanges += 1
        for peer in self._transport.peers:
            address = Address(Topic.EXCHANGE, -1, -1, self.num_exchanges, self._transport.rank)
            self._transport.send(peer, address, call)
        return self.num_exchanges

    def forget(self, step: int) -> None:
        """Forgets a step that every rank has ended."""
        self._digests.pop(step, None)

    def check_coming(self, needed: Sequence[Address]) -> None:
        """Makes sure that messages can still come.

        Raises:
            PeerError: their sender failed or left.
            UsageError: their sender waits for this rank outside the steps.
            PathMismatchError: their sender has ended the step without sending them.
        """
        transport = self._transport
        transport.check()
        here = transport.name(transport.rank)
        for address in needed:
            source, what = transport.name(address.source), describe(address, transport)
            ended = transport.ended.get(address.source, -1)
            if 0 <= address.step <= ended and not transport.has(address):
                raise PathMismatchError(
                    f"rank {source} ended step {address.step} without sending {what}, for which "
                    f"rank {here} waits. {ADVICE}"
                )
            number, call = transport.exchanges.get(address.source, (0, ""))
            if ended < address.step and number > self.num_exchanges:
                raise UsageError(
                    f"rank {source} called {call}, while rank {here} is in "
                    f"step {address.step}; every rank of the pipeline must call {call}"
                )
            if address.source in transport.gone and not transport.has(address):
                raise PeerError(
                    f"rank {source} ended its program while rank {here} "
                    f"waits for {what}; every rank must call the step equally often",
                    rank=source,
                )

    def check_order(self, run: Run) -> None:
        """Looks for messages that prove that what a body waits for will never come.

        A body takes its data in the order of their numbers, and a peer sends it in that order.

        Raises:
            PathMismatchError: there is such a message.
        """
        transport, body = self._transport, run.body
        missing = [a for a in run.addresses if not transport.has(a)]
        for address in missing:
            if address.topic is Topic.STRUCTURE:
                self._check_structure(run, address)
        needed = [a for a in missing if a.topic in _IN_ORDER]
        if not needed:
            return
        for address, message in transport.arrived_for(body.step, body.microbatch):
            if address.topic not in _IN_ORDER or address in run.addresses:
                continue
            is_orphan = address.number < min(a.number for a in needed)
            has_passed = any(
                a.source == address.source and a.number < address.number for a in needed
            )
            if is_orphan or has_passed:
                raise PathMismatchError(
                    f"rank {transport.name(address.source)} sent {describe(address, transport)} "
                    f"({_what(message.content)}), while rank {transport.name(transport.rank)} "
                    f"waits for {describe(needed[0], transport)} after {body.last_origin}. {ADVICE}"
                )

    def _check_structure(self, run: Run, needed: Address) -> None:
        """Looks for signs that the owner of a module saw other arguments than this rank."""
        transport, body = self._transport, run.body
        place = (body.step, body.microbatch, body.number)
        has_ended = transport.ended.get(needed.source, -1) >= body.step
        has_passed = has_ended or any(
            address.source == needed.source
            and address.topic in _IN_ORDER
            and address.number > body.number
            for address, _ in transport.arrived_for(body.step, body.microbatch)
        )
        told = [message.content[1] for _, message in transport.arrived_for(-1, -1)]
        if has_passed or any(other[:3] == place for other in told):
            raise PathMismatchError(
                f"{body.last_origin} was called with arguments that differ between ranks "
                f"{transport.name(needed.source)} and {transport.name(transport.rank)} in other "
                "things than the values of tensors: an object (a cache, say) that modules filled "
                "on their own ranks only, or a branch that depends on the rank, on time, or on "
                "unseeded random numbers"
            )

    def _compare(self, step: int) -> None:
        """Compares a step's paths with those peers whose word has come."""
        transport = self._transport
        for peer in transport.peers:
            address = Address(Topic.END, step, -1, 0, peer)
            if not transport.has(address):
                continue
            theirs = transport.take(address).content
            for i, (mine, other) in enumerate(zip(self._digests[step], theirs, strict=False)):
                if mine[0] != other[0]:
                    raise PathMismatchError(
                        f"step {step}, microbatch {i}: ranks {transport.name(transport.rank)} and "
                        f"{transport.name(peer)} took different paths; the last things on them are "
                        f"{mine[1]} and {other[1]}. {ADVICE}"
                    )


def _what(content: Any) -> str:
    return str(content[0]) if isinstance(content, tuple) else "a result"
