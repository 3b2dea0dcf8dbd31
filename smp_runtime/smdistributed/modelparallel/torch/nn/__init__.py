"""Modules under SMP's names."""

from smp_runtime.nn import *  # noqa: F403 - one list of names
from smp_runtime.nn import __all__ as _names

from . import huggingface as huggingface

__all__ = [*_names, "huggingface"]
