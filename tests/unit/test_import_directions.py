"""Imports go down only, and what decides is pure: a walk over the syntax of the whole package."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import gpusched

ROOT = Path(gpusched.__file__).parent

PAGE = ROOT.parent / "docs" / "explanation" / "architecture.md"


def house() -> dict[str, frozenset[str]]:
    """Folder or module -> what it may import, from the table of the architecture page, which is the rule."""
    section = PAGE.read_text(encoding="utf-8").partition("## The house")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+?)/?` \| [^|]+ \| ([^|]+) \|$", section, re.M)
    return {part: frozenset(re.findall(r"`([\w/]+?)/?`", others)) for part, others in rows}


ALLOWED = house()

PURE = ("model", "lifecycle", "scheduler", "predict")

IMPURE_MODULES = frozenset(
    {
        *("time", "os", "io", "sys", "subprocess", "socket", "select", "selectors", "signal_handlers"),
        *("threading", "multiprocessing", "asyncio", "concurrent", "pathlib", "shutil", "tempfile", "glob"),
        *("fcntl", "resource", "pwd", "grp", "platform", "random", "secrets", "uuid", "logging", "ctypes"),
        *("sqlite3", "sqlite_utils", "pynvml", "psutil", "filelock", "aiohttp", "importlib"),
    }
)

IMPURE_CALLS = frozenset({"open", "input", "print", "exec", "eval", "compile", "__import__", "hash"})
"""`hash` of a text differs between processes, which no decision may depend on."""

IMPURE_METHODS = frozenset({"now", "today", "utcnow"})
"""Of datetime and date: the clock by another name."""

FILES = sorted(ROOT.rglob("*.py"))

IMPORTS = (ast.Import, ast.ImportFrom)


def part_of(path: Path) -> str:
    """The row of the table that a module belongs to: its sub-folder, its folder or, at the top, itself."""
    folder = path.relative_to(ROOT).parent.parts[:2]
    return "/".join(folder) if folder else path.stem


def part_named(module: str) -> str | None:
    """The row that an imported name of the package belongs to; None for the package itself and its version."""
    path = ROOT.joinpath(*module.split(".")[1:])
    while path != ROOT:
        if (path / "__init__.py").exists():
            return part_of(path / "__init__.py")
        if path.with_suffix(".py").exists():
            return part_of(path.with_suffix(".py"))
        path = path.parent
    return None


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements, also inside others; not their expressions, which are most of a tree and import nothing."""
    ahead = [tree]
    while ahead:
        node = ahead.pop()
        yield node
        for part in ("handlers", "cases", "finalbody", "orelse", "body"):
            ahead.extend(reversed(getattr(node, part, ())))


def for_types_alone(tree: ast.AST) -> set[ast.AST]:
    """What stands below `if TYPE_CHECKING`."""
    blocks = (node for node in statements(tree) if isinstance(node, ast.If) and _is_for_types(node.test))
    return {inner for block in blocks for one in block.body for inner in statements(one)}


