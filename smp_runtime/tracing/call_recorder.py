"""Watches one run of a model: which module is called when, and what each operation costs where."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import device
from ..execution.rng import host_random_state
from ..planning.module_tree import OwnCost, ancestors, is_below
from .autograd_functions import AutogradFunctions
from .fake_operations import run_operation
from .op_cost import Machine, OpCost, draws, named_arguments, op_cost, parameter_gradient_cost

__all__ = ["CallRecorder", "Record"]


@dataclass(slots=True)
class Record:
    """What one run showed, by module path."""

    calls: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    costs: dict[str, dict[int, OwnCost]] = field(default_factory=lambda: defaultdict(dict))
    output_bytes: dict[str, int] = field(default_factory=dict)
    input_bytes: dict[str, int] = field(default_factory=dict)
    drawing: set[str] = field(default_factory=set)
    open_modules: set[str] = field(default_factory=set)
    opaque_modules: set[str] = field(default_factory=set)
    indivisible_modules: set[str] = field(default_factory=set)

    def add(self, path: str, origin: int, seconds: float = 0.0, saved_bytes: int = 0) -> None:
        """Adds to what the module at `path` costs itself."""
        costs = self.costs[path]
        before = costs.get(origin, OwnCost(origin, 0.0))
        costs[origin] = OwnCost(
            origin, before.compute + seconds, before.activation_bytes + saved_bytes
        )

    def keep_faster(self, other: Record) -> None:
        """Keeps of each cost the smaller one: what took longer in one run was disturbed."""
        for path, costs in self.costs.items():
            for origin, cost in costs.items():
                again = other.costs[path].get(origin, cost)
                costs[origin] = min(cost, again, key=lambda either: either.compute)


@dataclass(frozen=True, slots=True)
class _Frame:
    """A module call in progress; `given` are the storages of its tensor arguments."""

    path: str
    call: int
    given: frozenset[StorageWeakRef]


class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types here
    """Records calls and operations while active.

    Args:
        model: the model that runs.
        machine: how fast its device is.
        measure: take the measured time of each operation instead of the modelled one.
        before_write: called with each tensor that an operation is about to write to.

    Attributes:
        record: what the run showed.
        functions: watches user-defined autograd functions.
    """

    def __init__(
        self,
        model: nn.Module,
        machine: Machine,
        *,
        measure: bool = False,
        before_write: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.record = Record()
        self.functions = AutogradFunctions()
        self._machine = machine
        self._measure = measure
        self._before_write = before_write
        self._stack: list[_Frame] = []
        self._num_calls = 0
        self._host_state = _comparable_host_state()
        self._path_of = {id(module): path for path, module in model.named_modules()}
        self._holding = {
            path for path, module in model.named_modules() if _holds_parameters(module)
        }
        # Tensors that live on the modules: who owns them, and which call first used them.
        self._owners: dict[StorageWeakRef, list[str]] = defaultdict(list)
        self._trained: dict[StorageWeakRef, int] = {}
        for path, module in model.named_modules():
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                key = _storage(tensor)
                if key is not None:
                    self._owners[key].append(path)
                    if tensor.requires_grad:
                        self._trained[key] = tensor.numel() * tensor.element_size()
        self._origin: dict[StorageWeakRef, int] = {}
        self._saved: set[StorageWeakRef] = set()
        self._first_use: dict[StorageWeakRef, int] = {}
        self._hooks = []
        for module in model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def first_use_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the number of calls begun before a parameter was first used."""
        key = _storage(tensor)
        return None if key is None else self._first_use.get(key)

    def close(self) -> None:
        """Ends the run."""
        self._note_host_draws()
        for hook in self._hooks:
            hook.remove()
        self.record.indivisible_modules = self.functions.indivisible(self.record.calls)

    def save(self, tensor: torch.Tensor) -> Any:
        """Counts a tensor that autograd saves for backward; stands in for packing it."""
        key = _storage(tensor)
        if key is None or key in self._owners or key in self._saved:
            return None
        self._saved.add(key)
        size = tensor.untyped_storage().nbytes()
        self.record.add(self._path(), self._origin.get(key, -1), saved_bytes=size)
        return None

    def _path(self) -> str:
        return self._stack[-1].path if self._stack else ""

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        path = self._path_of.get(id(module))
        if path is None:
            return
        self._note_host_draws()
        if path in self._holding:
            self._note_open_modules(path)
            self.functions.note(path)
        tensors = _tensors((args, kwargs))
        size = max((t.numel() * t.element_size() for t in tensors), default=0)
        self.record.input_bytes[path] = max(size, self.record.input_bytes.get(path, 0))
        keys = map(_storage, tensors)
        given = frozenset(key for key in keys if key is not None)
        self._stack.append(_Frame(path, self._num_calls, given))
        self.record.calls[path].append(self._num_calls)
        self._num_calls += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self._path_of.get(id(module))
        if path is None or all(frame.path != path for frame in self._stack):
            return
        self._note_host_draws()
        # A call that raised inside may not have left.
        while self._stack.pop().path != path:
            pass
        size = sum(t.numel() * t.element_size() for t in _tensors(output))
        self.record.output_bytes[path] = max(size, self.record.output_bytes.get(path, 0))

    def _note_host_draws(self) -> None:
        """Finds draws of Python's and NumPy's generators since the last call or return."""
        state = _comparable_host_state()
        if state != self._host_state:
            self.record.drawing.add(self._path())
            self._host_state = state

    def _note_open_modules(self, path: str) -> None:
        """A call into a subtree from outside, or out of one, opens what it crosses."""
        active = {frame.path for frame in self._stack}
        self.record.open_modules.update(set(ancestors(path)) - active)
        self.record.open_modules.update(
            other for other in active if other != path and not is_below(path, other)
        )

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs the operation and records it."""
        kwargs = kwargs or {}
        if func.namespace == "prim":
            # Fake tensors look up their device as an operation.
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            # Elsewhere autograd has already taken composite operations apart.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        inputs = _tensors((args, kwargs))
        if self._before_write is not None and func._schema.is_mutable:
            self._save_written(func, args, kwargs)
        start = time.perf_counter()
        result = run_operation(func, args, kwargs)
        if self._measure:
            device.synchronize()
        measured = time.perf_counter() - start
        outputs = _tensors(result)
        origin = self._trace_origin(func, inputs, outputs)
        cost = op_cost(func, args, kwargs, inputs, outputs, result, self._machine)
        if self._measure and cost.forward:
            cost = OpCost(measured, measured * cost.backward / cost.forward)
        seconds = cost.forward + cost.backward + self._gradient_cost(func, inputs)
        self.record.add(self._path(), origin, seconds)
        if torch.Tag.nondeterministic_seeded in func.tags and draws(func, args, kwargs):
            self.record.drawing.add(self._path())
        return result

    def _trace_origin(
        self,
        func: torch._ops.OpOverload,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> int:
        """Returns the latest call that the operands come from, and hands it on to the results."""
        origin = -1
        for tensor in inputs:
            key = _storage(tensor)
            if key in self._owners:
                origin = max(origin, self._use(key))
            elif key is not None:
                origin = max(origin, self._origin.get(key, -1))
        for tensor in outputs:
            key = _storage(tensor)
            if key is not None and key not in self._owners:
                self._origin[key] = origin
        return origin

    def _use(self, key: StorageWeakRef) -> int:
        """Notes the use of a parameter or buffer; returns the call of its owner."""
        self._first_use.setdefault(key, self._num_calls)
        owners = self._owners[key]
        for frame in reversed(self._stack):
            if frame.path in owners:
                return frame.call
            if key in frame.given:
                return -1
        self._note_foreign_use(key, owners)
        return -1

    def _note_foreign_use(self, key: StorageWeakRef, owners: Sequence[str]) -> None:
        """A parameter is used while its owner is not being called."""
        for frame in reversed(self._stack):
            if any(is_below(owner, frame.path) for owner in owners):
                self.record.opaque_modules.add(frame.path)
                return
            self.record.open_modules.add(frame.path)

    def _gradient_cost(self, func: torch._ops.OpOverload, inputs: Sequence[torch.Tensor]) -> float:
        if func.is_view or not torch.is_grad_enabled():
            return 0.0
        keys = {_storage(tensor) for tensor in inputs if tensor.requires_grad}
        return sum(
            parameter_gradient_cost(self._trained[key], self._machine)
            for key in keys
            if key in self._trained
        )

    def _save_written(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        assert self._before_write is not None
        named = named_arguments(func, args, kwargs)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(named.get(argument.name)):
                    self._before_write(tensor)


def _tensors(nest: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Returns what views of one memory have in common; None for tensors without storage."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call] # as above
    except (NotImplementedError, RuntimeError):
        return None


def _holds_parameters(module: nn.Module) -> bool:
    return any(
        part._parameters or set(part._buffers) - part._non_persistent_buffers_set
        for part in module.modules()
    )


def _comparable_host_state() -> tuple[Any, ...]:
    python, numpy = host_random_state()
    return python, numpy and tuple(getattr(part, "tolist", lambda p=part: p)() for part in numpy)
