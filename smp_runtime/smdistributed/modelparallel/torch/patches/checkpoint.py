"""Activation checkpointing under SMP's names."""

from ..not_yet import runtime_or_placeholder

checkpoint = runtime_or_placeholder("checkpoint")
checkpoint_sequential = runtime_or_placeholder("checkpoint_sequential")
