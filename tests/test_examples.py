import ast
import importlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import smp_runtime as smp
from launch.overview import dry_run
from smp_runtime.config import load_config
from tests.worlds import run_world

CHECKOUT = Path(__file__).parent.parent
CONFIGS = sorted((CHECKOUT / "configs").glob("*.yaml"))
EXAMPLES = sorted((CHECKOUT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes examples import each other as they do when one of them is started."""
    monkeypatch.syspath_prepend(CHECKOUT / "examples")


@pytest.fixture
def text_data() -> Any:
    return importlib.import_module("text_data")


@pytest.fixture
def example() -> Any:
    return importlib.import_module("finetune_causal_lm")


class Letters:
    """Stands in for a tokenizer: a token for each letter, 0 for the end."""

    eos_token_id: int | None = 0

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


# ---------------------------------------------------------------------------------------------
# Configs


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_short_says_what_it_shows_and_can_be_drawn(config: Path, example: Any) -> None:
    lines = config.read_text().splitlines()
    assert len(lines) <= 20
    assert lines[0].startswith("# ")
    settings = load_config(config, {})
    degree = settings.pipeline_parallel_degree
    drawing = dry_run(settings, 2 * degree if settings.ddp else degree)
    assert f"0B{settings.microbatches - 1}" in drawing
    wanted = example.read_settings(str(config), [])
    assert wanted.batch_size % settings.microbatches == 0
    assert wanted.output == f"runs/{config.stem}"


# ---------------------------------------------------------------------------------------------
# What examples may use


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_uses_the_public_names_only(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("smp_runtime")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id != "smp" or node.attr in smp.__all__


def test_the_check_of_a_saved_model_has_never_heard_of_this_project() -> None:
    assert "smp" not in (CHECKOUT / "examples/check_saved_model.py").read_text()


# ---------------------------------------------------------------------------------------------
# Text


def test_documents_come_from_files_lines_and_python(tmp_path: Path, text_data: Any) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("one\ntwo")
    lines.write_text('{"text": "one"}\n\n{"text": "two", "more": 1}\n')
    assert text_data.read_documents(str(plain)) == ["one\ntwo"]
    assert text_data.read_documents(str(lines)) == ["one", "two"]
    assert len(text_data.read_documents("pydoc_data.topics")) > 50


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "there is no such file. Write the path"),
        ("empty.txt", " \n", "holds no text: write a file that is not empty"),
        ("a.jsonl", '{"text": "a"}\n{"txt": "b"}', "line 2 is .*write one JSON object a line"),
        ("b.jsonl", "text", "line 1 is 'text'; write one JSON object a line"),
        ("c.jsonl", '"text"', "line 1 is .*write one JSON object a line"),
    ],
)
def test_a_wrong_text_says_what_to_write(
    tmp_path: Path, text_data: Any, name: str, content: str | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(text_data.SettingError, match=f"text='.*{name}'.*{message}"):
        text_data.read_documents(str(path))


def test_documents_are_packed_end_to_end(text_data: Any) -> None:
    a, b, c, d = (ord(letter) for letter in "abcd")
    tokenizer = Letters()
    assert text_data.pack(["ab", "c", "d"], tokenizer, 3).tolist() == [[a, b, 0], [c, 0, d]]
    tokenizer.eos_token_id = None
    assert text_data.pack(["ab", "c", "d"], tokenizer, 2).tolist() == [[a, b], [c, d]]


def test_the_last_tenth_is_held_out_and_thinned_evenly(text_data: Any) -> None:
    sequences = torch.arange(400)[:, None]
    training, held_out = text_data.hold_out(sequences, 4, 1, most=11)
    assert training.flatten().tolist() == list(range(360))
    assert held_out.flatten().tolist() == [360, 365, 370, 375, 380, 385, 390, 395]
    training, held_out = text_data.hold_out(sequences[:24], 8, 2, most=1)
    assert (len(training), held_out.flatten().tolist()) == (16, list(range(16, 24)))


def test_a_text_too_short_says_what_to_write(text_data: Any) -> None:
    with pytest.raises(text_data.SettingError, match=r"(?s)batch_size=8 on 2 .* needs 24 .*give"):
        text_data.hold_out(torch.zeros(23, 5), 8, 2, most=8)


def test_replicas_see_different_sequences_and_peers_the_same(text_data: Any) -> None:
    sequences = torch.arange(20)

    def first_epochs(replica: int) -> list[list[int]]:
        batches = text_data.endless_batches(sequences, 4, replica, 2, seed=5)
        return [batch.tolist() for batch in itertools.islice(batches, 4)]

    mine, other = first_epochs(0), first_epochs(1)
    assert mine == first_epochs(0)
    for epoch in (0, 2):  # an epoch is two steps of 2 x 4, and drops 4 of the 20
        seen = sum(mine[epoch : epoch + 2] + other[epoch : epoch + 2], [])
        assert len(set(seen)) == 16
    assert mine[:2] != mine[2:]


# ---------------------------------------------------------------------------------------------
# Settings and models


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("stepz=3", "unknown setting 'stepz': did you mean 'steps'"),
        ("steps=0", "steps=0: it should be greater than 0"),
        ("steps=many", "steps='many': it should be a valid integer"),
        ("text", "text=None: it should be a valid string"),
    ],
)
def test_a_wrong_setting_says_what_to_write(example: Any, assignment: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        example.read_settings(str(CONFIGS[0]), [assignment])


def test_a_setting_of_the_command_line_wins(example: Any, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("smp:\n  microbatches: 2\ntrain:\n  steps: 3\n  learning_rate: 1e-3\n")
    settings = example.read_settings(str(config), ["steps=5", "output=there"])
    assert (settings.steps, settings.learning_rate, settings.output) == (5, 1e-3, "there")


def test_a_config_that_cannot_be_read_is_named(example: Any) -> None:
    with pytest.raises(ValueError, match=r"--config nowhere\.yaml: .*No such file"):
        example.read_settings("nowhere.yaml", [])


def test_a_wrong_model_says_what_to_write(tmp_path: Path) -> None:
    load_model = importlib.import_module("load_model").load_model
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1}))
    with pytest.raises(ValueError, match=r"(?s)model='.*' cannot be loaded.*Write a local Hugging"):
        load_model(str(tmp_path))


def test_the_tiny_model_depends_on_the_seed_only_and_reads_bytes() -> None:
    load_model = importlib.import_module("load_model").load_model
    torch.manual_seed(3)
    first, tokenizer = load_model("tiny-random")
    torch.manual_seed(3)
    second, _ = load_model("tiny-random")
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    text = "with  spaces,\n\ttabs and \u00fc"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text


# ---------------------------------------------------------------------------------------------
# Restarts


@pytest.mark.world
def test_a_restart_goes_on_from_checkpoints_of_its_own_run_only(
    example: Any, tmp_path: Path
) -> None:
    settings = example.Settings(output=str(tmp_path))
    newest = tmp_path / "checkpoints" / "newest"

    def start(run: str, restarts: tuple[int, int]) -> bool:
        """Says what both ranks do, whose machines count restarts differently."""

        def body() -> bool:
            smp.init({"pipeline_parallel_degree": 2})
            os.environ["TORCHELASTIC_RUN_ID"] = run
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts[smp.rank()])
            found: bool = example.has_begun(settings)
            return found

        first, second = run_world(2, body)
        assert first == second
        return bool(first)

    def save() -> None:
        newest.parent.mkdir(exist_ok=True)
        newest.write_text("step1_partial\n")

    assert not start("a", (0, 0))
    assert not start("a", (0, 1))  # it failed before its first checkpoint
    save()
    assert start("a", (0, 1))
    assert start("a", (2, 1))
    assert not start("b", (1, 1))  # which never came here before it was started again
    assert not start("none", (0, 0))
    assert not start("none", (1, 1))
    assert not start("none", (0, 0))  # a name that the next run has, too
    assert not start("none", (1, 1))
    save()
    assert start("none", (1, 1))
