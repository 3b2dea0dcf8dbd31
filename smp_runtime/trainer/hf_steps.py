"""The steps of a `transformers.Trainer`: its `compute_loss`, once for each microbatch.

The Trainer normalises the loss of a batch by the number of its tokens in all replicas and all
accumulated batches. Gradients are averaged over microbatches and replicas; so each microbatch
divides its own sum by the share of that number that would be its own, if all shares were equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..execution.step_inputs import Call
from ..microbatch import StepOutput
from ..runtime import current
from ..step_function import StepFunction
from ..trees import iter_tensors
from .hf_batches import is_shared


class TrainerStep(StepFunction):
    """A step on a batch of any size, in equal microbatches that are never larger than usual.

    Args:
        function: the body.
        batch_size: of a usual batch of one replica.
    """

    def __init__(self, function: Callable[..., Any], batch_size: int) -> None:
        super().__init__(function, (), {}, True)
        self._batch_size = batch_size

    def num_microbatches(self, call: Call) -> int:
        """Returns the smallest number of equal microbatches that take no more memory than usual."""
        size = next((tensor.shape[0] for tensor in iter_tensors(call) if tensor.dim()), 1)
        most = -(-min(size, self._batch_size) // current().config.microbatches)
        return next((m for m in range(1, size) if size % m == 0 and size // m <= most), size)

    def on_batch(
        self, trainer: Any, model: Any, inputs: Any, num_items: Any, is_shared: bool
    ) -> Any:
        """Runs a step with the share of `num_items` that would be each microbatch's."""
        if num_items is not None:
            replicas = current().placement.size("dp")
            num_items = float(num_items) / self.num_microbatches(((inputs,), {}))
            if trainer.args.average_tokens_across_devices:  # they are those of all replicas
                num_items /= replicas
            if is_shared:  # each replica adds up the losses of all
                num_items *= replicas
        with trainer.accelerator.counted_as_one():
            return self(model, inputs, num_items)


def train_on_batch(
    trainer: Any, model: Any, inputs: Any, num_items: torch.Tensor | int | None
) -> torch.Tensor:
    """Does one forward and backward pass and returns the loss, averaged over the replicas."""
    step = _step(trainer, "_smp_train", _train, trainer.args.train_batch_size)
    # The batches of one update are read ahead, and only the last of an epoch may be shared.
    is_last = trainer.accelerator.gradient_state.sync_gradients
    losses = step.on_batch(
        trainer, model, inputs, num_items, is_last and is_shared(trainer.accelerator)
    )
    return _mean_over_replicas(losses.reduce_mean())


def _mean_over_replicas(loss: torch.Tensor) -> torch.Tensor:
    mean = loss.detach().float()
    dist.all_reduce(mean, group=current().groups.of("dp"))
    return mean / current().placement.size("dp")


def evaluate_batch(trainer: Any, model: Any, inputs: Any) -> Any:
    """Does one forward pass and returns its outputs by microbatch.

    The loss among them is that of the batches of all replicas together.
    """
    num_items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
    step = _step(trainer, "_smp_evaluate", _evaluate, trainer.args.eval_batch_size)
    outputs = step.on_batch(trainer, model, inputs, num_items, is_shared(trainer.accelerator))
    if not _returns_loss(trainer, inputs):
        return outputs
    is_dict = isinstance(outputs, dict)
    losses = outputs["loss"] if is_dict else outputs[0]
    loss = StepOutput([_mean_over_replicas(losses.reduce_mean())])
    if is_dict:
        outputs["loss"] = loss
        return outputs
    return (loss, *outputs[1:])


def _step(trainer: Any, name: str, body: Callable[..., Any], batch_size: int) -> TrainerStep:
    """Returns the step of a Trainer, made at its first use."""
    if name not in vars(trainer):
        setattr(trainer, name, TrainerStep(functools.partial(body, trainer), batch_size))
    step: TrainerStep = getattr(trainer, name)
    return step


def _train(trainer: Any, model: Any, inputs: Any, num_items: float | None) -> torch.Tensor:
    with trainer.compute_loss_context_manager():
        loss: torch.Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
    if not _is_scaled(trainer, num_items):
        loss = loss / trainer.current_gradient_accumulation_steps
    model.backward(loss)
    return loss


def _is_scaled(trainer: Any, num_items: float | None) -> bool:
    """Whether a loss is that of all accumulated batches together, as transformers decides it."""
    declared: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
    if declared is not None:
        return declared
    takes_number = trainer.model_accepts_loss_kwargs and num_items is not None
    return takes_number or trainer.compute_loss_func is not None


def _returns_loss(trainer: Any, inputs: Any) -> bool:
    """Whether an evaluation has a loss, as transformers decides it."""
    has_labels = any(inputs.get(name) is not None for name in trainer.label_names)
    return has_labels or (not trainer.label_names and trainer.can_return_loss)


def _evaluate(trainer: Any, model: Any, inputs: Any, num_items: float | None) -> Any:
    if not _returns_loss(trainer, inputs):
        return model(**inputs)
    with trainer.compute_loss_context_manager():
        loss, outputs = trainer.compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items
        )
    if isinstance(outputs, dict):
        outputs["loss"] = loss
        return outputs
    return (loss, *outputs[1:])
