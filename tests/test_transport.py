"""Messages: every tensor arrives as it was, in any order; failures and farewells arrive too."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smp_runtime.errors import PeerError
from smp_runtime.messages.transport import Address, Message, Topic, Transport
from smp_runtime.messages.wire import connect
from tests.local_ranks import local_streams
from tests.worlds import run_world

MEGABYTE = 1024 * 1024


def data(number: int, source: int = 0, step: int = 1, microbatch: int = 0) -> Address:
    return Address(Topic.DATA, step, microbatch, number, source)


OPENED: list[Transport] = []


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    """Closes what `group` opened."""
    yield
    while OPENED:
        OPENED.pop().close(patience=0.0)


def group(size: int, **options: Any) -> list[Transport]:
    """Returns the transports of some connected ranks."""
    streams = local_streams(size)
    made = [Transport(mine, rank, **options) for rank, mine in enumerate(streams)]
    OPENED.extend(made)
    return made


def pair(**options: Any) -> tuple[Transport, Transport]:
    first, second = group(2, **options)
    return first, second


def receive(transport: Transport, address: Address) -> Message:
    assert transport.wait_any([address], 10.0)
    return transport.take(address)


def await_true(condition: Any) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_message_brings_content_tensors_and_the_senders_clock() -> None:
    first, second = pair(read_clock=lambda: 2.5)
    first.send(1, data(1), {"word": ("x", 3)}, [torch.arange(3), torch.ones(2, 2)])
    content, tensors, clock, num_bytes = receive(second, data(1))
    assert content == {"word": ("x", 3)}
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2], [[1.0, 1.0], [1.0, 1.0]]]
    assert clock == 2.5
    assert num_bytes == 128  # each tensor begins at a multiple of 64


def test_peers_are_the_others() -> None:
    assert Transport([None], 0).peers == []
    assert group(3)[1].peers == [0, 2]


def test_tensors_may_change_as_soon_as_they_are_sent() -> None:
    first, second = pair()
    small, large = torch.zeros(4), torch.zeros(4000)
    first.send(1, data(1), None, [small, large])
    small += 1
    large += 1
    tensors = receive(second, data(1)).tensors
    assert [tensor.sum().item() for tensor in tensors] == [0.0, 0.0]


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, *range(1500, 2100, 61), 5000])
def test_every_length_around_that_of_a_frame_arrives(num_bytes: int) -> None:
    first, second = pair()
    sent = torch.arange(num_bytes).to(torch.uint8)
    first.send(1, data(1), "x" * (num_bytes % 7), [sent])
    message = receive(second, data(1))
    assert message.content == "x" * (num_bytes % 7)
    assert torch.equal(message.tensors[0], sent)


def test_long_content_arrives() -> None:
    first, second = pair()
    first.send(1, data(1), "x" * 100_000)
    assert receive(second, data(1)) == Message("x" * 100_000, [], 0.0, 0)


def test_messages_are_found_in_any_order() -> None:
    first, second = pair()
    for number in (3, 1, 2):
        first.send(1, data(number), number)
    assert [receive(second, data(number)).content for number in (1, 2, 3)] == [1, 2, 3]


def test_every_part_of_an_address_counts() -> None:
    transport = Transport([None], 0)
    addresses = [
        Address(Topic.DATA, 1, 2, 3, 0),
        Address(Topic.GRADIENT, 1, 2, 3, 0),
        Address(Topic.DATA, 9, 2, 3, 0),
        Address(Topic.DATA, 1, 9, 3, 0),
        Address(Topic.DATA, 1, 2, 9, 0),
        Address(Topic.DATA, 1, 2, 3, 1),
    ]
    for index, address in enumerate(addresses):
        transport.put(address, Message(index, [], 0.0, 0))
    assert [transport.take(address).content for address in addresses] == [0, 1, 2, 3, 4, 5]


def test_taking_removes_and_looking_does_not() -> None:
    transport = Transport([None], 0)
    message = Message("news", [], 0.0, 0)
    assert not transport.has(data(1))
    transport.put(data(1), message)
    assert transport.has(data(1))
    assert transport.look(data(1)) is message
    assert transport.take(data(1)) is message
    assert not transport.has(data(1))


def test_messages_for_a_body_are_listed() -> None:
    transport = Transport([None], 0)
    for address in (data(1), data(2), data(1, microbatch=1), data(1, step=2)):
        transport.put(address, Message(None, [], 0.0, 0))
    assert [address for address, _ in transport.arrived_for(1, 0)] == [data(1), data(2)]


def test_dropping_a_step_forgets_it_and_earlier_ones() -> None:
    transport = Transport([None], 0)
    kept = [data(1, step=3), data(1, step=-1)]  # of the next step, and of none
    dropped = [data(1, step=0), data(1, step=1), data(1, step=2)]
    for address in (*kept, *dropped):
        transport.put(address, Message(None, [], 0.0, 0))
    assert transport.drop_step(2) == dropped
    assert [transport.has(address) for address in kept] == [True, True]


def test_waiting_ends_at_the_first_message_or_after_the_time() -> None:
    transport = Transport([None], 0)
    assert not transport.wait_any([data(1)], 0.01)
    threading.Timer(0.05, transport.put, (data(2), Message(None, [], 0.0, 0))).start()
    assert transport.wait_any([data(1), data(2)], 10.0)


def test_a_failure_reaches_whoever_waits() -> None:
    first, second = pair()
    threading.Timer(0.05, first.fail, ("no more memory",)).start()
    with pytest.raises(PeerError, match="no more memory") as caught:
        second.wait_any([data(1)], 10.0)
    assert caught.value.rank == 0
    with pytest.raises(PeerError, match="no more memory"):
        second.check()
    assert second.gone == {0}


def test_what_arrived_before_a_failure_can_be_taken() -> None:
    first, second = pair()
    first.send(1, data(1), "before")
    first.fail("after")
    await_true(lambda: second.failure)
    assert second.wait_any([data(1)], 0.0)
    assert second.take(data(1)).content == "before"


def test_the_first_failure_stays() -> None:
    here, *others = group(3)
    others[0].fail("first")
    await_true(lambda: here.failure)
    others[1].fail("second")
    await_true(lambda: here.gone == {1, 2})
    with pytest.raises(PeerError, match="first"):
        here.check()


def test_a_farewell_is_no_failure_and_costs_no_time() -> None:
    first, second = pair()
    start = time.monotonic()
    closing = threading.Thread(target=first.close)
    closing.start()
    await_true(lambda: second.gone)
    second.close()
    closing.join()
    second.check()
    assert second.gone == {0}
    assert first.gone == {1}
    assert time.monotonic() - start < 2.0


def test_a_farewell_waits_only_so_long() -> None:
    first, _ = pair()
    start = time.monotonic()
    first.close(patience=0.1)
    assert time.monotonic() - start < 2.0


def test_nothing_is_said_after_a_failure() -> None:
    first, second = pair()
    first.fail("once")
    first.fail("twice")
    first.close(patience=0.0)
    await_true(lambda: second.failure)
    assert str(second.failure) == "once"


def test_the_end_of_a_step_is_noted_and_its_message_kept() -> None:
    first, second = pair()
    address = Address(Topic.END, 7, -1, 0, 0)
    first.send(1, address, "digest")
    assert receive(second, address).content == "digest"
    assert second.ended == {0: 7}


def test_what_is_no_message_is_a_failure_of_its_sender() -> None:
    streams, (other, _) = local_streams(2)
    transport = Transport(streams, 0)
    OPENED.append(transport)
    assert other is not None
    other.send(bytes([1]) * 2048)
    with pytest.raises(PeerError, match="something that is no message") as caught:
        transport.wait_any([data(1)], 10.0)
    assert caught.value.rank == 1
    other.close()


TENSORS = {
    "bool": torch.tensor([True, False]),
    "int64": torch.tensor([-(2**62), 2**62]),
    "float16": torch.tensor([0.5, 65504.0], dtype=torch.float16),
    "bfloat16": torch.tensor([1e30, -0.0], dtype=torch.bfloat16),
    "float64": torch.tensor([1 / 3], dtype=torch.float64),
    "complex64": torch.tensor([1 + 2j]),
    "without dimensions": torch.tensor(7),
    "empty": torch.zeros(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "with gaps": torch.arange(12.0).view(3, 4)[:, ::2],
    "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "infinite": torch.tensor([float("inf"), float("-inf")]),
    "parameter": torch.nn.Parameter(torch.ones(3)),
}


@pytest.mark.world
def test_the_wire_keeps_types_and_layouts_and_takes_large_messages_both_ways() -> None:
    large = torch.arange(5 * MEGABYTE, dtype=torch.int32)  # 20 MB

    def body() -> dict[str, torch.Tensor]:
        rank = dist.get_rank()
        transport = Transport(connect(dist.group.WORLD, rank, 2, 20.0), rank)
        peer = 1 - rank
        transport.send(peer, data(2, rank), None, [large + rank])
        transport.send(peer, data(3, rank), None, [large - rank])
        transport.send(peer, data(1, rank), list(TENSORS), list(TENSORS.values()))
        message = receive(transport, data(1, peer))
        assert torch.equal(receive(transport, data(3, peer)).tensors[0], large - peer)
        assert torch.equal(receive(transport, data(2, peer)).tensors[0], large + peer)
        transport.close()
        assert transport.failure is None
        assert transport.gone == {peer}
        return dict(zip(message.content, message.tensors, strict=True))

    for received in run_world(2, body):
        for name, sent in TENSORS.items():
            got = received[name]
            assert got.dtype == sent.dtype, name
            assert torch.equal(got, sent), name
            assert not got.requires_grad, name
            if name != "with gaps":
                assert got.stride() == sent.stride(), name


def test_a_rank_that_has_left_in_peace_needs_nothing_any_more() -> None:
    first, second = pair()
    second.close(patience=0.0)
    await_true(lambda: 1 in first.gone)
    for number in range(3):
        first.send(1, data(number), None, [torch.zeros(MEGABYTE)])
    first.check()
