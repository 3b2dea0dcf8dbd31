"""Activation checkpointing: what is not kept but computed again."""
