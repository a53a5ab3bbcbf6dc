"""The traces that come with the package; `traces/README.md` says whose they are."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "traces"


def names() -> tuple[str, ...]:
    """File names of all of them, sorted."""
    return tuple(sorted(path.name for path in FOLDER.glob("*.gz")))
