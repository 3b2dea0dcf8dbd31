"""Runs a script that was written for CUDA on the CPU: ``python -m launch --emulate-cuda``.

What such a script says about devices is redirected before torch hears of it, in this process only.
Memory statistics answer with what the process itself uses. Nothing is faster, and what needs real
CUDA kernels fails and says why.
"""

import functools
import os
import resource
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # lists torch's functions, and must find the real ones
import torch.distributed as dist
from torch.jit import _builtins

import smp_runtime as smp_runtime  # before anything is replaced: it tells torch's functions apart

from .cuda_names import CUDA_PACKAGES, FACTORIES, METHODS, TENSOR_TYPES, WITHOUT_EFFECT
from .cuda_stand_ins import Autocast, Context, CudaAutocast, Event, Scaler, Stream

CPU = torch.device("cpu")


def redirected(value: Any) -> Any:
    """Returns the CPU for what names a CUDA device, and anything else as it is."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return CPU
    if isinstance(value, str) and value.startswith("torch.cuda."):
        return value.replace("torch.cuda.", "torch.")
    return value


def redirecting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that never hears of CUDA devices in its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(redirected, args))
        return function(*args, **{name: redirected(value) for name, value in kwargs.items()})

    return call


def install() -> None:
    """Redirects devices in this process, for good."""
    _redirect_tensors()
    _replace_cuda()
    _redirect_mixed_precision()
    _redirect_distributed()


def _redirect_tensors() -> None:
    for name in FACTORIES:
        native = getattr(torch, name)
        setattr(torch, name, redirecting(native))
        # What torch.jit compiles a call to.
        if operation := _builtins._find_builtin(native):  # type: ignore[no-untyped-call]
            _builtins._register_builtin(getattr(torch, name), operation)
    for name in METHODS:
        setattr(torch.Tensor, name, redirecting(getattr(torch.Tensor, name)))

    def stay(moved: Any, *args: Any, **kwargs: Any) -> Any:
        return moved

    kinds: list[Any] = [torch.Tensor, torch.nn.Module, torch.UntypedStorage, torch.TypedStorage]
    for kind in kinds:
        kind.cuda = stay
    kinds[0].pin_memory = stay
    kinds[1].to = redirecting(torch.nn.Module.to)
    torch.load = redirecting(torch.load)
    torch.set_default_device = redirecting(torch.set_default_device)
    torch.accelerator.is_available = lambda: False  # loaders would pin memory for it
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")


def _replace_cuda() -> None:
    cuda: Any = torch.cuda
    here = SimpleNamespace(index=0)

    def set_device(device: Any) -> None:
        index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
        here.index = int(index or 0)

    def nothing(*args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "current_device": lambda: here.index,
        "set_device": set_device,
        "get_device_name": lambda device=None: "CPU (emulated CUDA device)",
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="CPU (emulated CUDA device)",
            **{"major": 8, "minor": 0, "total_memory": total_memory()},
            multi_processor_count=os.cpu_count() or 1,
        ),
        "mem_get_info": lambda device=None: (total_memory() - used_memory(), total_memory()),
        "memory_stats": lambda device=None: {
            f"{kind}_bytes.all.{when}": value
            for kind in ("allocated", "reserved", "active")
            for when, value in (("current", used_memory()), ("peak", peak_memory()))
        },
        "memory_summary": lambda *args, **kwargs: f"{used_memory()} bytes of a process on the CPU",
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "initial_seed": torch.initial_seed,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": lambda stream=None: Context(),
        "device": lambda device=None: Context(),
        "Event": Event,
        "Stream": Stream,
        "is_current_stream_capturing": lambda: False,
    }
    for name in ("memory_allocated", "memory_reserved", "memory_cached"):
        answers[name] = lambda device=None: used_memory()
        answers[f"max_{name}"] = lambda device=None: peak_memory()
    # A seed for CUDA only changes nothing: draws come from the generator that torch.manual_seed
    # seeds, as weights and data of this process do.
    for name in WITHOUT_EFFECT:
        answers[name] = nothing
    for name, answer in answers.items():
        for module in (cuda, cuda.memory, cuda.random):  # scripts name these modules, too
            if module is cuda or hasattr(module, name):
                setattr(module, name, answer)
    for name in TENSOR_TYPES:
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, nothing)
    cuda.nvtx.range = lambda *args, **kwargs: Context()
    cuda.is_emulated = True  # the runtime computes on the CPU then


def _redirect_mixed_precision() -> None:
    modules: list[Any] = [torch, torch.amp, torch.amp.autocast_mode]
    for module in modules:
        module.autocast = Autocast
    amp: Any = torch.amp
    amp.GradScaler = amp.grad_scaler.GradScaler = Scaler
    cuda_amp: Any = torch.cuda.amp
    cuda_amp.autocast = CudaAutocast
    cuda_amp.GradScaler = functools.partial(Scaler, "cuda")


def _redirect_distributed() -> None:
    def without_nccl(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple("gloo" if value == "nccl" else value for value in args)
            if kwargs.get("backend") == "nccl":
                kwargs["backend"] = "gloo"
            kwargs.pop("device_id", None)
            return function(*args, **kwargs)

        return call

    dist.init_process_group = without_nccl(dist.init_process_group)
    dist.new_group = without_nccl(dist.new_group)


def used_memory() -> int:
    """Returns the bytes of memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_memory() -> int:
    """Returns the most bytes of memory that this process held."""
    # The kernel counts the peak a little late.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, used_memory())


def total_memory() -> int:
    """Returns the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def explain(error: BaseException) -> None:
    """Adds to an error what it has to do with the emulation, if it has."""
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ImportError) and package in CUDA_PACKAGES:
        error.add_note(
            f"launch: --emulate-cuda can't emulate {package}, which consists of CUDA kernels. In "
            "place of apex's layer norm use smp.nn.FusedLayerNorm, and torch's own AdamW for its "
            "optimizers"
        )
    elif "cuda" in str(error).lower():
        error.add_note(
            "launch: --emulate-cuda redirects devices, streams and memory statistics to the CPU; "
            "what runs CUDA kernels itself can't be emulated"
        )


def main(arguments: list[str]) -> None:
    """Runs a script, whose path and arguments are given, as the program of this process."""
    install()
    if os.environ.get("RANK", "0") == "0":
        print("launch: emulating CUDA: this script computes on the CPU", file=sys.stderr)
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except BaseException as error:
        explain(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
