"""Mixed precision under SMP's names."""

from .not_yet import runtime_or_placeholder

GradScaler = runtime_or_placeholder("GradScaler")
