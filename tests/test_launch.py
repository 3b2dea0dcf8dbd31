import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import __main__ as command
from launch.processes import DEFAULTS, rank_environment, run_ranks

# torch's launcher leaves it to the garbage collector to close what it opened for a rank's output.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file .*smprun_:ResourceWarning")

CHECKOUT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def unchanged_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what a launcher that runs inside the test sets for its ranks."""
    before, handlers = dict(os.environ), {s: signal.getsignal(s) for s in (15, 2, 1, 3)}
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.clear()
    os.environ.update(before)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("pipeline_parallel_degree: 2\nmicrobatches: 4\n")
    return path


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + text)
    return str(path)


# ---------------------------------------------------------------------------------------------
# The command line


def test_all_after_the_script_belongs_to_the_script() -> None:
    line = command.parse(["--ranks", "3", "c.yaml", "s.py", "--plan", "--ranks", "7"], "smprun")
    assert (line.config, line.script, line.ranks) == ("c.yaml", "s.py", 3)
    assert line.arguments == ("--plan", "--ranks", "7")
    assert not line.shows_plan


def test_what_is_shown_has_no_script_and_its_options_may_come_last() -> None:
    line = command.parse(["--plan", "c.yaml", "--model", "gpt2", "--batch", "8"], "smprun")
    assert (line.config, line.script, line.shows_plan) == ("c.yaml", "", True)
    assert (line.model, line.sequence_length, line.batch) == ("gpt2", 128, 8)


@pytest.mark.parametrize("arguments", [["c.yaml"], ["c.yaml", "--ranks", "2", "s.py"]])
def test_a_missing_script_says_so(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.parse(arguments, "smprun")
    assert ended.value.code == 2
    assert "SCRIPT is missing after CONFIG" in capsys.readouterr().err


def test_a_missing_file_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(config), "nowhere.py"]) == 2
    assert "there is no script 'nowhere.py'" in capsys.readouterr().err


def test_a_variable_that_is_set_is_left_alone() -> None:
    settings = rank_environment({"OMP_NUM_THREADS": "7"})
    assert "OMP_NUM_THREADS" not in settings
    assert settings["MALLOC_TOP_PAD_"]


# ---------------------------------------------------------------------------------------------
# Ranks


def test_ranks_get_config_arguments_and_settings(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(
        tmp_path, "print(sys.argv[1:], os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'])"
    )
    assert command.main([str(config), path, "--lr", "1e-4"]) == 0
    expected = f"['--config', '{config}', '--lr', '1e-4'] 2 1"
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"[rank 0] {expected}",
        f"[rank 1] {expected}",
    ]


def test_lines_come_whole_and_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(
        tmp_path,
        "for i in range(200):\n"
        "    sys.stdout.write(f'{i} ')\n"
        "    sys.stdout.write('x' * 300 + '\\n')\n"
        "sys.stderr.write('a bar\\ra longer bar\\nno end')\n",
    )
    assert run_ranks(2, [path]) == 0
    out, err = capsys.readouterr()
    for rank in (0, 1):
        lines = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert lines == [f"[rank {rank}] {i} {'x' * 300}" for i in range(200)]
        assert f"[rank {rank}] a bar\r" in err
        assert f"[rank {rank}] a longer bar\n" in err
        assert f"[rank {rank}] no end\n" in err


def test_a_failing_rank_stops_all_and_names_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(
        tmp_path,
        "if rank == 1:\n    raise SystemExit(7)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('told to end'), sys.exit(0)))\n"
        "time.sleep(60)\n",
    )
    began = time.monotonic()
    assert run_ranks(2, [path]) == 7
    assert time.monotonic() - began < 10
    out, err = capsys.readouterr()
    assert "launch: rank 1 ended with code 7, all ranks are stopped" in err
    assert "[rank 0] told to end" in out


def test_a_rank_ended_by_a_signal_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)\n")
    assert run_ranks(1, [path]) == 128 + signal.SIGKILL
    assert "rank 0 ended with SIGKILL" in capsys.readouterr().err


def launcher_with_ready_ranks(config: Path, path: str, **environ: str) -> subprocess.Popen[str]:
    """Starts `python -m launch` and waits until each of two ranks has made its file."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "launch", str(config), path],
        cwd=CHECKOUT,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(list(config.parent.glob("ready*"))) < 2:
        assert launcher.poll() is None, launcher.communicate()[1]
        time.sleep(0.05)
    return launcher


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank(number: signal.Signals, config: Path, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        f"signal.signal({int(number)}, lambda *_: (print('the signal'), sys.exit(0)))\n"
        f"open(r'{tmp_path}/ready' + str(rank), 'w').close()\n"
        "time.sleep(60)\n",
    )
    launcher = launcher_with_ready_ranks(config, path)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + number
    assert sorted(out.splitlines()) == ["[rank 0] the signal", "[rank 1] the signal"]
    assert f"launch: {number.name}, all ranks are stopped" in err


