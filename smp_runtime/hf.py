"""`transformers.Trainer` over pipeline ranks and replicas.

One call at the top of a script, before anything is imported from transformers' Trainer::

    import smp_runtime.hf

    smp_runtime.hf.enable({"pipeline_parallel_degree": 2, "microbatches": 4})

    from transformers import Trainer, TrainingArguments

From there on the script is that of one process. The Trainer trains, evaluates, saves and resumes
with the losses of a plain one whose batch is the batch of all replicas together.

transformers has a path for SMP v1 in its Trainer, of which much is broken. `enable` switches it on,
as SageMaker's variables would, and repairs what is broken, without a change to the script:

* TrainingArguments asked for a CUDA device.
* No optimizer was made (transformers 5.3 and later).
* All replicas got the same batches, and evaluation looked at one replica's only.
* Losses were not normalised by the number of tokens, and `compute_loss` was never called.
* Label smoothing took the wrapper for the model, and did not shift the labels of language models.
* All ranks wrote to the same files of a checkpoint at once.
* Batches that microbatches don't divide failed; they are cut into another number of microbatches.
* Replicas repeated samples to fill the last batch of an epoch. Where it is not full every replica
  gets all of its samples instead, so that none counts twice. An IterableDataset still repeats some.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from .config import ENVIRONMENT_VARIABLE, load_config
from .errors import UsageError

__all__ = ["enable", "repair_when_imported"]

_TRAINER = "transformers.trainer"
_ARGUMENTS = "transformers.training_args"


def enable(config: Mapping[str, Any] | str | Path | None = None) -> None:
    """Makes `transformers.Trainer` train over all ranks of this job, and calls `smp.init`.

    Args:
        config: as for `smp.init`.

    Raises:
        UsageError: transformers' Trainer was imported before.
        ConfigError: as for `smp.init`.
    """
    settings = load_config(config, os.environ).model_dump(exclude_unset=True)
    gate = {**settings, "partitions": settings.get("pipeline_parallel_degree", 1)}
    environment = {
        ENVIRONMENT_VARIABLE: json.dumps(gate),  # transformers looks for `partitions` in it
        "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_enabled": True}),
    }
    if _ARGUMENTS in sys.modules and not _is_on():
        raise UsageError(
            "smp_runtime.hf.enable was called after the Trainer of transformers was imported: call "
            "it before `from transformers import Trainer, TrainingArguments`"
        )
    os.environ.update(environment)
    repair_when_imported()
    importlib.import_module(_TRAINER)  # calls `smp.init` with what stands in the environment


def _is_on() -> bool:
    return hasattr(sys.modules.get(_ARGUMENTS), "smp")


def repair_when_imported() -> None:
    """Repairs the Trainer, now or when it is imported; at most once."""
    module = sys.modules.get(_TRAINER)
    if module is not None and "Trainer" in vars(module):
        from .trainer.hf_repairs import repair

        repair(module, sys.modules[_ARGUMENTS])
    elif module is not None:
        module.__class__ = _Unrepaired
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Unrepaired(ModuleType):
    """The Trainer's module while it is being imported, and imports this package on the way."""

    def __getattribute__(self, name: str) -> Any:
        """Repairs the Trainer before anybody gets it."""
        if name == "Trainer" and name in self.__dict__:
            module: Any = self
            module.__class__ = ModuleType
            repair_when_imported()
        return ModuleType.__getattribute__(self, name)


class _Watch(MetaPathFinder):
    """Repairs the Trainer when its module has been executed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Finds the Trainer's module as it would be found without this, and adds the repair."""
        if fullname != _TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_repair(module: Any) -> None:
                execute(module)
                repair_when_imported()

            loader.exec_module = execute_and_repair
        return spec
