"""gtop, which an add-on brings."""

from __future__ import annotations

from gpusched import entry_points
from gpusched.cli import output


def main() -> int:
    return output.run("gtop", lambda words: int(entry_points.need("gtop", "top", "gtop")(words)))
