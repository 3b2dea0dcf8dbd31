"""The example with transformers' Trainer does over ranks what a plain Trainer does in one process.

Each run is a process that has not imported the Trainer yet, or one for each rank: transformers
decides when it is imported whether its Trainer takes the path that `smp_runtime.hf` repairs.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.forked_script import run_script

CHECKOUT = Path(__file__).parent.parent
EXAMPLE = CHECKOUT / "examples" / "finetune_with_trainer.py"
OLD = Path(os.environ.get("TRANSFORMERS_4", CHECKOUT / ".venv" / "transformers_4"))

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.timeout(400)]


def start(command: list[str], old: bool = False) -> None:
    """Runs Python with these arguments, in the checkout."""
    paths = [*([str(OLD)] if old else []), str(CHECKOUT)]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def run(folder: Path, ranks: int, *arguments: str, old: bool = False) -> None:
    """Starts the example, on so many ranks that torchrun starts, or as a plain script for none."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    script = [str(EXAMPLE), "--output", str(folder), *arguments]
    start([*(torchrun if ranks else []), *script], old)


def run_again(folder: Path, ranks: int, *arguments: str, old: bool) -> None:
    """Does the same in forks of this process, for the version of transformers that it has."""
    if old:
        run(folder, ranks, *arguments, old=True)
        return
    for ended in run_script(EXAMPLE, "--output", folder, *arguments, ranks=ranks):
        assert ended.code == 0, ended.text[-6000:]


def history(folder: Path) -> list[dict[str, float]]:
    """Returns what the Trainer logged: losses, norms, rates, metrics; no times."""
    state = json.loads((folder / "trainer_state.json").read_text())
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    lines = [{key: line[key] for key in kept if key in line} for line in state["log_history"]]
    return [line for line in lines if len(line) > 1]


def check_equal(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for line, wanted in zip(found, expected, strict=True):
        assert line == pytest.approx(wanted, rel=2e-4)


@pytest.fixture(scope="module", params=[False, True], ids=["transformers_5", "transformers_4"])
def old(request: pytest.FixtureRequest) -> bool:
    if request.param and not OLD.is_dir():
        pytest.skip(f"there is no {OLD}: run `make setup`")
    return bool(request.param)


@pytest.fixture(scope="module")
def plain(old: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("plain")
    run_again(folder, 0, "--plain", old=old)
    yield folder


def test_a_pipeline_trains_evaluates_saves_and_resumes(
    old: bool, plain: Path, tmp_path: Path
) -> None:
    expected = history(plain)
    assert [line["step"] for line in expected if "eval_loss" in line] == [4, 8]
    run(tmp_path, 2, old=old)
    check_equal(history(tmp_path), expected)
    weights: dict[str, Any] = load_file(tmp_path / "model.safetensors")
    wanted = load_file(plain / "model.safetensors")
    assert weights.keys() == wanted.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-4)
    shutil.rmtree(tmp_path / "checkpoint-8")
    run_again(tmp_path, 2, "--resume", old=old)
    check_equal(history(tmp_path), expected)


def test_a_pipeline_with_two_replicas(old: bool, plain: Path, tmp_path: Path) -> None:
    if old:
        pytest.skip("takes long, and the path through transformers is the one of the test above")
    run_again(tmp_path, 4, old=old)
    check_equal(history(tmp_path), history(plain))


def test_a_script_that_knows_sagemaker_only(old: bool, plain: Path, tmp_path: Path) -> None:
    """A script without a call of this project, for CUDA."""
    if old:
        pytest.skip("takes long, and nothing in it depends on the version")
    text = EXAMPLE.read_text()
    call = text[
        text.index("    if not line.plain:") : text.index("    from transformers import Tr")
    ]
    text = text.replace(call, "").replace("import smp_runtime.hf\n", "")
    assert "smp" not in text.partition("import argparse")[2]
    script, config = EXAMPLE.parent / "text_data.py", tmp_path / "config.yaml"
    shutil.copy(script, tmp_path)
    (tmp_path / "train.py").write_text(text)
    config.write_text("partitions: 2\nmicrobatches: 4\nddp: true\n")
    launcher = ["-m", "launch", "--sagemaker", "--emulate-cuda", "--ranks", "4", str(config)]
    start([*launcher, str(tmp_path / "train.py"), "--output", str(tmp_path)])
    check_equal(history(tmp_path), history(plain))
