"""The lists of modules in pyproject.toml are complete."""

import tomllib
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parent.parent
SETTINGS: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(CHECKOUT).with_suffix("").parts)


def test_every_module_has_a_floor() -> None:
    contracts = SETTINGS["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["id"] == "floors"]
    floors = [name.strip() for layer in layers for name in layer.split("|")]
    modules = {
        dotted(path)
        for path in (CHECKOUT / "smp_runtime").rglob("*.py")
        if path.name != "__init__.py" and "smdistributed" not in path.parts
    }
    assert sorted(floors) == sorted(modules | {"smp_runtime.smdistributed"})


def test_every_package_is_installed() -> None:
    packages = {
        dotted(path.parent)
        for path in (CHECKOUT / "smp_runtime").rglob("__init__.py")
        if "smdistributed" not in path.parts
    }
    listed = set(SETTINGS["setuptools"]["packages"])
    assert packages <= listed
