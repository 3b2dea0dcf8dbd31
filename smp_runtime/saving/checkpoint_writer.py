"""Writes a checkpoint on all ranks together, so that it is there as a whole or not at all."""

from __future__ import annotations

import io
import logging
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, CheckpointWriteError, UsageError
from ..planning.placement import Coordinates
from ..replication.roll_call import RollCall
from ..tensors import meta_of
from .checkpoint_index import (
    FORMAT,
    INCOMPLETE,
    INDEX,
    NEWEST,
    PARTIAL,
    RUN_STATE,
    USER_CONTENT,
    Index,
    Layout,
    Place,
    complete,
)
from .durable_files import durable_file, publish_folder, replace_text, write_errors
from .local_state import LocalState
from .optimizer_state import Piece
from .safetensors_file import write_safetensors

_log = logging.getLogger("smp_runtime")


class Written(NamedTuple):
    """What one rank has written, as it tells rank 0."""

    files: dict[str, int]
    model: dict[str, Place]
    aliases: dict[str, str]
    optimizer: list[tuple[str, str, Place]]
    facts: dict[str, Any]


def write_checkpoint(
    roll: RollCall,
    path: Path,
    tag: str,
    state: LocalState,
    here: Coordinates,
    layout: Layout,
    num_kept: int | None,
) -> None:
    """Writes a checkpoint; every rank calls it, perhaps in a thread.

    Args:
        roll: the call that this belongs to.
        path: the folder of all checkpoints; is made if it is not there.
        tag: the name of this one. One of the same name is replaced in the end.
        state: this rank's part. Its tensors must not change meanwhile.
        here: this rank's place.
        layout: of the ranks.
        num_kept: how many complete checkpoints to keep; None for all.

    Raises:
        CheckpointWriteError: something could not be written, here or on another rank.
    """
    temporary = path / f"{tag}{PARTIAL}{INCOMPLETE}"
    try:
        identity, first_tag = roll.from_first(lambda: (_begin(temporary), tag))

        def write_part() -> Written:
            if tag != first_tag:
                raise UsageError(f"tag={tag!r} on rank {roll.rank} and {first_tag!r} on rank 0")
            return _write_part(roll, temporary, identity, state, here)

        parts = roll.gather(write_part)
        roll.from_first(lambda: _finish(path, tag, identity, parts, state, layout, num_kept))
    except BaseException:
        if roll.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _begin(temporary: Path) -> str:
    shutil.rmtree(temporary, ignore_errors=True)
    with write_errors(temporary):
        temporary.mkdir(parents=True)
    return uuid.uuid4().hex


def _write_part(
    roll: RollCall, folder: Path, identity: str, state: LocalState, here: Coordinates
) -> Written:
    if not folder.is_dir():
        raise CheckpointWriteError(
            f"{folder} was made by rank 0 and is not there; every rank must see the same file "
            "system: choose a folder on a shared one"
        )
    suffix = f"{here.pp_rank}_{here.tp_rank}_{here.rdp_rank}.safetensors"
    files: dict[str, int] = {}

    def write(name: str, tensors: Mapping[str, Tensor]) -> None:
        def progressing() -> Any:
            for tensor in tensors.values():
                roll.note_progress()
                yield tensor

        if tensors:
            metas = {key: meta_of(tensor) for key, tensor in tensors.items()}
            files[name] = write_safetensors(
                folder / name, metas, progressing(), {"checkpoint": identity}
            )

    write(f"model_{suffix}", state.model)
    optimizer: dict[str, Tensor] = {}
    places = []
    for name, kind, values in state.optimizer:
        is_piece = isinstance(values, Piece)
        tensor = values.values if isinstance(values, Piece) else values
        start = values.start if isinstance(values, Piece) else None
        key = f"{name}/{kind}/{start}" if is_piece else f"{name}/{kind}"
        optimizer[key] = tensor
        place = Place(file=f"optimizer_{suffix}", key=key, shape=tuple(tensor.shape), start=start)
        places.append((name, kind, place))
    write(f"optimizer_{suffix}", optimizer)
    model = {
        name: Place(file=f"model_{suffix}", key=name, shape=tuple(tensor.shape))
        for name, tensor in state.model.items()
    }
    return Written(files, model, state.aliases, places, state.facts)


def _finish(
    path: Path,
    tag: str,
    identity: str,
    parts: Sequence[Written],
    state: LocalState,
    layout: Layout,
    num_kept: int | None,
) -> None:
    folder = path / f"{tag}{PARTIAL}{INCOMPLETE}"
    facts = merge_facts([part.facts for part in parts])
    files = {name: size for part in parts for name, size in part.files.items()}
    files[RUN_STATE] = _write(folder / RUN_STATE, as_torch_file({**facts, "checkpoint": identity}))
    files[USER_CONTENT] = _write(folder / USER_CONTENT, state.user_content)
    optimizer: dict[str, dict[str, list[Place]]] = {}
    for part in parts:
        for name, kind, place in part.optimizer:
            optimizer.setdefault(name, {}).setdefault(kind, []).append(place)
    index = Index(
        format=FORMAT,
        identity=identity,
        saved_at=time.time(),
        layout=layout,
        files=files,
        model={name: place for part in parts for name, place in part.model.items()},
        aliases={name: first for part in parts for name, first in part.aliases.items()},
        optimizer=optimizer if facts["groups"] is not None else None,
    )
    _write(folder / INDEX, index.model_dump_json(indent=1).encode())
    publish_folder(folder, path / f"{tag}{PARTIAL}")
    replace_text(path / NEWEST, f"{tag}{PARTIAL}")  # no newline: scripts join it to the path
    if num_kept is not None:
        for old in complete(path)[:-num_kept]:
            if old != tag:
                shutil.rmtree(path / f"{old}{PARTIAL}", ignore_errors=True)


def merge_facts(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins what is small of all ranks: of what several know the first word counts."""
    groups: list[tuple[dict[str, Any], dict[str, None]]] | None = None
    scalars: dict[str, dict[str, Any]] = {}
    extra_state: dict[str, Any] = {}
    for fact in facts:
        if groups is None and fact["groups"] is not None:
            groups = [(settings, {}) for settings, _ in fact["groups"]]
        for (_, all_names), (_, names) in zip(groups or (), fact["groups"] or (), strict=True):
            all_names.update(dict.fromkeys(names))
        for name, values in fact["scalars"].items():
            scalars[name] = {**values, **scalars.get(name, {})}
        extra_state = {**fact["extra_state"], **extra_state}
    return {
        **{key: facts[0][key] for key in ("num_steps", "seed", "loss_scaler")},
        "groups": None if groups is None else [(kept, list(names)) for kept, names in groups],
        "scalars": scalars,
        "extra_state": extra_state,
        "generators": [fact["generators"] for fact in facts],
    }


def as_torch_file(content: Any) -> bytes:
    """Returns what torch.save writes.

    Raises:
        CheckpointError: something in it can't be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
    except Exception as error:
        raise CheckpointError(
            f"user_content can't be saved: {error}; give plain values, tensors, and dicts and "
            "lists of them"
        ) from error
    buffer.seek(0)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(buffer):
        _log.warning(
            "what is saved holds objects of %s: loading it runs pickled code and needs "
            "weights_only=False; better save plain values and tensors",
            ", ".join(unsafe),
        )
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> int:
    with durable_file(path) as file:
        file.write(content)
    return len(content)
