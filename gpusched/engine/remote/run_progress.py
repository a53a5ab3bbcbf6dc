"""Progress of the runs of a node, as they report it in its spool, for the reports to the head."""

from __future__ import annotations

import os
import stat

from gpusched.model.progress import ToldProgress, parse_progress

MOST_RUNS = 200
"""In one report, those that have reported last."""
_TAIL_BYTES = 4096
_ENDING = ".progress"
_Mark = tuple[int, int, int]


class SpoolProgress:
    """Reads what has changed. Bars in output files may be on a file server that hangs: they are not looked at."""

    def __init__(self, spool: str) -> None:
        self._spool = spool
        self._known: dict[str, tuple[_Mark, ToldProgress | None]] = {}

    def read(self) -> dict[str, ToldProgress]:
        """By run, those that report any. Raises: OSError."""
        found = {}
        for name in os.listdir(self._spool):
            if name.endswith(_ENDING):
                run = name.removesuffix(_ENDING)
                known = _read(f"{self._spool}/{name}", self._known.get(run))
                if known is not None:
                    found[run] = known
        self._known = found
        told = [(run, one) for run, (_, one) in found.items() if one is not None]
        told.sort(key=lambda entry: (-entry[1].changed_at, entry[0]))
        return dict(told[:MOST_RUNS])


def _read(path: str, known: tuple[_Mark, ToldProgress | None] | None) -> tuple[_Mark, ToldProgress | None] | None:
    """The progress in a file; `known` if it has not changed, None for what is not a file."""
    try:
        # Its owner may have put a pipe there.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        mark = status.st_ino, status.st_size, status.st_mtime_ns
        if not stat.S_ISREG(status.st_mode):
            return None
        if known is not None and known[0] == mark:
            return known
        content = os.pread(fd, _TAIL_BYTES, max(0, status.st_size - _TAIL_BYTES))
    except OSError:
        return None
    finally:
        os.close(fd)
    progress = parse_progress(content.decode("utf-8", "replace"))
    return mark, None if progress is None else ToldProgress(status.st_mtime, progress)
