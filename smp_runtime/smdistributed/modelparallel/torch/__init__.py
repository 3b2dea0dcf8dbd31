"""``import smdistributed.modelparallel.torch as smp``: SMP v1's API, by `smp_runtime`."""

from smp_runtime import *  # noqa: F403 - whatever the runtime offers, under SMP's module path
from smp_runtime.hf import repair_when_imported

from . import amp, core, exceptions, model, nn, optimizers, patches, state_mod, utils
from .state_mod import state

# SMP's package has a module and a decorator of this name. The decorator is what scripts mean.
from .step import step

# transformers imports this package for its Trainer, whose path for it needs repairs.
repair_when_imported()

__all__ = [  # noqa: PLE0604 - and the names of the runtime
    "amp",
    "core",
    "exceptions",
    "model",
    "nn",
    "optimizers",
    "patches",
    "state",
    "state_mod",
    "step",
    "utils",
]
