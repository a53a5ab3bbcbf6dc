"""The next ids, kept in a file beside the job table: what is left of them when the table is lost.

The table is the truth. The record is written after each commit that assigned ids, without fsync: it survives the end
of the daemon, and after a power cut the table, which is durable, is at least as far.
"""

from __future__ import annotations

import os

_NUMBER_DIGITS = 20


class IdRecord:
    """The file with the next job id and the next pipeline number; only the daemon writes it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self.job, self.pipeline = read_ids(path)

    def note(self, job: int, pipeline: int) -> None:
        """Record the next ids if they have grown. Raises: OSError."""
        if job <= self.job and pipeline <= self.pipeline:
            return
        job, pipeline = max(job, self.job), max(pipeline, self.pipeline)
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Always as long, so that each write replaces the one before.
        os.pwrite(self._fd, f"{job:0{_NUMBER_DIGITS}} {pipeline:0{_NUMBER_DIGITS}}\n".encode(), 0)
        self.job, self.pipeline = job, pipeline

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_ids(path: str) -> tuple[int, int]:
    """The next job id and pipeline number that a record has; (1, 1) where there is none, or it is damaged."""
    try:
        with open(path, encoding="ascii") as file:
            job, pipeline = map(int, file.read(100).split())
    except (OSError, ValueError):
        return 1, 1
    return max(job, 1), max(pipeline, 1)
