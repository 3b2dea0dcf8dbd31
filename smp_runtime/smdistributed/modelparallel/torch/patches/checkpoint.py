"""Activation checkpointing under SMP's names."""

from smp_runtime import checkpoint as checkpoint
from smp_runtime import checkpoint_sequential as checkpoint_sequential
