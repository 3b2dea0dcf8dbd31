import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.forked_script import run_script

CHECKOUT = Path(__file__).parent.parent
SCRIPT = "examples/finetune_causal_lm.py"
FEW = ["steps=4", "batch_size=4", "held_out_sequences=8", "sample_tokens=4"]

pytestmark = [pytest.mark.world, pytest.mark.slow]


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Runs a Python command in the checkout, with its two outputs in one."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=CHECKOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=55,
        check=False,
    )


def losses(output: str) -> tuple[float, float]:
    """Returns the held-out losses before and after that a run printed."""
    found = re.search(r"held-out loss before ([\d.]+), after ([\d.]+)", output)
    assert found, output
    return float(found[1]), float(found[2])


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    sentences = [f"The number after {i} is {i + 1}, and {i + 2} comes next." for i in range(99)]
    path.write_text("\n".join(json.dumps({"text": sentence}) for sentence in sentences))
    return path


@pytest.fixture(scope="module")
def two_ranks(lines: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a run over two ranks printed, and the folder that it saved."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    config = "configs/finetune_tiny_ci.yaml"
    ended = run(["-m", "launch", config, SCRIPT, f"text={lines}", f"output={folder}", *FEW])
    assert ended.returncode == 0, ended.stdout
    return ended.stdout, folder


def test_a_run_shows_partition_progress_memory_and_samples(two_ranks: tuple[str, Path]) -> None:
    printed, folder = two_ranks
    shown = ["Partition assignments:", "tokens/s", "s/step", "peak memory", "bubble"]
    for part in [*shown, "sample before", "sample after", str(folder)]:
        assert part in printed
    assert all(line.startswith("[rank ") for line in printed.splitlines())


def test_plain_transformers_loads_what_was_saved(two_ranks: tuple[str, Path]) -> None:
    _, folder = two_ranks
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors"}
    assert names >= {"tokenizer.json", "tokenizer_config.json"}
    checked = run(["examples/check_saved_model.py", folder])
    assert checked.returncode == 0, checked.stdout


def test_one_process_learns_the_same(
    two_ranks: tuple[str, Path], lines: Path, tmp_path: Path
) -> None:
    config = "configs/finetune_tiny_one_process.yaml"
    alone = run([SCRIPT, "--config", config, f"text={lines}", f"output={tmp_path}", *FEW])
    assert alone.returncode == 0, alone.stdout
    assert losses(alone.stdout) == pytest.approx(losses(two_ranks[0]), rel=1e-4)


def test_torchrun_goes_on_from_a_saved_folder(
    two_ranks: tuple[str, Path], lines: Path, tmp_path: Path
) -> None:
    printed, folder = two_ranks
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    config = ["--config", "configs/finetune_tiny_ci.yaml", f"model={folder}", f"text={lines}"]
    continued = run([*torchrun, *config, f"output={tmp_path}", *FEW])
    assert continued.returncode == 0, continued.stdout
    assert losses(continued.stdout)[0] == pytest.approx(losses(printed)[1], rel=1e-4)


def test_a_run_that_was_killed_goes_on_to_the_same_losses(
    two_ranks: tuple[str, Path], lines: Path, tmp_path: Path
) -> None:
    command = ["-m", "launch", "configs/finetune_tiny_ci.yaml", SCRIPT, f"text={lines}", *FEW]
    settings = [*command, "save_every=1"]
    killed, newest = tmp_path / "killed", tmp_path / "killed/checkpoints/newest"
    with subprocess.Popen(
        [sys.executable, *settings, f"output={killed}"],
        cwd=CHECKOUT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        while not newest.exists() and process.poll() is None:
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
    resumed = run([*settings, f"output={killed}", "--resume"])
    assert resumed.returncode == 0, resumed.stdout
    found = re.search(r"resumed after step (\d+)", resumed.stdout)
    assert found and 1 <= int(found[1]) <= 4, resumed.stdout
    assert losses(resumed.stdout) == losses(two_ranks[0])


def test_a_run_that_learns_nothing_fails(lines: Path, tmp_path: Path) -> None:
    config = "configs/finetune_tiny_one_process.yaml"
    worse = [*FEW, "learning_rate=10", "steps=1", f"text={lines}", f"output={tmp_path}"]
    (ended,) = run_script(CHECKOUT / SCRIPT, "--config", CHECKOUT / config, *worse)
    assert ended.code == 1
    assert "the held-out loss is not lower than before" in ended.text
