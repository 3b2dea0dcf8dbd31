"""What a tensor looks like without its data, and how its data travels as bytes.

A `TensorMeta` is all that a rank knows of a tensor it does not own. Strides are part of it,
because `.view` in the user's glue must succeed or fail on every rank alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import device
from .errors import NotSupportedError

_PROPERTY_NAMES = """
_version dtype is_cuda is_mkldnn is_mps is_nested is_quantized
is_sparse is_xpu itemsize layout name names nbytes ndim output_nr shape
"""
_METHOD_NAMES = """
__hash__ __len__ dim element_size get_device is_complex is_conj is_contiguous is_floating_point
is_inference is_neg is_signed ndimension nelement numel register_hook
register_post_accumulate_grad_hook retain_grad size storage_offset stride
"""


def _metadata_functions() -> frozenset[Any]:
    found: list[Any] = [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor]
    for name in _METHOD_NAMES.split():
        if hasattr(torch.Tensor, name):  # not every torch has them all
            found.append(getattr(torch.Tensor, name))
    for name in _PROPERTY_NAMES.split():
        if hasattr(torch.Tensor, name):
            found.append(getattr(torch.Tensor, name).__get__)
    return frozenset(found)


METADATA_FUNCTIONS = _metadata_functions()
"""What torch can tell of a tensor without its data: shapes, types, and what autograd keeps."""


class TensorMeta(NamedTuple):
    """Shape, memory layout, type, device and autograd flag of one tensor.

    The device has no index: metas are compared between ranks, and each rank has a device of its
    own of that type.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a tensor without dimensions."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        """Bytes of the data on the wire, which holds no gaps."""
        return self.num_elements * self.dtype.itemsize

    def describe(self) -> str:
        """Prints like ``float32[4, 128]``."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Returns the meta of a strided tensor.

    Raises:
        NotSupportedError: the tensor is sparse or nested; only strided tensors cross ranks.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise NotSupportedError(
            f"a tensor of layout {tensor.layout} can't cross pipeline ranks; "
            "convert it with .to_dense() before it meets a module of another rank"
        )
    found = tensor.device
    return TensorMeta(
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        found if found.index is None else torch.device(found.type),
        tensor.requires_grad,
    )


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often a tensor was changed in place; -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _memory_order(meta: TensorMeta) -> tuple[int, ...] | None:
    """Dimensions from slowest to fastest if the tensor is dense, else None."""
    order = sorted(range(len(meta.shape)), key=lambda dim: (-meta.stride[dim], dim))
    expected = 1
    for dim in reversed(order):
        if meta.shape[dim] != 1 and meta.stride[dim] != expected:
            return None
        expected *= meta.shape[dim]
    return tuple(order)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's data as a flat byte tensor on the CPU, in memory order if dense.

    The result may share memory with `tensor`: copy it before the tensor may change.
    """
    plain = tensor.detach()
    if plain.is_complex() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        order = _memory_order(meta_of(plain))
        if order is not None:
            plain = plain.permute(order)
        plain = plain.contiguous()
    flat = plain.view(-1).cpu()
    return flat.view(torch.uint8)


def from_bytes(buffer: torch.Tensor, offset: int, meta: TensorMeta) -> torch.Tensor:
    """Builds the tensor of `meta` over `buffer`, without a copy where the device allows it.

    Args:
        buffer: flat byte tensor on the CPU.
        offset: where the data begins; a multiple of the item size.
        meta: what the tensor must look like. Gaps of a non-dense layout are not kept.
    """
    order = _memory_order(meta) or tuple(range(len(meta.shape)))
    shape = [meta.shape[dim] for dim in order]
    strides = _dense_strides(shape)
    stride = [0] * len(order)
    for place, dim in enumerate(order):
        stride[dim] = strides[place]
    # `set_` rather than a view: autograd treats in-place changes of a view differently.
    tensor = torch.empty(0, dtype=meta.dtype)
    tensor.set_(
        buffer.untyped_storage(),
        (buffer.storage_offset() + offset) // meta.dtype.itemsize,
        meta.shape,
        stride,
    )
    return tensor if meta.device.type == "cpu" else tensor.to(device.local(meta.device))


def _dense_strides(shape: list[int]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return strides


def gradient_type(tensor: torch.Tensor) -> torch.dtype:
    """Returns the type of a parameter's gradient, which may be wider than its own."""
    kind: torch.dtype | None = getattr(tensor, "grad_dtype", None)
    return kind or tensor.dtype