def test_a_rank_that_ignores_the_signal_is_killed(config: Path, tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"with open(r'{tmp_path}/ready' + str(rank), 'w') as file:\n"
        "    file.write(str(os.getpid()))\n"
        "time.sleep(60)\n",
    )
    launcher = launcher_with_ready_ranks(config, path, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    launcher.terminate()
    launcher.communicate(timeout=50)  # torch 2.9 does not read the variable, and waits for 30
    assert launcher.returncode == 128 + signal.SIGTERM
    for file in tmp_path.glob("ready*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


# ---------------------------------------------------------------------------------------------
# Recipes, and the package once installed


def test_the_recipe_for_several_nodes_makes_one_world(config: Path, tmp_path: Path) -> None:
    path = script(tmp_path, "print('of', os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])")
    with socket.create_server(("localhost", 0)) as server:
        place = f"localhost:{server.getsockname()[1]}"
    environ = {"NODES": "2", "RANKS": "1", "RENDEZVOUS": place, "PYTHON": sys.executable}
    nodes = [
        subprocess.Popen(
            [CHECKOUT / "launch" / "several_nodes.sh", config, path],
            env=os.environ | environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    lines = [node.communicate(timeout=50)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert sorted(lines) == ["[rank 0] of 2 0\n", "[rank 1] of 2 0\n"]


@pytest.mark.parametrize("name", ["one_gpu_node.sh", "several_nodes.sh", "slurm.sbatch"])
def test_recipes_are_programs(name: str) -> None:
    path = CHECKOUT / "launch" / name
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True)


def test_the_wheel_brings_a_command_but_no_package_called_launch(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in CHECKOUT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, source)
    for package in ("smp_runtime", "launch"):
        shutil.copytree(CHECKOUT / package, source / package)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        + ["--no-index", "--wheel-dir", tmp_path, source],
        check=True,
    )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        entry_points = next(name for name in names if name.endswith("/entry_points.txt"))
        command_line = wheel.read(entry_points).decode()
    folders = {name.split("/")[0].split("-")[0] for name in names}
    assert folders == {"smp_runtime", "smdistributed"}
    mapped = CHECKOUT / "smp_runtime" / "smdistributed"
    files = {path.relative_to(mapped.parent).as_posix() for path in mapped.rglob("*.py")}
    assert files == {name for name in names if name.startswith("smdistributed/")}
    assert "smprun = smp_runtime.launch.__main__:main" in command_line
    assert {"smp_runtime/py.typed", "smp_runtime/launch/__main__.py"} < set(names)


# ---------------------------------------------------------------------------------------------
# What a run would do


def test_dry_run_draws_placement_and_schedule(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--dry-run", "--ranks", "4", str(config)]) == 0
    out = capsys.readouterr().out
    assert "4 ranks: pipeline 2, tensor 1, replicas 2, placement cluster" in out
    assert "   3        1        0         1        1        1\n" in out
    assert "rank 0  0F0 0F1  .  0B0 0F2 0B1 0F3 0B2  .  0B3" in out
    assert "in flight by pipeline rank: 2, 1" in out
    assert "bubble: 20%" in out


def test_a_wrong_setting_is_told_without_a_traceback(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("microbatchs: 4\n")
    assert command.main(["--dry-run", str(config)]) == 2
    assert "'microbatches'" in capsys.readouterr().err


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_plan_prints_assignments_and_bytes_by_rank(
    config: Path, shape: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--plan", str(config), "--sequence-length", "16", "--batch", "8", "--model"]
    assert command.main([*arguments, str(shape)]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM on 2 partitions, 4 microbatches of 2 x 16 tokens" in out
    assert "\nPartition assignments:\n" in out
    assert re.search(r"^main/model/embed_tokens: 0 ", out, re.MULTILINE)
    assert re.search(r"^main/lm_head: 1 ", out, re.MULTILINE)
    header = r"^partition .* memory += parameters +\+ gradients +\+ Adam +\+ activations$"
    assert len(re.findall(header, out, re.MULTILINE)) == 1
    assert (
        len(re.findall(r"^ +\d( +[\d,]+){3} +[\d.]+%( +[\d.]+ [KM]iB){5}$", out, re.MULTILINE)) == 2
    )
    assert command.main([*arguments, str(shape / "config.json")]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "write --model"),
        (["--model", "MODEL", "--batch", "6"], "write --batch 8"),
        (["--model", "/nowhere/to/be/found"], "cannot read the shape of the model"),
    ],
)
def test_plan_tells_what_is_missing(
    arguments: list[str],
    message: str,
    config: Path,
    shape: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(shape) if argument == "MODEL" else argument for argument in arguments]
    assert command.main(["--plan", str(config), *given]) == 2
    assert message in capsys.readouterr().err
