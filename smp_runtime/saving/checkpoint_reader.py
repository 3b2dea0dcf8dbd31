"""Reads a checkpoint tensor by tensor: a rank reads what it needs, whoever wrote it."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE

from ..creation.pending_values import provide
from ..errors import CheckpointDamagedError, CheckpointMismatchError, UnsafeContentError
from .checkpoint_index import RUN_STATE, USER_CONTENT, Place, read_index
from .optimizer_state import Group
from .safetensors_file import SafetensorsFile


class Checkpoint:
    """A complete checkpoint.

    Args:
        folder: where it is.

    Attributes:
        index: what is where.

    Raises:
        CheckpointIncompleteError: files are missing.
        CheckpointDamagedError: files are truncated, or of another checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_index(folder)
        self._files: dict[str, SafetensorsFile] = {}
        self.run_state: dict[str, Any] = load_torch_file(folder / RUN_STATE, weights_only=True)
        if self.run_state["checkpoint"] != self.index.identity:
            raise _mixed(folder / RUN_STATE)

    def user_content(self, weights_only: bool | None) -> Any:
        """Returns what the script gave to be saved."""
        return load_torch_file(self.folder / USER_CONTENT, weights_only)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of parameters and buffers, under all their names."""
        shapes = {name: place.shape for name, place in self.index.model.items()}
        return shapes | {name: shapes[first] for name, first in self.index.aliases.items()}

    def first_name(self, name: str) -> str:
        """Returns the name under which a parameter or buffer is saved."""
        return self.index.aliases.get(name, name)

    def model_tensor(self, name: str) -> Tensor:
        """Reads a parameter or buffer."""
        return self._read(self.index.model[self.first_name(name)])

    def groups(self) -> list[Group]:
        """Returns the parameter groups of the optimizer."""
        return [Group(settings, names) for settings, names in self.run_state["groups"]]

    def optimizer_state(self, shapes: Mapping[str, tuple[int, ...]]) -> LazyState:
        """Returns the state of some parameters, read when it is asked for.

        Args:
            shapes: the names of the parameters, and their shapes.
        """
        return LazyState(self, shapes)

    def state_of(self, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """Reads the state of one parameter."""
        state = dict(self.run_state["scalars"].get(name, {}))
        for kind, places in (self.index.optimizer or {}).get(name, {}).items():
            if places[0].start is None:
                state[kind] = self._read(places[0])
            else:
                state[kind] = self._join(name, places, shape)
        return state

    def _join(self, name: str, places: Sequence[Place], shape: tuple[int, ...]) -> Tensor:
        size = 1
        for length in shape:
            size *= length
        whole: Tensor | None = None
        covered = 0
        for place in sorted(places, key=lambda place: place.start or 0):
            start, length = place.start or 0, place.shape[0]
            if start > covered:
                break
            part = self._read(place)
            whole = part.new_empty(size) if whole is None else whole
            whole[start : start + length] = part
            covered = max(covered, start + length)
        if whole is None or covered != size:
            raise CheckpointMismatchError(
                f"the state of {name} has {covered} elements in the checkpoint and {size} in the "
                "model"
            )
        return whole.view(shape)

    def _read(self, place: Place) -> Tensor:
        if place.file not in self._files:
            file = SafetensorsFile(self.folder / place.file)
            if file.metadata.get("checkpoint") != self.index.identity:
                raise _mixed(file.path)
            self._files[place.file] = file
        return self._files[place.file].read(place.key)


def check(checkpoint: Checkpoint, module: nn.Module, strict: bool) -> None:
    """Makes sure that a checkpoint fits a model.

    Raises:
        CheckpointMismatchError: shapes differ, or, if `strict`, names.
    """
    wanted = _state_tensors(module)
    saved = checkpoint.shapes()
    problems = [
        f"{name} has shape {saved[name]} in the checkpoint and {tuple(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in saved and saved[name] != tuple(tensor.shape)
    ]
    if strict:
        problems += _differing("missing in the checkpoint", wanted.keys() - saved.keys())
        problems += _differing("not in the model", saved.keys() - wanted.keys())
        first_name: dict[int, str] = {}
        for name, tensor in wanted.items():
            first = first_name.setdefault(id(tensor), name)
            if {name, first} <= saved.keys() and (
                checkpoint.first_name(name) != checkpoint.first_name(first)
            ):
                problems.append(
                    f"{first} and {name} are one in the model and two in the checkpoint"
                )
    if problems:
        advice = "build the model as it was" + (", or pass strict=False" if strict else "")
        raise CheckpointMismatchError(
            f"{checkpoint.folder} does not fit the model: {'; '.join(problems)}; {advice}"
        )


def load_model(checkpoint: Checkpoint, module: nn.Module, is_partitioned: bool) -> None:
    """Reads what this rank holds of a model.

    What is on meta because nobody knows yet who holds it is read when that is known.
    """
    saved, done = checkpoint.shapes(), set()
    with torch.no_grad():
        for name, tensor in _state_tensors(module).items():
            if name not in saved or id(tensor) in done:
                continue
            done.add(id(tensor))
            if not tensor.is_meta:
                tensor.copy_(checkpoint.model_tensor(name))
            elif not is_partitioned:
                provide(tensor, functools.partial(checkpoint.model_tensor, name))
    extra_state = checkpoint.run_state["extra_state"]
    for path, part in module.named_modules():
        key = f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE
        if key in extra_state:
            part.set_extra_state(extra_state[key])


def _state_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: entry
        for name, entry in module.state_dict(keep_vars=True).items()
        if isinstance(entry, Tensor)
    }


def _differing(what: str, names: Iterable[str]) -> list[str]:
    found = sorted(names)
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return [f"{what}: {', '.join(found[:10])}{more}"] if found else []


class LazyState(Mapping[str, Mapping[str, Any]]):
    """State of the optimizer by parameter and kind, read from the files when it is asked for.

    Parameters that had no state yet are not in it.
    """

    def __init__(self, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._checkpoint = checkpoint
        index = checkpoint.index.optimizer or {}
        scalars = checkpoint.run_state["scalars"]
        self._shapes = {
            name: shape for name, shape in shapes.items() if name in index or name in scalars
        }

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._checkpoint.state_of(name, self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def load_torch_file(
    path: Path, weights_only: bool | None, map_location: Any = "cpu", **options: Any
) -> Any:
    """Reads a file of torch.save.

    Args:
        path: the file.
        weights_only: False runs code that is pickled in the file. None is torch's own rule: True,
            unless the environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set.
        map_location: as for torch.load.
        options: for torch.load.

    Raises:
        UnsafeContentError: the file holds more than tensors and plain values.
        CheckpointDamagedError: the file can't be read.
    """
    try:
        return torch.load(path, map_location, weights_only=weights_only, **options)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        if "GLOBAL" in str(error) or "Unsupported" in str(error):
            raise UnsafeContentError(
                f"{path} holds pickled objects, not only tensors and plain values; loading runs "
                "code that may be in it. If you trust the file pass weights_only=False, or allow "
                f"the classes by torch.serialization.add_safe_globals ({_unsafe(str(error))})"
            ) from None
        raise CheckpointDamagedError(f"{path} can't be read: {reason}") from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise CheckpointDamagedError(
            f"{path} is truncated or no file of torch.save: {error}"
        ) from error


def _unsafe(message: str) -> str:
    for line in message.splitlines():
        if "GLOBAL" in line:
            return line.strip()[:200]
    return message.splitlines()[0][:200]


def _mixed(path: Path) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"{path} belongs to another checkpoint than the index beside it; copy all files of one "
        "checkpoint together"
    )
