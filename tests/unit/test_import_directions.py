"""Imports go down only, and what decides is pure: a walk over the syntax of the whole package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpusched

ROOT = Path(gpusched.__file__).parent

ALLOWED: dict[str, frozenset[str]] = {
    part: frozenset(others.split())
    for part, others in {
        "errors": "",
        "model": "errors",
        "ports": "scheduler lifecycle predict model errors",
        "paths": "errors",
        "private": "errors",
        "quickjson": "",
        "tail": "model",
        "instants": "model",
        "client": "paths private quickjson model errors",
        "predict": "model errors",
        "lifecycle": "model errors",
        "scheduler": "lifecycle model errors",
        "plugins": "scheduler model errors",
        "store": "ports model errors",
        "gpu": "ports model errors",
        "engine": "ports model errors",
        "config": "scheduler model errors",
        "notify": "paths config lifecycle model errors",
        "access": "scheduler model errors",
        "daemon": "api access client paths config store gpu engine notify scheduler lifecycle plugins predict private "
        "ports model errors",
        "api": "access scheduler lifecycle predict ports model errors",
        "snapshots": "paths model errors",
        "simulate": "daemon engine gpu config paths quickjson scheduler lifecycle predict store ports model errors",
        "sdk": "client snapshots paths private quickjson tail instants model errors",
        "cli": "daemon access client paths config store gpu engine scheduler lifecycle ports notify private "
        "quickjson tail instants snapshots model errors simulate",
    }.items()
}
"""What each part may import of the others. Parts that are not listed (the builders for tests) stand
above everything and are imported by none of these; benchmarks and tools are outside the package."""

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


def part_of(path: Path) -> str:
    """First name below the package: `scheduler` for gpusched/scheduler/cycle.py, `errors` for errors.py."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that is imported, also inside functions."""
    package = ("gpusched", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield node.lineno, module
            if module == "gpusched" or node.module is None:
                for alias in node.names:
                    yield node.lineno, f"{module}.{alias.name}"


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_down_only(path: Path) -> None:
    part = part_of(path)
    if part not in ALLOWED:
        return
    allowed = ALLOWED[part] | {part}
    wrong = [
        f"line {line}: {part} imports {module}"
        for line, module in imports_of(ast.parse(path.read_bytes()), path)
        if module.startswith("gpusched.") and module.split(".")[1] not in allowed
        # The version and its like are part of the package itself.
        if not module.split(".")[1].startswith("__")
    ]
    assert not wrong


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) == "daemon"], ids=name)
def test_only_the_composition_root_of_the_daemon_imports_the_api(path: Path) -> None:
    modules = {module for _, module in imports_of(ast.parse(path.read_bytes()), path)}
    assert path == ROOT / "daemon" / "main.py" or not any(one.startswith("gpusched.api") for one in modules)


def test_every_part_of_the_package_is_known_here() -> None:
    above = {"__init__", "testing"}
    assert {part_of(path) for path in FILES} <= set(ALLOWED) | above


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


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) in PURE], ids=name)
def test_what_decides_is_pure(path: Path) -> None:
    assert list(impurities(ast.parse(path.read_bytes()), path)) == []


@pytest.mark.parametrize("path", FILES, ids=name)
def test_only_one_module_talks_to_the_driver(path: Path) -> None:
    modules = {module.split(".")[0] for _, module in imports_of(ast.parse(path.read_bytes()), path)}
    assert "pynvml" not in modules or path == ROOT / "gpu" / "nvml.py"


LIGHT = ("errors.py", "paths.py", "client.py", "model/units.py", "model/states.py")

HEAVY_MODULES = frozenset(
    {
        *("aiohttp", "asyncio", "rich", "typer", "click", "sqlite3", "sqlite_utils", "psutil", "pynvml"),
        *("filelock", "tomllib", "tomli", "logging", "multiprocessing", "concurrent", "http"),
    }
)


@pytest.mark.parametrize("path", [path for path in FILES if name(path) in LIGHT], ids=name)
def test_what_every_command_imports_at_the_prompt_is_light(path: Path) -> None:
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
def test_the_walk_finds(source: str) -> None:
    assert list(impurities(ast.parse(source), ROOT / "scheduler" / "x.py"))


def test_the_walk_resolves_relative_imports() -> None:
    tree = ast.parse("from ..store import sqlite\nfrom . import cells\nfrom .. import gpu\nfrom gpusched import api")
    modules = {module for _, module in imports_of(tree, ROOT / "scheduler" / "x.py")}
    assert {"gpusched.store", "gpusched.scheduler.cells", "gpusched.gpu", "gpusched.api"} <= modules


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in Path(__file__).parent.parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", [path for path in FILES if name(path) != "model/value.py"], ids=name)
def test_values_are_copied_by_the_function_that_can(path: Path) -> None:
    """`dataclasses.replace` passes the type checker for a struct, and fails when it is called."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses":
            assert "replace" not in {alias.name for alias in node.names}, "import it from gpusched.model.value"
