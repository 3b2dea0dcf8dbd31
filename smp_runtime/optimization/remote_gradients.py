"""What stands in `grad` of a parameter of another rank: something that can't be mistaken for one.

Code that loops over all parameters and computes a norm, or an update, would otherwise silently
leave out what lives elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..execution.placing import LocalPart

_HARMLESS = frozenset([torch.ops.aten.detach.default, torch.ops.aten.zero_.default])


class RemoteGradient(torch.Tensor):
    """The gradient of a parameter that lives on another pipeline rank; holds no data."""

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> RemoteGradient:
        """Makes the place-holder for the gradient of a parameter on meta."""
        made: RemoteGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=_dtype_of(parameter), device=parameter.device
        )
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        """Says what it is."""
        return f"RemoteGradient(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuses to compute.

        Raises:
            UsageError: always, except for setting it to zero.
        """
        if func in _HARMLESS:
            return args[0]
        raise UsageError(
            f"{func} met the gradient of a parameter that lives on another pipeline rank. For "
            "norms call model.clip_grad_norm_(max_norm); wrap the optimizer in "
            "smp.DistributedOptimizer; for anything else use model.local_parameters()"
        )


class RemoteGradients:
    """The place-holders for all parameters of other ranks, made once."""

    def __init__(self, module: nn.Module, part: LocalPart) -> None:
        self._remote = {
            parameter: RemoteGradient(parameter)
            for parameter in module.parameters()
            if not part.is_local(parameter)
        }

    def mark(self) -> None:
        """Puts them where the parameters may have their gradients."""
        for parameter, gradient in self._remote.items():
            if parameter.requires_grad and parameter.grad is None:
                if gradient.dtype != _dtype_of(parameter):
                    gradient = self._remote[parameter] = RemoteGradient(parameter)
                parameter.grad = gradient

    def clear(self) -> None:
        """Takes them away, before a conversion of the model would stumble over them."""
        for parameter in self._remote:
            if isinstance(parameter.grad, RemoteGradient):
                parameter.grad = None


def _dtype_of(parameter: torch.Tensor) -> torch.dtype:
    """The type of a parameter's gradient, which may be wider than the parameter's."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return dtype or parameter.dtype
