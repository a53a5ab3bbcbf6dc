"""Whether the files that SQLite has open are still those at the database's path.

SQLite continues with a file that was deleted, replaced or truncated, and its commits are then lost with the process.
A check costs three stats. The file is opened here once and kept open: closing any descriptor of it would drop the
locks of this process's connections.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from contextlib import closing

from gpusched.errors import BrokenInvariant, GpuschedError, NotReady, StoreBroken, StoreFull

RESCUED = ".rescued"
"""Suffix for the copy of a deleted database, with which the next daemon continues."""
REPLACED = ".replaced"
"""Suffix for the copy of a database that was replaced by another file."""
RESTART = "gpusched daemon stop; gpusched daemon start (on a server: systemctl restart gpusched)"
SIDE_FILES = ("-wal", "-shm")
COPY_AGAIN_S = 60.0
"""Interval between attempts to copy: each fills what is left of a full disk."""
_HEADER_BYTES = 100
_MAGIC = b"SQLite format 3\0"
_CHANGES = slice(24, 28)
"""Change counter in the header. Source: section 1.3 of https://sqlite.org/fileformat2.html."""


class DatabaseFile:
    """The file of one open database, and its write-ahead log and index."""

    def __init__(self, path: str) -> None:
        """Raises: OSError."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        self._id = status.st_dev, status.st_ino
        self._side_ids: dict[str, tuple[int, int]] = {}
        self._copy: str | None = None
        """The copy that was made of it since it is gone from its path."""
        self._copy_error = ""
        self._copy_at = 0.0
        """Monotonic instant from which on a copy may be tried."""
        self.note_write()

    def note_write(self) -> None:
        """Note that this process has written to it, or may have."""
        status = os.fstat(self._fd)
        self._written = status.st_mtime_ns, status.st_size
        self._header = os.pread(self._fd, _HEADER_BYTES, 0)

    def problem(self, connection: sqlite3.Connection) -> StoreBroken | None:
        """What became of it; None while unchanged. Copies a file that is gone from its path.

        Args: connection: one that has it open.
        """
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return self._gone("deleted", RESCUED, connection)
        except OSError as error:
            return StoreBroken(
                f"the database {self.path} can no longer be reached ({(error.strerror or str(error)).lower()}); "
                "nothing is recorded",
                f"look at its folder: ls -ld {os.path.dirname(self.path)}",
            )
        if (status.st_dev, status.st_ino) != self._id:
            return self._gone("replaced by another file", REPLACED, connection)
        if self._copy is not None:
            remove_if_there(self._copy)
            self._copy = None
        if (status.st_mtime_ns, status.st_size) != self._written and not self._is_own(status.st_size, connection):
            done = "overwritten" if status.st_size else "emptied"
            return StoreBroken(
                f"the database {self.path} was {done} while the daemon runs; nothing is recorded",
                "put back the newest backup: gpusched daemon stop; gpusched restore FILE",
            )
        return None

    def lost_side_file(self) -> str | None:
        """The write-ahead log or its index, if no longer the file that SQLite has open."""
        for suffix in SIDE_FILES:
            try:
                status = os.stat(self.path + suffix)
            except OSError:
                if suffix in self._side_ids:
                    return self.path + suffix
                continue
            found = status.st_dev, status.st_ino
            if self._side_ids.setdefault(suffix, found) != found:
                return self.path + suffix
        return None

    def forget_side_files(self) -> None:
        """Reset after they were recreated."""
        self._side_ids.clear()

    def close(self) -> None:
        """Call it once the connections of the process are closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _gone(self, what: str, suffix: str, connection: sqlite3.Connection) -> StoreBroken:
        text = f"the database {self.path} was {what} while the daemon runs; nothing is recorded"
        if self._copy is None and time.monotonic() >= self._copy_at:
            try:
                self._copy = _copy(connection, self.path + suffix)
            except (OSError, sqlite3.Error) as error:
                self._copy_error, self._copy_at = str(error), time.monotonic() + COPY_AGAIN_S
        if self._copy is None:
            return StoreBroken(f"{text}, and no copy of it can be made ({self._copy_error})", "put the file back")
        if suffix == RESCUED:
            return StoreBroken(text, f"put the file back; or continue with the copy {self._copy}: {RESTART}")
        return StoreBroken(text, f"put the file back (a copy: {self._copy}); or continue with the new one: {RESTART}")

    def _is_own(self, size: int, connection: sqlite3.Connection) -> bool:
        """Whether SQLite can have written this on behalf of another program that has the database open."""
        header = os.pread(self._fd, _HEADER_BYTES, 0)
        if not header.startswith(_MAGIC) or len(header) < _HEADER_BYTES:
            return False
        before, after = (int.from_bytes(data[_CHANGES], "big") for data in (self._header, header))
        if after < before or (after == before and not self._can_have(size, connection)):
            return False
        self.note_write()
        return True

    def _can_have(self, size: int, connection: sqlite3.Connection) -> bool:
        """Whether the file may have this size after another process's checkpoint.

        All commits of one connection leave the same count. The file grows page by page to the committed size; free
        space at its end is cut off in one step.
        """
        try:
            pages, page_bytes = (
                int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size")
            )
        except sqlite3.Error:
            return False
        return size == pages * page_bytes or self._written[1] <= size < pages * page_bytes


