"""Operations on tensors that have no values yet, written down so that they can be repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Ref(NamedTuple):
    """A view of a tensor that has no values yet."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation on such tensors, and all that it takes to repeat it.

    Attributes:
        function: torch's own function.
        given: its arguments, with a `Ref` for each tensor without values.
        reads: the storages of those.
        writes: the storages that it changes or makes.
        overwrites: whether nothing is left of what was in `writes`.
        outputs: the tensors that it makes, None for results that were there before.
        generator_state: where the generator was, None if it draws nothing.
    """

    function: Any
    given: Call
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    overwrites: bool
    outputs: tuple[Ref | None, ...]
    generator_state: Tensor | None


@contextmanager
def generator_at(state: Tensor | None, kwargs: dict[str, Any]) -> Iterator[None]:
    """Lets an operation draw what it would have drawn when it was written down."""
    if state is None:
        yield
        return
    if kwargs.get("generator") is not None:
        kwargs["generator"] = torch.Generator().set_state(state)
        yield
        return
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(state)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def ref_of(tensor: Tensor) -> Ref:
    """Returns what stands for a tensor without values."""
    return Ref(
        tensor.untyped_storage()._cdata,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.dtype,
    )


def is_ref(leaf: Any) -> bool:
    """Says whether something stands for a tensor without values."""
    return isinstance(leaf, Ref)


def view_of(ref: Ref, storage: Any) -> Tensor:
    """Returns the tensor that a reference stands for, on memory that has the values."""
    return torch.empty(0, dtype=ref.dtype).set_(storage, ref.offset, ref.size, ref.stride)


def has_storage(tensor: Tensor) -> bool:
    """Says whether a tensor is an ordinary one, whose memory can be told from others'."""
    return tensor.layout is torch.strided and not isinstance(tensor, FakeTensor)


def is_whole(tensor: Tensor) -> bool:
    """Says whether a tensor takes all of its memory."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the arguments that an operation changes in place."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    return found


def is_cpu(device: Any) -> bool:
    """Says whether a device is given and is the CPU."""
    return device is not None and torch.device(device).type == "cpu"


def is_for_cpu(kwargs: Mapping[str, Any], leaves: Sequence[Tensor]) -> bool:
    """Says whether an operation makes its result on the CPU."""
    device = kwargs.get("device")
    return is_cpu(device) if device is not None else all(is_cpu(leaf.device) for leaf in leaves)


def to_meta(leaf: Any) -> Any:
    """Returns a tensor without values that looks like another one; anything else as it is."""
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def ones_like(leaf: Any) -> Any:
    """Returns ones in the place of a tensor on meta; anything else as it is."""
    if not isinstance(leaf, Tensor) or not leaf.is_meta:
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype).fill_(1)
