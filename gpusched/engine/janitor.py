"""Removes files of ended runs in a thread: each removal waits for the file system's journal, up to milliseconds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from gpusched.engine.spool import remove

log = logging.getLogger(__name__)


class Janitor:
    """One thread, started when there is something to do. What a crash leaves is swept at the next start."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Sequence[str] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def remove(self, paths: Sequence[str]) -> None:
        """Remove these files soon."""
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
        while (paths := self._queue.get()) is not None:
            try:
                remove(paths)
            except OSError as error:
                log.warning("files of an ended run stay in the spool: %s", error)
