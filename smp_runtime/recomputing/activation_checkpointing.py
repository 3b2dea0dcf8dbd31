"""Activation checkpointing, by module: what scripts call.

A checkpointed module keeps its inputs and its result; what lies between is freed and computed
again in the backward. A module can be checkpointed if it is placed on one rank as a whole, or is
inside a module that is. Of a Sequential each layer must be.

What can't be: with `auto_partition` it runs without, after one warning; placed by hand it is an
error. Modules without parameters between those of several ranks are glue and stay as they are.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from .. import device
from ..errors import UsageError
from ..execution.body import current_body
from ..execution.wrapping import Level, Wrapper
from ..runtime import current, local_size
from .checkpointed_call import call_checkpointed
from .checkpointed_modules import (
    Mark,
    mark_of,
    path_of,
    run_in_groups,
    set_mark,
)
from .checkpointing_marks import check_marks, choose_again, is_partitioned, is_whole, refuse
from .layer_groups import group_size
from .native_checkpoint import checkpointing_calls
from .seq_layers import block_list

_log = logging.getLogger("smp_runtime")


def checkpoint(
    module: nn.Module, /, *args: Any, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """Calls a module and keeps its inputs only; ``checkpoint(self.fc1, x)`` for ``self.fc1(x)``.

    Args:
        module: what to call.
        args: its arguments, in any structure.
        preserve_rng_state: whether its recomputation draws the same random numbers.
        kwargs: its keyword arguments.

    Returns:
        What the module returns.

    Raises:
        UsageError: `module` is no module.
        PartitionError: it was placed on several ranks by hand.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"checkpoint takes a module, not {type(module).__name__}; put what it computes into "
            "the forward of a module"
        )
    if isinstance(module, nn.Sequential) and len(args) == 1 and not kwargs:
        return checkpoint_sequential(
            module, args[0], "contiguous", preserve_rng_state=preserve_rng_state
        )
    body = current_body()
    if body is None or not body.glue.is_active:
        modules = tuple(module.named_modules())
        return call_checkpointed(
            path_of(module), modules, module, preserve_rng_state, *args, **kwargs
        )
    if not is_whole(module):
        refuse(module)
        return module(*args, **kwargs)
    with checkpointing_calls(body, preserve_rng_state):
        return module(*args, **kwargs)


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Calls a Sequential and keeps the inputs of its groups of layers only.

    Args:
        sequential: what to call.
        input: its argument.
        strategy: `each` layer for itself; `contiguous`: neighbours on one rank together;
            `group_N`: up to N such neighbours together.
        preserve_rng_state: whether recomputations draw the same random numbers.
        pack_args_as_tuple: accepted for SMP's sake; any argument is passed on as it is.

    Returns:
        What the Sequential returns.

    Raises:
        UsageError: `sequential` is no Sequential, or there is no such strategy.
        PartitionError: a layer was placed on several ranks by hand.
    """
    if not isinstance(sequential, nn.Sequential):
        raise UsageError(
            f"checkpoint_sequential takes an nn.Sequential, not {type(sequential).__name__}; write "
            "checkpoint(module, ...)"
        )
    group_size(strategy)
    if strategy == "auto":
        raise UsageError(
            "strategy='auto' is for set_activation_checkpointing, which is called outside steps; "
            "write 'each', 'contiguous' or 'group_N' here"
        )
    body = current_body()
    if body is not None and body.glue.is_active and not is_whole(sequential):
        for layer in sequential:
            if not is_whole(layer):
                refuse(layer)
    return run_in_groups(
        sequential, input, _functional_mark(sequential, strategy, preserve_rng_state)
    )


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
    *,
    enabled: bool = True,
    memory_budget: int | None = None,
) -> None:
    """Makes all later calls of a module checkpointed, before or after the first step.

    Args:
        module: a part of the model. Of a Sequential or ModuleList each layer is meant, of any
            other module the whole of it.
        preserve_rng_state: whether recomputations draw the same random numbers.
        pack_args_as_tuple: accepted for SMP's sake; any argument is passed on as it is.
        strategy: of a Sequential: `each` layer for itself; `contiguous`: neighbours on one rank
            together; `group_N`: up to N such neighbours together. `auto`: the fewest layers with
            which a step fits into `memory_budget`, on each rank; of a module that is no list, those
            of the list in it with the most parameters. Before the first step by the bytes of its
            trace; after it by what training steps measured, too, and every rank calls it then.
        enabled: False switches it off again.
        memory_budget: for `auto`: bytes that a rank may use for parameters, gradients, optimizer
            state and what is saved for backward; for all tensors on its device, once their peak is
            measured. None: the memory of its device, on a CPU the machine's divided by its ranks.

    Raises:
        UsageError: there is no such strategy, or not for such a module, or now.
        PartitionError: the module was placed on several ranks by hand.
    """
    module = _unwrapped(module)
    size = group_size(strategy)
    if memory_budget is not None and strategy != "auto":
        raise UsageError(f"memory_budget={memory_budget} is for strategy='auto': write that, too")
    if strategy == "auto":
        _leave_the_choice(module, preserve_rng_state, memory_budget, enabled)
        return
    if not isinstance(module, nn.Sequential) and strategy != "each":
        what = "the layers of a ModuleList are" if isinstance(module, nn.ModuleList) else "it is"
        raise UsageError(
            f"strategy={strategy!r} is for nn.Sequential, not for {type(module).__name__}: {what} "
            "called by the model's own code; leave the strategy out"
        )
    if isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and size == 1):
        units: list[nn.Module] = list(module)
    else:
        units = [module]
    is_container = isinstance(module, (nn.Sequential, nn.ModuleList))
    for marked in (module, *(module.children() if is_container else ())):
        set_mark(marked, None)
    for unit in units:
        set_mark(unit, Mark(strategy, preserve_rng_state) if enabled else None)
    if enabled and is_partitioned():
        check_marks(units)


def list_activation_checkpointing() -> dict[str, str]:
    """Returns the modules of the model whose calls are checkpointed, with their strategies.

    Without those that lie on several ranks, once it is known where they lie.
    """
    model = current().model
    if model is None:
        return {}
    is_known = is_partitioned()
    return {
        path: mark.strategy
        for path, module in model.get_module().named_modules()
        if (mark := mark_of(module)) is not None
        and (not is_known or isinstance(module, nn.Sequential) or is_whole(module))
    }


def _leave_the_choice(
    module: nn.Module, preserve_rng_state: bool, memory_budget: int | None, enabled: bool
) -> None:
    runtime = current()
    if not isinstance(module, (nn.Sequential, nn.ModuleList)):
        module = block_list(module)
    budget = memory_budget or device.memory_bytes() // (
        1 if device.has_accelerator() else local_size()
    )
    if enabled and runtime.model is not None and runtime.model.is_traced:
        if current_body() is not None:
            raise UsageError(
                "strategy='auto' was asked for inside a step; ask for it before or after one"
            )
        costs, measured = runtime.model.traced_costs, runtime.model.measured_memory.peak
        choose_again(module, costs, measured, (preserve_rng_state, budget))
        return
    for part in (module, *module.children()):
        set_mark(part, None)
    runtime.choices.pop(id(module), None)
    if not enabled:
        return
    runtime.choices[id(module)] = (module, preserve_rng_state, budget)


def _functional_mark(sequential: nn.Sequential, strategy: str, preserve_rng_state: bool) -> Mark:
    """Returns the mark of a call; kept, as the groups that were called are known by it."""
    known: dict[Any, Mark] = sequential.__dict__.setdefault("_smp_checkpointed_calls", {})
    return known.setdefault((strategy, preserve_rng_state), Mark(strategy, preserve_rng_state))


def _unwrapped(module: Any) -> nn.Module:
    while isinstance(module, (Wrapper, Level)):
        module = module.get_module() if isinstance(module, Wrapper) else vars(module)["module"]
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"set_activation_checkpointing takes a module, not {type(module).__name__}"
        )
    return module
