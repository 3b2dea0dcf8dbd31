"""Neither a wire with NCCL's rules nor random delays change a number or make a step stall."""

import itertools
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import smp_runtime as smp
from smp_runtime.messages.transport import Address, Topic, Transport
from tests.local_ranks import LocalRank, backward, run_ranks
from tests.replicated_chain import assert_close, batch, gradients, mean_gradients, start, train
from tests.subjects import SUBJECTS
from tests.test_engine import WIDTH, chain, pins
from tests.transparency import Case, check
from tests.wires import OrderedStream, delays, ordered
from tests.worlds import run_world

POLICIES = ["interleaved", "simple"]
Streams = list[list[Any]]


def ordered_streams(size: int) -> Streams:
    """Returns for each rank its ordered streams to the others."""
    streams: Streams = [[None] * size for _ in range(size)]
    for a, b in itertools.combinations(range(size), 2):
        near, far = socket.socketpair()
        streams[a][b], streams[b][a] = OrderedStream(near, b, 5.0), OrderedStream(far, a, 5.0)
    return streams


def test_a_send_ends_when_its_receiver_has_taken_it() -> None:
    ((_, first), (second, _)) = ordered_streams(2)
    sent = threading.Event()

    def send() -> None:
        first.send(b"abc")
        sent.set()

    def listen() -> None:
        with suppress(OSError, EOFError):  # until it is closed
            first.receive_into(memoryview(bytearray(1)))

    for work in (send, listen):
        threading.Thread(target=work, daemon=True).start()
    taken = bytearray(2)
    second.receive_into(memoryview(taken))
    assert not sent.wait(0.1)
    rest = bytearray(1)
    second.receive_into(memoryview(rest))
    assert sent.wait(5.0)
    assert taken + rest == b"abc"
    for stream in (first, second):
        stream.close()


def test_messages_cross_without_buffers() -> None:
    streams = ordered_streams(2)
    ranks = [Transport(mine, rank) for rank, mine in enumerate(streams)]
    big = torch.arange(1 << 20)

    def send(rank: Transport) -> None:
        for number in range(5):
            peer = 1 - rank.rank
            rank.send(peer, Address(Topic.DATA, 1, 0, number, rank.rank), number, [big + number])

    threads = [threading.Thread(target=send, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for rank, number in itertools.product(ranks, range(5)):
        address = Address(Topic.DATA, 1, 0, number, 1 - rank.rank)
        assert rank.wait_any([address], 5.0)
        assert torch.equal(rank.take(address).tensors[0], big + number)
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.close(patience=0.5)


def step_results(size: int, num_microbatches: int, policy: str, **options: Any) -> list[Any]:
    """Returns each rank's losses and gradients of two steps of a chain and a ring."""
    torch.manual_seed(0)
    model, x = chain(size + 1), torch.arange(2.0 * WIDTH).view(2, WIDTH) / WIDTH
    places = {**pins(size), str(size): 0}  # the last stage is back on rank 0

    def body(rank: LocalRank) -> tuple[list[float], list[Tensor | None]]:
        mine = rank.place(model, places, x)

        def step(x: Tensor) -> Tensor:
            loss = mine(x).square().mean()
            backward(loss)
            return loss

        batches = [x * (i + 1) for i in range(num_microbatches)]
        losses = [float(loss) for _ in range(2) for loss in rank.step(step, batches)]
        return losses, [p.grad for p in mine.parameters() if not p.is_meta]

    return run_ranks(size, body, policy=policy, active=4, **options)


def equal(a: Any, b: Any) -> bool:
    """Compares results bit by bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("size", "num_microbatches"), [(2, 1), (2, 5), (3, 4), (4, 2), (4, 6)])
def test_schedules_on_an_ordered_wire(
    size: int, num_microbatches: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step_results(size, num_microbatches, policy)
    monkeypatch.setattr("tests.local_ranks.local_streams", ordered_streams)
    assert equal(step_results(size, num_microbatches, policy), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_random_delays_change_nothing(policy: str) -> None:
    expected = step_results(3, 4, policy)
    with delays(2.0):
        assert equal(step_results(3, 4, policy), expected)


@pytest.mark.world
def test_a_transparency_case_on_an_ordered_wire_with_delays() -> None:
    with ordered(), delays(0.3):
        check(SUBJECTS[0], 3, [Case(4, policy) for policy in POLICIES])


@pytest.mark.world
def test_replicas_on_an_ordered_wire_average_their_gradients() -> None:
    def body() -> Any:
        model = start(2, m=2)
        found = []
        for step in range(2):
            model.zero_grad()
            train(model, batch(smp.dp_rank() + step))
            found.append(gradients(model))
        return found

    with ordered():
        by_rank = run_world(4, body)
    for found in by_rank:
        for step in range(2):
            assert_close(found[step], mean_gradients(1.0, step, step + 1))
