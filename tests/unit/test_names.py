"""One word has one meaning: no public class name stands for two things in the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import gpusched

ROOT = Path(gpusched.__file__).parent


def test_no_public_class_name_is_used_twice() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
