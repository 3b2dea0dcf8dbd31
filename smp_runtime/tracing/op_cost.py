"""What one tensor operation costs, forward and backward: a roofline with a few exceptions.

An operation takes as long as its arithmetic or its memory traffic, whichever is more. The
constants were measured with one thread on a server CPU (AMD EPYC); only their ratios matter to
the partitioning, and those differ little between CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

__all__ = [
    "ACCELERATOR",
    "CPU",
    "Machine",
    "OpCost",
    "draws",
    "named_arguments",
    "op_cost",
    "parameter_gradient_cost",
]


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast a device is.

    Args:
        flops: per second, of large matrix products.
        traffic: bytes read or written per second.
        fresh: bytes per second of writing newly allocated memory in tensors of at least
            `large` bytes: those are given back to the kernel and paged in again each time.
        large: see `fresh`.
        seconds_per_op: of starting an operation.
        element_seconds: of the operations in `ELEMENT_COST`, per unit of that table.
    """

    flops: float
    traffic: float
    fresh: float
    large: int
    seconds_per_op: float
    element_seconds: float


CPU = Machine(85e9, 25e9, 2e9, 32 << 20, 3e-6, 1e-9)
ACCELERATOR = Machine(2e14, 3e12, 3e12, 1 << 60, 5e-6, 0.0)

ELEMENT_COST: Mapping[str, float] = {
    "_log_softmax": 0.6,
    "_softmax": 0.75,
    "cos": 1.0,
    "erf": 1.0,
    "exp": 1.1,
    "gelu": 0.5,
    "log": 1.0,
    "native_batch_norm": 0.5,
    "native_group_norm": 0.5,
    "native_layer_norm": 0.5,
    "sigmoid": 0.7,
    "silu": 0.5,
    "sin": 1.0,
    "softplus": 2.0,
    "tanh": 3.4,
}
"""Nanoseconds per element of the result on a CPU, where more than memory traffic."""

BACKWARD_LIKE_FORWARD = frozenset({"_log_softmax", "_softmax", "gelu", "silu", "softplus"})
"""Operations of `ELEMENT_COST` whose backward does the same arithmetic again."""

GATHERS = frozenset({"embedding", "gather", "index", "index_select", "select_scatter", "slice"})
"""Operations that read only as much of their operands as they write."""

FREE = frozenset({"detach", "empty", "empty_strided", "empty_like", "lift_fresh", "new_empty"})

ATTENTION_BACKWARD = 2.5
"""Attention kernels recompute the scores in backward: five products against two."""


class OpCost(NamedTuple):
    """Seconds of the forward and of the backward of one operation."""

    forward: float
    backward: float


def op_cost(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    result: Any,
    machine: Machine,
) -> OpCost:
    """Returns the cost of one call of an operation.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its keyword arguments.
        inputs: the tensors among both.
        outputs: those of its result.
        result: the result.
        machine: how fast the device is.
    """
    name = func._overloadpacket.__name__.removesuffix("_")
    if func.is_view or name in FREE:
        return OpCost(0.0, 0.0)
    trained = [t for t in inputs if t.requires_grad] if torch.is_grad_enabled() else []
    written = sum(map(_bytes, outputs))
    moved = written + (written if name in GATHERS else sum(map(_bytes, inputs)))
    traffic = moved / machine.traffic + _first_touch(outputs, machine)
    formula = flop_registry.get(func._overloadpacket) or _FLOPS.get(func._schema.name)
    if formula is not None:
        flops = formula(*args, **kwargs, out_val=result)
        forward = machine.seconds_per_op + max(flops / machine.flops, traffic)
        products = ATTENTION_BACKWARD if "attention" in name else sum(t.dim() > 1 for t in trained)
        return OpCost(forward, forward * products if trained else 0.0)
    element = _element_seconds(name, outputs, machine)
    forward = machine.seconds_per_op + max(element, traffic)
    if not trained:
        return OpCost(forward, 0.0)
    # Twice the traffic: the output gradient is read besides what forward read.
    again = max(element if name in BACKWARD_LIKE_FORWARD else 0.0, 2 * traffic)
    return OpCost(forward, machine.seconds_per_op + again)


def parameter_gradient_cost(num_bytes: int, machine: Machine) -> float:
    """Returns the seconds to write a parameter's gradient and add it to those before."""
    paging = num_bytes / machine.fresh if num_bytes >= machine.large else 0.0
    return 4 * num_bytes / machine.traffic + paging


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _first_touch(outputs: Sequence[torch.Tensor], machine: Machine) -> float:
    large = [size for size in map(_bytes, outputs) if size >= machine.large]
    return sum(large) / machine.fresh


def _element_seconds(name: str, outputs: Sequence[torch.Tensor], machine: Machine) -> float:
    if name not in ELEMENT_COST or not outputs:
        return 0.0
    return ELEMENT_COST[name] * machine.element_seconds * outputs[0].numel()


def _attention_flops(query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> int:
    batch, heads, length, size = query.shape
    # Kernels for the CPU reach about half of the speed of a plain product.
    return 2 * 4 * batch * heads * length * key.shape[2] * size


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


# By name: not every torch has them all.
_FLOPS: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "aten::_grouped_mm": _grouped_flops,
}


def named_arguments(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of an operation by name, defaults included."""
    declared = func._schema.arguments
    given = dict(zip((argument.name for argument in declared), args, strict=False))
    return {argument.name: argument.default_value for argument in declared} | given | dict(kwargs)


def draws(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Says whether an operation that may draw random numbers does so with these arguments."""
    named = named_arguments(func, args, kwargs)
    off = any(named.get(name) is False for name in ("train", "training"))
    zero = any(named.get(name) == 0.0 for name in ("dropout_p", "dropout"))
    return not (off or zero)
