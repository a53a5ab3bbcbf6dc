"""Follows a growing output file from its last lines on, through truncation, rotation and removal.

`gsub --log-max` rotates the file to `PATH.old1`, the one before it to `PATH.old2`.
"""

from __future__ import annotations

import os
import stat

from gpusched import quickjson
from gpusched.errors import NotReady
from gpusched.model.units import put_aside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    Sink = Callable[[bytes], None]
    Identity = tuple[int, int]

PIECE = 1 << 18
KNOWN_BYTES = 64
LONGEST_LINE = 1 << 20
"""Bytes read per line at most in the search for the last N lines, as a file may be one endless line."""


def find_lines(fd: int, lines: int) -> tuple[int, int]:
    """Offset of the last `lines` lines of an open file, and their actual number."""
    end = at = os.fstat(fd).st_size
    if lines == 0 or end == 0:
        return end, 0
    least = max(0, end - (lines + 1) * LONGEST_LINE)
    found = 0
    while at > least:
        step = min(at - least, 1 << 16)
        at -= step
        piece = os.pread(fd, step, at)
        place = len(piece)
        while (place := piece.rfind(b"\n", 0, place)) != -1:
            # A final newline ends the last line and starts no new one.
            found += at + place != end - 1
            if found == lines:
                return at + place + 1, lines
    # If the search was cut short, the first line is incomplete.
    return least, lines if least else found + 1


class Tail:
    """Available output of one run. Reads regular files only: reading a pipe would take its bytes from others."""

    def __init__(self, path: str, keep: int = 0) -> None:
        """Args: keep: maximum number of rotated files."""
        self.path = path
        self._keep = keep
        self._fd: int | None = None
        self._at = 0
        self._before = b""
        """The bytes before this place, by which it is known again."""
        self.was_found = False
        """Whether there was a file to read."""
        self.skipped = False
        """Whether files were put aside and removed before they could be read."""

    @classmethod
    def of_job(cls, job: Mapping[str, Any], path: str) -> Tail:
        """Args: job: as the API shows it with its runs."""
        return cls(path, job["log_keep"])

    def begin_whole(self) -> None:
        """Start with the oldest rotated file."""
        for number in range(self._keep, 0, -1):
            if self._open(number):
                return

    def begin_last(self, lines: int) -> None:
        """Start with the last `lines` lines of the available output."""
        for number in range(self._keep + 1):
            if not self._open(number):
                continue
            assert self._fd is not None
            self._at, found = find_lines(self._fd, lines)
            self._before = os.pread(self._fd, min(self._at, KNOWN_BYTES), max(0, self._at - KNOWN_BYTES))
            lines -= found
            if lines <= 0:
                return

    @property
    def cursor(self) -> str:
        """Its position, for `resume` in another process; empty before a file was found."""
        if self._fd is None:
            return ""
        return f"{os.fstat(self._fd).st_ino}.{self._at}.{self._before.hex()}"

    def resume(self, cursor: str) -> None:
        """Go on from a cursor, or with the oldest output if its file is gone. Raises: ValueError when it is none."""
        inode, at, before = cursor.split(".")
        wanted, place, known = int(inode), int(at), bytes.fromhex(before)
        if place < len(known) or len(known) > KNOWN_BYTES:
            raise ValueError("no cursor")
        for number in range(self._keep + 1):
            if self._open(number) and self._fd is not None and os.fstat(self._fd).st_ino == wanted:
                self._at, self._before = place, known
                return
        self.close()
        self.skipped = bool(self._keep)
        self.begin_whole()

    def copy(self, sink: Sink, most: int | None = None) -> int:
        """Copy new output, about `most` bytes at most; returns the number of bytes."""
        copied = 0
        while most is None or copied < most:
            if self._fd is None and not self._open(0):
                break
            assert self._fd is not None
            piece = self._read()
            if piece:
                copied += len(piece)
                sink(piece)
            elif not self._turn():
                break
        return copied

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _read(self) -> bytes:
        """Read on; after a truncation, a file that has grown past this offset again is reread from its start."""
        assert self._fd is not None
        known = self._before
        data = os.pread(self._fd, PIECE, self._at - len(known))
        if len(data) <= len(known):
            return b""
        if not data.startswith(known):
            self._at, self._before = 0, b""
            return self._read()
        self._at += len(data) - len(known)
        self._before = data[-KNOWN_BYTES:]
        return data[len(known) :]

    def _turn(self) -> bool:
        """At the end of the open file: return to the start if it was truncated, or move on to its successor."""
        assert self._fd is not None
        own = os.fstat(self._fd)
        if own.st_size < self._at:
            self._at, self._before = 0, b""
            return True
        current = _identity(self.path)
        mine = (own.st_dev, own.st_ino)
        if current is None or current == mine:
            # Without a name, it may still be written to.
            return False
        if own.st_size > self._at:
            return True
        return self._open_after(mine)

    def _open_after(self, mine: Identity) -> bool:
        """Open the successor of this file; False if there is none yet."""
        while True:
            place = self._place_of(mine)
            if place is None:
                # It has no name left: the oldest named file is next.
                self.skipped = self.skipped or bool(self._keep)
                return any(map(self._open, range(self._keep, -1, -1)))
            if not any(map(self._open, range(place - 1, -1, -1))):
                return False
            if self._place_of(mine) == place:
                return True
            # Rotated again meanwhile: the opened file may not be the next one.

    def _place_of(self, mine: Identity) -> int | None:
        places = range(1, self._keep + 1)
        return next((place for place in places if _identity(put_aside(self.path, place)) == mine), None)

    def _open(self, number: int) -> bool:
        path = put_aside(self.path, number)
        try:
            # Checked before opening, as opening a pipe would affect its other end.
            if not stat.S_ISREG(os.stat(path).st_mode):
                return False
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return False
        self.close()
        self._fd, self._at, self._before = fd, 0, b""
        self.was_found = True
        return True


