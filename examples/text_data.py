"""Text for a causal language model: read, tokenise, pack, hold out, shuffle. Knows no ranks."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


class SettingError(ValueError):
    """A setting of the example is wrong; says which, and what to write instead."""


def read_documents(text: str) -> list[str]:
    """Returns the documents of a text file, a JSON-lines file, or a module's dict `topics`."""
    path = Path(text)
    if path.is_file():
        content = path.read_text(encoding="utf-8")
        is_lines = path.suffix in {".jsonl", ".ndjson", ".json"}
        documents = list(read_lines(path, content)) if is_lines else [content]
    elif text == "pydoc_data.topics":  # what `help("with")` prints; part of every CPython
        documents = list(importlib.import_module(text).topics.values())
    else:
        raise SettingError(
            f"text={text!r}: there is no such file. Write the path of a text file, of a .jsonl "
            'file whose lines are like {"text": "..."}, or pydoc_data.topics'
        )
    if not any(document.strip() for document in documents):
        raise SettingError(f"text={text!r} holds no text: write a file that is not empty")
    return documents


def read_lines(path: Path, content: str) -> Iterator[str]:
    """Yields the field `text` of each line."""
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield str(json.loads(line)["text"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise SettingError(
                f"text={str(path)!r}: line {number} is {line[:60]!r}; write one JSON object a "
                'line, like {"text": "..."}'
            ) from None


def pack(documents: list[str], tokenizer: Any, sequence_length: int) -> torch.Tensor:
    """Returns all documents end to end, each with an end mark, cut into equal sequences."""
    tokens: list[int] = []
    for document in tokenizer(documents, add_special_tokens=False)["input_ids"]:
        tokens += document
        if tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
    num_sequences = len(tokens) // sequence_length  # the rest, less than one sequence, is dropped
    packed = torch.tensor(tokens[: num_sequences * sequence_length])
    return packed.view(num_sequences, sequence_length)


def hold_out(
    sequences: torch.Tensor, batch_size: int, num_replicas: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits off the last tenth, at least one batch, and returns what is left and some of it.

    Args:
        sequences: what `pack` returned.
        batch_size: sequences that one replica takes in one step.
        num_replicas: how many replicas train at once.
        most: the second result has about this many sequences, evenly spread over the tenth and a
            multiple of `batch_size`.
    """
    needed = batch_size * (num_replicas + 1)
    if len(sequences) < needed:
        raise SettingError(
            f"batch_size={batch_size} on {num_replicas} data-parallel ranks needs {needed} "
            f"sequences of sequence_length={sequences.shape[1]} tokens, one batch of them held "
            f"out, and the text gives {len(sequences)}: write a smaller batch_size or "
            "sequence_length, or a longer text"
        )
    num_held_out = max(len(sequences) // 10, batch_size)
    num_training = len(sequences) - num_held_out
    num_kept = max(min(most, num_held_out) // batch_size, 1) * batch_size
    kept = torch.arange(num_kept) * num_held_out // num_kept
    return sequences[:num_training], sequences[num_training:][kept]


def endless_batches(
    sequences: torch.Tensor, batch_size: int, replica: int, num_replicas: int, seed: int
) -> Iterator[torch.Tensor]:
    """Yields one replica's batches, reshuffled in every epoch; replicas see different sequences."""
    generator = torch.Generator().manual_seed(seed)
    num_taken = batch_size * num_replicas
    while True:
        order = torch.randperm(len(sequences), generator=generator)
        for start in range(0, len(order) - num_taken + 1, num_taken):
            first = start + replica * batch_size
            yield sequences[order[first : first + batch_size]]
