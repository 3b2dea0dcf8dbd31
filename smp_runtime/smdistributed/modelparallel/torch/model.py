"""The module of `DistributedModel`, which trainers name in `isinstance`."""

from smp_runtime import DistributedModel

__all__ = ["DistributedModel"]