def _is_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def imports_of(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that is imported, also inside functions.

    The API is called by the daemon and asks it in turn: it may name the daemon's types, and import nothing of it.
    """
    package = ("gpusched", *path.relative_to(ROOT).parent.parts)
    left_out = for_types_alone(tree) if package[1:2] == ("api",) else ()
    for node in statements(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield node.lineno, module
            if module.split(".")[0] == "gpusched":
                for alias in node.names:
                    yield node.lineno, f"{module}.{alias.name}"


class Facts(NamedTuple):
    """What the tests look at in a module, from one walk over its syntax: that takes longer than all of them."""

    imported: tuple[tuple[int, str], ...]
    """Line and absolute name of everything that it imports, see `imports_of`."""
    named: tuple[str, ...]
    """Names in all import statements, also in those below `if TYPE_CHECKING`."""
    running: frozenset[str]
    """Names of what it imports when it runs: without what stands below `if TYPE_CHECKING`."""
    impure: tuple[str, ...]
    """`impurities`, of a module that is to have none."""


@functools.cache
def facts_of(path: Path) -> Facts:
    tree = ast.parse(path.read_bytes())
    is_pure = part_of(path).partition("/")[0] in PURE
    named, impure = tuple(_imported_names(tree)), tuple(impurities(tree, path) if is_pure else ())
    imported, for_types = tuple(imports_of(tree, path)), for_types_alone(tree)
    kept = [node for node in statements(tree) if isinstance(node, IMPORTS) and node not in for_types]
    running = frozenset(name for _, name in imports_of(ast.Module(body=kept, type_ignores=[]), path))
    return Facts(imported, named, running, impure)


def imported_by(path: Path) -> tuple[tuple[int, str], ...]:
    return facts_of(path).imported


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parts_imported(path: Path) -> dict[str, int]:
    """Other rows that a module imports from -> the first line that does."""
    found: dict[str, int] = {}
    for line, module in imported_by(path):
        part = part_named(module) if module.startswith("gpusched.") else None
        if part is not None and part != part_of(path):
            found.setdefault(part, line)
    return found


# Stand above everything and are imported by nothing: the package's own name and what tests build with.
ABOVE = frozenset({"__init__", "testing"})


# One test looks at all modules, rather than one at each: a thousand tests cost more than what they look at.


def test_a_module_imports_what_its_row_names() -> None:
    wrong = {
        f"{name(path)}, line {line}: {part}"
        for path in FILES
        if part_of(path) not in ABOVE
        for part, line in parts_imported(path).items()
        if part not in ALLOWED[part_of(path)]
    }
    assert wrong == set()


def test_a_row_names_no_import_that_is_gone() -> None:
    used: dict[str, set[str]] = {part: set() for part in (*ALLOWED, *ABOVE)}
    for path in FILES:
        used[part_of(path)] |= parts_imported(path).keys()
    assert {part: found for part in ALLOWED if (found := ALLOWED[part] - used[part])} == {}


def test_the_core_imports_no_add_on() -> None:
    """What it asks of them is found by `entry_points`; and the table allows no exception, not even for types."""
    core = {part: others for part, others in ALLOWED.items() if not part.startswith("addons")}
    assert {part: others for part, others in core.items() if any(other.startswith("addons") for other in others)} == {}
    names = {name(path): facts_of(path).named for path in FILES if part_of(path) in core}
    assert {path: found for path, found in names.items() if any("addons" in one for one in found)} == {}


def _imported_names(tree: ast.AST) -> list[str]:
    """Of all import statements, also of those below `if TYPE_CHECKING`."""
    found: list[str] = []
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_only_the_composition_root_of_the_daemon_imports_the_api() -> None:
    daemon = [path for path in FILES if part_of(path).startswith("daemon")]
    importing = {name(path) for path in daemon if any(one.startswith("api") for one in parts_imported(path))}
    assert importing == {"daemon/main.py"}


def test_every_folder_has_a_row() -> None:
    assert {part_of(path) for path in FILES} - ABOVE == set(ALLOWED)


def test_the_picture_shows_every_part_and_imports_point_down() -> None:
    picture = re.search(r"^## The house\n.*?```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert picture
    tops = {part for part in ALLOWED if "/" not in part}
    floors = [tops & set(re.findall(r"\w+", line.partition("|")[0])) for line in picture[1].splitlines()]
    floor_of = {part: number for number, parts in enumerate(floors) for part in parts}
    assert set(floor_of) == tops
    assert sum(map(len, floors)) == len(tops), "a part stands on one floor"
    for part, others in ALLOWED.items():
        for other in others:
            above, below = part.partition("/")[0], other.partition("/")[0]
            assert above == below or floor_of[above] < floor_of[below], f"{part} imports {other}, which is not below it"


def impurities(tree: ast.AST, path: Path) -> Iterator[str]:
    """Everything in this module that could make equal inputs give different answers."""
    for line, module in imports_of(tree, path):
        if module.split(".")[0] in IMPURE_MODULES:
            yield f"line {line}: imports {module}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            yield f"line {node.lineno}: calls {node.func.id}"
        if isinstance(node.func, ast.Attribute) and node.func.attr in IMPURE_METHODS:
            yield f"line {node.lineno}: calls .{node.func.attr}()"


def test_scheduling_packages_are_pure() -> None:
    pure = [path for path in FILES if part_of(path).partition("/")[0] in PURE]
    assert {name(path): found for path in pure if (found := facts_of(path).impure)} == {}


def test_only_one_module_talks_to_the_driver() -> None:
    talking = {name(path) for path in FILES if any(one.split(".")[0] == "pynvml" for _, one in imported_by(path))}
    assert talking <= {"gpu/nvml.py"}


LIGHT = ("errors.py", "paths.py", "client.py", "model/units.py", "model/states.py")

HEAVY_MODULES = frozenset(
    {
        *("aiohttp", "asyncio", "rich", "typer", "click", "sqlite3", "sqlite_utils", "psutil", "pynvml"),
        *("filelock", "tomllib", "tomli", "logging", "multiprocessing", "concurrent", "http"),
    }
)


@pytest.mark.parametrize("path", [path for path in FILES if name(path) in LIGHT], ids=name)
def test_modules_imported_by_every_command_are_light(path: Path) -> None:
    tree = ast.parse(path.read_bytes())
    # What a function imports is paid for by those who call it.
    tree.body = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert not {module.split(".")[0] for _, module in imports_of(tree, path)} & HEAVY_MODULES


IMPURE_SOURCES = [
    "import time",
    "from os import environ",
    "import os.path",
    "def f():\n    from random import random",
    "from datetime import datetime\ndatetime.now()",
    "import datetime\ndatetime.date.today()",
    "open('x')",
    "hash('x')",
]


@pytest.mark.parametrize("source", IMPURE_SOURCES)
def test_the_walk_finds_imports(source: str) -> None:
    assert list(impurities(ast.parse(source), ROOT / "scheduler" / "x.py"))


def test_the_walk_resolves_relative_imports() -> None:
    tree = ast.parse("from ..store import sqlite\nfrom . import cells\nfrom .. import gpu\nfrom gpusched import api")
    modules = {module for _, module in imports_of(tree, ROOT / "scheduler" / "x.py")}
    assert {"gpusched.store", "gpusched.scheduler.cells", "gpusched.gpu", "gpusched.api"} <= modules


def test_test_file_names_are_unique() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in Path(__file__).parent.parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_values_are_copied_by_the_right_function() -> None:
    """`dataclasses.replace` passes the type checker for a struct, and fails when it is called."""
    importing = {name(path) for path in FILES if "dataclasses.replace" in facts_of(path).named}
    assert importing == {"model/value.py"}, "import it from gpusched.model.value"
