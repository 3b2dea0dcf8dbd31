"""What a torch function does to tensors that only look like something.

Glue on stand-ins needs shapes, and every rank, also the one with the data, must come to the same
conclusions: which results are new, which are the very operand, which are views, what was changed
in place. So an operation is run once on fake tensors and the outcome is kept under the
operation's signature; one run on fake tensors takes 150 to 300 microseconds, a look-up a few.
Where fake tensors can't tell (the result depends on data), the owner is asked.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..tensors import TensorMeta, meta_of
from ..trees import LEAF_TYPES, is_container, is_dict, map_tensors

_MAX_KEPT = 8192


class New(NamedTuple):
    """A result that did not exist before; a view of operand `view_of` if that is not None."""

    meta: TensorMeta
    view_of: int | None


class Same(NamedTuple):
    """A result that is an operand itself."""

    operand: int


class Effect(NamedTuple):
    """What an operation does.

    Attributes:
        known: False where only the data can tell; the rest means nothing then.
        template: the result, with `Slot` in place of tensors.
        results: what stands at each slot.
        changed: operands changed in place, with their metas afterwards.
    """

    known: bool
    template: Any
    results: tuple[New | Same, ...]
    changed: tuple[tuple[int, TensorMeta], ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor in a template."""

    index: int


NO_TEMPLATE = "no template"
UNKNOWN = Effect(known=False, template=None, results=(), changed=())


class Analyser:
    """Finds and remembers effects."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._kept: OrderedDict[Any, Effect] = OrderedDict()

    def effect(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        operands: Sequence[torch.Tensor],
        metas: Sequence[TensorMeta],
    ) -> Effect:
        """Says what ``func(*args, **kwargs)`` does.

        Args:
            func: a torch function.
            args: its positional arguments.
            kwargs: its keyword arguments.
            operands: the tensors in the arguments, in the order of `trees.iter_tensors`.
            metas: what each operand looks like to every rank.
        """
        positions: dict[int, int] = {}
        for operand in operands:
            positions.setdefault(id(operand), len(positions))
        try:
            key = (
                func,
                signature((args, kwargs), positions),
                tuple(metas),
                torch.is_grad_enabled(),
                autocast_state(),
            )
            effect = self._kept.get(key)
        except TypeError:  # an argument that can't be kept or compared: find out each time
            return self._find(func, args, kwargs, operands, metas)
        if effect is None:
            effect = self._kept[key] = self._find(func, args, kwargs, operands, metas)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return effect

    def _find(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        operands: Sequence[torch.Tensor],
        metas: Sequence[TensorMeta],
    ) -> Effect:
        fakes: dict[int, torch.Tensor] = {}
        first: dict[int, int] = {}
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            for index, (operand, meta) in enumerate(zip(operands, metas, strict=True)):
                if id(operand) not in fakes:
                    fakes[id(operand)] = self._fake(operand, meta)
                    first[id(fakes[id(operand)])] = index
            versions = {key: fake._version for key, fake in fakes.items()}
            try:
                with self._mode:
                    fake_args, fake_kwargs = map_tensors(
                        lambda tensor: fakes[id(tensor)], (tuple(args), dict(kwargs))
                    )
                    out = func(*fake_args, **fake_kwargs)
                return self._describe(out, fakes, first, versions, metas)
            except Exception:  # noqa: BLE001 - whatever it is, the owner's real run will show it
                return UNKNOWN

    def _fake(self, operand: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
        is_leaf = isinstance(operand, torch.nn.Parameter)
        with self._mode, torch.enable_grad():
            fake = torch.empty_strided(
                meta.shape,
                meta.stride,
                dtype=meta.dtype,
                device=meta.device,
                requires_grad=meta.requires_grad and is_leaf,
            )
            # Only a parameter is a leaf: what was computed may be changed in place.
            if meta.requires_grad and not is_leaf:
                anchor = torch.empty(0, requires_grad=True)
                made: torch.Tensor = _Computed.apply(anchor, fake)  # type: ignore[no-untyped-call]
                return made
        return fake

    def _describe(
        self,
        out: Any,
        fakes: Mapping[int, torch.Tensor],
        first: Mapping[int, int],
        versions: Mapping[int, int],
        metas: Sequence[TensorMeta],
    ) -> Effect:
        storages = {
            fake.untyped_storage()._cdata: first[id(fake)]
            for fake in reversed(list(fakes.values()))
        }
        results: list[New | Same] = []

        def slot(tensor: torch.Tensor) -> Slot:
            if id(tensor) in first:
                results.append(Same(first[id(tensor)]))
            else:
                view_of = storages.get(tensor.untyped_storage()._cdata)
                results.append(New(meta_of(tensor), view_of))
            return Slot(len(results) - 1)

        template = map_tensors(slot, out)
        if not _is_plain(template):
            return UNKNOWN
        changed = tuple(
            (first[id(fake)], meta_of(fake))
            for key, fake in fakes.items()
            # Detaching or asking for a gradient changes a tensor, too, and counts as no write.
            if fake._version != versions[key] or meta_of(fake) != metas[first[id(fake)]]
        )
        return Effect(known=True, template=template, results=tuple(results), changed=changed)


class _Computed(torch.autograd.Function):
    """Gives a tensor a history without changing how it lies in memory."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(data)
        return data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