def use_rescued(path: str) -> bool:
    """Restore the copy of a deleted database before it is opened; returns whether there was one.

    Raises: OSError.
    """
    rescued = path + RESCUED
    if not os.path.exists(rescued):
        return False
    if os.path.exists(path):
        # Put back, or restored from a backup, meanwhile.
        os.replace(rescued, path + REPLACED)
        return False
    for suffix in SIDE_FILES:
        remove_if_there(path + suffix)
    os.replace(rescued, path)
    return True


def remove_if_there(path: str) -> None:
    """Remove a file, existing or not. Raises: OSError for any other reason."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _copy(connection: sqlite3.Connection, target: str) -> str:
    """Copy all recorded data to a new file, completely or not at all. Raises: OSError, sqlite3.Error."""
    part = f"{target}.part"
    remove_if_there(part)
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        with closing(sqlite3.connect(part)) as copy:
            connection.backup(copy)
        os.replace(part, target)
    except BaseException:
        remove_if_there(part)
        raise
    return target


# By message: the numeric codes reach Python only from 3.11 on, and the messages are part of SQLite's interface.
_FULL = ("database or disk is full",)
_CORRUPT = ("file is not a database", "malformed", "file is encrypted")
_READ_ONLY = ("readonly database", "unable to open database file")
_BUSY = ("database is locked", "database table is locked", "locking protocol")


def explain(error: Exception, path: str) -> GpuschedError:
    """Translate an error that occurred while working on the database at `path`."""
    text = str(error)
    if isinstance(error, OSError):
        return _explain_os_error(error, path)
    if isinstance(error, (sqlite3.IntegrityError, OverflowError, ValueError, TypeError)):
        return BrokenInvariant(f"the job table refused a record: {text}", "report this with: gpusched doctor")
    if any(words in text for words in _FULL):
        return disk_full(path)
    if any(words in text for words in _CORRUPT):
        return damaged(path, text)
    if any(words in text for words in _READ_ONLY):
        return NotReady(f"the database {path} cannot be written ({text})", _hint_for_read_only(path))
    if any(words in text for words in _BUSY):
        return NotReady(
            f"another process holds the database {path} ({text})", f"see which one with: fuser {path}; then try again"
        )
    return NotReady(f"the database {path} cannot be used: {text}", "look at it with: gpusched doctor")


def _explain_os_error(error: OSError, path: str) -> GpuschedError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(path)
    reason = (error.strerror or str(error)).lower()
    return NotReady(f"the database {path} cannot be created: {reason}", _hint_for_read_only(path))


def _hint_for_read_only(path: str) -> str:
    return f"check the folder with: ls -ld {_folder(path)}; or choose another place with GPUSCHED_HOME"


def disk_full(path: str) -> StoreFull:
    return StoreFull(
        f"the disk that holds the database {path} is full; nothing was recorded",
        f"free space there, see: df -h {_folder(path)}",
    )


def damaged(path: str, detail: str) -> StoreBroken:
    """The file is damaged, or not a database of ours."""
    return StoreBroken(
        f"the database {path} is damaged ({detail})",
        "look closer with: gpusched doctor; put a backup back: gpusched restore FILE; or begin anew: "
        "gpusched restore --empty",
    )


def not_ours(path: str, tables: list[str]) -> StoreBroken:
    """The file is another program's database."""
    return StoreBroken(
        f"{path} is a database, but not gpusched's: it holds {', '.join(tables[:3])}",
        f"move it away: mv {path} {path}.other; or choose another place with GPUSCHED_HOME",
    )


def too_new(path: str, found: int, known: int, release: str) -> StoreBroken:
    """The file was written by a later release."""
    return StoreBroken(
        f"the database {path} has schema version {found}, but gpusched {release} knows only up to {known}",
        "it was written by a newer release: install that one again (in its clone: pip install .); or put a backup made "
        "by this one back: gpusched restore FILE",
    )


def _folder(path: str) -> str:
    return path.rpartition("/")[0] or "."
