"""Optimizers under SMP's names."""

from smp_runtime.optimizers import FusedLAMB, FusedNovoGrad

FusedLamb = FusedLAMB  # SMP's documents spell it so

__all__ = ["FusedLAMB", "FusedLamb", "FusedNovoGrad"]
