"""Ranks that wait for each other and for nothing else: proof that a wait will never end.

A rank that waits says which peers could let it go on, and how many messages it has sent to and
received from each. Nothing stops such ranks but a message from one of them. If there is a set of
ranks each of which needs another one of the set, and no message is under way between them, none
of them will ever go on: the first to do so would have to receive a message that was sent after
its sender had said that it waits, so that sender would have gone on before it. The ranks need not
have spoken at the same time.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Standing(NamedTuple):
    """What a rank says of itself while it waits.

    Attributes:
        needs: for each way to go on (a body that waits, say) the peers whose messages it lacks;
            empty where it lacks none.
        sent: number of messages sent to each peer.
        received: number of messages received from each peer.
        text: what it waits for, in words.
    """

    needs: tuple[tuple[int, ...], ...]
    sent: Mapping[int, int]
    received: Mapping[int, int]
    text: str


def stuck_ranks(standings: Mapping[int, Standing]) -> list[int]:
    """Returns the ranks that will never go on, in order.

    Args:
        standings: the last word of each rank that has waited, also of those that went on since.
    """
    stuck = set(standings)
    while True:
        free = {
            rank
            for rank in stuck
            if any(stuck.isdisjoint(peers) for peers in standings[rank].needs)
            or _may_receive(rank, stuck, standings)
        }
        if not free:
            return sorted(stuck)
        stuck -= free


def _may_receive(rank: int, stuck: set[int], standings: Mapping[int, Standing]) -> bool:
    """Says whether a message to `rank` may be under way."""
    received = standings[rank].received
    return any(
        standings[peer].sent.get(rank, 0) != received.get(peer, 0) for peer in stuck - {rank}
    )
