"""The package in which SMP kept its replacements of functions of torch."""

from . import checkpoint

__all__ = ["checkpoint"]
