"""No class in these folders grows beyond what a reader keeps in mind, unless its docstring says why."""

from __future__ import annotations

import ast
from pathlib import Path

import gpusched

ROOT = Path(gpusched.__file__).parent
FOLDERS = ("daemon", "daemon/launch", "daemon/verbs", "daemon/watch", "engine", "engine/linux", "engine/supervisor")
"""Without what is below them."""
METHODS, ATTRIBUTES = 30, 20


def sizes(node: ast.ClassDef) -> tuple[int, int]:
    """Methods of a class, and attributes that it has of its own."""
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    named = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and isinstance(one.value, ast.Name):
            named |= {one.attr} if one.value.id == "self" else set()
    return len(methods), len(named)


def test_large_classes_say_why_they_are_large() -> None:
    silent = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if not isinstance(node, ast.ClassDef):
                    continue
                methods, attributes = sizes(node)
                is_large = methods > METHODS or attributes > ATTRIBUTES
                if is_large and "one class" not in (ast.get_docstring(node) or "").lower():
                    silent.append((path.relative_to(ROOT).as_posix(), node.name, methods, attributes))
    assert silent == []
