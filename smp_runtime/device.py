"""The one file that knows which device and which communication backend there is."""

from __future__ import annotations

import os
from typing import Any

import torch


def has_accelerator() -> bool:
    """Says whether this process computes on a CUDA device."""
    # Somebody may have put stand-ins into torch.cuda, for scripts. The launcher marks its own; a
    # torch without CUDA knows better than any.
    is_built: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    is_emulated: bool = getattr(torch.cuda, "is_emulated", False)
    return is_built and torch.cuda.is_available() and not is_emulated


def current_device() -> torch.device:
    """Returns the device on which this rank's modules live."""
    if has_accelerator():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def local(kind: torch.device) -> torch.device:
    """Returns this rank's device of the type of `kind`."""
    return current_device() if kind.type == "cuda" else kind


def use_local_device(local_rank: int) -> None:
    """Selects the accelerator of a local rank; several ranks may share one."""
    if has_accelerator():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def default_backend() -> str:
    """Returns the backend of torch.distributed that serves every tensor of this process."""
    return "cpu:gloo,cuda:nccl" if has_accelerator() else "gloo"


def random_state() -> tuple[Any, ...]:
    """Returns the states of torch's generators: the CPU's and the current device's."""
    if has_accelerator():
        return torch.default_generator.get_state(), torch.cuda.get_rng_state()
    return (torch.default_generator.get_state(),)


def set_random_state(state: tuple[Any, ...]) -> None:
    """Restores what `random_state` returned."""
    torch.default_generator.set_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1])


def seed_generators(seed: int) -> None:
    """Seeds torch's generators: the CPU's and the current device's."""
    torch.default_generator.manual_seed(seed)
    if has_accelerator():
        torch.cuda.manual_seed(seed)


def bookmark() -> int:
    """Returns the seed that the CPU's generator got last; part of its state."""
    return torch.default_generator.initial_seed()


def memory_bytes() -> int:
    """Returns the memory of the device on which this rank computes; on a CPU the machine's."""
    if has_accelerator():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory_bytes() -> int:
    """Returns the most memory that tensors of this process had on the device; 0 on a CPU.

    By the device's allocator, since the process began or a script reset the statistics. A CPU has
    no such allocator: what the process holds there is mostly not tensors.
    """
    return int(torch.cuda.max_memory_allocated()) if has_accelerator() else 0


def synchronize() -> None:
    """Waits until the device has done what was asked of it."""
    if has_accelerator():
        torch.cuda.synchronize()
