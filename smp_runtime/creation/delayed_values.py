"""Tensors that are made on meta and get their values later: those that they would have had at once.

While a `Recording` is active, large tensors that torch makes (``empty``, ``zeros``, ``randn``) come
out on meta, and what is done to them is written down. Small ones are made as ever, so that
schedules, rotary frequencies and other values that a constructor looks at are there. An operation
that draws random numbers is carried out on memory that is freed again at once: so the generator is
where it would be without all this, and its state before the draw is written down with the
operation.

`Recording.value_of` then repeats, for one tensor, just the operations that its values come from. So
each rank makes its own parameters, and they are those of a model that was made whole with the same
seed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import NotSupportedError, UsageError
from .recorded_operations import (
    Call,
    Operation,
    generator_at,
    has_storage,
    is_cpu,
    is_for_cpu,
    is_ref,
    is_whole,
    ones_like,
    ref_of,
    to_meta,
    view_of,
    written_by,
)

LEAST_ELEMENTS = 4096
"""Tensors with fewer elements are made at once."""

_FACTORY_NAMES = """
empty empty_strided empty_like new_empty new_empty_strided zeros zeros_like new_zeros ones
ones_like new_ones full full_like new_full rand rand_like randn randn_like normal
"""
_FACTORIES = frozenset(_FACTORY_NAMES.split())
_OVERWRITING_NAMES = "normal_ uniform_ zero_ fill_ copy_ exponential_ bernoulli_"
_OVERWRITING = frozenset(_OVERWRITING_NAMES.split())

_tensor: Any = Tensor
_LOOKS = {_tensor.is_meta.__get__: False, _tensor.device.__get__: torch.device("cpu")}
"""What a tensor says while it has no values."""


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is to be done to tensors that have no values yet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[Operation] = []
        self._writers: dict[int, list[int]] = {}
        self._storages: dict[int, Any] = {}  # alive, so that no other one gets their addresses
        self._parameters: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._memory: Tensor | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Records what is done inside."""
        for reference, _ in self._parameters.values():
            self._check_unchanged(reference())
        hook = register_module_parameter_registration_hook(self._note)
        try:
            with _LooksMade(self), self:
                yield
        finally:
            hook.remove()
            self._memory = None
            for key, (reference, _) in list(self._parameters.items()):
                parameter = reference()
                if parameter is not None:
                    self._parameters[key] = (reference, parameter._version)

    def clear(self) -> None:
        """Forgets everything."""
        self._operations.clear()
        self._writers.clear()
        self._storages.clear()
        self._parameters.clear()

    def knows(self, tensor: Tensor) -> bool:
        """Says whether a tensor on meta has values to come."""
        return has_storage(tensor) and tensor.untyped_storage()._cdata in self._storages

    def value_of(self, tensor: Tensor) -> Tensor:
        """Returns another tensor, with the values.

        Raises:
            UsageError: there are none, because it was not made while this was active, or it was
                changed since.
        """
        if not self.knows(tensor):
            raise UsageError(
                f"a tensor of shape {tuple(tensor.shape)} on meta has no values: it was made "
                "outside of smp.model_creation; build and change the model inside of it, or load a "
                "checkpoint"
            )
        self._check_unchanged(tensor)
        ref = ref_of(tensor)
        return view_of(ref, self._run(ref.storage))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operation, or writes it down."""
        with torch._C.DisableTorchFunction():
            return self._run_or_write_down(func, args, kwargs)

    def _run_or_write_down(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        given = (tuple(args), dict(kwargs or {}))
        leaves = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
        is_delayed = any(map(self.knows, leaves))
        name = func.overloadpacket.__name__
        # A number is made into a tensor where it is put: `weight[0] = 1`.
        is_number = name == "scalar_tensor" and given[1]["device"].type == "meta"
        is_factory = is_number or (name in _FACTORIES and is_for_cpu(given[1], leaves))
        if not is_delayed and not is_factory:
            return func(*given[0], **given[1])
        written = written_by(func, *given)
        if all(map(self.knows, written)):
            meta_args, meta_kwargs = tree_map(to_meta, given)
            if is_factory or is_cpu(meta_kwargs.get("device")):
                meta_kwargs["device"] = torch.device("meta")
            try:
                result = func(*meta_args, **meta_kwargs)
            except (NotImplementedError, RuntimeError):
                pass  # what comes out depends on values
            else:
                outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
                if (
                    is_delayed
                    or is_number
                    or any(leaf.numel() >= LEAST_ELEMENTS for leaf in outputs)
                ):
                    self._write_down(func, given, written, outputs)
                    return result
        if any(map(self.knows, written)):
            raise NotSupportedError(f"{func} can't be done later; build the model without delay")
        args, kwargs = tree_map(self._with_values, given)
        return func(*args, **kwargs)

    def _note(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        if parameter is not None and self.knows(parameter):
            self._parameters[id(parameter)] = (weakref.ref(parameter), parameter._version)

    def _check_unchanged(self, tensor: Tensor | None) -> None:
        if tensor is None:
            return
        reference, version = self._parameters.get(id(tensor), (None, 0))
        if reference is not None and reference() is tensor and tensor._version != version:
            raise UsageError(
                f"a parameter of shape {tuple(tensor.shape)} was changed outside of "
                "smp.model_creation, where it has no values yet; change it inside, or after the "
                "first step"
            )

    def _write_down(
        self, func: Any, given: Call, written: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        made = [tensor for tensor in outputs if not self.knows(tensor)]
        if not written and not made:
            return  # a view
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = (given[1].get("generator") or torch.default_generator).get_state()
            self._draw(func, given)
        kept = tree_map(self._kept, given)
        if made and any(argument.name == "dtype" for argument in func._schema.arguments):
            kept[1]["dtype"] = made[0].dtype  # the default may be another one later
        if made and "device" in kept[1]:
            kept[1]["device"] = torch.device("cpu")
        refs = tree_flatten(kept, is_leaf=is_ref)[0]
        for tensor in made:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage
        name = func.overloadpacket.__name__
        is_made = {id(tensor) for tensor in made}
        operation = Operation(
            func,
            kept,
            reads=tuple(ref.storage for ref in refs if is_ref(ref)),
            writes=tuple(tensor.untyped_storage()._cdata for tensor in (*written, *made)),
            overwrites=not written or (name in _OVERWRITING and all(map(is_whole, written))),
            outputs=tuple(ref_of(leaf) if id(leaf) in is_made else None for leaf in outputs),
            generator_state=state,
        )
        for key in operation.writes:
            self._writers.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)

    def _draw(self, func: Any, given: Call) -> None:
        """Draws what an operation draws, for the generator's sake."""
        leaves = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
        if func.overloadpacket.__name__ not in _OVERWRITING or len(leaves) != 1:
            args, kwargs = tree_map(ones_like, given)
            func(*args, **kwargs)
            return
        # In the same memory again and again: the allocator would not give it back.
        num_bytes = leaves[0].untyped_storage().nbytes()
        if self._memory is None or self._memory.numel() < num_bytes:
            self._memory = None
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        scratch = view_of(ref_of(leaves[0]), self._memory.untyped_storage())
        args, kwargs = tree_map(lambda leaf: scratch if isinstance(leaf, Tensor) else leaf, given)
        func(*args, **kwargs)

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return ref_of(leaf) if self.knows(leaf) else leaf.detach().clone()

    def _with_values(self, leaf: Any) -> Any:
        return self.value_of(leaf) if isinstance(leaf, Tensor) and self.knows(leaf) else leaf

    def _needed(self, storage: int) -> list[int]:
        """Returns the operations that the values of a storage come from, in their order."""
        needed: set[int] = set()
        explored: set[tuple[int, int]] = set()
        found = [(storage, len(self._operations))]
        while found:
            of, before = found.pop()
            for number in reversed(self._writers[of]):
                if number >= before:
                    continue
                if (of, number) in explored:
                    break
                explored.add((of, number))
                needed.add(number)
                operation = self._operations[number]
                for read in operation.reads:
                    if not (operation.overwrites and read in operation.writes):
                        found.append((read, number))
                if operation.overwrites:
                    break
        return sorted(needed)

    @torch.no_grad()
    def _run(self, storage: int) -> Any:
        """Does what was written down for a storage, and returns one with the values."""
        storages: dict[int, Any] = {}

        def thawed(leaf: Any) -> Any:
            if not is_ref(leaf):
                return leaf
            if leaf.storage not in storages:
                num_bytes = self._storages[leaf.storage].nbytes()
                storages[leaf.storage] = torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()
            return view_of(leaf, storages[leaf.storage])

        for number in self._needed(storage):
            operation = self._operations[number]
            args, kwargs = tree_map(thawed, operation.given, is_leaf=is_ref)
            with generator_at(operation.generator_state, kwargs):
                result = operation.function(*args, **kwargs)
            leaves = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
            for ref, leaf in zip(operation.outputs, leaves, strict=True):
                if ref is not None:
                    if (tuple(leaf.stride()), leaf.storage_offset()) != (ref.stride, ref.offset):
                        leaf = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype).copy_(
                            leaf
                        )
                    storages[ref.storage] = leaf.untyped_storage()
        return storages[storage]


class _LooksMade(TorchFunctionMode):
    """Lets code that looks at a tensor without values see the CPU, where it would be."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answers for `is_meta` and `device`."""
        if func in _LOOKS and self._recording.knows(args[0]):
            return _LOOKS[func]
        return func(*args, **(kwargs or {}))
