"""Heads of messages: what is packed comes out, and only what nobody can change is remembered."""

import pickle
from typing import Any

import pytest
import torch

from smp_runtime.errors import NotSupportedError
from smp_runtime.messages import heads
from smp_runtime.messages.heads import Edge, Heads
from smp_runtime.tensors import meta_of

EDGE = Edge("the output of h.0", (2, 3), torch.float32)
METAS = [meta_of(torch.zeros(2, 3)), meta_of(torch.zeros(4, dtype=torch.int64))]


@pytest.mark.parametrize("content", [None, EDGE, [1, "two"], {"lr": 0.5}, (EDGE, EDGE)])
def test_a_head_comes_out_as_it_went_in(content: Any) -> None:
    sender, receiver = Heads(), Heads()
    for _ in range(2):
        assert receiver.unpack(sender.pack(content, METAS)) == (content, METAS)


def test_heads_of_transfers_are_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = Heads(), Heads()
    packed = sender.pack(EDGE, METAS)
    first = receiver.unpack(packed)
    monkeypatch.setattr(pickle, "dumps", None)
    monkeypatch.setattr(heads, "load_data", None)
    again = Edge("the output of h.0", (2, 3), torch.float32)
    assert sender.pack(again, list(METAS)) is packed
    assert receiver.unpack(bytes(bytearray(packed))) is first


def test_what_a_receiver_may_change_is_read_afresh() -> None:
    sender, receiver = Heads(), Heads()
    packed = sender.pack([1], [])
    receiver.unpack(packed)[0].append(2)
    assert receiver.unpack(packed)[0] == [1]


def test_other_shapes_types_and_origins_are_other_heads() -> None:
    sender, receiver = Heads(), Heads()
    contents = [EDGE, EDGE._replace(origin="h.1"), EDGE._replace(shape=(3, 2)), None]
    for content in contents:
        for metas in (METAS, METAS[:1], []):
            assert receiver.unpack(sender.pack(content, metas)) == (content, metas)


def test_remembering_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_MAX_KEPT", 3)
    sender, receiver = Heads(), Heads()
    for length in range(10):  # sequences of another length in each step
        edge = EDGE._replace(shape=(length, 3))
        assert receiver.unpack(sender.pack(edge, [])) == (edge, [])
        assert len(sender._packed) <= 3
        assert len(receiver._unpacked) <= 3


def test_a_head_that_names_a_function_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="os.system|posix.system"):
        Heads().unpack(pickle.dumps((pickle.loads(pickle.dumps(__import__("os").system)), [])))
