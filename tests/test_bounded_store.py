"""Calls of a store end, also when the store does not answer."""

import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist

from smp_runtime.messages.bounded_store import BoundedStore


class Stuck:
    """A store behind a link that can be cut."""

    def __init__(self) -> None:
        self.link = threading.Event()
        self.link.set()
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]

    def add(self, key: str, amount: int) -> int:
        self.link.wait()
        total: int = self.store.add(key, amount)
        return total

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)


def test_it_answers_as_the_store_does() -> None:
    store = BoundedStore(dist.HashStore())  # type: ignore[attr-defined]
    assert not store.check(["a"])
    store.set("a", "value")
    assert store.check(["a"])
    assert store.get("a") == b"value"
    assert [store.append("n", "one"), store.append("n", "two")] == [1, 2]
    assert [store.get("n/1"), store.get("n/2")] == [b"one", b"two"]


def test_an_error_of_the_store_is_raised() -> None:
    class Broken:
        def get(self, key: str) -> bytes:
            raise ConnectionError("gone")

    broken: Any = Broken()
    with pytest.raises(ConnectionError, match="gone"):
        BoundedStore(broken).get("a")


def test_without_an_answer_it_raises_soon_then_at_once_and_goes_on_later() -> None:
    stuck: Any = Stuck()
    store = BoundedStore(stuck, patience=0.2)
    assert store.append("n", "one") == 1
    stuck.link.clear()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        store.append("n", "two")
    assert 0.2 <= time.monotonic() - began < 5.0
    with pytest.raises(TimeoutError, match="earlier"):
        store.append("n", "three")
    stuck.link.set()
    deadline = time.monotonic() + 5.0
    while not stuck.store.check(["n/2"]):  # what was late is done, and whole
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert stuck.store.get("n/2") == b"two"
    number = 0
    while not number:
        assert time.monotonic() < deadline
        with suppress(TimeoutError):
            number = store.append("n", "four")
    assert number == 3
