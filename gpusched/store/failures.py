"""What SQLite and the file system report, as errors that say what happened and what to do."""

from __future__ import annotations

import errno
import sqlite3

from gpusched.errors import BrokenInvariant, GpuschedError, NotReady, StoreBroken, StoreFull

# By message: the numeric codes reach Python only from 3.11 on, and the messages are part of SQLite's interface.
_FULL = ("database or disk is full",)
_CORRUPT = ("file is not a database", "malformed", "file is encrypted")
_READ_ONLY = ("readonly database", "unable to open database file")
_BUSY = ("database is locked", "database table is locked", "locking protocol")


def explain(error: Exception, path: str) -> GpuschedError:
    """The error to raise in place of one that came up while working on the database at `path`."""
    text = str(error)
    if isinstance(error, OSError):
        return _explain_os_error(error, path)
    if isinstance(error, (sqlite3.IntegrityError, OverflowError, ValueError, TypeError)):
        return BrokenInvariant(f"the job table refused a record: {text}", "report this with: gpusched doctor")
    if any(words in text for words in _FULL):
        return full(path)
    if any(words in text for words in _CORRUPT):
        return corrupt(path, text)
    if any(words in text for words in _READ_ONLY):
        return NotReady(f"the database {path} cannot be written ({text})", _hint_for_read_only(path))
    if any(words in text for words in _BUSY):
        return NotReady(
            f"another process holds the database {path} ({text})", f"see which one with: fuser {path}; then try again"
        )
    return NotReady(f"the database {path} cannot be used: {text}", "look at it with: gpusched doctor")


def _explain_os_error(error: OSError, path: str) -> GpuschedError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return full(path)
    reason = (error.strerror or str(error)).lower()
    return NotReady(f"the database {path} cannot be created: {reason}", _hint_for_read_only(path))


def _hint_for_read_only(path: str) -> str:
    return f"check the folder with: ls -ld {_folder(path)}; another place is chosen by GPUSCHED_HOME"


def full(path: str) -> StoreFull:
    """The disk takes no more."""
    return StoreFull(
        f"the disk that holds the database {path} is full; nothing was recorded",
        f"free space there, see: df -h {_folder(path)}",
    )


def corrupt(path: str, detail: str) -> StoreBroken:
    """The file is damaged, or no database of ours."""
    return StoreBroken(
        f"the database {path} is damaged ({detail})",
        f"look closer with: gpusched doctor; to start anew, move it away: mv {path} {path}.damaged",
    )


def foreign(path: str, tables: list[str]) -> StoreBroken:
    """The file is a database of something else."""
    return StoreBroken(
        f"{path} is a database, but not of gpusched: it holds {', '.join(tables[:3])}",
        f"move it away: mv {path} {path}.other; or choose another place by GPUSCHED_HOME",
    )


def newer(path: str, found: int, known: int, release: str) -> StoreBroken:
    """The file was written by a later release."""
    return StoreBroken(
        f"the database {path} has schema version {found}, but gpusched {release} knows only up to {known}",
        "it was written by a newer release: upgrade with: pip install --upgrade gpusched-lab",
    )


def _folder(path: str) -> str:
    return path.rpartition("/")[0] or "."
