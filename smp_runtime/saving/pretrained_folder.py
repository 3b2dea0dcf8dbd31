"""Reads weights of a Hugging Face folder, or of one file, tensor by tensor."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..creation.pending_values import provide
from ..errors import (
    CheckpointDamagedError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from .checkpoint_reader import load_torch_file
from .pretrained_keys import Group, Read, loading_groups
from .safetensors_file import SafetensorsFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Weights:
    """Tensors by name, read one at a time.

    Attributes:
        path: where they are.
        shapes: their shapes.
        read: reads one.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], read: Read) -> None:
        self.path = path
        self.shapes = shapes
        self.read = read


def open_weights(
    path: Path,
    weights_only: bool | None = None,
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Weights:
    """Finds the weights at a path.

    Args:
        path: a folder with safetensors files, one such file, or a file of torch.save. Where there
            is no such file, safetensors beside it are taken: transformers saves those now.
        weights_only: False runs code that is pickled in a file of torch.save.
        translate: changes the state dict of such a file.

    Raises:
        CheckpointNotFoundError: there is nothing.
        CheckpointIncompleteError: a file is missing.
        CheckpointDamagedError: a file is truncated.
        UnsafeContentError: a file holds pickled code.
    """
    if path.is_dir():
        return _open_folder(path)
    if path.is_file() and path.suffix == ".safetensors":
        file = SafetensorsFile(path)
        return Weights(path, file.shapes, file.read)
    if path.is_file():
        content = load_torch_file(path, weights_only, mmap=_is_zip(path))
        state = translate(content) if translate is not None else content
        tensors = {name: entry for name, entry in state.items() if isinstance(entry, Tensor)}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return Weights(path, shapes, lambda name: tensors[name].clone())
    if (path.parent / INDEX).is_file() or (path.parent / SINGLE).is_file():
        return _open_folder(path.parent)
    raise CheckpointNotFoundError(
        f"there is no {path}; write a folder with {SINGLE} or {INDEX}, or the path and tag of a "
        "file of torch.save"
    )


def _open_folder(folder: Path) -> Weights:
    if (folder / INDEX).is_file():
        try:
            places: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointDamagedError(f"{folder / INDEX} can't be read: {error!r}") from error
        if missing := sorted({name for name in places.values() if not (folder / name).is_file()}):
            raise CheckpointIncompleteError(f"{folder} lacks {', '.join(missing)}; copy all of it")
        files = {name: SafetensorsFile(folder / name) for name in set(places.values())}
        if lost := [key for key, name in places.items() if key not in files[name].shapes]:
            raise CheckpointDamagedError(
                f"{folder / places[lost[0]]} does not hold {lost[0]}, as {INDEX} says"
            )
        shapes = {key: files[name].shapes[key] for key, name in places.items()}
        return Weights(folder, shapes, lambda key: files[places[key]].read(key))
    if (folder / SINGLE).is_file():
        file = SafetensorsFile(folder / SINGLE)
        return Weights(folder, file.shapes, file.read)
    others = sorted(file.name for file in folder.iterdir() if file.suffix in {".bin", ".gguf"})
    if others:
        raise CheckpointNotFoundError(
            f"{folder} has {others[0]} but no safetensors files; build the model by transformers' "
            "own from_pretrained on every rank, without smp.model_creation, and wrap it"
        )
    what = "is empty" if not any(folder.iterdir()) else f"has neither {SINGLE} nor {INDEX}"
    raise CheckpointNotFoundError(f"{folder} {what}")


def load_weights(weights: Weights, module: nn.Module, strict: bool, is_partitioned: bool) -> None:
    """Reads what this rank holds of a model.

    What is on meta because nobody knows yet who holds it is read when that is known.

    Args:
        weights: from `open_weights`.
        module: the user's model.
        strict: every parameter has to be there, and everything there has to be one. Off: what is
            missing keeps its values.
        is_partitioned: whether it is known who holds what.

    Raises:
        CheckpointMismatchError: names or shapes do not fit.
    """
    groups = loading_groups(module, weights.shapes)
    targets: dict[int, tuple[str, Tensor]] = {}
    missing: dict[int, str] = {}
    for name, entry in module.state_dict(keep_vars=True).items():
        if isinstance(entry, Tensor):
            if name in groups:
                targets.setdefault(id(entry), (name, entry))
            else:
                missing.setdefault(id(entry), name)
    problems = [
        f"{name} has shape {weights.shapes[key]} there and {tuple(entry.shape)} in the model"
        for name, entry in targets.values()
        if groups[name].converter is None
        and weights.shapes[key := groups[name].keys[0][0]] != tuple(entry.shape)
    ]
    if strict:
        lost = sorted(name for key, name in missing.items() if key not in targets)
        known = set(module.state_dict())
        extra = sorted(
            name for name in groups if name not in known and not _is_ignored(name, module)
        )
        problems += [f"missing there: {', '.join(lost[:10])}"] if lost else []
        problems += [f"not in the model: {', '.join(extra[:10])}"] if extra else []
    if problems:
        raise CheckpointMismatchError(f"{weights.path} does not fit: {'; '.join(problems)}")
    with torch.no_grad():
        for name, entry in targets.values():
            read = functools.partial(_make, name, tuple(entry.shape), groups[name], module, weights)
            if not entry.is_meta:
                entry.copy_(read())
            elif not is_partitioned:
                provide(entry, read)


def _make(
    name: str, shape: tuple[int, ...], group: Group, module: nn.Module, weights: Weights
) -> Tensor:
    made = group.convert(module, weights.read)
    if name not in made or tuple(made[name].shape) != shape:
        found = {key: tuple(tensor.shape) for key, tensor in made.items()}
        raise CheckpointMismatchError(
            f"{weights.path}: {name} of shape {shape} does not come out of "
            f"{', '.join(key for key, _ in group.keys)}, but {found}"
        )
    return made[name].contiguous()


def _is_ignored(name: str, module: nn.Module) -> bool:
    """Says whether transformers takes no notice of a tensor: buffers of older versions."""
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"
