"""What README.md shows is so: its code runs, its output is what comes out, its names exist.

A block of Python is a script for two ranks; the block of text after it is what they print, one
after the other. Shell commands that only look (`make`, `--dry-run`, `--plan`) are run, and the
text after them is compared; of the others it is checked that they would start.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import smp_runtime as smp
from launch.__main__ import main, parse
from smp_runtime import errors
from smp_runtime.config import NOT_YET, Config, load_config
from tests import transparency
from tests.worlds import run_world

CHECKOUT = Path(__file__).parent.parent
README = (CHECKOUT / "README.md").read_text()
PAGES = ["README.md", "smp_runtime/HOW_IT_WORKS.md", "launch/README.md"]
NUM_RANKS = 2


class Block(NamedTuple):
    """A block of code, and the text after it that shows its output, "" if none does."""

    language: str
    code: str
    output: str
    line: int

    def __str__(self) -> str:
        return f"line_{self.line}"


def blocks() -> Iterator[Block]:
    fences = list(re.finditer(r"^```(\w*)\n(.*?)^```\n", README, re.MULTILINE | re.DOTALL))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        output = ""
        if following and following[1] == "text":
            between = README[fence.end() : following.start()]
            output = "" if between.strip() else following[2]
        yield Block(fence[1], fence[2], output, README.count("\n", 0, fence.start()) + 1)


def of(language: str) -> list[Block]:
    return [block for block in blocks() if block.language == language]


class Command(NamedTuple):
    """A command line, and the output that the page shows for it."""

    line: str
    output: str

    def __str__(self) -> str:
        return self.line.replace("/", "_").replace(" ", "_")


def commands() -> list[Command]:
    return [
        Command(line, block.output)
        for block in of("shell")
        for line in block.code.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the checkout, with the files that the page tells to make."""
    for name in ("configs", "examples", "launch", "Makefile"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    for name, language in (("train.py", "python"), ("llama.json", "json")):
        assert f"`{name}`" in README
        (tmp_path / name).write_text(of(language)[0].code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------------------------------------
# Python


def run_script(block: Block) -> str:
    """Runs a block on two ranks and returns what they print."""

    def body() -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.code, f"README.md:{block.line}", "exec"), {"__name__": "__main__"})
        return printed.getvalue()

    return "".join(run_world(NUM_RANKS, body))


@pytest.mark.world
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_runs_and_prints_what_is_shown(block: Block) -> None:
    printed = run_script(block)
    if block.output:
        assert printed == block.output
    elif "print(" in block.code:  # a time, which the text below the block gives
        (shown,) = re.findall(r"prints (\d+) ms or a little more", README)
        assert int(shown) <= int(printed.split()[0]) < 1.3 * int(shown)


def test_the_first_block_is_a_whole_training_step() -> None:
    code = of("python")[0].code
    for part in ("smp.init", "@smp.step", "model.backward", "optimizer.step()"):
        assert part in code


# ---------------------------------------------------------------------------------------------
# The shell


def start_of(words: list[str]) -> list[str]:
    """Returns the command without the variables that are set in front of it."""
    return words[1:] and start_of(words[1:]) if "=" in words[0] else words


@pytest.mark.parametrize("command", commands(), ids=str)
def test_commands_would_start(command: Command, folder: Path) -> None:
    program, *rest = start_of(shlex.split(command.line, comments=True))
    if program == "make":
        assert rest and all(f"\n{target}:" in (folder / "Makefile").read_text() for target in rest)
    elif program in ("smprun", "python") and ("-m" in rest or program == "smprun"):
        arguments = rest[rest.index("launch") + 1 :] if program == "python" else rest
        check_launch(arguments, command.output)
    elif program == "torchrun":
        assert shutil.which("torchrun", path=str(Path(sys.executable).parent))
        assert rest[0] == "--nproc-per-node"
        check_script(rest[2], rest[4:5])
    elif program == "python":
        assert Path(rest[0]).is_file()
    elif program == "sbatch" or program.startswith("launch/"):
        recipe = program if program != "sbatch" else next(w for w in rest if "slurm" in w)
        assert os.access(recipe, os.X_OK) or program == "sbatch"
        config, script = [word for word in rest if word.startswith(("configs/", "examples/"))]
        check_script(script, [config])
    else:
        pytest.fail(f"nobody has told this test what {program} is")


