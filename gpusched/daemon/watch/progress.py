"""Reads the progress of runs on demand, never in the tick: for clients, and for the plan.

A run reports progress in the file that GPUSCHED_PROGRESS names, or by a bar at the end of its output. Both
files belong to the user, so they are opened in a way that has no side effects and follows no links, and only
their ends are read; in a separate thread, because an unavailable file server must not block the daemon.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gpusched.engine.spool import progress_path
from gpusched.model.job import Job, Run, run_id
from gpusched.model.progress import (
    Progress,
    Sample,
    ShownProgress,
    ToldProgress,
    left_s,
    parse_bar,
    parse_progress,
    with_sample,
)

FRESH_S = 2.0
"""Shortest time between two looks at a run."""
PATIENCE_S = 0.1
"""Time an answer waits for the files before it falls back to earlier results."""
MOST_RUNS = 500
"""Runs to look at for one answer, least recently seen first."""
TAIL_BYTES = 4096
Mark = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Said:
    """Content of one progress file of a run."""

    mark: Mark
    changed_at: float
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """State of one run."""

    looked_at: float
    """On the monotonic clock."""
    files: Mapping[str, _Said] = field(default_factory=dict)
    said: _Said | None = None
    """From the file that counts."""
    samples: tuple[Sample, ...] = ()
    began_anew: bool = False


class ProgressReader:
    """Progress of runs, refreshed on demand."""

    def __init__(
        self, spool: str, now: Callable[[], float], told: Callable[[Run], ToldProgress | None] = lambda run: None
    ) -> None:
        """Args: spool: the engine's folder; now: the daemon's clock, UTC epoch seconds; told: what a node says."""
        self._spool = spool
        self._told = told
        self._now = now
        self._seen: dict[str, _Seen] = {}
        self._is_reading = False
        self._began_at = 0.0
        self._done = asyncio.Event()
        self._found: deque[dict[str, _Seen]] = deque()

    async def refresh(self, jobs: Iterable[Job], runs: Mapping[str, Run]) -> None:
        """Look at the current runs of these jobs, unless that was done a moment ago.

        Args: runs: all open runs by handle; forgets all others.
        """
        self._take(runs)
        at = time.monotonic()
        if self._is_reading:
            # Another request is reading, or a file system hangs; in that case, do not ask it for more.
            await self._wait(self._began_at + PATIENCE_S - at, runs)
            return
        due: list[tuple[float, str, int]] = []
        for job in jobs:
            handle = run_id(job.id, job.run)
            seen = self._seen.get(handle)
            looked_at = float("-inf") if seen is None else seen.looked_at
            if at - looked_at >= FRESH_S and handle in runs and runs[handle].start_at is not None:
                due.append((looked_at, handle, job.uid))
        if not due:
            return
        due.sort()
        work = [
            (runs[handle], uid, self._seen.get(handle), self._told(runs[handle])) for _, handle, uid in due[:MOST_RUNS]
        ]
        now = self._now()
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        self._done, self._began_at = done, at

        def read() -> None:
            found = {}
            try:
                found = {run.id: look(self._spool, run, uid, seen, now, at, told) for run, uid, seen, told in work}
            finally:
                self._found.append(found)
                loop.call_soon_threadsafe(done.set)

        self._is_reading = True
        # Not in a pool, which would wait for the thread when the daemon exits.
        threading.Thread(target=read, name="progress", daemon=True).start()
        await self._wait(PATIENCE_S, runs)

    async def _wait(self, timeout_s: float, runs: Mapping[str, Run]) -> None:
        try:
            await asyncio.wait_for(self._done.wait(), max(0.0, timeout_s))
        except asyncio.TimeoutError:
            return
        self._take(runs)

    def _take(self, runs: Mapping[str, Run]) -> None:
        while self._found:
            self._is_reading = False
            self._seen.update(self._found.popleft())
            self._seen = {handle: seen for handle, seen in self._seen.items() if handle in runs}

    def of(self, handle: str) -> ShownProgress | None:
        """The progress of a run; None if it reports none or has not been read."""
        seen = self._seen.get(handle)
        if seen is None or seen.said is None or seen.said.progress is None:
            return None
        progress, now = seen.said.progress, self._now()
        if progress.left_s is None:
            seconds = left_s(seen.samples, seen.began_anew)
            eta_at = None if seconds is None else now + seconds
        else:
            # The bar's own estimate is better than ours: it counts from the start of the bar.
            eta_at = seen.said.changed_at + progress.left_s
            if eta_at < now - FRESH_S:
                eta_at = None
        return ShownProgress(progress.fraction, progress.text, eta_at)


def look(
    spool: str,
    run: Run,
    uid: int,
    seen: _Seen | None,
    now: float,
    looked_at: float,
    told: ToldProgress | None = None,
) -> _Seen:
    """Read the current progress of a run. An unreadable file yields none. Args: told: what its node says instead."""
    seen = seen or _Seen(looked_at)
    files: dict[str, _Said] = {}
    if told is not None:
        files[run.node] = _Said((0, 0, 0), told.changed_at, told.progress)
    for path, parse in ((progress_path(spool, run.id), parse_progress), (run.stdout_path, parse_bar)):
        if path is None or told is not None:
            continue
        before = seen.files.get(path)
        tail = read_tail(path, uid, None if before is None else before.mark)
        if tail is None:
            continue
        if tail.content is None and before is not None:
            files[path] = before
        else:
            text = (tail.content or b"").decode("utf-8", "replace")
            files[path] = _Said(tail.mark, tail.changed_at, parse(text))
        if files[path].progress is not None:
            break
    said = next((said for said in files.values() if said.progress is not None), None)
    if said is None or said.progress is None:
        return _Seen(looked_at, files, None, seen.samples, seen.began_anew)
    least_s = seen.samples[-1].elapsed_s if seen.samples else 0.0
    start_at = now if run.start_at is None else run.start_at
    sample = Sample(max(least_s, now - start_at - run.suspended_s), said.progress.fraction)
    fell = bool(seen.samples) and sample.fraction < seen.samples[-1].fraction
    return _Seen(looked_at, files, said, with_sample(seen.samples, sample), seen.began_anew or fell)


@dataclass(frozen=True, slots=True)
class FileTail:
    """The end of a file."""

    mark: Mark
    """Changes with the content."""
    changed_at: float
    content: bytes | None
    """None if unchanged."""


def read_tail(path: str, owner: int, known: Mark | None) -> FileTail | None:
    """The end of a regular file of this owner; None for anything else, including links."""
    try:
        # Open with O_PATH first: opening a device or a pipe for reading can have side effects.
        handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            return None
        mark = (found.st_ino, found.st_size, found.st_mtime_ns)
        if mark == known:
            return FileTail(mark, found.st_mtime, None)
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            content = os.pread(fd, TAIL_BYTES, max(0, found.st_size - TAIL_BYTES))
        finally:
            os.close(fd)
    except OSError:
        return None
    finally:
        os.close(handle)
    return FileTail(mark, found.st_mtime, content)
