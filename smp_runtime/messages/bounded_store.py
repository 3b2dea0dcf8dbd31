"""A client of torch's store whose calls end: with an answer, or with an error after some seconds.

Most calls of torch's client wait for the answer without a limit, and hold the client's lock
meanwhile. Where the link to the store's machine is cut, nothing ever answers, and whoever wants to
report just that would wait as well. So a thread of its own makes the calls, one after the other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch.distributed.distributed_c10d import Store

_Request = tuple[Callable[..., Any], tuple[Any, ...], "Future[Any]"]


class BoundedStore:
    """The calls of a store that the board needs. They may be made from any thread.

    Every one raises `TimeoutError` after `patience` seconds without an answer, and at once as long
    as an earlier one has none. The store goes on when it answers again.

    Args:
        store: a client that nobody else uses.
        patience: seconds to wait for an answer.
    """

    def __init__(self, store: Store, patience: float = 3.0) -> None:
        self._store: Any = store
        self._patience = patience
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._late: Future[Any] | None = None
        threading.Thread(target=self._serve, daemon=True, name="smp-store").start()

    def append(self, name: str, value: str) -> int:
        """Gives ``name/N`` a value, where N counts from 1, and returns N.

        Both are one question: if the answer is late, no number stays without its value.
        """
        number: int = self._ask(self._append, name, value)
        return number

    def check(self, keys: Sequence[str]) -> bool:
        """Says whether all keys have values."""
        found: bool = self._ask(self._store.check, list(keys))
        return found

    def get(self, key: str) -> bytes:
        """Returns the value of a key."""
        value: bytes = self._ask(self._store.get, key)
        return value

    def set(self, key: str, value: str) -> None:
        """Gives a key a value."""
        self._ask(self._store.set, key, value)

    def _append(self, name: str, value: str) -> int:
        number: int = self._store.add(f"{name}/count", 1)
        self._store.set(f"{name}/{number}", value)
        return number

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        with self._lock:
            if self._late is not None and not self._late.done():
                raise TimeoutError("the job's store has not answered an earlier question yet")
            answer: Future[Any] = Future()
            self._requests.put((call, args, answer))
            try:
                return answer.result(self._patience)
            except TimeoutError:
                self._late = answer
                raise

    def _serve(self) -> None:
        while True:
            call, args, answer = self._requests.get()
            try:
                answer.set_result(call(*args))
            except Exception as error:  # noqa: BLE001 - carried to who asked
                answer.set_exception(error)
