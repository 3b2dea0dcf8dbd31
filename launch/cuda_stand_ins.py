"""What stands for CUDA's objects on a CPU: streams, events, mixed precision."""

import time
from typing import Any, Self

import torch
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler


class Context:
    """A context in which nothing is different."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class Stream(Context):
    """Stands for a stream; on a CPU operations are done when they return."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def synchronize(self) -> None:
        """Returns."""

    def query(self) -> bool:
        """Says that everything is done."""
        return True

    def wait_stream(self, stream: Any) -> None:
        """Returns."""

    def wait_event(self, event: Any) -> None:
        """Returns."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Returns an event of now."""
        event = event or Event()
        event.record()
        return event


class Event:
    """Stands for an event, with the time at which it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Notes the time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Returns the milliseconds from this event to another one."""
        return (end._seconds - self._seconds) * 1000

    def synchronize(self) -> None:
        """Returns."""

    def wait(self, stream: Any = None) -> None:
        """Returns."""

    def query(self) -> bool:
        """Says that the event is over."""
        return True


class Autocast(autocast):
    """torch's autocast, on the CPU also where CUDA is asked for; float16 stays its default."""

    def __init__(
        self,
        device_type: str = "cuda",
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type.startswith("cuda"):
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        super().__init__(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class CudaAutocast(Autocast):
    """Stands for `torch.cuda.amp.autocast`."""

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> None:
        super().__init__("cuda", dtype, enabled, cache_enabled)


class Scaler(GradScaler):
    """torch's scaler of losses, on the CPU also where CUDA is asked for."""

    def __init__(self, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device.startswith("cuda") else device, *args, **kwargs)
