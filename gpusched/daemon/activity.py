"""What the processes of runs with idle GPUs do beside them, asked for only when the settings may end such runs.

Files are looked at on another thread: they are the users', on whatever file system, and may take for ever to answer.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping

from gpusched.lifecycle.idling import Activity

from .tick import Scheduler

_MOST_FILES = 1000
"""Of a checkpoint folder, so many are looked at."""


class ActivityReader:
    """Looks once in each window of [idle] window_s."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._next_at = 0.0
        self._is_looking = False

    def poll(self) -> None:
        """Look now if it is time and somebody's GPUs are idle."""
        loop = asyncio.get_running_loop()
        settings = self._scheduler.settings.idle
        if settings.then == "off" or self._is_looking or loop.time() < self._next_at:
            return
        names = self._scheduler.idle.suspects()
        if not names:
            return
        self._next_at = loop.time() + settings.window_s
        at = self._scheduler.now()
        cpu_s = self._scheduler.engine.cpu_seconds(names)
        saved = {name: self._scheduler.world.checkpoints.get(name) for name in names}
        files = {name: self._scheduler.files_of(name) for name in names}

        def done(looked: asyncio.Future[dict[str, tuple[object, ...] | None]]) -> None:
            self._is_looking = False
            if looked.cancelled():
                return
            if (error := looked.exception()) is not None:
                self._scheduler.failures.note("files of idle runs", error)
                return
            self._scheduler.failures.recovered("files of idle runs")
            found = looked.result()
            activities = {
                name: Activity(at, cpu_s.get(name), None if (mark := found[name]) is None else (*mark, saved[name]))
                for name in names
            }
            self._scheduler.idle.note(activities, self._scheduler.settings)

        loop.run_in_executor(None, _look, files).add_done_callback(done)
        self._is_looking = True


def _look(files: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[object, ...] | None]:
    return {name: marks_of(paths) for name, paths in files.items()}


def marks_of(paths: tuple[str, ...]) -> tuple[object, ...] | None:
    """Something that changes when one of these files, or one in one of these folders, does; None when one hides.

    A path that is not there is a mark too: it changes when somebody makes it.
    """
    marks: list[object] = []
    try:
        for path in paths:
            marks.append(_mark(path))
            if os.path.isdir(path):
                with os.scandir(path) as entries:
                    inside = sorted(entry.path for _, entry in zip(range(_MOST_FILES), entries, strict=False))
                marks.extend(_mark(one) for one in inside)
    except OSError:
        return None
    return tuple(marks)


def _mark(path: str) -> object:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    # What goes through a pipe or a terminal leaves no trace there: nobody knows. A socket is that of a foreground,
    # which its supervisor dates.
    is_dated = any(kind(found.st_mode) for kind in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISSOCK))
    if not is_dated and path != os.devnull:
        raise OSError(f"{path} shows nothing of what is written to it")
    return found.st_mtime_ns, found.st_size
