"""Mixed precision under SMP's names."""

from smp_runtime import GradScaler as GradScaler
