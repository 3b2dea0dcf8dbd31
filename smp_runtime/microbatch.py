"""Cutting a step's arguments into microbatches, and joining the results again."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .errors import MicrobatchError
from .trees import is_dict, with_items

_log = logging.getLogger("smp_runtime")

_SILENT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.nn.Module,
    torch.device,
    torch.dtype,
    argparse.Namespace,
)


class StepOutput:
    """A tensor that a step returned, once per microbatch.

    Attributes:
        outputs: the tensors, by microbatch.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    def reduce_mean(self) -> torch.Tensor:
        """Returns the mean over the microbatches."""
        return torch.stack(self.outputs).mean(dim=0)

    def reduce_sum(self) -> torch.Tensor:
        """Returns the sum over the microbatches."""
        return torch.stack(self.outputs).sum(dim=0)

    def concat(self) -> torch.Tensor:
        """Joins the tensors along the batch dimension; scalars become a vector."""
        if self.outputs[0].dim() == 0:
            return self.stack()
        return torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """Joins the tensors along a new first dimension, one entry per microbatch."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """Returns the same tensors without their graphs."""
        return StepOutput([output.detach() for output in self.outputs])

    def __len__(self) -> int:
        """Number of microbatches."""
        return len(self.outputs)

    def __repr__(self) -> str:
        """Shows the tensors."""
        return f"StepOutput({self.outputs!r})"


class _OwnVersions:
    """Gives the parts of one microbatch version counters of their own.

    A part shares the counter of the whole with the parts of other microbatches. So one that is
    changed in place would look as if all were, and autograd would refuse what others saved.
    Arguments of one memory keep one counter, as in one process.
    """

    def __init__(self) -> None:
        self._wholes: dict[int, torch.Tensor] = {}

    def part(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the same part with another counter; one that has a history as it is."""
        base = part._base
        if base is None or base.requires_grad or part.requires_grad or not _is_plain(part, base):
            return part
        whole = self._wholes.setdefault(id(base), base.data)
        return whole.as_strided(part.shape, part.stride(), part.storage_offset())


def _is_plain(part: torch.Tensor, base: torch.Tensor) -> bool:
    """Says whether shape, strides and offset are all that tells a part from what it views."""
    return (
        type(part) is torch.Tensor
        and part.layout is base.layout is torch.strided
        and part.dtype is base.dtype
        and not (part.is_conj() or part.is_neg() or part.is_quantized)
    )


