"""Small functions that scripts take from SMP."""

import torch

from smp_runtime import is_initialized, rank

__all__ = ["get_distribution_axis", "rmsg"]


def get_distribution_axis(param: torch.Tensor) -> int | None:
    """Returns along which dimension a parameter is cut over tensor ranks: None, it is whole."""
    return None


def rmsg(message: object) -> str:
    """Returns a message with this rank in front."""
    return f"[{rank() if is_initialized() else 0}] {message}"
