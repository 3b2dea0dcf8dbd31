"""News for every rank of the job, also those that share no pipeline: a board in torch's store.

News are numbered and stay on the board; each rank reads them in their order. Three kinds exist: a
rank failed, a rank ended its program, and a rank asks all others what they are doing (a roll call).
Answers lie beside the board. Everything is JSON.
"""

from __future__ import annotations

import json
import time
from typing import Any, Literal, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from .bounded_store import BoundedStore

FAILURE: Literal["failure"] = "failure"
END: Literal["end"] = "end"
ROLL_CALL: Literal["roll call"] = "roll call"

_GLANCE = 0.05


class News(NamedTuple):
    """One item on the board.

    Attributes:
        number: its place on the board, from 1; a roll call's answers go by it.
        kind: `failure`, `end` or `roll call`.
        rank: the global rank that put it there.
        text: what that rank says.
    """

    number: int
    kind: str
    rank: int
    text: str


class Bulletin:
    """The board as one rank sees it. Its methods may be called from any thread.

    They raise `TimeoutError` where the store does not answer.

    Args:
        store: torch's store; all ranks have the same one.
        name: tells apart boards of one store.
        rank: this rank, globally.
    """

    def __init__(self, store: Store, name: str, rank: int) -> None:
        # A client of its own, as another thread's blocking call would hold this one up.
        own = store.clone() if hasattr(store, "clone") else store
        self._store = BoundedStore(PrefixStore(f"smp_runtime/{name}", own))
        self._rank = rank
        self._num_read = 0

    def post(self, kind: str, text: str) -> int:
        """Puts news on the board and returns their number."""
        return self._store.append("news", json.dumps([kind, self._rank, text]))

    def read(self) -> list[News]:
        """Returns the news that came since the last call."""
        news = []
        while self._store.check([f"news/{self._num_read + 1}"]):
            found = self._store.get(f"news/{self._num_read + 1}")
            self._num_read += 1
            news.append(News(self._num_read, *json.loads(found)))
        return news

    def is_mine(self, news: News) -> bool:
        """Says whether this rank posted some news."""
        return news.rank == self._rank

    def answer(self, call: int, answer: Any) -> None:
        """Answers a roll call with something that JSON can hold."""
        self._store.set(f"answer/{call}/{self._rank}", json.dumps(answer))

    def answers(self, call: int, size: int, patience: float) -> dict[int, Any]:
        """Returns the answers to a roll call by rank, of those that answer in time.

        Args:
            call: its number.
            size: the number of ranks.
            patience: seconds to wait for all.
        """
        deadline = time.monotonic() + patience
        found: dict[int, Any] = {}
        while True:
            for rank in set(range(size)) - found.keys():
                key = f"answer/{call}/{rank}"
                if self._store.check([key]):
                    found[rank] = json.loads(self._store.get(key))
            if len(found) == size or time.monotonic() > deadline:
                return found
            time.sleep(_GLANCE)
