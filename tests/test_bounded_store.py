"""Calls of a store end, also when the store does not answer."""

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from smp_runtime.messages.bounded_store import BoundedStore


class Stuck:
    """A store behind a link that can be cut."""

    def __init__(self) -> None:
        self.link = threading.Event()
        self.link.set()
        self.total = 0

    def add(self, key: str, amount: int) -> int:
        self.link.wait()
        self.total += amount
        return self.total


def test_it_answers_as_the_store_does() -> None:
    store = BoundedStore(dist.HashStore())  # type: ignore[attr-defined]
    assert not store.check(["a"])
    store.set("a", "value")
    assert store.check(["a"])
    assert store.get("a") == b"value"
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]


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
    assert store.add("n", 1) == 1
    stuck.link.clear()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        store.add("n", 1)
    first = time.monotonic() - began
    assert 0.2 <= first < 5.0
    with pytest.raises(TimeoutError, match="earlier"):
        store.add("n", 1)
    stuck.link.set()
    while stuck.total < 2:
        time.sleep(0.01)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            assert store.add("n", 1) == 3
            return
        except TimeoutError:
            time.sleep(0.01)
    pytest.fail("it never went on")
