"""Lines of the package by folder, beside the most that the table of docs/contributing.md allows.

    python -m tools.sizes             print both
    python -m tools.sizes --tighten   lower the table to what there is and half a percent

Lines of modules are counted, blank ones and comments too; not those of the two modules that installing makes.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "contributing.md"
MADE = frozenset({"sdk/async_client.py", "sdk/job_options.py"})
CORE, ALL = "core", "all together"
_ROOM = 0.005
_ROW = re.compile(r"^\| (`[\w/]+/`|core|all together|other modules) \| ([\d,]+) \|", re.M)


def sizes() -> dict[str, int]:
    """Lines by row of the table: folders of the core, its other modules, the core, add-ons, all together."""
    found: Counter[str] = Counter()
    package = ROOT / "gpusched"
    for path in package.rglob("*.py"):
        name = path.relative_to(package)
        if str(name) in MADE:
            continue
        parts = name.parts[:-1]
        is_add_on = parts[:1] == ("addons",)
        depth = 2 if is_add_on else 1
        row = f"`{'/'.join(parts[:depth])}/`" if len(parts) >= depth else "other modules"
        count = path.read_bytes().count(b"\n")
        found[row] += count
        found[ALL] += count
        if not is_add_on:
            found[CORE] += count
    return dict(sorted(found.items()))


def limits() -> dict[str, int]:
    """The most lines by row, from the table."""
    return {row: int(number.replace(",", "")) for row, number in _ROW.findall(PAGE.read_text(encoding="utf-8"))}


def main(words: list[str]) -> int:
    found, allowed = sizes(), limits()
    if words == ["--tighten"]:
        text = PAGE.read_text(encoding="utf-8")
        tight = {row: min(allowed.get(row, sys.maxsize), int(count * (1 + _ROOM))) for row, count in found.items()}
        # A total allows no more than its folders do.
        folders = {row: most for row, most in tight.items() if row not in (CORE, ALL)}
        tight[ALL] = min(tight[ALL], sum(folders.values()))
        tight[CORE] = min(tight[CORE], sum(most for row, most in folders.items() if "addons" not in row))
        for row, most in tight.items():
            text = re.sub(rf"^\| {re.escape(row)} \| [\d,]+ \|", f"| {row} | {most:,} |", text, flags=re.M)
        PAGE.write_text(text, encoding="utf-8")
        allowed = limits()
    for row in dict.fromkeys((*found, *allowed)):
        sys.stdout.write(f"{row:28} {found.get(row, 0):8,} of {allowed.get(row, 0):8,}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