def check_launch(arguments: list[str], output: str) -> None:
    line = parse(arguments, "python -m launch")
    if line.script:
        check_script(line.script, [line.config])
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(arguments) == 0
    assert printed.getvalue() == output


def check_script(script: str, configs: list[str]) -> None:
    assert Path(script).is_file()
    for config in configs:
        load_config(config, {})


def test_make_alone_lists_the_targets_of_the_page() -> None:
    listed = subprocess.run(["make"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    for target in set(re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE)):
        assert f"make {target} " in listed.stdout


def test_the_installed_command_has_the_name_on_the_page() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert "smprun" in project["scripts"]
    assert project["readme"] == "README.md"


# ---------------------------------------------------------------------------------------------
# Settings and other data


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_is_a_config(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(block.code)
    assert load_config(file, {}).pipeline_parallel_degree > 1


def settings_table() -> str:
    """Returns the table of all settings that work, as the page must show it."""
    rows = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for name, field in Config.model_fields.items():
        if name not in NOT_YET:
            meaning = str(field.description).replace("\n", " ")
            rows.append(f"| `{name}` | `{field.default}` | {meaning} |")
    return "\n".join(rows)


def test_the_table_of_settings_is_that_of_the_code() -> None:
    assert settings_table() in README


def test_the_settings_that_do_not_work_yet_are_named() -> None:
    paragraph = next(part for part in README.split("\n\n") if "refused otherwise" in part)
    assert set(re.findall(r"`(\w+)`", paragraph)) == NOT_YET


def test_the_errors_are_those_of_the_code() -> None:
    listed = set(re.findall(r"^\| `(\w+Error)` \|", README, re.MULTILINE))
    defined = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert listed | {"SMPError"} == defined


def test_the_tolerances_are_those_of_the_tests() -> None:
    def shown(tolerance: dict[str, float]) -> str:
        return f"relative {tolerance['rtol']:.0e}, absolute {tolerance['atol']:.0e}"

    for row in (
        f"relative {transparency.LOSS_TOLERANCE:.0e}",
        shown(transparency.GRADIENT_TOLERANCE),
        shown(transparency.PARAMETER_TOLERANCE),
    ):
        assert f"| {row.replace('e-0', 'e-')} |" in README


# ---------------------------------------------------------------------------------------------
# The pages


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_links_of_a_page_exist(page: str) -> None:
    text = (CHECKOUT / page).read_text()
    named = set(re.findall(r"`((?:smp_runtime|launch|configs|examples|tests)/[\w./]*)`", text))
    linked = {
        str(Path(page).parent / target) for target in re.findall(r"\]\((?!http)([^)#]+)\)", text)
    }
    for name in named | linked:
        assert (CHECKOUT / name).exists(), name


@pytest.mark.parametrize("page", PAGES)
def test_the_names_on_a_page_are_public(page: str) -> None:
    text = (CHECKOUT / page).read_text()
    assert text.isascii()
    for name in re.findall(r"\bsmp\.(\w+)", text):
        assert name in smp.__all__, name


def test_no_block_is_left_out() -> None:
    known = {"python", "shell", "yaml", "json"}
    shown = sum(bool(block.output) for block in blocks() if block.language in known)
    assert len(of("text")) == shown  # each shows the output of the block before it
    drawings: list[Any] = [block for block in blocks() if block.language not in known | {"text"}]
    assert [block.language for block in drawings] == ["", ""]  # a run by hand, and a drawing
