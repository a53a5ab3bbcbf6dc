"""A job's output as lines of text, of a run that is over or of one that goes on."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpusched.errors import NotFound, Refused

if TYPE_CHECKING:
    from gpusched.sdk.client import Client
    from gpusched.sdk.values import JobDetails, Run

_LOOK_S = 0.2
_WAIT_S = 60


def read_logs(
    client: Client, job_id: str, *, follow: bool, run: int | None, err: bool, lines: int | None
) -> Iterator[str]:
    """See Client.logs. What is wrong is said at once, not when the first line is asked for."""
    job = client.job(job_id)
    if follow and run is None:
        return _followed(client, job.id, err, lines)
    runs = {attempt.run: attempt for attempt in job.runs}
    number = max(runs, default=0) if run is None else run
    if number not in runs:
        if run is not None:
            raise NotFound(f"job {job.id} has no run {run}", f"list its runs with: gshow {job.id}")
        raise Refused(f"job {job.id} has not started: {job.reason_text or job.state}", "wait for it with follow=True")
    path = _path(job, runs[number], err)
    try:
        reader = _Reader(path)
    except FileNotFoundError:
        raise Refused(f"there is no file {path}; it was moved, removed or never made", f"see: gshow {job.id}") from None
    return _all_of(reader, lines)


def _all_of(reader: _Reader, lines: int | None) -> Iterator[str]:
    with reader:
        if lines is None:
            yield from reader.lines()
            yield from reader.rest()
        else:
            yield from deque((*reader.lines(), *reader.rest()), maxlen=lines)


def _path(job: JobDetails, run: Run, err: bool) -> str:
    path = run.stderr_path if err and run.stderr_path else run.stdout_path
    return str(path or job.stdout_path)


def _followed(client: Client, job_id: str, err: bool, lines: int | None) -> Iterator[str]:
    number = 0
    reader: _Reader | None = None
    skipped = lines
    try:
        while True:
            job = client.job(job_id)
            for run in job.runs:
                if run.run <= number or run.start_at is None:
                    continue
                if reader is not None:
                    yield from reader.lines()
                    yield from reader.rest()
                    reader.close()
                    reader = None
                try:
                    reader = _Reader(_path(job, run, err))
                except FileNotFoundError:
                    if not job.is_final and run is job.runs[-1]:
                        break  # recorded as running, its file is a moment away
                number = run.run
                if reader is not None and skipped is not None:
                    yield from deque(reader.lines(), maxlen=skipped)
                    skipped = None
            if reader is not None:
                yield from reader.lines()
            if job.is_final:
                if reader is not None:
                    yield from reader.rest()
                return
            if reader is None and job.state == "PENDING":
                client.call(
                    "GET",
                    f"/v1/wait?ids={job.id}&timeout_s={_WAIT_S}&state_not={job.state.value}&run_not={job.run}",
                )
            else:
                time.sleep(_LOOK_S)
    finally:
        if reader is not None:
            reader.close()


class _Reader:
    """Whole lines of a file that may grow."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._begun = b""

    def lines(self) -> Iterator[str]:
        """The lines that have been completed since the last call."""
        if os.fstat(self._fd).st_size < os.lseek(self._fd, 0, os.SEEK_CUR):
            os.lseek(self._fd, 0, os.SEEK_SET)  # emptied under us
            self._begun = b""
        while piece := os.read(self._fd, 1 << 16):
            *whole, self._begun = (self._begun + piece).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace") + "\n"

    def rest(self) -> Iterator[str]:
        """A last line without its end."""
        if self._begun:
            line, self._begun = self._begun, b""
            yield line.decode(errors="replace")

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
