"""`--mp_parameters` on the command line of a script is no argument of the script."""

import logging
import sys

import pytest

import smp_runtime as smp
from smp_runtime.launcher_arguments import drop_mp_parameters
from tests.worlds import run_world


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["s.py", "--mp_parameters", "ddp=True,partitions=2", "--lr", "1"], ["s.py", "--lr", "1"]),
        (["s.py", "--lr", "1", "--mp_parameters=ddp=True"], ["s.py", "--lr", "1"]),
        (["s.py", "--mp_parameters"], ["s.py"]),
        (["s.py", "--lr", "1"], ["s.py", "--lr", "1"]),
    ],
)
def test_it_is_taken_out(given: list[str], left: list[str]) -> None:
    arguments = list(given)
    drop_mp_parameters(arguments)
    assert arguments == left


@pytest.mark.parametrize("in_environment", [True, False])
def test_settings_that_are_nowhere_else_are_not_lost_silently(
    in_environment: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"partitions": 2}' if in_environment else "")
    with caplog.at_level(logging.WARNING):
        drop_mp_parameters(["s.py", "--mp_parameters", "partitions=2"])
    assert ("is ignored" in caplog.text) is not in_environment


@pytest.mark.world
def test_init_does_it() -> None:
    def body() -> list[str]:
        sys.argv[:] = ["s.py", "--mp_parameters", "partitions=2"]
        smp.init()
        return sys.argv

    assert run_world(1, body) == [["s.py"]]
