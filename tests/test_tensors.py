"""Metas, and the way of a tensor's data through bytes."""

import pytest
import torch

from smp_runtime.errors import NotSupportedError
from smp_runtime.tensors import TensorMeta, as_bytes, from_bytes, meta_of

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
)


def through_bytes(tensor: torch.Tensor, offset: int = 64) -> torch.Tensor:
    """Takes a tensor apart into a buffer and builds it again from there."""
    meta = meta_of(tensor)
    buffer = torch.zeros(offset + meta.num_bytes, dtype=torch.uint8)
    buffer[offset:] = as_bytes(tensor)
    return from_bytes(buffer, offset, meta)


def test_meta_says_how_a_tensor_looks_and_not_what_is_in_it() -> None:
    tensor = torch.zeros(3, 2, dtype=torch.int16).t()
    assert meta_of(tensor) == TensorMeta(
        shape=(2, 3),
        stride=(1, 2),
        dtype=torch.int16,
        device=torch.device("cpu"),
        requires_grad=False,
    )
    assert meta_of(torch.zeros(1, requires_grad=True)).requires_grad


@pytest.mark.parametrize(
    ("tensor", "num_elements", "num_bytes", "text"),
    [
        (torch.zeros(4, 128), 512, 2048, "float32[4, 128]"),
        (torch.zeros((), dtype=torch.int64), 1, 8, "int64[]"),
        (torch.zeros(3, 0, dtype=torch.bool), 0, 0, "bool[3, 0]"),
        (torch.zeros(1, 1).expand(5, 5), 25, 100, "float32[5, 5]"),
    ],
)
def test_sizes(tensor: torch.Tensor, num_elements: int, num_bytes: int, text: str) -> None:
    meta = meta_of(tensor)
    assert (meta.num_elements, meta.num_bytes) == (num_elements, num_bytes)
    assert meta.describe() == text


def test_sparse_tensors_are_refused_with_what_to_write() -> None:
    with pytest.raises(NotSupportedError, match=r"torch\.sparse_coo.*\.to_dense\(\)"):
        meta_of(torch.eye(2).to_sparse())


def test_bytes_are_those_in_memory() -> None:
    transposed = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8).t()
    assert as_bytes(transposed).tolist() == [1, 2, 3, 4, 5, 6]
    with_gaps = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.uint8)[:, ::2]
    assert as_bytes(with_gaps).tolist() == [1, 3, 4, 6]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_survives(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]).to(dtype)
    result = through_bytes(tensor)
    assert result.dtype == dtype
    assert torch.equal(as_bytes(result), as_bytes(tensor))
    assert result.tolist() == tensor.tolist()


LAYOUTS = {
    "without dimensions": torch.tensor(2.5),
    "empty": torch.zeros(3, 0, 2),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "permuted": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "channels_last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": torch.rand(2, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d),
    "offset": torch.arange(12.0).view(3, 4)[1:],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_dense_layouts_keep_their_strides(name: str) -> None:
    tensor = LAYOUTS[name]
    result = through_bytes(tensor)
    assert result.shape == tensor.shape
    assert result.stride() == tensor.stride()
    assert torch.equal(result, tensor)


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.arange(12.0).view(3, 4)[:, ::2], (2, 1)),
        (torch.arange(3.0).expand(2, 3), (3, 1)),
        (torch.arange(3.0).view(3, 1).expand(3, 2), (2, 1)),
    ],
)
def test_gaps_and_repetitions_are_not_kept(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    result = through_bytes(tensor)
    assert result.stride() == stride
    assert torch.equal(result, tensor)


def test_odd_strides_of_dimensions_of_size_1_move_no_value() -> None:
    tensor = torch.arange(6.0).as_strided((1, 3, 1, 2), (1, 2, 50, 1))
    assert torch.equal(through_bytes(tensor), tensor)


def test_conjugated_and_negated_views_arrive_as_values() -> None:
    complex_numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert through_bytes(complex_numbers.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert through_bytes(complex_numbers.conj().imag).tolist() == [-2.0, 4.0]


def test_data_comes_without_its_graph() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    result = through_bytes(parameter)
    assert type(result) is torch.Tensor
    assert not result.requires_grad
    assert result.tolist() == [1.0, 2.0]


def test_built_tensor_lies_in_the_buffer_and_is_no_view() -> None:
    buffer = torch.zeros(64 + 8, dtype=torch.uint8)
    result = from_bytes(buffer, 64, meta_of(torch.zeros(2)))
    assert not result._is_view()
    result += 1
    assert buffer.nonzero().numel() > 0
