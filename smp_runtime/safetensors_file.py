"""Writes safetensors files tensor by tensor; the library for it wants all of them in memory.

The format: eight bytes of header length, a JSON header with the place of each tensor, the data in
row-major order. Reading is left to the library, which maps files and reads single tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .durable_files import durable_file
from .errors import CheckpointDamagedError, NotSupportedError
from .tensors import TensorMeta, as_bytes

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
        tensors: the tensors. Each is asked for when the one before it is written.
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
        return file.tell()


def read_keys(path: Path) -> list[str]:
    """Returns the names of the tensors in a file.

    Raises:
        CheckpointDamagedError: the file is no safetensors file, or is truncated.
    """
    with open_safetensors(path) as file:
        return list(file.keys())


def open_safetensors(path: Path) -> Any:
    """Opens a file for reading single tensors (`keys`, `get_tensor`, `get_slice`, `metadata`).

    Raises:
        CheckpointDamagedError: the file is no safetensors file, or is truncated.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointDamagedError(
            f"{path} is truncated or no safetensors file ({error}); copy it again, or resume from "
            "another checkpoint"
        ) from error


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
