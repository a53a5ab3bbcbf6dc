"""Removes files of ended runs, in a thread and in quiet moments.

Each removal waits for the file system's journal, up to milliseconds, and makes every fsync of a run or
of the job table that falls into the same moment wait longer: while runs come and go, files are left to lie.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from gpusched.engine.spool import remove

log = logging.getLogger(__name__)

_QUIET_S = 0.25
_MOST = 12000
"""Paths that are kept, for files that may be there, before they are removed in the busiest moment."""


class Janitor:
    """One thread, started when there is something to do. What a crash leaves is swept at the next start."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Sequence[str] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def remove(self, paths: Sequence[str]) -> None:
        """Remove these files once nothing has been asked for a moment."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="engine-janitor", daemon=True)
            self._thread.start()
        self._queue.put(paths)

    def close(self) -> None:
        """Finish what was asked for."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        waiting: list[str] = []
        while True:
            try:
                paths = self._queue.get(timeout=_QUIET_S if waiting else None)
            except Empty:
                self._sweep(waiting)
                continue
            if paths is None:
                self._sweep(waiting)
                return
            waiting.extend(paths)
            if len(waiting) >= _MOST:
                self._sweep(waiting)

    def _sweep(self, paths: list[str]) -> None:
        try:
            remove(paths)
        except OSError as error:
            log.warning("files of an ended run stay in the spool: %s", error)
        paths.clear()
