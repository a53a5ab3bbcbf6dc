"""Cleans up after ended runs, on one thread and in quiet moments.

Removing a name waits up to milliseconds for the file system, and delays every name created and every fsync of a run
or of the job table in the same moment. So leftovers stay while runs come and go.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from logging import getLogger
from typing import Generic, TypeVar

log = getLogger(__name__)

_QUIET_S = 0.25
_LONGEST_S = 60.0
"""Clean up after this time even in the busiest moment, ..."""
_MOST = 20_000
"""... or when this many items are pending."""

_Thing = TypeVar("_Thing")


class Janitor(Generic[_Thing]):
    """One thread, started with the first item; it sleeps while there is nothing to clean up."""

    def __init__(self, clear: Callable[[_Thing], None], name: str) -> None:
        """Args: clear: called on the thread with each item added."""
        self._clear = clear
        self._name = name
        self._things: deque[_Thing] = deque()
        self._first_at = self._added_at = 0.0
        """Monotonic instants of the oldest thing and of the newest."""
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, thing: _Thing) -> None:
        """Queue an item for cleanup once no item has been added for a moment."""
        self._added_at = time.monotonic()
        if not self._things:
            self._first_at = self._added_at
        self._things.append(thing)
        if not self._news.is_set():
            self._news.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self, *, finish: bool) -> None:
        """End the thread. Args: finish: clean up all pending items first."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if not finish:
            self._things.clear()
        self._closing.set()
        self._news.set()
        if finish:
            thread.join()

    def _work(self) -> None:
        while not self._closing.is_set():
            self._news.wait()
            while self._things and not self._closing.is_set():
                due_at = min(self._added_at + _QUIET_S, self._first_at + _LONGEST_S)
                left_s = due_at - time.monotonic()
                if left_s > 0 and len(self._things) < _MOST:
                    self._closing.wait(left_s)
                else:
                    self._sweep()
            # Items added from here on set it again; those added just before are seen in the next round.
            self._news.clear()
            if self._things:
                self._news.set()
        self._sweep()

    def _sweep(self) -> None:
        """Clean up pending items; stop when more are added meanwhile, unless they have waited too long."""
        began = time.monotonic()
        is_late = began - self._first_at >= _LONGEST_S or len(self._things) >= _MOST or self._closing.is_set()
        for _ in range(len(self._things)):
            if self._added_at > began and not is_late:
                return
            thing = self._things.popleft()
            try:
                self._clear(thing)
            except Exception:
                log.exception("%s could not clear up %r", self._name, thing)
        self._first_at = began
