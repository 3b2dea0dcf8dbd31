"""The migration guide tells the truth: its names exist, and what it says is missing says so."""

import contextlib
import importlib
import io
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
import smp_runtime
from smp_runtime.config import ALIASES, NOT_YET, WITHOUT_MEANING, Config
from smp_runtime.errors import NotSupportedError
from smp_runtime.optimizer import LocalOptimizer, SubstitutingOptimizer
from tests.test_smdistributed import NAMES
from tests.worlds import run_world

CHECKOUT = Path(__file__).parent.parent
PAGE = (CHECKOUT / "smp_runtime/smdistributed/MIGRATION.md").read_text()

# Settings that this project adds to SMP's.
OWN_SETTINGS = {
    *("broadcast_inputs", "debug", "timeout", "seed", "stages_per_rank", "tied_weights"),
    *("recompute_ahead", "recompute_ahead_modules", "fp32_grad_accumulation"),
    *(
        "emulate_clock",
        "emulated_latency_us",
        "emulated_bandwidth_gbps",
        "overlap_parameter_gather",
    ),
}


class Row(NamedTuple):
    name: str
    status: str
    how: str


def rows() -> list[Row]:
    found = re.findall(r"^\| `([\w.]+)` \| (supported|differs|not yet) \| (.*?) ?\|$", PAGE, re.M)
    return [Row(*row) for row in found]


def names(prefix: str) -> list[Row]:
    return [row for row in rows() if row.name.startswith(prefix)]


def settings() -> list[Row]:
    return [row for row in rows() if "." not in row.name]


def resolve(name: str) -> Any:
    if name.startswith("smdistributed."):
        path, _, leaf = name.rpartition(".")
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
        return getattr(importlib.import_module(path), leaf)
    found: Any = smp
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def test_every_line_of_the_tables_is_read() -> None:
    tables = PAGE[PAGE.index("## Every name and setting") :]
    assert len(rows()) == sum(line.startswith("| `") for line in tables.splitlines())
    assert len({row.name for row in rows()}) == len(rows())
    for row in rows():
        assert row.how or row.status == "supported", f"{row.name} differs, but how?"


@pytest.mark.parametrize("row", [*names("smp."), *names("smdistributed.")], ids=lambda r: r.name)
def test_a_name_is_there_and_a_missing_one_says_so(row: Row) -> None:
    is_of_job = row.name.startswith("smp.state.")
    if row.status == "not yet":
        with pytest.raises(NotSupportedError, match="not supported"):
            found = resolve(row.name)
            found()
    elif not is_of_job or smp.is_initialized():
        assert resolve(row.name) is not None


@pytest.mark.parametrize("row", names("DistributedModel."), ids=lambda row: row.name)
def test_a_member_of_a_model(row: Row) -> None:
    member = row.name.partition(".")[2]
    assert hasattr(smp.DistributedModel, member) is (row.status != "not yet")


@pytest.mark.parametrize("row", names("optimizer."), ids=lambda row: row.name)
def test_a_member_of_an_optimizer(row: Row) -> None:
    member = row.name.partition(".")[2]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    annotations = SubstitutingOptimizer.__annotations__
    has_it = hasattr(optimizer, member) or hasattr(LocalOptimizer, member)
    if row.status == "differs":  # perhaps there in 16-bit training only
        assert has_it or member in {*dir(SubstitutingOptimizer), *annotations}
    else:
        assert has_it is (row.status == "supported")


@pytest.mark.parametrize("row", names("StepOutput."), ids=lambda row: row.name)
def test_a_member_of_a_result(row: Row) -> None:
    assert hasattr(smp.StepOutput([torch.ones(1)]), row.name.partition(".")[2])


def test_the_tables_have_every_name_that_clients_use() -> None:
    listed = {row.name for row in rows()}
    modules = {f"smp.nn.huggingface.{family}" for family in ("bert", "roberta", "gptneox")}
    for name in set(NAMES) - modules:
        head = name.rpartition(".")[0]
        assert name in listed or head in {"smp.CommGroup", "smp.RankType"}, name


def test_the_tables_have_every_name_there_is() -> None:
    listed = {row.name for row in rows()}
    added = PAGE[PAGE.index("## New here") :]
    for name in smp_runtime.__all__:
        assert f"smp.{name}" in listed or f"`{name}`" in added, name


def test_the_tables_have_every_setting() -> None:
    known = (Config.model_fields.keys() - OWN_SETTINGS) | ALIASES.keys() | WITHOUT_MEANING.keys()
    assert {row.name for row in settings()} == known
    for row in settings():
        if row.name in NOT_YET:
            assert row.status == "not yet"
        if row.name in WITHOUT_MEANING:
            assert "gnored" in row.how
        if row.name in ALIASES:
            assert f"Another name of `{ALIASES[row.name]}`" in row.how
        if row.status == "supported":
            assert row.name not in NOT_YET
            assert row.name not in WITHOUT_MEANING


def test_since_when() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert f"since version {project['version']}, the first one" in PAGE


@pytest.mark.world
def test_the_script_runs_as_it_is_and_under_the_other_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path))
    text, reader = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    def body(code: str) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
        return out.getvalue()

    native = text.replace(
        "import smdistributed.modelparallel.torch as smp", "import smp_runtime as smp"
    )
    assert native != text
    alone = run_world(1, body, text.replace('"partitions": 2', '"partitions": 1'))[0]
    assert alone.count("step ") == 3
    for code in (text, native):
        assert run_world(2, body, code) == [alone, ""]
    found: dict[str, Any] = {}
    exec(compile(reader, "helper.py", "exec"), found)
    assert found["user_content"] == {"step": 3}
    shapes = {name: tuple(tensor.shape) for name, tensor in found["weights"].items()}
    assert shapes == {"0.weight": (32, 16), "0.bias": (32,), "2.weight": (4, 32), "2.bias": (4,)}
    written = {path.name for path in (tmp_path / "step3_partial").iterdir()}
    ranks = {f"{kind}_{pp}_0_0.safetensors" for kind in ("model", "optimizer") for pp in (0, 1)}
    assert written == {*ranks, "index.json", "run_state.pt", "user_content.pt"}


def test_files_and_links_exist() -> None:
    for name in re.findall(r"`((?:smp_runtime|launch|examples)/[\w./]+)`", PAGE):
        assert (CHECKOUT / name).exists(), name
    assert PAGE.isascii()
