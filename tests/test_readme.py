"""What the pages show is so: their code runs, their output is what comes out, their names exist.

README.md is the front page; the others lie beside what they describe. A block of Python is a script
for two ranks; the block of text after it is what they print, one after the other. Shell commands
that only look (`make`, `--dry-run`, `--plan`) are run, and the text after them is compared; of the
others it is checked that they would start. `test_migration.py` runs what the migration guide shows.
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
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

import smp_runtime as smp
from launch.__main__ import main, parse
from smp_runtime import errors
from smp_runtime.config import NOT_YET, Config, load_config
from tests import transparency
from tests.worlds import run_world

CHECKOUT = Path(__file__).parent.parent
# Every page, and how many blocks it has that can't be run: drawings, and in "bash" commands with
# placeholders.
NOT_RUN = {
    "README.md": 2,  # a run by hand, and a drawing
    ".github/CONTRIBUTING.md": 0,
    "launch/README.md": 2,
    "smp_runtime/HOW_IT_WORKS.md": 14,
    "smp_runtime/SETTINGS.md": 0,
    "smp_runtime/execution/EMULATED_CLOCK.md": 0,
    "smp_runtime/execution/FAILURES.md": 0,
    "smp_runtime/execution/STEPS.md": 0,
    "smp_runtime/optimization/README.md": 0,
    "smp_runtime/planning/README.md": 0,
    "smp_runtime/recomputing/README.md": 0,
    "smp_runtime/replication/README.md": 0,
    "smp_runtime/saving/README.md": 0,
    "smp_runtime/trainer/README.md": 0,
}
MIGRATION = "smp_runtime/smdistributed/MIGRATION.md"
TEXTS = {page: (CHECKOUT / page).read_text() for page in NOT_RUN}
PAGES = [*NOT_RUN, MIGRATION]
README = TEXTS["README.md"]
SETTINGS = TEXTS["smp_runtime/SETTINGS.md"]
FAILURES = TEXTS["smp_runtime/execution/FAILURES.md"]
CLOCK = TEXTS["smp_runtime/execution/EMULATED_CLOCK.md"]
LINK = r"\]\((?!http|#)([^)#]+)(?:#[^)]*)?\)"
NUM_RANKS = 2
MOST_LINES = 465  # of the front page


class Block(NamedTuple):
    """A block of code, and the text after it that shows its output, "" if none does."""

    page: str
    language: str
    code: str
    output: str
    line: int

    def __str__(self) -> str:
        return f"{self.page.replace('/', '_')}_line_{self.line}"


def blocks(page: str) -> Iterator[Block]:
    text = TEXTS[page]
    fences = list(re.finditer(r"^```(\w*)\n(.*?)^```\n", text, re.MULTILINE | re.DOTALL))
    for fence, following in zip_longest(fences, fences[1:]):
        output = ""
        if following and following[1] == "text":
            between = text[fence.end() : following.start()]
            output = "" if between.strip() else following[2]
        yield Block(page, fence[1], fence[2], output, text.count("\n", 0, fence.start()) + 1)


def of(language: str) -> list[Block]:
    return [block for page in TEXTS for block in blocks(page) if block.language == language]


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
    """A folder that looks like the checkout, with the files that the pages tell to make."""
    for name in ("configs", "examples", "launch", "Makefile"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    for name, language in (("train.py", "python"), ("llama.json", "json")):
        block = of(language)[0]
        assert f"`{name}`" in TEXTS[block.page]
        (tmp_path / name).write_text(block.code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------------------------------------
# Python


def run_script(block: Block) -> str:
    """Runs a block on two ranks and returns what they print."""

    def body() -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = compile(block.code, f"{block.page}:{block.line}", "exec")
            exec(code, {"__name__": "__main__"})
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
        (shown,) = re.findall(r"prints (\d+) ms or a little more", CLOCK)
        assert int(shown) <= int(printed.split()[0]) < 1.3 * int(shown)


def test_the_first_block_is_a_whole_training_step() -> None:
    code = next(block.code for block in blocks("README.md") if block.language == "python")
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


def test_make_alone_lists_the_targets_of_the_pages() -> None:
    listed = subprocess.run(["make"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    for target in set(re.findall(r"(?:^|`)make (\w+)", "\n".join(TEXTS.values()), re.MULTILINE)):
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
    assert settings_table() in SETTINGS


def test_the_settings_that_do_not_work_yet_are_named() -> None:
    paragraph = next(part for part in SETTINGS.split("\n\n") if "refused otherwise" in part)
    assert set(re.findall(r"`(\w+)`", paragraph)) == NOT_YET


def test_the_errors_are_those_of_the_code() -> None:
    listed = set(re.findall(r"^\| `(\w+Error)` \|", FAILURES, re.MULTILINE))
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


def test_every_page_is_known_and_can_be_reached() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    ).stdout.split()
    assert set(tracked) <= set(PAGES)
    linked = {str(CHECKOUT / target) for target in re.findall(LINK, README)}
    assert {str(CHECKOUT / page) for page in PAGES} <= linked | {str(CHECKOUT / "README.md")}


def test_the_front_page_is_short() -> None:
    assert README.count("\n") <= MOST_LINES


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_links_of_a_page_exist(page: str) -> None:
    text = (CHECKOUT / page).read_text()
    folder = Path(page).parent
    named = set(re.findall(r"`((?:smp_runtime|launch|configs|examples|tests)/[\w./]*)`", text))
    linked = {str(folder / target) for target in re.findall(LINK, text)}
    for name in named | linked:
        assert (CHECKOUT / name).exists(), name
    for name in set(re.findall(r"`([\w./]+\.py)`", text)) - {"train.py"}:
        assert (CHECKOUT / name).exists() or (CHECKOUT / folder / name).exists(), name


@pytest.mark.parametrize("page", PAGES)
def test_the_headings_that_links_lead_to_exist(page: str) -> None:
    text = (CHECKOUT / page).read_text()
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", text):
        other = (CHECKOUT / page).parent / target if target else CHECKOUT / page
        headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
        names = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert anchor in names, f"{target}#{anchor}"


@pytest.mark.parametrize("page", NOT_RUN)
def test_the_names_on_a_page_are_public(page: str) -> None:
    text = TEXTS[page]
    assert text.isascii()
    for name in re.findall(r"\bsmp\.(\w+)", text):
        assert name in smp.__all__, name


@pytest.mark.parametrize("page", NOT_RUN)
def test_no_block_is_left_out(page: str) -> None:
    known = {"python", "shell", "yaml", "json"}
    found = list(blocks(page))
    shown = sum(bool(block.output) for block in found if block.language in known)
    texts = [block for block in found if block.language == "text"]
    assert len(texts) == shown  # each shows the output of the block before it
    others = [block for block in found if block.language not in known | {"text"}]
    assert len(others) == NOT_RUN[page]
    for block in others:
        assert not block.language or (block.language == "bash" and "CONFIG" in block.code)
    assert TEXTS[page].count("```") == 2 * len(found)