class Splitter:
    """Splits the arguments of one function.

    Args:
        function: the step function; its signature names the arguments.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: batch dimension by argument name, where it is not 0.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        non_split_inputs: Sequence[str],
        input_split_axes: Mapping[str, int],
    ) -> None:
        self.signature = inspect.signature(function)
        self._whole = frozenset(non_split_inputs)
        self._axes = dict(input_split_axes)
        self._warned: set[type] = set()
        self._check_names([*non_split_inputs, *input_split_axes])

    @property
    def first_name(self) -> str:
        """The name of the function's first argument, "" if it takes none."""
        return next(iter(self.signature.parameters), "")

    def without_first(self) -> Splitter:
        """Returns a splitter for the arguments after the first one, of a bound method."""
        rest = copy.copy(self)  # shares what it has warned of
        parameters = list(self.signature.parameters.values())[1:]
        rest.signature = self.signature.replace(parameters=parameters)
        return rest

    def _check_names(self, names: Sequence[str]) -> None:
        parameters = self.signature.parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return
        for name in names:
            if name not in self.signature.parameters:
                raise MicrobatchError(
                    f"the step function has no argument {name!r}; "
                    f"its arguments are {', '.join(self.signature.parameters)}"
                )

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Returns the arguments of each microbatch.

        Raises:
            MicrobatchError: tensors have no common batch size, or it does not divide by the
                number of microbatches.
        """
        named = list(self._named(args, kwargs))
        self._check_sizes(named, num_microbatches)
        calls = []
        for i in range(num_microbatches):
            own = _OwnVersions()
            taken = [self._take(name, value, num_microbatches, i, own) for name, value in named]
            positional = tuple(taken[: len(args)])
            calls.append((positional, dict(zip(kwargs, taken[len(args) :], strict=True))))
        return calls

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Pairs each argument with its name in the signature, positional ones first."""
        self.signature.bind(*args, **kwargs)  # raises the TypeError of a wrong call
        names: list[str] = []
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                names += [parameter.name] * (len(args) - len(names))
            elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
        yield from zip(names, args, strict=False)
        yield from kwargs.items()

    def _check_sizes(self, named: Sequence[tuple[str, Any]], num_microbatches: int) -> None:
        sizes: dict[int, str] = {}
        for name, value in named:
            axis = self._axes.get(name, 0)
            for tensor in _split_tensors(value) if name not in self._whole else ():
                if tensor.dim() == 0:
                    continue
                if not -tensor.dim() <= axis < tensor.dim():
                    raise MicrobatchError(
                        f"input_split_axes says axis {axis} for {name!r}, which has a tensor of "
                        f"shape {tuple(tensor.shape)}"
                    )
                sizes.setdefault(tensor.shape[axis], f"{name} {tuple(tensor.shape)}")
        if len(sizes) > 1:
            raise MicrobatchError(
                f"the tensors passed to the step have no common batch size: "
                f"{', '.join(sizes.values())}. Name those without a batch dimension in "
                "@smp.step(non_split_inputs=[...]), and other batch dimensions in "
                "@smp.step(input_split_axes={name: axis})"
            )
        for size, name in sizes.items():
            if size % num_microbatches:
                raise MicrobatchError(
                    f"a batch of {size} ({name}) does not divide into {num_microbatches} "
                    "microbatches: change the setting `microbatches`, or let the loader drop the "
                    "last batch (drop_last=True)"
                )

    def _take(self, name: str, value: Any, num_microbatches: int, i: int, own: _OwnVersions) -> Any:
        if name in self._whole:
            return value
        return self._slice(value, num_microbatches, i, self._axes.get(name, 0), own)

    def _slice(self, value: Any, num: int, i: int, axis: int, own: _OwnVersions) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dim() == 0:
                return value
            size = value.shape[axis] // num
            return own.part(value.narrow(axis, i * size, size))
        if hasattr(value, "smp_slice"):
            return value.smp_slice(num, i, axis)
        if is_dict(value):
            items = {key: self._slice(item, num, i, axis, own) for key, item in value.items()}
            return with_items(value, items)
        if isinstance(value, (list, tuple, set)):
            parts = [self._slice(item, num, i, axis, own) for item in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        self._warn(value)
        return value

    def _warn(self, value: Any) -> None:
        if isinstance(value, _SILENT) or type(value) in self._warned:
            return
        self._warned.add(type(value))
        if isinstance(value, torch.optim.Optimizer):
            _log.warning("an optimizer was passed to smp.step; this might be a bug")
        else:
            _log.warning(
                "Non-splittable object of type %s was passed to smp.step; every microbatch gets "
                "it whole. To split it, implement smp_slice(num_microbatches, microbatch, axis)",
                type(value).__name__,
            )


def _split_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that are split by narrowing."""
    if isinstance(value, torch.Tensor):
        yield value
    elif hasattr(value, "smp_slice"):
        return
    elif is_dict(value):
        for item in value.values():
            yield from _split_tensors(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _split_tensors(item)


def join(results: Sequence[Any]) -> Any:
    """Joins the results of the microbatches.

    Tensors become a `StepOutput`, other leaves, a `torch.Size` among them, a list with one entry
    per microbatch; containers keep their types. A step that returns nothing returns None.

    Raises:
        MicrobatchError: the microbatches returned different structures.
    """
    if all(result is None for result in results):
        return None
    return _join(results)


def _join(results: Sequence[Any]) -> Any:
    first = results[0]
    if isinstance(first, torch.Tensor):
        if not all(isinstance(result, torch.Tensor) for result in results):
            raise MicrobatchError("a step returned a tensor for some microbatches only")
        return StepOutput(results)
    if is_dict(first):
        _check_alike([tuple(result) for result in results])
        items = {key: _join([result[key] for result in results]) for key in first}
        return with_items(first, items)
    if isinstance(first, (list, tuple)) and not isinstance(first, torch.Size):
        _check_alike([len(result) for result in results])
        parts = [_join(parts) for parts in zip(*results, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        joined_fields: Any = copy.copy(first)
        for field in dataclasses.fields(first):
            part = _join([getattr(result, field.name) for result in results])
            object.__setattr__(joined_fields, field.name, part)
        return joined_fields
    return list(results)


def _check_alike(shapes: Sequence[Any]) -> None:
    if any(shape != shapes[0] for shape in shapes):
        raise MicrobatchError(
            f"a step returned different structures for its microbatches: {shapes}"
        )
