"""The examples of docs/contributing.md, applied to a copy of the package."""

from __future__ import annotations

import re
from pathlib import Path

from support import copy_package

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "contributing.md"


def changes(title: str) -> dict[str, str]:
    """File -> change, as this section of the page shows them; for a new file its content."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^\d\. [^\n]*`(gpusched/[\w/.]+)`.*?```(?:diff|python)\n(.*?)```", section, re.S | re.M)
    return {path: "".join(line[4:] or "\n" for line in text.splitlines(keepends=True)) for path, text in blocks}


def changed_copy(folder: Path, title: str) -> Path:
    """A copy of the package in this folder with the changes of this section; returns the folder."""
    copy_package(folder)
    for path, change in changes(title).items():
        if (folder / path).exists():
            _apply(folder / path, [line for line in change.splitlines() if line.strip()])
        else:
            (folder / path).write_text(change, encoding="utf-8")
    return folder


def _apply(path: Path, lines: list[str]) -> None:
    """Put the lines that begin with + behind those before them; blocks are divided by lines of @@."""
    while "@@" in lines:
        _apply(path, lines[: lines.index("@@")])
        lines = lines[lines.index("@@") + 1 :]
    before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    after = "".join(f"{line[1:]}\n" for line in lines)
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path} has changed; mend docs/contributing.md"
    path.write_text(text.replace(before, after), encoding="utf-8")
