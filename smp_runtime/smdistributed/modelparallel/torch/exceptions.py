"""The errors of `smp_runtime`, where SageMaker's launcher looks for them."""

from smp_runtime.errors import (
    ConfigError,
    MicrobatchError,
    NotSupportedError,
    PartitionError,
    PathMismatchError,
    PeerError,
    ScheduleError,
    SMPError,
    UsageError,
    WaitTimeoutError,
)

__all__ = [
    "ConfigError",
    "MicrobatchError",
    "NotSupportedError",
    "PartitionError",
    "PathMismatchError",
    "PeerError",
    "SMPError",
    "ScheduleError",
    "UsageError",
    "WaitTimeoutError",
]
