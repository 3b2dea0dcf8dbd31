"""Unpickling brings data back, and calls nothing that a pickle names."""

import collections
import functools
import os
import pickle
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache

from smp_runtime.errors import NotSupportedError
from smp_runtime.messages.unpickling import load_data


@dataclass
class Pair:
    first: Any
    second: Any


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


DATA = [
    {"a": [1, 2.5, None, True, b"x", 1j], ("t",): {3}, "s": slice(1, None)},
    collections.OrderedDict(a=1),
    torch.float16,
    torch.Size([2, 3]),
    torch.device("cpu"),
    torch.strided,
    Pair(1, Pair("x", frozenset({2}))),
    Path("a/b"),
    np.float32(2.5),
    np.dtype("int64"),
]


@pytest.mark.parametrize("data", DATA, ids=repr)
def test_data_arrives(data: Any) -> None:
    assert load_data(pickle.dumps(data, pickle.HIGHEST_PROTOCOL)) == data


def test_arrays_and_caches_arrive() -> None:
    array = np.arange(6).reshape(2, 3)
    assert np.array_equal(load_data(pickle.dumps(array, 5)), array)
    tensors = [torch.arange(6).view(2, 3), torch.ones(2, dtype=torch.bfloat16)]
    for sent, came in zip(tensors, load_data(pickle.dumps(tensors)), strict=True):
        assert torch.equal(sent, came)
    assert isinstance(load_data(pickle.dumps(DynamicCache())), DynamicCache)


EVIL = [
    Calls(os.system, "touch evil"),
    Calls(eval, "open('evil', 'w')"),
    Calls(exec, "open('evil', 'w')"),
    Calls(subprocess.Popen, ["touch", "evil"]),
    Calls(getattr, "os", "system"),
    Calls(functools.partial, print),
    Calls(torch.load, "evil"),
    Calls(np.save, "evil", 1),
    Calls(pickle.loads, b""),
    Calls(__import__, "antigravity"),
    os.path.join,
    subprocess.run,
]


@pytest.mark.parametrize("evil", EVIL, ids=range(len(EVIL)))
def test_nothing_else_is_found(evil: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotSupportedError, match="ranks send each other data only"):
        load_data(pickle.dumps([1, evil]))
    assert not list(tmp_path.iterdir())


def test_modules_are_not_imported() -> None:
    with pytest.raises(NotSupportedError, match="names antigravity.fly"):
        load_data(b"cantigravity\nfly\n.")


@given(st.binary(max_size=60))
def test_any_bytes_raise_or_give_data(junk: bytes) -> None:
    try:
        load_data(junk)
    except Exception as error:
        assert not isinstance(error, (SystemExit, KeyboardInterrupt))