def template_of(obj: Any, slot: Callable[[torch.Tensor], Slot]) -> Any:
    """Puts slots in the place of the tensors in nested tuples, lists and dicts.

    Returns:
        The template, or `NO_TEMPLATE` if there is anything else in the nest.
    """
    if isinstance(obj, torch.Tensor):
        return slot(obj)
    if obj is None:
        return None
    if type(obj) in (tuple, list):
        items = [template_of(item, slot) for item in obj]
        return NO_TEMPLATE if NO_TEMPLATE in items else type(obj)(items)
    if type(obj) is dict:
        made = {key: template_of(item, slot) for key, item in obj.items()}
        return NO_TEMPLATE if NO_TEMPLATE in made.values() else made
    return NO_TEMPLATE


def fill(template: Any, tensor_at: Callable[[int], torch.Tensor]) -> Any:
    """Puts tensors in the places of a template's slots."""
    if isinstance(template, Slot):
        return tensor_at(template.index)
    if isinstance(template, torch.Size) or not is_container(template):
        return template
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return type(template)(*(fill(item, tensor_at) for item in template))
    if isinstance(template, (tuple, list)):
        items = [fill(item, tensor_at) for item in template]
        # Named results such as torch.return_types.max take one sequence, as tuples do.
        return type(template)(items)
    if isinstance(template, dict):
        return {key: fill(item, tensor_at) for key, item in template.items()}
    return template


def signature(obj: Any, positions: Mapping[int, int]) -> Any:
    """Turns arguments into something that can be compared.

    Args:
        obj: a nest of arguments.
        positions: a number for each tensor by identity, to stand in its place.

    Raises:
        TypeError: there is something in it that is neither a container nor a plain value.
    """

    def walk(obj: Any) -> Any:
        # Runs for every operation of the glue: what is most frequent is tested first.
        kind = type(obj)
        if kind is int or kind is bool or kind is float:
            return kind, obj  # 1, 1.0 and True are equal, but promote differently
        if kind in LEAF_TYPES:
            return obj
        if isinstance(obj, torch.Tensor):
            return Ellipsis, positions[id(obj)]
        if isinstance(obj, (tuple, list)):
            return kind, *[walk(item) for item in obj]
        if is_dict(obj):
            return kind, *[(key, walk(item)) for key, item in obj.items()]
        if isinstance(obj, slice):
            return slice, walk(obj.start), walk(obj.stop), walk(obj.step)
        if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
            names = [field.name for field in dataclasses.fields(obj)]
            return kind, *[(name, walk(getattr(obj, name, None))) for name in names]
        return _kept_leaf(obj)

    return walk(obj)


def _kept_leaf(leaf: Any) -> Any:
    """Lets plain values into a key. Anything else would be kept alive by it.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(leaf, (type, Enum, torch.memory_format, np.generic)):
        return leaf
    raise TypeError(f"a {type(leaf).__name__} is no plain value")


def autocast_state() -> tuple[Any, ...]:
    """Returns what is set of autocast, as far as it changes result types."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


def _is_plain(template: Any) -> bool:
    """Says whether a result can be kept and handed out again without its tensors."""
    if isinstance(template, (tuple, list)):
        return all(_is_plain(item) for item in template)
    if isinstance(template, dict):
        return all(_is_plain(item) for item in template.values())
    # No strings: those are made of data, as `print` shows.
    return template is None or isinstance(
        template, (Slot, bool, int, float, torch.dtype, torch.device, torch.layout)
    )
