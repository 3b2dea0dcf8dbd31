"""Hugging Face folders in and out: `from_pretrained`, and whole models saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..creation.pending_values import is_pending
from ..errors import CheckpointMismatchError, CheckpointNotFoundError
from ..execution.placing import LocalPart
from ..replication.roll_call import RollCall
from ..runtime import Runtime
from .checkpoint_reader import load_torch_file
from .pretrained_export import Parts, write_pretrained
from .pretrained_folder import load_weights, open_weights

USER_CONTENT = "user_content_"
"""Beginning of the file's name with the script's content beside a whole model."""


def from_pretrained(
    folder: str | Path,
    model_class: Any = None,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    **settings: Any,
) -> Any:
    """Builds a model of transformers whose weights are read when it is known who holds them.

    Nothing is read but the headers: each rank reads its own tensors from the safetensors files,
    when the model is partitioned. The result is wrapped like any other model.

    Args:
        folder: a local Hugging Face folder with safetensors files, sharded in any way.
        model_class: a class of transformers; `AutoModelForCausalLM` if not given.
        dtype: type of the parameters; the folder's own if not given.
        strict: everything in the folder has to be a parameter. Every parameter has to be there in
            any case.
        settings: changes to the configuration.

    Returns:
        The model, on meta but for its buffers, in evaluation mode as transformers returns it.

    Raises:
        CheckpointNotFoundError: there is no such folder, or no safetensors file in it.
        CheckpointIncompleteError: a file is missing.
        CheckpointDamagedError: a file is truncated.
        CheckpointMismatchError: the files do not fit the model.
    """
    import transformers
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    path = Path(folder)
    if not path.is_dir():
        raise CheckpointNotFoundError(
            f"there is no folder {path}; write a local Hugging Face folder (download one with "
            "huggingface_hub.snapshot_download)"
        )
    weights = open_weights(path)
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, **settings)
    model_class = model_class or transformers.AutoModelForCausalLM
    make = getattr(model_class, "from_config", None) or model_class._from_config
    with init_empty_weights(include_buffers=False):
        module = make(config, dtype=dtype or config.dtype or torch.get_default_dtype())
    module.tie_weights()  # inside, each name gets a parameter of its own
    if (path / "generation_config.json").is_file() and module.can_generate():
        module.generation_config = transformers.GenerationConfig.from_pretrained(
            path, local_files_only=True
        )
    load_weights(weights, module, strict, is_partitioned=False)
    lost = [name for name, p in module.named_parameters() if p.is_meta and not is_pending(p)]
    if lost:
        raise CheckpointMismatchError(
            f"{path} has no values for {', '.join(lost[:10])}; build the model in "
            "smp.model_creation, wrap it, and call smp.resume_from_checkpoint(folder, "
            "partial=False, strict=False): what is missing is initialised then"
        )
    return module.eval()


def save_whole(
    roll: RollCall,
    module: nn.Module,
    part: LocalPart | None,
    runtime: Runtime,
    folder: Path,
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Saves a folder that transformers loads. Every rank calls it.

    Args:
        roll: the call that this belongs to.
        module: the user's model.
        part: what is local; None where all of it is.
        runtime: the runtime.
        folder: where to.
        tokenizer: is saved, too, if given.
        max_shard_size: largest size of a file, in bytes or like ``"5GB"``.

    Raises:
        CheckpointWriteError: a file can't be written.
    """
    from accelerate.utils import convert_file_size_to_int  # type: ignore[import-untyped]

    here = runtime.here

    def work() -> None:
        if here.rdp_rank > 0:
            return
        parts = Parts(module, part, runtime.engine)
        if here.pp_rank > 0 and part is not None:
            parts.serve()
        elif here.pp_rank == 0:
            try:
                size = convert_file_size_to_int(max_shard_size)
                write_pretrained(parts, module, folder, tokenizer, size)
            finally:
                if part is not None:
                    parts.end()

    roll.gather(work)


def load_whole(
    roll: RollCall,
    module: nn.Module,
    path: Path,
    tag: str | None,
    *,
    strict: bool,
    is_partitioned: bool,
    weights_only: bool | None,
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None,
) -> Any:
    """Loads what `save_whole` saved, or any weights of transformers. Every rank calls it.

    Returns:
        The `user_content` that was saved with it; an empty dict if there was none.
    """
    place = path / tag if tag else path
    content: Any = {}

    def work() -> None:
        nonlocal content
        if not path.exists():
            raise CheckpointNotFoundError(f"there is no folder {path}")
        load_weights(open_weights(place, weights_only, translate), module, strict, is_partitioned)
        file = path / f"{USER_CONTENT}{tag}"
        if file.is_file():
            content = load_torch_file(file, weights_only)

    roll.gather(work)
    return content