class NodeTail:
    """As `Tail`, for output on another node, which the daemon reads there.

    Args: ask: sends a GET request; returns the bytes of its answer, and raises its errors. query: path of the request,
    with its first parameters.
    """

    def __init__(self, ask: Callable[[str], bytes | bytearray], query: str) -> None:
        self._ask = ask
        self.query = query
        self._begin = ""
        self.cursor = ""
        self.was_found = False
        self.skipped = False
        self.path: str | None = None
        """Where the output is, if not where it was wanted."""

    def begin_whole(self) -> None:
        """Start with the oldest rotated file."""

    def begin_last(self, lines: int) -> None:
        """Start with the last `lines` lines of the available output."""
        self._begin = f"&lines={lines}"

    def probe(self) -> None:
        """Find out whether the node answers. Raises: as `ask`."""
        self._ask(f"{self.query}&lines=0")

    def read(self, wait_s: float = 0.0) -> bytes:
        """New output, in pieces of limited size; waits for some, and returns none if there is none."""
        place = f"&cursor={self.cursor}" if self.cursor else self._begin
        line, _, data = bytes(self._ask(f"{self.query}{place}&wait_s={wait_s:g}")).partition(b"\n")
        facts = quickjson.loads(line)
        self.cursor = facts["cursor"]
        self.was_found = self.was_found or facts["is_found"]
        self.skipped = self.skipped or facts["is_skipped"]
        self.path = facts["path"]
        return data

    def copy(self, sink: Sink, most: int | None = None) -> int:
        """Copy new output, about `most` bytes at most; returns the number of bytes."""
        copied = 0
        while (most is None or copied < most) and (data := self.read()):
            copied += len(data)
            sink(data)
        return copied

    def close(self) -> None:
        """Nothing is open between two requests."""


def _identity(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def tail_of(
    ask: Callable[[str], bytes | bytearray], query: str | None, job: Mapping[str, Any], path: str
) -> Tail | NodeTail:
    """A file of a run, wherever it is. Args: query: as for `NodeTail`; None if the file is here. Raises: NotReady."""
    if query is not None:
        tail = NodeTail(ask, query)
        try:
            tail.probe()
            return tail
        except NotReady:
            # The node does not answer; with a shared file system, the same file is here.
            if not os.path.isfile(path):
                raise
    return Tail.of_job(job, path)
