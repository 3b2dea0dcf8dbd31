"""The module in which SMP kept `init` and the ranks."""

from smp_runtime import (
    dp_rank,
    dp_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    shutdown,
    size,
    tp_rank,
    tp_size,
)

initialized = is_initialized

__all__ = [
    "dp_rank",
    "dp_size",
    "init",
    "initialized",
    "is_initialized",
    "local_rank",
    "local_size",
    "mp_rank",
    "mp_size",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "shutdown",
    "size",
    "tp_rank",
    "tp_size",
]
