"""The lines of several jobs on one screen: each begins with the job that it is of."""

from __future__ import annotations

import os
import sys

from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LINE_BYTES = 1 << 16
"""A line that is longer is printed in parts."""
COLOURS = (36, 33, 32, 35, 34, 31)


class Printer:
    """Where a job's bytes go: to stdout as they are, which is what the user's own program wrote, or line by line."""

    def __init__(self, prefix: str = "", colour: int = 0) -> None:
        self._prefix = f"\x1b[{colour}m{prefix}\x1b[0m".encode() if prefix and colour else prefix.encode()
        self._rest = b""
        # On a terminal a bar that is drawn again and again would draw over the prefix.
        self._is_terminal = bool(prefix) and sys.stdout.isatty()

    def write(self, piece: bytes) -> None:
        """Print, but for a line that is not whole yet and needs a prefix."""
        if not self._prefix:
            sys.stdout.buffer.write(piece)
            return
        *lines, self._rest = (self._rest + piece).split(b"\n")
        sys.stdout.buffer.write(b"".join(map(self._line, lines)))
        if len(self._rest) > LINE_BYTES:
            self.finish()

    def finish(self) -> None:
        """Print what is left of a line."""
        if self._rest:
            sys.stdout.buffer.write(self._line(self._rest))
            self._rest = b""

    def _line(self, line: bytes) -> bytes:
        if self._is_terminal and b"\r" in line:
            line = line.rstrip(b"\r").rpartition(b"\r")[2]
        return self._prefix + line + b"\n"


def printer_for(job: dict[str, Any], place: int, has_prefix: bool) -> Printer:
    """A printer with the prefix that the job's lines need: `[42 train] `, in a colour of its own on a terminal."""
    if not has_prefix:
        return Printer()
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return Printer(f"[{job['id']} {printable(job['name'], 24)}] ", COLOURS[place % len(COLOURS)] if is_coloured else 0)
