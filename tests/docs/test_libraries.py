"""The decision on libraries lists what the package depends on, and the package imports all of it."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LISTED = set(
    re.findall(
        r"`([\w-]+)`",
        "\n".join(
            row.split("|")[1]
            for row in (ROOT / "docs" / "decisions" / "0026-libraries.md").read_text(encoding="utf-8").splitlines()
            if row.startswith("| `")
        ),
    )
)
MODULES = {"nvidia-ml-py": "pynvml", "pyyaml": "yaml"}
TESTS_ONLY = {"pytest", "hypothesis", "jsonschema", "pyte"}


def named(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s<>=;~!\[]", requirement, maxsplit=1)[0] for requirement in requirements}


EXTRAS = PROJECT["optional-dependencies"]
# tomli is the standard library's tomllib for Python 3.10.
USED = ("notify", "plot", "amd", "executor", "ray", "mcp")
OPTIONAL = [*(one for extra in USED for one in EXTRAS[extra])]
NEEDED = named(PROJECT["dependencies"]) - {"tomli"} | named(OPTIONAL)


def _from_elsewhere(text: str) -> set[str]:
    """What may be imports of neither the standard library nor the package."""
    return set(re.findall(r"^ *(?:import|from) (\w+)", text, re.M)) - sys.stdlib_module_names - {"gpusched"}


@cache
def imported() -> set[str]:
    found = set()
    for path in (ROOT / "gpusched").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        # Parsing all modules takes seconds; most import nothing but the standard library and the package.
        if "import_module" not in text and not _from_elsewhere(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
                found |= {str(arg.value).partition(".")[0] for arg in node.args if isinstance(arg, ast.Constant)}
    # For the type checker alone.
    return found - {"typing_extensions"}


def test_the_decision_lists_every_dependency() -> None:
    assert {MODULES.get(name, name) for name in NEEDED} | TESTS_ONLY == LISTED


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_the_package_imports_every_dependency(name: str) -> None:
    assert MODULES.get(name, name.replace("-", "_")) in imported()


def test_the_package_imports_no_undeclared_dependency() -> None:
    known = {MODULES.get(name, name.replace("-", "_")) for name in NEEDED} | {"gpusched", "tomli"}
    assert imported() - known - sys.stdlib_module_names == set()
