"""The one run of a model that finds out in which order its modules run and what they cost.

It runs on fake tensors: no weights, no data, seconds for a model of any size. Where a model
looks at values, it runs for real; where it cannot, the declared order has to do. In every case
the model is afterwards as it was before.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from .. import device
from ..execution.rng import host_random_state, seed_host, set_host_random_state
from ..planning.module_tree import ModuleNode, ParameterFact, join_path
from ..tensors import gradient_type
from ..trees import iter_tensors, map_tensors
from .call_recorder import CallRecorder, Record
from .model_state import ModelState, values_kept
from .op_cost import ACCELERATOR, CPU, Machine

__all__ = ["Trace", "trace_model"]

_log = logging.getLogger("smp_runtime")

Source = Literal["fake", "real", "measured", "declared"]

DECLARED_TOKENS = 512
"""Assumed rows of each module's input where no run tells."""

SEED = 0
"""Every run draws the same numbers, so that the partition does not depend on the random state."""

MEASURED_RUNS = 3
"""Of so many measured runs the fastest time of each module counts."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run of the model showed.

    Args:
        root: the tree of costs; `compute` is in seconds for forward and backward.
        drawing_modules: paths of the modules that draw random numbers themselves, and of all that
            this run did not call, as they may draw in another run.
        source: how the costs were found.
    """

    root: ModuleNode
    drawing_modules: frozenset[str]
    source: Source


def trace_model(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    measure_times: bool = False,
) -> Trace:
    """Runs `model` once and returns what it showed; leaves the model as it was.

    Hooks on the modules do not fire, unless the forward fails without them.

    Args:
        model: any module, also on the meta device.
        args: example arguments, with the sizes of one microbatch; values matter only where the
            model looks at them.
        kwargs: example keyword arguments.
        measure_times: run on the real parameters and measure, instead of modelling the times.
    """
    kwargs = dict(kwargs or {})
    is_meta = any(t.is_meta or isinstance(t, FakeTensor) for t in _all_tensors(model, args, kwargs))
    attempts: list[Source] = ["fake"] if is_meta else ["fake", "real"]
    if measure_times and not is_meta:
        attempts = ["measured"]
    reasons = []
    for with_hooks in (False, True):
        for source in attempts:
            try:
                return _run(model, args, kwargs, source, with_hooks=with_hooks)
            except Exception as error:  # noqa: BLE001 (whatever the user's forward raises)
                reasons.append(f"{source}: {type(error).__name__}: {error}")
    warnings.warn(
        "the model could not be traced, so it is partitioned in its declared order, by the size "
        f"of its parameters ({'; '.join(dict.fromkeys(reasons))})",
        stacklevel=2,
    )
    return _declared(model)


def _run(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    source: Source,
    *,
    with_hooks: bool,
) -> Trace:
    state = ModelState(model, args, kwargs)
    target = _device_of(state.tensors)
    machine = CPU if target.type == "cpu" else ACCELERATOR
    with _random_state_kept(), values_kept(state.tensors) as before_write:
        try:
            if not with_hooks:
                state.remove_hooks()
            if source == "fake":
                recorder, fakes = _run_fake(model, args, kwargs, state, target, machine)
            else:
                fakes = {}
                measure = source == "measured"
                make = partial(
                    CallRecorder, model, machine, measure=measure, before_write=before_write
                )
                recorder = _call(model, args, kwargs, make)
                for _ in range(MEASURED_RUNS - 1 if measure else 0):
                    recorder.record.keep_faster(_call(model, args, kwargs, make).record)
        finally:
            state.restore()
    uses = {
        id(tensor): recorder.first_use_of(fakes.get(id(tensor), tensor))
        for tensor in [*model.parameters(), *model.buffers()]
    }
    root = _tree(model, recorder.record, uses)
    for path in sorted(recorder.record.indivisible_modules):
        _log.info("%s stays on one rank: an autograd function calls modules in it", path)
    never_called = {
        path
        for path, module in model.named_modules()
        if _is_callable(module) and path not in recorder.record.calls
    }
    return Trace(root, frozenset(recorder.record.drawing | never_called), source)


