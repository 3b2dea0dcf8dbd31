"""What torch keeps per thread and a body's thread must take over from its caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _python_dispatch as python_dispatch

# Torch 2.6 and 2.7 can't say which hooks are active: there, those around a step don't reach its
# bodies.
_SAVED_HOOKS: Callable[[bool], tuple[Any, Any] | None] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda is_tracing: None
)


@dataclass(frozen=True)
class ThreadState:
    """Grad mode, inference mode, autocast, function and dispatch modes, hooks of saved tensors.

    Attributes:
        grad: whether operations record a graph.
        inference: whether inference mode is on.
        autocast: device type, enabled, dtype of each kind of autocast.
        cache: whether autocast keeps converted weights.
        modes: the function modes that are active, outermost first.
        dispatch_modes: likewise of torch's dispatcher.
        saved_hooks: what packs and unpacks tensors that are saved for backward, if anything does.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    saved_hooks: tuple[Any, Any] | None

    @classmethod
    def current(cls) -> ThreadState:
        """Reads the calling thread's state."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda")
            ),
            torch.is_autocast_cache_enabled(),
            tuple(torch.overrides._get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
            tuple(python_dispatch._get_current_dispatch_mode_stack()),
            _SAVED_HOOKS(False),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Gives the calling thread this state for a while."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.cache))
            for mode in self.modes:
                torch._C._push_on_torch_function_stack(mode)
                stack.callback(torch._C._pop_torch_function_stack)
            for mode in self.dispatch_modes:
                python_dispatch._push_mode(mode)
                stack.callback(python_dispatch._pop_mode)
            if self.saved_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_hooks))
            yield
