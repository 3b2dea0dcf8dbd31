"""What `hf` changes in the classes of transformers' Trainer. Each function says why."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .. import device
from ..errors import UsageError
from ..messages.communication import barrier
from ..model import DistributedModel
from ..runtime import current
from .hf_accelerator import ReplicaAccelerator, alone
from .hf_batches import is_shared
from .hf_steps import evaluate_batch, train_on_batch

_NUM_STEPS = "smp_num_steps.json"
_evaluating: list[Any] = []


def repair(trainer: Any, arguments: Any) -> None:
    """Repairs the modules of `Trainer` and of `TrainingArguments`, once."""
    if hasattr(trainer.Trainer, "_smp_runtime_repaired") or not hasattr(trainer, "smp"):
        return
    trainer.Trainer._smp_runtime_repaired = True
    arguments.TrainingArguments._setup_devices = property(_device)
    for name, replacement in (
        ("create_accelerator_and_postprocess", _create_accelerator),
        ("_wrap_model", _wrap_model),
        ("_get_num_items_in_batch", _get_num_items_in_batch),
        ("training_step", _training_step),
        ("prediction_step", _prediction_step),
        ("save_model", _save_model),
        ("_save", _save),
        ("_save_rng_state", _save_rng_state),
        ("_load_rng_state", _load_rng_state),
    ):
        native = getattr(trainer.Trainer, name)
        setattr(trainer.Trainer, name, _replaced(native, replacement))
    trainer.smp_forward_only = lambda model, inputs: evaluate_batch(_evaluating[-1], model, inputs)


def _replaced(native: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(native, self, *args, **kwargs)

    return call


def _device(arguments: Any) -> torch.device:
    """The device of this rank. transformers would ask for CUDA, or fail where it must not."""
    arguments.distributed_state = None
    arguments._n_gpu = int(device.has_accelerator())
    return device.current_device()


def _create_accelerator(native: Callable[..., Any], trainer: Any) -> None:
    """accelerate would take all ranks for replicas, or, on a CPU, see one process."""
    with alone():
        native(trainer)
    trainer.accelerator.__class__ = ReplicaAccelerator


def _wrap_model(
    native: Callable[..., Any], trainer: Any, model: Any, training: bool = True, **kwargs: Any
) -> Any:
    """transformers would wrap a model again to evaluate, and never make an optimizer."""
    known = current().model
    if known is not None and known.get_module() is model:
        wrapped: Any = known
    elif isinstance(model, DistributedModel):
        wrapped = model
    else:
        if known is not None:
            raise UsageError(
                "a second model was given to a Trainer; a script has one smp.DistributedModel"
            )
        # Gradients are reduced at every step: the last accumulation of an epoch may be shorter.
        wrapped = DistributedModel(model)
    if training and trainer.optimizer is None:
        trainer.model_wrapped = wrapped
        trainer.create_optimizer()
    return wrapped


def _get_num_items_in_batch(
    native: Callable[..., Any], trainer: Any, batch_samples: Any, *args: Any, **kwargs: Any
) -> Any:
    """The tokens of a batch that all replicas got would count once for each."""
    if not batch_samples or not is_shared(trainer.accelerator):
        return native(trainer, batch_samples, *args, **kwargs)
    before, shared = (
        native(trainer, batches, *args, **kwargs)
        for batches in (batch_samples[:-1], batch_samples[-1:])
    )
    if shared is None:
        return None
    return (0 if before is None else before) + shared / current().placement.size("dp")


def _training_step(
    native: Callable[..., Any],
    trainer: Any,
    model: Any,
    inputs: Any,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """transformers would ignore the number of tokens, and `compute_loss`."""
    model.train()
    if callable(getattr(trainer.optimizer, "train", None)):
        trainer.optimizer.train()
    return train_on_batch(trainer, model, trainer._prepare_inputs(inputs), num_items_in_batch)


def _prediction_step(native: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers would ignore the number of tokens, and `compute_loss`."""
    with _evaluation(trainer):
        return native(trainer, *args, **kwargs)


@contextmanager
def _evaluation(trainer: Any) -> Iterator[None]:
    _evaluating.append(trainer)
    try:
        yield
    finally:
        _evaluating.pop()


def _save_model(native: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """What follows may read what another rank writes."""
    native(trainer, *args, **kwargs)
    barrier()


def _save(native: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """All ranks would write the same files at once."""
    if trainer.args.should_save:
        native(trainer, *args, **kwargs)


def _save_rng_state(native: Callable[..., Any], trainer: Any, output_dir: str) -> None:
    """All ranks of a pipeline would write the same file at once; their states are equal."""
    if current().here.mp_rank == 0:
        native(trainer, output_dir)
    if current().here.mp_rank == current().here.dp_rank == 0:
        counted = json.dumps(list(current().engine.num_steps))
        Path(output_dir, _NUM_STEPS).write_text(counted, encoding="utf-8")


def _load_rng_state(native: Callable[..., Any], trainer: Any, checkpoint: str | None) -> None:
    """What is drawn inside of steps depends on how many there were."""
    native(trainer, checkpoint)
    file = Path(checkpoint or "", _NUM_STEPS)
    if checkpoint is not None and file.is_file():
        current().engine.num_steps = tuple(json.loads(file.read_text(encoding="utf-8")))