def _run_fake(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    state: ModelState,
    target: torch.device,
    machine: Machine,
) -> tuple[CallRecorder, dict[int, torch.Tensor]]:
    """Runs the model with fake tensors in the place of all its own."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            device_ = target if tensor.is_meta else tensor.device
            with mode:
                made = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device_
                )
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            elif tensor.requires_grad:
                made.requires_grad_()
            fakes[id(tensor)] = made
        return fakes[id(tensor)]

    fake_args, fake_kwargs = map_tensors(fake, (tuple(args), dict(kwargs)))
    state.replace_tensors(fake)
    with mode, _quiet():
        recorder = _call(model, fake_args, fake_kwargs, partial(CallRecorder, model, machine))
    return recorder, fakes


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from complaining of what does not work on fake tensors: there is another way.

    Or it does no harm: with torch 2.9, transformers asks where weights are in memory, to see
    whether that is aligned.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        logger.disabled = was_disabled


def _call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    make_recorder: Callable[[], CallRecorder],
) -> CallRecorder:
    device.seed_generators(SEED)
    seed_host(SEED)
    recorder = make_recorder()
    # Nothing that is saved is kept, so the graph takes no memory; it is never run.
    hooks = saved_tensors_hooks(recorder.save, _unpack)
    with torch.enable_grad(), recorder, recorder.functions.watched(), hooks:
        model(*args, **kwargs)
    recorder.close()
    return recorder


def _unpack(_: Any) -> torch.Tensor:
    raise NotImplementedError("a forward that runs a backward cannot be traced")


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Puts every random generator back."""
    torch_state, host_state = device.random_state(), host_random_state()
    try:
        yield
    finally:
        device.set_random_state(torch_state)
        set_host_random_state(host_state)


def _all_tensors(model: nn.Module, *nests: Any) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    yield from iter_tensors(nests)


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device for fakes of meta tensors."""
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))


def _tree(model: nn.Module, record: Record, uses: Mapping[int, int | None]) -> ModuleNode:
    """Makes the tree of a model from what was recorded."""
    path_of = {id(module): path for path, module in model.named_modules()}
    groups: dict[int, int] = {}

    def node(module: nn.Module, path: str) -> ModuleNode:
        children = [
            node(child, join_path(path, name))
            for name, child in module._modules.items()
            # A module with several parents belongs to the first one.
            if child is not None and path_of[id(child)] == join_path(path, name)
        ]
        return ModuleNode(
            path=path,
            type_name=type(module).__name__,
            calls=tuple(record.calls.get(path, ())),
            own_parameters=tuple(_facts(module, groups, uses)),
            own_costs=tuple(record.costs.get(path, {}).values()),
            output_bytes=record.output_bytes.get(path, 0),
            input_bytes=record.input_bytes.get(path, 0),
            children=tuple(children),
            is_closed=path not in record.open_modules,
            is_repeated_container=isinstance(module, (nn.ModuleList, nn.Sequential)),
            is_opaque=path in record.opaque_modules,
            is_indivisible=path in record.indivisible_modules,
            is_callable=_is_callable(module),
        )

    return node(model, "")


def _facts(
    module: nn.Module, groups: dict[int, int], uses: Mapping[int, int | None]
) -> Iterator[ParameterFact]:
    """Yields what a module holds directly; `groups` numbers the tensors met so far."""
    persistent = {
        name: buffer
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }
    for name, tensor in {**module._parameters, **persistent}.items():
        if tensor is not None:
            yield ParameterFact(
                name=name,
                group=groups.setdefault(id(tensor), len(groups)),
                num_elements=tensor.numel(),
                bytes=tensor.numel() * tensor.element_size(),
                requires_grad=tensor.requires_grad,
                is_buffer=name in persistent,
                first_use=uses.get(id(tensor)),
                summed_bytes=_summed_bytes(tensor),
            )


def _summed_bytes(tensor: torch.Tensor) -> int | None:
    """Returns the size of a parameter's gradient where that is wider than the parameter."""
    kind = gradient_type(tensor)
    return None if kind == tensor.dtype else tensor.numel() * kind.itemsize


def _is_callable(module: nn.Module) -> bool:
    """Says whether a module has a forward; mere containers have none."""
    return type(module).forward is not nn.Module.forward


def _declared(model: nn.Module) -> Trace:
    """Makes do without a run: modules in the order in which they are declared."""
    record = Record()
    for path, module in model.named_modules():
        if not _is_callable(module):
            continue
        call = len(record.calls)
        record.calls[path].append(call)
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        record.add(path, call, seconds=6 * size * DECLARED_TOKENS / CPU.flops)
    return Trace(_tree(model, record, {}), frozenset(record.calls), "declared")
