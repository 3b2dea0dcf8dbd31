"""Writes and reads safetensors files tensor by tensor.

The library for it wants all tensors of a file in memory to write them, and maps files to read them,
which counts as memory of each rank that reads. The format is simple: eight bytes of header length,
a JSON header with the place of each tensor, the data in row-major order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import CheckpointDamagedError, NotSupportedError
from ..tensors import TensorMeta, as_bytes
from .durable_files import durable_file

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_ALIGNMENT = 8


def write_safetensors(
    path: Path,
    metas: Mapping[str, TensorMeta],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str],
) -> int:
    """Writes a file that is on the disk when this returns.

    Args:
        path: the file.
        metas: what the tensors look like, by name, in the order in which they come.
        tensors: the tensors, perhaps in flat pieces. Each is asked for when the one before it is
            written.
        metadata: strings to keep in the header.

    Returns:
        The size of the file in bytes.

    Raises:
        CheckpointWriteError: the file can't be written.
        NotSupportedError: the format has no name for a type.
    """
    header = _header(metas, metadata)
    with durable_file(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            if tensor.numel():
                file.write(as_bytes(tensor.detach().contiguous()).numpy().data)
            del tensor  # before the next one is made
        return file.tell()


class SafetensorsFile:
    """A file to read single tensors from.

    Args:
        path: the file.

    Attributes:
        path: the file.
        metadata: strings that are kept in the header.
        shapes: the shape of each tensor, by name.

    Raises:
        CheckpointDamagedError: the file is no safetensors file, or is truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > path.stat().st_size:
                    raise ValueError("its header is longer than the file")
                header = json.loads(file.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self._entries: dict[str, dict[str, Any]] = header
            self._begin = 8 + length
            self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if self._begin + end > path.stat().st_size:
                raise ValueError(f"it should have {self._begin + end} bytes")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointDamagedError(
                f"{path} is truncated or no safetensors file ({error}); copy it again, or use "
                "another one"
            ) from error

    def read(self, name: str) -> torch.Tensor:
        """Reads one tensor into new memory."""
        entry = self._entries[name]
        tensor = torch.empty(self.shapes[name], dtype=_DTYPES[entry["dtype"]])
        start, end = entry["data_offsets"]
        if end > start:
            raw = tensor.view(-1).view(torch.uint8)
            with self.path.open("rb", buffering=0) as file:
                file.seek(self._begin + start)
                _fill(raw.numpy().data, file)
        return tensor


def _fill(buffer: memoryview, file: IO[bytes]) -> None:
    """Reads until a buffer is full; a single read stops at two gigabytes."""
    filled = 0
    while filled < len(buffer):
        count = file.readinto(buffer[filled:])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointDamagedError(f"{file.name} is truncated; copy it again")
        filled += count


def _header(metas: Mapping[str, TensorMeta], metadata: Mapping[str, str]) -> bytes:
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, meta in metas.items():
        if meta.dtype not in _DTYPE_NAMES:
            raise NotSupportedError(
                f"{name} has the type {meta.dtype}, which a safetensors file can't hold; convert it"
            )
        content[name] = {
            "dtype": _DTYPE_NAMES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [offset, offset + meta.num_bytes],
        }
        offset += meta.num_bytes
    text = json.dumps(content).encode()
    return text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
