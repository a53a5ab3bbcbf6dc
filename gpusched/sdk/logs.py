"""A job's output as lines of text, of a run that is over or of one that goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpusched.errors import NotFound, Refused
from gpusched.tail import Tail

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
    reader = _Reader(path, _kept(job))
    if not reader.begin(lines):
        raise Refused(f"there is no file {path}; it was moved, removed or never made", f"see: gshow {job.id}")
    return _all_of(reader)


def _all_of(reader: _Reader) -> Iterator[str]:
    with reader:
        yield from reader.lines()
        yield from reader.rest()


def _path(job: JobDetails, run: Run, err: bool) -> str:
    path = run.stderr_path if err and run.stderr_path else run.stdout_path
    return str(path or job.stdout_path)


def _kept(job: JobDetails) -> int:
    """How many files put aside its output may consist of."""
    launch = job.spec.get("launch", {})
    return launch.get("log_keep", 0) if launch.get("log_max_mib") else 0


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
                number = run.run
                reader = _Reader(_path(job, run, err), _kept(job))
                reader.begin(skipped)
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
    """Whole lines of a file that may grow, be emptied, or be put aside."""

    def __init__(self, path: str, keep: int) -> None:
        self._tail = Tail(path, keep)
        self._begun = b""

    def begin(self, lines: int | None) -> bool:
        """Begin with the last this many lines, or with all of them; whether there is a file."""
        if lines is None:
            self._tail.begin_whole()
        else:
            self._tail.begin_last(lines)
        # Opens it if nothing has.
        self._tail.copy(self._add, 1)
        return self._tail.was_found

    def _add(self, piece: bytes) -> None:
        self._begun += piece

    def lines(self) -> Iterator[str]:
        """The lines that have been completed since the last call."""
        while True:
            *whole, self._begun = self._begun.split(b"\n")
            for line in whole:
                yield line.decode(errors="replace") + "\n"
            if not self._tail.copy(self._add, 1):
                return

    def rest(self) -> Iterator[str]:
        """A last line without its end."""
        if self._begun:
            line, self._begun = self._begun, b""
            yield line.decode(errors="replace")

    def close(self) -> None:
        """Let go of the file."""
        self._tail.close()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
