"""Files that survive a crash: either the old content is there or the new one, never a mixture.

A file is written under another name, flushed to the disk, and renamed; the folder that holds the
name is flushed as well. A folder of files is made the same way: under another name, and renamed
when everything in it is down.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..errors import CheckpointWriteError

REPLACED = ".replaced"
"""Suffix of a folder that is about to be deleted because a newer one has taken its name."""


@contextmanager
def durable_file(path: Path) -> Iterator[IO[bytes]]:
    """Yields a new file for writing, which is on the disk when the context ends.

    Raises:
        CheckpointWriteError: the disk is full, or the file can't be written.
    """
    with write_errors(path), path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Gives a text file new content, or leaves the old one where that fails."""
    temporary = path.with_name(f".{path.name}.new")
    with durable_file(temporary) as file:
        file.write(text.encode())
    with write_errors(path):
        temporary.replace(path)
    flush_folder(path.parent)


def publish_folder(temporary: Path, final: Path) -> None:
    """Gives a finished folder its name; a folder that has this name already is replaced.

    A crash in between leaves the old folder under the suffix `REPLACED`, see `current_folder`.
    """
    replaced = final.with_name(final.name + REPLACED)
    flush_folder(temporary)
    with write_errors(final):
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
    flush_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def current_folder(final: Path) -> Path:
    """Returns where the last published folder of a name is, also after a crash while replacing."""
    replaced = final.with_name(final.name + REPLACED)
    return replaced if not final.exists() and replaced.exists() else final


def flush_folder(path: Path) -> None:
    """Makes sure that the names in a folder are on the disk."""
    with write_errors(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Says of an operating system's error which file of a checkpoint it struck, and what to do."""
    try:
        yield
    except CheckpointWriteError:
        raise
    except OSError as error:
        raise CheckpointWriteError(
            f"{path} could not be written ({error.strerror or error}); free space or choose "
            "another folder and save again. Checkpoints that were complete before are untouched"
        ) from error
