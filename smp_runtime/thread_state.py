"""What torch keeps per thread and a body's thread must take over from its caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ThreadState:
    """Grad mode, inference mode, autocast, default device and other function modes.

    Attributes:
        grad: whether operations record a graph.
        inference: whether inference mode is on.
        autocast: device type, enabled, dtype of each kind of autocast.
        cache: whether autocast keeps converted weights.
        modes: the function modes that are active, outermost first.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    modes: tuple[Any, ...]

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
            yield
