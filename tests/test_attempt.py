"""Ranks that are started again see nothing in torch's store of those that were there before."""

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from smp_runtime.errors import WaitTimeoutError
from smp_runtime.messages.attempt import fresh_store

TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def attempt(shared: Store, delays: list[float], timeout: float = 5.0) -> list[Store | str]:
    """Returns the store, or the error, that each rank gets; ranks come after their delays."""
    found: list[Store | str] = [""] * len(delays)

    def come(rank: int) -> None:
        time.sleep(delays[rank])
        try:
            found[rank] = fresh_store(shared, rank, len(delays), timeout, TORCHRUN)
        except WaitTimeoutError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(len(delays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def stores(found: list[Store | str]) -> list[Store]:
    assert not [each for each in found if isinstance(each, str)]
    return [each for each in found if isinstance(each, Store)]


@pytest.mark.parametrize("delays", [[0.0, 0.0, 0.1], [0.1, 0.0, 0.0]], ids=["first", "last"])
def test_what_an_earlier_attempt_wrote_is_not_seen(delays: list[float]) -> None:
    shared = store()
    for _ in range(3):
        ranks = stores(attempt(shared, delays))
        assert not any(each.check(["key"]) for each in ranks)
        ranks[0].set("key", "value")
        assert [each.get("key") for each in ranks] == [b"value"] * 3


def test_an_attempt_that_broke_off_while_it_met_is_not_taken_for_this_one() -> None:
    shared = store()
    for rank in (1, 2, 0):  # each says hello, or makes its offer, and ends alone
        with pytest.raises(WaitTimeoutError):
            fresh_store(shared, rank, 3, 0.1, TORCHRUN)
    ranks = stores(attempt(shared, [0.0, 0.1, 0.2]))
    ranks[1].set("key", "value")
    assert [each.get("key") for each in ranks] == [b"value"] * 3


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(WaitTimeoutError, match="ranks 1, 2 did not come to smp.init within 0.1 s"):
        fresh_store(store(), 0, 3, 0.1, TORCHRUN)
    with pytest.raises(WaitTimeoutError, match="rank 0 did not come"):
        fresh_store(store(), 2, 3, 0.1, TORCHRUN)


def test_a_store_that_ends_with_the_ranks_is_taken_as_it_is() -> None:
    shared = store()
    assert fresh_store(shared, 0, 2, 0.1, {}) is shared
