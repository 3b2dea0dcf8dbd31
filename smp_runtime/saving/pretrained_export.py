"""Saves a partitioned model as a Hugging Face folder, tensor by tensor.

Pipeline rank 0 writes, and asks the others for one piece of a tensor after the other; nobody sends
before being asked. Beside its own part rank 0 holds one piece, or, where transformers has a rule
for converting tensors, those that are converted together.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..execution.engine import Engine
from ..execution.placing import LocalPart
from ..messages.transport import Address, Topic
from ..tensors import TensorMeta, meta_of
from .durable_files import flush_folder, write_errors
from .pretrained_folder import INDEX, SINGLE
from .pretrained_keys import Group, saving_groups
from .safetensors_file import write_safetensors

_PIECE_BYTES = 2**20
"""Of so many bytes are the pieces in which a tensor travels.

Small, because the allocator keeps some of what the threads that receive have given back.
"""


class _Shard(NamedTuple):
    """One file: the groups that make its tensors, and what those look like."""

    groups: list[Group]
    metas: dict[str, TensorMeta]


class Parts:
    """The tensors of a model, wherever they are. All ranks of a pipeline make one together.

    Args:
        module: the user's model.
        part: what is local; None where all of it is.
        engine: reaches the other ranks.
    """

    def __init__(self, module: nn.Module, part: LocalPart | None, engine: Engine) -> None:
        state = module.state_dict(keep_vars=True)
        self.entries = {name: entry for name, entry in state.items() if isinstance(entry, Tensor)}
        self._part = part
        self._engine = engine
        self._rank = engine.transport.rank
        self._exchange = engine.next_exchange("smp.save_checkpoint")
        self._next: dict[int, int] = {}

    def get(self, name: str) -> Tensor:
        """Returns a tensor on pipeline rank 0, which asks for it."""
        return torch.cat(list(self.pieces(name))).view(self.entries[name].shape)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yields a flat tensor in pieces on pipeline rank 0, which asks for one after the other."""
        source, entry = self._source(name), self.entries[name]
        if source == self._rank:
            yield entry.detach().reshape(-1)
            return
        length = max(_PIECE_BYTES // entry.element_size(), 1)
        for start in range(0, entry.numel(), length):
            self._ask(source, (name, start, start + length))
            yield self._engine.fetch(self._address(source, self._next[source])).tensors[0]

    def end(self) -> None:
        """Lets the other ranks go; called on pipeline rank 0, also after a failure."""
        for peer in self._engine.transport.peers:
            self._ask(peer, None)

    def serve(self) -> None:
        """Sends what pipeline rank 0 asks for, until it asks for nothing more."""
        number = 0
        while True:
            number += 1
            wanted = self._engine.fetch(self._address(0, number)).content
            if wanted is None:
                return
            name, start, stop = wanted
            piece = [self.entries[name].detach().reshape(-1)[start:stop]]
            self._engine.transport.send(0, self._address(self._rank, number), None, piece)

    def _ask(self, source: int, wanted: tuple[str, int, int] | None) -> None:
        self._next[source] = self._next.get(source, 0) + 1
        address = self._address(0, self._next[source])
        self._engine.transport.send(source, address, wanted)

    def _source(self, name: str) -> int:
        return 0 if self._part is None else min(self._part.holders(name))

    def _address(self, source: int, number: int) -> Address:
        return Address(Topic.STATE, -1, self._exchange, number, source)


def write_pretrained(
    parts: Parts, module: nn.Module, folder: Path, tokenizer: Any, shard_bytes: int
) -> None:
    """Writes the folder; called on pipeline rank 0 while the others serve.

    A file appears under its name when it is whole, the index last.

    Args:
        parts: the tensors.
        module: the user's model; one of transformers also gives its configuration files.
        folder: where to; is made if it is not there.
        tokenizer: is saved, too, if given.
        shard_bytes: largest size of a file, unless one tensor is larger.

    Raises:
        CheckpointWriteError: a file can't be written.
    """
    work = folder / ".saving"
    with write_errors(folder):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    try:
        save_configuration: Any = getattr(module, "save_pretrained", None)
        if save_configuration is not None:
            save_configuration(work, state_dict={})  # also makes a file of no weights
            (work / SINGLE).unlink(missing_ok=True)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
        shards = list(_shards(saving_groups(module, parts.entries), parts, module, shard_bytes))
        names = _file_names(len(shards))
        for name, shard in zip(names, shards, strict=True):
            tensors = _tensors(shard, parts, module)
            write_safetensors(work / name, shard.metas, tensors, {"format": "pt"})
        if len(shards) > 1:
            (work / INDEX).write_text(_index(dict(zip(names, shards, strict=True))))
        _move(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _shards(
    groups: Sequence[Group], parts: Parts, module: nn.Module, shard_bytes: int
) -> Iterator[_Shard]:
    """Distributes groups over files, by what will come out of them."""

    def on_meta(name: str) -> Tensor:
        return torch.empty_like(parts.entries[name], device="meta")

    shard = _Shard([], {})
    for group in groups:
        metas = {
            name: meta_of(tensor.contiguous())
            for name, tensor in group.convert(module, on_meta).items()
        }
        num_bytes = sum(meta.num_bytes for meta in (*shard.metas.values(), *metas.values()))
        if shard.groups and num_bytes > shard_bytes:
            yield shard
            shard = _Shard([], {})
        shard.groups.append(group)
        shard.metas.update(metas)
    yield shard


def _tensors(shard: _Shard, parts: Parts, module: nn.Module) -> Iterator[Tensor]:
    names = iter(shard.metas)
    for group in shard.groups:
        if group.converter is None:
            next(names)
            yield from parts.pieces(group.keys[0][0])
            continue
        made = group.convert(module, parts.get)
        for name in list(made):
            expected = next(names)
            if name != expected or tuple(made[name].shape) != shard.metas[name].shape:
                raise CheckpointError(f"{name} came out of its conversion in place of {expected}")
            yield made.pop(name)


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _index(shards: Mapping[str, _Shard]) -> str:
    metas = [meta for shard in shards.values() for meta in shard.metas.values()]
    content = {
        "metadata": {
            "total_parameters": sum(meta.num_elements for meta in metas),
            "total_size": sum(meta.num_bytes for meta in metas),
        },
        "weight_map": {key: name for name, shard in shards.items() for key in shard.metas},
    }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _move(work: Path, folder: Path) -> None:
    """Gives the files their places, the index last, and removes those of a save before."""
    with write_errors(folder):
        made = sorted(work.rglob("*"), key=lambda file: file.name in {INDEX, SINGLE})
        for file in made:
            if file.is_file():
                target = folder / file.relative_to(work)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
        names = {file.name for file in made}
        for file in folder.glob("model*.safetensors*"):
            is_ours = file.name in {SINGLE, INDEX} or re.fullmatch(
                r"model-\d{5}-of-\d{5}\.safetensors", file.name
            )
            if is_ours and file.name not in names:
                file.unlink()
    flush_folder(folder)
