"""What a checkpoint folder holds: the index, the names, and which folder is the newest.

    path/
        newest                      the name of the folder that was completed last
        step100_partial/            a complete checkpoint; it got this name when all was down
            index.json              what is where; written last
            model_0_0_0.safetensors     tensors by name of the plain model, of one rank
            optimizer_0_0_0.safetensors state of the optimizer by name of the parameter
            run_state.pt            what is small: settings of groups, random generators, counters
            user_content.pt         what the script gave
        step200_partial.incomplete/ saving was interrupted, or goes on

Nothing in the files knows the layout of the ranks: tensors have the names of the plain model, and
the index says which file holds which. Every file carries the checkpoint's identity, so that parts
of two checkpoints are never mixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import (
    CheckpointDamagedError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
)
from .durable_files import current_folder

FORMAT = 1
PARTIAL = "_partial"
INCOMPLETE = ".incomplete"
NEWEST = "newest"
INDEX = "index.json"
RUN_STATE = "run_state.pt"
USER_CONTENT = "user_content.pt"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Place(_Strict):
    """A tensor in a file, or a part of one.

    Attributes:
        file: name of the file.
        key: name of the tensor in the file.
        shape: its shape there.
        start: None for a whole tensor; else where this part of the flattened tensor begins.
    """

    file: str
    key: str
    shape: tuple[int, ...]
    start: int | None = None


class Layout(_Strict):
    """How many ranks of each kind saved a checkpoint; for messages only."""

    size: int
    pp: int
    tp: int
    rdp: int

    def describe(self) -> str:
        """Prints like ``4 ranks (pipeline 2, tensor 1, replicas 2)``."""
        return f"{self.size} ranks (pipeline {self.pp}, tensor {self.tp}, replicas {self.rdp})"


class Index(_Strict):
    """The content of `index.json`.

    Attributes:
        format: version of the format.
        identity: equal in every file of the checkpoint, and in no other one.
        saved_at: seconds since 1970.
        layout: the ranks that saved it.
        files: size in bytes of every other file of the folder.
        model: where each parameter and buffer is, by its name in the plain model.
        aliases: further names of shared tensors, with the name that is in `model`.
        optimizer: where the state of each parameter is, by name and kind (``exp_avg``); None if no
            optimizer was saved.
    """

    format: int
    identity: str
    saved_at: float
    layout: Layout
    files: dict[str, int]
    model: dict[str, Place]
    aliases: dict[str, str]
    optimizer: dict[str, dict[str, list[Place]]] | None


def find(path: Path, tag: str | None) -> Path:
    """Returns the folder of a complete checkpoint.

    Args:
        path: where checkpoints are.
        tag: which one; None for the newest.

    Raises:
        CheckpointNotFoundError: `path` does not exist, or holds no such checkpoint.
        CheckpointIncompleteError: saving the one that was asked for did not come to its end.
    """
    if not path.is_dir():
        raise CheckpointNotFoundError(
            f"there is no folder {path}; write the path that was given to smp.save_checkpoint"
        )
    if tag is None:
        tag = _newest(path)
    folder = current_folder(path / f"{tag}{PARTIAL}")
    if folder.is_dir():
        return folder
    if (path / f"{tag}{PARTIAL}{INCOMPLETE}").exists():
        raise CheckpointIncompleteError(
            f"saving the checkpoint {tag!r} in {path} was interrupted; {_choice(path)}"
        )
    raise CheckpointNotFoundError(f"there is no checkpoint {tag!r} in {path}; {_choice(path)}")


def complete(path: Path) -> list[str]:
    """Returns the tags of the complete checkpoints in a folder, the oldest first."""
    found = [
        (index.stat().st_mtime_ns, folder.name.removesuffix(PARTIAL))
        for folder in path.glob(f"*{PARTIAL}")
        if (index := folder / INDEX).is_file()
    ]
    return [tag for _, tag in sorted(found)]


def read_index(folder: Path) -> Index:
    """Returns the index of a checkpoint whose files are all there and whole.

    Raises:
        CheckpointIncompleteError: files are missing.
        CheckpointDamagedError: the index can't be read, or a file has another size.
    """
    file = folder / INDEX
    if not file.is_file():
        what = "is empty" if not any(folder.iterdir()) else f"has no {INDEX}"
        raise CheckpointIncompleteError(
            f"{folder} {what}: it is no checkpoint, or parts of it were deleted; "
            f"{_choice(folder.parent)}"
        )
    try:
        index = Index.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointDamagedError(
            f"{file} is no index of a checkpoint: {first['msg']} at {first['loc']}; "
            f"{_choice(folder.parent)}"
        ) from None
    if index.format != FORMAT:
        raise CheckpointDamagedError(
            f"{file} has format {index.format}, and this version reads format {FORMAT}; resume "
            "with the version that saved it"
        )
    problems = list(_problems(folder, index))
    if missing := [text for is_missing, text in problems if is_missing]:
        raise CheckpointIncompleteError(
            f"{folder} lacks {', '.join(missing)}; copy all of it, or resume from another "
            f"checkpoint: {_choice(folder.parent)}"
        )
    if problems:
        raise CheckpointDamagedError(
            f"{folder}: {', '.join(text for _, text in problems)}; copy it again, or resume from "
            f"another checkpoint: {_choice(folder.parent)}"
        )
    return index


def _newest(path: Path) -> str:
    pointer = path / NEWEST
    if pointer.is_file():
        return pointer.read_text(errors="replace").strip().removesuffix(PARTIAL)
    if not any(path.iterdir()):
        raise CheckpointNotFoundError(f"{path} is empty: nothing was saved there")
    interrupted = sorted(file.name for file in path.glob(f"*{INCOMPLETE}"))
    if interrupted:
        raise CheckpointIncompleteError(
            f"no checkpoint in {path} is complete: saving {', '.join(interrupted)} was interrupted"
        )
    raise CheckpointNotFoundError(
        f"{path} has no file `{NEWEST}`, which says what was saved last; {_choice(path)}"
    )


def _choice(path: Path) -> str:
    tags = complete(path)
    if not tags:
        return f"there is no complete checkpoint in {path}"
    return f"complete in {path}, oldest first: {', '.join(map(repr, tags))}"


def _problems(folder: Path, index: Index) -> Iterator[tuple[bool, str]]:
    """Yields whether a file is missing, and what is wrong with it."""
    for name, size in index.files.items():
        file = folder / name
        if not file.is_file():
            yield True, name
        elif (found := file.stat().st_size) != size:
            yield False, f"{name} has {found} bytes and should have {size}"
