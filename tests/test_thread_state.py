"""What torch keeps per thread, read in one thread and restored in another."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from smp_runtime.execution.thread_state import ThreadState


def in_thread(state: ThreadState, look: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns what `look` sees in a new thread under `state` and after it."""
    seen: list[Any] = []

    def run() -> None:
        with state.restored():
            seen.append(look())
        seen.append(look())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen[0], seen[1]


def test_grad_mode_follows() -> None:
    with torch.no_grad():
        state = ThreadState.current()
    assert in_thread(state, torch.is_grad_enabled) == (False, True)


def test_inference_mode_follows() -> None:
    with torch.inference_mode():
        state = ThreadState.current()
    assert in_thread(state, torch.is_inference_mode_enabled) == (True, False)


def test_grad_may_be_enabled_inside_no_grad() -> None:
    with torch.no_grad(), torch.enable_grad():
        state = ThreadState.current()
    assert in_thread(state, torch.is_grad_enabled) == (True, True)


def test_autocast_follows_with_its_type() -> None:
    def look() -> tuple[bool, torch.dtype]:
        out = torch.ones(2, 2) @ torch.ones(2, 2)
        return torch.is_autocast_enabled("cpu"), out.dtype

    with torch.autocast("cpu", dtype=torch.float16):
        state = ThreadState.current()
    assert in_thread(state, look) == ((True, torch.float16), (False, torch.float32))


def test_autocast_cache_follows() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        state = ThreadState.current()
    assert in_thread(state, torch.is_autocast_cache_enabled)[0] is False


def test_default_device_follows() -> None:
    with torch.device("meta"):
        state = ThreadState.current()
    assert in_thread(state, lambda: torch.zeros(1).device.type) == ("meta", "cpu")


class Recorder(TorchFunctionMode):
    """Notes its name for each function that it sees."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.name = name
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(self.name)
        return func(*args, **(kwargs or {}))


def test_function_modes_follow_in_their_order() -> None:
    seen: list[str] = []
    with Recorder("outer", seen), Recorder("inner", seen):
        state = ThreadState.current()
    in_thread(state, lambda: torch.add(torch.ones(()), 1))
    both, after = seen[:4], seen[4:]
    assert both == ["inner", "outer"] * 2
    assert after == []


def test_a_plain_thread_stays_plain() -> None:
    state = ThreadState.current()
    assert (state.grad, state.inference, state.modes) == (True, False, ())
    assert in_thread(state, torch.is_grad_enabled) == (True, True)


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="this torch can't say which hooks are active",
)
def test_hooks_of_saved_tensors_follow() -> None:
    packed: list[int] = []

    def look() -> int:
        packed.clear()
        torch.ones(2, requires_grad=True).square()
        return len(packed)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(1)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        state = ThreadState.current()
    assert in_thread(state, look) == (1, 0)


def test_dispatch_modes_follow() -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def look() -> int:
        seen.clear()
        torch.ones(2)
        return len(seen)

    with Watch():
        state = ThreadState.current()
    assert in_thread(state, look) == (1, 0)
