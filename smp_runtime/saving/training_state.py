"""Saves and resumes a job: `save_checkpoint` and `resume_from_checkpoint`.

What is saved has the names of the plain model, so a job may be resumed on any number of ranks:
weights and buffers, the optimizer's state, the random streams and generators, and what the script
gives as `user_content`. `checkpoint_index` says what the files are.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from ..errors import CheckpointMismatchError, UsageError
from ..execution import rng
from ..model import DistributedModel
from ..replication.roll_call import RollCall
from ..runtime import Runtime, current
from .checkpoint_index import Layout, find
from .checkpoint_reader import Checkpoint, check, load_model
from .checkpoint_writer import as_torch_file, write_checkpoint
from .durable_files import durable_file
from .local_state import collect
from .optimizer_state import (
    NamesItsState,
    load_groups,
    load_local_state,
    needed_names,
    parameter_names,
)
from .pretrained import USER_CONTENT, load_whole, save_whole
from .random_state import restore_generators

_log = logging.getLogger("smp_runtime")
_background: ThreadPoolExecutor | None = None
_last_save: Future[None] | None = None


def save_checkpoint(
    path: str | Path,
    tag: str,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: Optimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    async_save: bool = False,
) -> Future[None] | None:
    """Saves a checkpoint. Every rank calls it.

    Args:
        path: the folder of all checkpoints, on a file system that every rank sees.
        tag: the name of this checkpoint, the same on all ranks. One of the same name is replaced.
        partial: everything that is needed to go on training, each rank writing its own part. Off:
            the model alone, as a folder ``path/tag`` that transformers loads.
        model: the wrapped model; the one of the script if not given.
        optimizer: the wrapped optimizer; the one of the script if not given.
        user_content: anything that the script needs to go on: numbers, the state dicts of
            schedulers and scalers, the position in the data. Rank 0's is saved.
        translate_if_full: accepted; there is nothing to translate.
        num_kept_partial_checkpoints: how many to keep; older ones are deleted. None keeps all.
        async_save: return once the state is copied to memory, and write in the background. A
            checkpoint of the model alone is written at once in any case.

    Returns:
        With `async_save` what to wait for; an error while writing is raised by its ``result()``,
        and else by the next call of this function.

    Raises:
        UsageError: there is no model yet.
        CheckpointWriteError: the disk is full, or a file can't be written, on any rank.
        WaitTimeoutError: ranks are missing; names them.
    """
    runtime = current()
    wait_for_saves()
    roll = RollCall("smp.save_checkpoint")
    model = _model(model)
    optimizer = optimizer or model.attached_optimizer
    if num_kept_partial_checkpoints is not None and num_kept_partial_checkpoints < 1:
        raise UsageError(
            f"num_kept_partial_checkpoints={num_kept_partial_checkpoints}: write at least 1, or "
            "None to keep all"
        )
    _check_tag(tag)
    if not partial:
        _save_whole(roll, Path(path), tag, model, user_content, runtime)
        return None
    seed = runtime.config.seed if runtime.config.seed is not None else rng.initial_seed()
    state = collect(model.get_module(), model.local_part, optimizer, runtime, seed, copy=async_save)
    if roll.rank == 0:
        state = dataclasses.replace(state, user_content=as_torch_file(user_content))

    def write() -> None:
        layout = _layout(runtime)
        kept = num_kept_partial_checkpoints
        write_checkpoint(roll, Path(path), tag, state, runtime.here, layout, kept)

    if not async_save:
        write()
        return None
    return _start(write)


def _save_whole(
    roll: RollCall,
    path: Path,
    tag: str,
    model: DistributedModel,
    user_content: Any,
    runtime: Runtime,
) -> None:
    save_whole(roll, model.get_module(), model.local_part, runtime, path / tag)

    def write_content() -> None:
        with durable_file(path / f"{USER_CONTENT}{tag}") as file:
            file.write(as_torch_file(user_content))

    if user_content is not None:
        roll.from_first(write_content)


def wait_for_saves() -> None:
    """Waits until what is saved in the background is down.

    Raises:
        CheckpointError: it could not be written.
    """
    global _last_save
    if _last_save is not None:
        pending, _last_save = _last_save, None
        pending.result()


def resume_from_checkpoint(
    path: str | Path,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    weights_only: bool | None = None,
) -> Any:
    """Goes on from a checkpoint, saved on however many ranks. Every rank calls it.

    Called when model and optimizer are wrapped. Weights are there when this returns; the state of
    the optimizer is read when the model is partitioned, in the first step.

    Args:
        path: the folder that was given to `save_checkpoint`.
        tag: which checkpoint; None for the one that was completed last.
        partial: resume from what `save_checkpoint` with `partial` wrote. Off: load the model alone,
            from a Hugging Face folder ``path`` or ``path/tag``, or a state dict ``path/tag``.
        strict: names of parameters and buffers must be those of the checkpoint. Off: what is
            in both is loaded. Shapes must fit in any case.
        load_optimizer: also load the state of the optimizer.
        load_sharded_optimizer_state: accepted; state is loaded whole at every layout.
        translate_function: changes a full state dict before it is loaded.
        weights_only: False lets pickled code in `user_content` run; None is torch's own rule.

    Returns:
        The `user_content` that was saved.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointIncompleteError: saving it was interrupted, or files are missing.
        CheckpointDamagedError: files are truncated.
        CheckpointMismatchError: it does not fit the model or the optimizer.
        UnsafeContentError: it holds pickled code.
        WaitTimeoutError: ranks are missing; names them.
    """
    runtime = current()
    wait_for_saves()
    roll = RollCall("smp.resume_from_checkpoint")
    model = _model(None)
    if not partial:
        return load_whole(
            roll,
            model.get_module(),
            Path(path),
            tag,
            strict=strict,
            is_partitioned=model.partitioned,
            weights_only=weights_only,
            translate=translate_function,
        )
    optimizer = model.attached_optimizer if load_optimizer else None
    folder = roll.from_first(lambda: find(Path(path), tag))
    opened: list[Checkpoint] = []
    content: list[Any] = []

    def read() -> None:
        opened.append(Checkpoint(folder))
        content.append(opened[0].user_content(weights_only))
        check(opened[0], model.get_module(), strict)
        if optimizer is not None:
            _check_optimizer(opened[0], optimizer, model)

    roll.gather(read)
    roll.gather(lambda: _load(opened[0], model, optimizer, runtime))
    return content[0]


def _load(
    checkpoint: Checkpoint,
    model: DistributedModel,
    optimizer: Optimizer | None,
    runtime: Runtime,
) -> None:
    load_model(checkpoint, model.get_module(), model.partitioned)
    if optimizer is not None:
        model.when_partitioned(lambda: _load_optimizer(checkpoint, optimizer, model))
    _restore_random(checkpoint, runtime)
    _log.info("resumed from %s, saved on %s", checkpoint.folder, checkpoint.index.layout.describe())


def _check_optimizer(checkpoint: Checkpoint, optimizer: Optimizer, model: DistributedModel) -> None:
    if checkpoint.index.optimizer is None:
        raise CheckpointMismatchError(
            f"{checkpoint.folder} was saved without an optimizer; pass load_optimizer=False"
        )
    load_groups(optimizer, checkpoint.groups(), parameter_names(model.get_module()))


def _load_optimizer(checkpoint: Checkpoint, optimizer: Optimizer, model: DistributedModel) -> None:
    names = parameter_names(model.get_module())
    wanted = set(needed_names(optimizer, names))
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in model.get_module().named_parameters()
        if name in wanted
    }
    load_local_state(optimizer, checkpoint.optimizer_state(shapes), names)
    if isinstance(optimizer, NamesItsState) and checkpoint.run_state["loss_scaler"]:
        optimizer.load_loss_scaler_state(checkpoint.run_state["loss_scaler"])


def _restore_random(checkpoint: Checkpoint, runtime: Runtime) -> None:
    state = checkpoint.run_state
    runtime.engine.num_steps = tuple(state["num_steps"])
    if not restore_generators(state["generators"], runtime.here):
        _log.warning(
            "rank %d is of a replica that the checkpoint does not know: its random generators "
            "stay as they are",
            dist.get_rank(),
        )
    seed = runtime.config.seed
    if seed is not None and seed != state["seed"]:
        _log.warning(
            "the setting `seed` is %d, and was %d when the checkpoint was saved: what is drawn in "
            "steps will differ",
            seed,
            state["seed"],
        )


def _model(given: DistributedModel | None) -> DistributedModel:
    model = current().model
    if model is None or (given is not None and given is not model):
        raise UsageError(
            "saving and resuming need the wrapped model: call smp.DistributedModel before"
        )
    return model


def _check_tag(tag: str) -> None:
    if not tag or tag != Path(tag).name:
        raise UsageError(f"tag={tag!r} has to be the name of one folder, such as 'step100'")


def _layout(runtime: Runtime) -> Layout:
    placement = runtime.placement
    return Layout(
        size=dist.get_world_size(),
        pp=placement.size("pp"),
        tp=placement.size("tp"),
        rdp=placement.size("rdp"),
    )


def _start(write: Callable[[], None]) -> Future[None]:
    """Writes in the background; the process ends no sooner than that is done."""
    global _background, _last_save
    if _background is None:
        _background = ThreadPoolExecutor(1, thread_name_prefix="smp-save")

    def logged() -> None:
        try:
            write()
        except Exception:
            _log.exception("saving in the background failed")
            raise

    _last_save = _background.submit(logged)
    return _last_save
