"""`smp.save` and `smp.load`: files of torch.save, one for each rank or one for all.

A partial file has the rank in its name: ``f_<pp>_<tp>``, and with ``v3`` ``f_<pp>_<tp>_<rdp>``.
What is in it belongs to one layout of ranks; `save_checkpoint` writes what fits any.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointMismatchError, CheckpointNotFoundError, UsageError
from ..runtime import current
from .checkpoint_reader import load_torch_file
from .durable_files import durable_file, flush_folder, write_errors


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Saves an object, usually a local state dict, from this rank.

    Args:
        obj: what torch.save takes.
        f: the path. A crash leaves the file that was there before.
        partial: append this rank's place to the name. Called once for each place: where
            ``smp.dp_rank() == 0``, or by all ranks with `v3`.
        pickle_module: for torch.save.
        pickle_protocol: for torch.save.
        v3: append the replica, too.

    Raises:
        UsageError: `f` is no string.
        CheckpointWriteError: the file can't be written.
    """
    path = Path(_checked(f) + (_suffix(v3) if partial else ""))
    temporary = path.with_name(f".{path.name}.new")
    with durable_file(temporary) as file:
        torch.save(obj, file, pickle_module, pickle_protocol)
    with write_errors(path):
        temporary.replace(path)
    flush_folder(path.parent)


def load(
    f: str,
    map_location: Any = "cpu",
    pickle_module: Any = None,
    partial: bool = True,
    back_compat: bool = False,
    weights_only: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Loads what `save` saved.

    Args:
        f: the path that was given to `save`.
        map_location: for torch.load; the CPU if not given.
        pickle_module: for torch.load.
        partial: load the file of this rank's place.
        back_compat: accepted; files without a replica in their names are found in any case.
        weights_only: False runs code that is pickled in the file. None is torch's own rule.
        pickle_load_args: for torch.load.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointMismatchError: it was saved at another number of partitions, or, with `v3`, by
            fewer replicas.
        CheckpointDamagedError: the file can't be read.
        UnsafeContentError: it holds pickled code.
    """
    path = _part(Path(_checked(f))) if partial else Path(_checked(f))
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"there is no file {path}; write the path that was given to smp.save, and the same "
            "`partial`"
        )
    return load_torch_file(
        path, weights_only, map_location, pickle_module=pickle_module, **pickle_load_args
    )


def _part(path: Path) -> Path:
    """Returns this rank's file, and makes sure that it is one of as many as there are ranks."""
    size = current().placement.size("pp")
    pattern = re.compile(re.escape(path.name) + r"_(\d+)_(\d+)(?:_(\d+))?")
    folder = path.parent.iterdir() if path.parent.is_dir() else ()
    parts = [found for file in folder if (found := pattern.fullmatch(file.name))]
    saved = {int(part[1]) for part in parts}
    if not saved:
        raise CheckpointNotFoundError(f"there are no files {path}_<pp_rank>_<tp_rank>")
    if max(saved) + 1 != size:
        raise CheckpointMismatchError(
            f"{path} was saved at pipeline degree {max(saved) + 1}, and this job has {size}; use "
            "smp.save_checkpoint and smp.resume_from_checkpoint, which work at any degree"
        )
    candidates = [path.with_name(path.name + _suffix(v3)) for v3 in (True, False)]
    present = [candidate for candidate in candidates if candidate.is_file()]
    if not present:
        replicas = 1 + max((int(part[3]) for part in parts if part[3]), default=0)
        if any(part[3] for part in parts) and current().here.rdp_rank >= replicas:
            raise CheckpointMismatchError(
                f"{path} was saved by {replicas} replicas, each its own part, and this is replica "
                f"{current().here.rdp_rank}; use smp.save_checkpoint and "
                "smp.resume_from_checkpoint, which work at any degree"
            )
        names = " or ".join(candidate.name for candidate in candidates)
        raise CheckpointNotFoundError(
            f"the part of this rank, {names}, is missing in {path.parent}; copy all parts"
        )
    return present[0]


def _suffix(v3: bool) -> str:
    here = current().here
    suffix = f"_{here.pp_rank}_{here.tp_rank}"
    return f"{suffix}_{here.rdp_rank}" if v3 else suffix


def _checked(f: Any) -> str:
    if not isinstance(f, str):
        raise UsageError(f"the path must be a string, not {f!r}")
    return f
