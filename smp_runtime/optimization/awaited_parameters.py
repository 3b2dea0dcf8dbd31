"""Parameters whose values are on their way: they are waited for at the first use.

torch shows each operation on a tensor to the `__torch_function__` of the tensor's class, whether
a module, an optimizer or the script calls it. So while its values come, a parameter has a class
that waits for them first, and then it is a plain parameter again. What can be told without the
values (shape, type, gradient) does not wait.

Some uses torch does not show: those of memory that was taken out of a parameter before (a view,
an array of NumPy), and those of code below Python that is handed the parameter itself (extensions
in C++ not registered with torch, the transforms of `torch.func`). They would see old values
without a sign. Therefore parameters are awaited only where a script asks for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..tensors import METADATA_FUNCTIONS
from ..trees import iter_tensors


def _accessors(*names: str) -> frozenset[Any]:
    properties = [getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)]
    return frozenset(
        getattr(found, way) for found in properties for way in ("__get__", "__set__", "__delete__")
    )


_NEEDS_NO_VALUES = (
    METADATA_FUNCTIONS
    | _accessors("device", "grad", "grad_dtype", "grad_fn", "is_leaf", "is_meta", "requires_grad")
    | frozenset([torch.Tensor.requires_grad_])
)


class _Arrival(NamedTuple):
    parameters: tuple[nn.Parameter, ...]
    arrive: Callable[[], None]


# By identity: tensors compare element by element. Each arrival holds its parameters.
_arrivals: dict[int, _Arrival] = {}
_lock = threading.RLock()


class AwaitedParameter(nn.Parameter):
    """The class of a parameter until its first use."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Makes a plain parameter: a copy of an awaited one is of what has come."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Waits for values if the function needs them, and calls it."""
        kwargs = kwargs or {}
        if func in _NEEDS_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        awaited = [tensor for tensor in iter_tensors((args, kwargs)) if id(tensor) in _arrivals]
        for tensor in awaited:
            if id(tensor) in _arrivals:  # not come with another one
                _settle(_arrivals[id(tensor)])
        if not awaited:  # hidden in an argument of another kind
            await_all()
        return func(*args, **kwargs)


def await_at_first_use(parameters: Sequence[nn.Parameter], arrive: Callable[[], None]) -> None:
    """Lets parameters have their values only when one of them is used.

    Args:
        parameters: of exactly the class `nn.Parameter`, and not awaited yet.
        arrive: gives all of them their values; called once, in any thread, without autograd.
    """
    arrival = _Arrival(tuple(parameters), arrive)
    for parameter in parameters:
        _arrivals[id(parameter)] = arrival
        parameter.__class__ = AwaitedParameter


def await_all() -> None:
    """Waits for all values that are on their way, in the order in which they were sent."""
    for arrival in list(_arrivals.values()):
        _settle(arrival)


def _settle(arrival: _Arrival) -> None:
    with _lock:
        if not any(_arrivals.get(id(parameter)) is arrival for parameter in arrival.parameters):
            return
        # Whatever watches operations here (fake tensors, counters, autograd) must not see these.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
        ):
            arrival.arrive()
        for parameter in arrival.parameters:
            del _arrivals[id(parameter)]
            parameter.__class__ = nn.Parameter


os.register_at_fork(before=await_all)  # a child would wait for what only its parent receives
