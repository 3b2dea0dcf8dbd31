"""What a message says of itself before its data: Python content, and what its tensors look like.

The head is pickled. Most messages bring an activation or a gradient and say the same of it in
every microbatch of every step, so those heads are remembered on both sides: pickling one and
reading it again costs some 20 us, in the middle of a step several times that.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..tensors import TensorMeta
from .unpickling import load_data

_MAX_KEPT = 4096


class Edge(NamedTuple):
    """What a transfer brings, as either end of it expects it.

    Attributes:
        origin: what made the tensor.
        shape: its shape.
        dtype: its type.
    """

    origin: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Heads:
    """Packs and unpacks heads, and remembers those that may come again."""

    def __init__(self) -> None:
        self._packed: dict[tuple[Edge | None, tuple[TensorMeta, ...]], bytes] = {}
        self._unpacked: dict[bytes, tuple[Edge | None, list[TensorMeta]]] = {}

    def pack(self, content: Any, metas: Sequence[TensorMeta]) -> bytes:
        """Turns the content and the metas of a message into bytes."""
        if not _recurs(content):
            return pickle.dumps((content, list(metas)), pickle.HIGHEST_PROTOCOL)
        key = (content, tuple(metas))
        packed = self._packed.get(key)
        if packed is None:
            packed = pickle.dumps((content, list(metas)), pickle.HIGHEST_PROTOCOL)
            _keep(self._packed, key, packed)
        return packed

    def unpack(self, packed: bytes) -> tuple[Any, list[TensorMeta]]:
        """Reads what `pack` made.

        Raises:
            NotSupportedError: the bytes hold more than data.
        """
        head = self._unpacked.get(packed)
        if head is None:
            head = content, metas = load_data(packed)
            if _recurs(content):
                _keep(self._unpacked, packed, head)
        return head


def _recurs(content: Any) -> bool:
    """Says whether a content may come again, and nobody can change it meanwhile."""
    return content is None or type(content) is Edge


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    if len(kept) >= _MAX_KEPT:
        kept.clear()
    kept[key] = value
