"""Ranks that part company are found out, each time with both sides of the story."""

from types import SimpleNamespace
from typing import Any

import pytest

from smp_runtime.errors import PathMismatchError, PeerError
from smp_runtime.execution.paths import Paths, describe
from smp_runtime.execution.runs import Run
from smp_runtime.messages.transport import Address, Message, Topic
from tests.local_ranks import LocalRank, run_ranks


def data(number: int, source: int = 1, topic: Topic = Topic.DATA) -> Address:
    return Address(topic, 4, 0, number, source)


def run_at(digest: int, origin: str = "here", *addresses: Address) -> Run:
    body: Any = SimpleNamespace(digest=digest, last_origin=origin, step=4, microbatch=0)
    return Run(body, addresses=addresses)


def test_a_message_is_described_in_words() -> None:
    transport: Any = SimpleNamespace(name=lambda rank: rank + 4)  # of another pipeline group
    assert describe(data(7), transport) == "data 7 of step 4, microbatch 0 from rank 5"
    assert describe(Address(Topic.STRUCTURE, -1, -1, 123, 2), transport) == "structure from rank 6"


def await_end(rank: LocalRank, step: int) -> None:
    """Waits until the other rank has told its path."""
    transport = rank.transport
    with transport.arrived:
        assert transport.arrived.wait_for(
            lambda: transport.ended.get(1 - rank.index, 0) >= step or transport.gone, 10.0
        )


def tell(rank: LocalRank, *digests: int) -> None:
    """Ends step 4 on a path, and hears of the other's by the end of the next."""
    paths = Paths(rank.transport)
    paths.tell(4, [run_at(digest, f"place {digest}") for digest in digests])
    await_end(rank, 4)
    paths.tell(5, [])
    await_end(rank, 5)


def test_equal_paths_are_silent() -> None:
    run_ranks(2, lambda rank: tell(rank, 1, 2))


def test_other_paths_are_named_with_their_microbatch_and_ends() -> None:
    with pytest.raises(
        PathMismatchError,
        match=r"step 4, microbatch 1: ranks \d and \d .* are place \d and place \d\. Every rank",
    ):
        run_ranks(2, lambda rank: tell(rank, 1, 2 + rank.index))


def test_what_is_forgotten_is_not_compared() -> None:
    def body(rank: LocalRank) -> None:
        paths = Paths(rank.transport)
        paths.tell(4, [run_at(rank.index)] if rank.index == 0 else [run_at(0)])
        paths.forget(4)
        paths.tell(5, [run_at(3)])
        await_end(rank, 5)

    run_ranks(2, body)


def check_coming(prepare: Any) -> None:
    def body(rank: LocalRank) -> None:
        prepare(rank.transport)
        Paths(rank.transport).check_coming([data(7)])

    run_ranks(1, body)


def test_a_message_may_still_come() -> None:
    check_coming(lambda transport: None)
    check_coming(lambda transport: transport.ended.update({1: 3}))


def test_a_sender_that_ended_the_step_sends_no_more() -> None:
    with pytest.raises(PathMismatchError, match=r"rank 1 ended step 4 without sending data 7 of"):
        check_coming(lambda transport: transport.ended.update({1: 4}))


def test_a_sender_that_left_sends_no_more() -> None:
    with pytest.raises(PeerError, match=r"rank 1 ended its program while rank 0 waits") as caught:
        check_coming(lambda transport: transport.gone.add(1))
    assert caught.value.rank == 1


def test_what_has_come_is_no_matter() -> None:
    def come_and_go(transport: Any) -> None:
        transport.put(data(7), Message(None, [], 0.0, 0))
        transport.gone.add(1)
        transport.ended[1] = 4

    check_coming(come_and_go)


def check_order(arrived: Address, *needed: Address) -> None:
    def body(rank: LocalRank) -> None:
        rank.transport.put(arrived, Message(("the output of h", (), None), [], 0.0, 0))
        Paths(rank.transport).check_order(run_at(0, "the loss", *needed))

    run_ranks(1, body)


def test_a_later_message_of_the_same_sender_proves_that_an_earlier_one_was_left_out() -> None:
    with pytest.raises(
        PathMismatchError,
        match=r"rank 1 sent data 9 .*\(the output of h\), while rank 0 waits for data 7 .* the lo",
    ):
        check_order(data(9), data(7))


def test_an_earlier_message_that_nobody_took_is_an_orphan() -> None:
    with pytest.raises(PathMismatchError, match="sent data 5"):
        check_order(data(5), data(7))
    with pytest.raises(PathMismatchError, match="sent answer 5"):
        check_order(data(5, topic=Topic.ANSWER), data(7))


def test_what_is_in_order_is_no_matter() -> None:
    check_order(data(7), data(7))
    check_order(data(9, source=2), data(7))
    check_order(data(5, topic=Topic.GRADIENT), data(7))
    check_order(data(5))
