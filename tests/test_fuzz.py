"""Whatever comes in from outside, only this package's errors come out, and they name the setting.

Configurations as dicts, YAML and JSON files and in the environment, arguments of a step, and
checkpoint folders. What is received from other ranks is `test_unpickling.py`'s.
"""

import json
import string
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from smp_runtime.config import ALIASES, ENVIRONMENT_VARIABLE, Config, load_config
from smp_runtime.errors import SMPError
from smp_runtime.microbatch import Splitter
from smp_runtime.saving.checkpoint_index import find, read_index

NAMES = [*Config.model_fields, *ALIASES, "layouts"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["interleaved", "spread", "DPT", "auto", "1", "-1", "nan", ""])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
KEYS = st.sampled_from(NAMES) | st.text(string.ascii_letters + "_", min_size=1, max_size=20)
SETTINGS = st.dictionaries(KEYS, VALUES, max_size=5)
IN_A_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def load(source: Any, environ: dict[str, str] | None = None) -> None:
    """Loads a configuration; anything but a `Config` or one of our errors fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = load_config(source, environ or {})
        except SMPError as error:
            assert str(error)
        else:
            assert isinstance(loaded, Config)


@given(SETTINGS)
@example({"pipeline_parallel_degree": 10**30})
@example({"layouts": {"2": None}})
def test_dicts(given_settings: dict[str, Any]) -> None:
    load(given_settings)
    load(given_settings, {"WORLD_SIZE": "2"})


@given(st.sampled_from(NAMES), VALUES)
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load_config({name: value}, {})
        except SMPError as error:
            real = ALIASES.get(name, name)
            assert real in str(error) or name in str(error) or "needs" in str(error)


@IN_A_FOLDER
@given(st.text(max_size=60) | SETTINGS.map(lambda made: yaml.safe_dump(made)))
@example("smp: [1]")
@example("smp:\n  microbatches: &a [*a]")
@example("!!python/object/apply:os.system ['touch evil']")
@example("\t")
@example("? {a: b}\n: 1")
def test_yaml_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    load(path)
    assert not Path("evil").exists()


@IN_A_FOLDER
@given(st.binary(max_size=40))
def test_files_of_any_bytes(tmp_path: Path, content: bytes) -> None:
    for name in ("config.yaml", "config.json"):
        (tmp_path / name).write_bytes(content)
        load(tmp_path / name)


@given(st.text(max_size=40) | SETTINGS.map(lambda made: json.dumps(made)))
@example("[" * 10_000)
def test_the_environment(text: str) -> None:
    load({}, {ENVIRONMENT_VARIABLE: text})


@pytest.mark.parametrize("path", ["", ".", "/", "nowhere/config.yaml"])
def test_paths_that_are_no_files(path: str) -> None:
    load(path)


LEAVES = st.one_of(
    st.builds(torch.zeros, st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    SCALARS,
)
ARGUMENTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.lists(ARGUMENTS, max_size=3),
    st.dictionaries(st.sampled_from(["x", "mask"]), ARGUMENTS, max_size=2),
    st.integers(1, 5),
)
def test_arguments_of_a_step(args: list[Any], kwargs: dict[str, Any], m: int) -> None:
    splitter = Splitter(lambda *args, **kwargs: None, (), {})
    try:
        calls = splitter.split(tuple(args), kwargs, m)
    except SMPError as error:
        assert str(error)
    else:
        assert len(calls) == m


@IN_A_FOLDER
@given(
    st.dictionaries(
        st.sampled_from(["newest", "step1/index.json", "step1_partial/index.json", "step1/x"]),
        st.binary(max_size=30) | VALUES.map(lambda made: json.dumps(made, default=str).encode()),
    )
)
def test_checkpoint_folders(tmp_path: Path, files: dict[str, bytes]) -> None:
    folder = tmp_path / "checkpoints"
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    try:
        read_index(find(folder, None))
    except SMPError as error:
        assert str(error)
