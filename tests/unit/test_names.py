"""One word has one meaning: no public class name stands for two things in the package."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from pathlib import Path

import gpusched

ROOT = Path(gpusched.__file__).parent


@functools.cache
def classes() -> defaultdict[str, list[str]]:
    """Public class -> the modules that define it."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for name in re.findall(r"^class ([A-Za-z]\w*)[(:]", path.read_text(encoding="utf-8"), re.M):
            found[name].append(str(path.relative_to(ROOT)))
    return found


def test_no_public_class_name_is_used_twice() -> None:
    assert {name: paths for name, paths in classes().items() if len(paths) > 1} == {}


def test_the_glossary_names_classes_that_exist() -> None:
    page = (ROOT.parent / "docs" / "glossary.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| [^|]+ \| .+ \| ([^|]+) \|$", page, re.M)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 30
    assert sorted(named - set(classes())) == []
