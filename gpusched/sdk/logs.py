"""A job's output as lines of text, of a run that is over or of one that goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gpusched.errors import NotFound, Refused, UsageError
from gpusched.tail import Tail

if TYPE_CHECKING:
    from gpusched.sdk.link import Link

_LOOK_S = 0.2
_WAIT_S = 60
LONGEST = 1 << 20
"""Bytes of a line; a longer one comes in parts."""


def read_logs(link: Link, job_id: str, *, follow: bool, run: int | None, err: bool, lines: int | None) -> Iterator[str]:
    """See Client.logs. What is wrong is said at once, not when the first line is asked for."""
    answer = _asked(link, job_id)
    if answer["arrays"]:
        array_id = answer["arrays"][0]["id"]
        raise UsageError(
            f"job {array_id} is an array; each of its tasks has an output of its own", f'name one: logs("{array_id}_0")'
        )
    job = answer["jobs"][0]
    if follow:
        return _followed(link, answer, err, lines, run)
    runs = {one["run"]: one for one in _started(job)}
    number = max(runs, default=0) if run is None else run
    if number not in runs:
        if run is not None:
            raise _no_run(job, run)
        why = job["reason_text"] or job["state"]
        if answer["done"]:
            raise Refused(f"job {job['id']} has no output: {why}", f"see: gshow {job['id']}")
        raise Refused(f"job {job['id']} has not started: {why}", "wait for it with follow=True")
    path = _path(runs[number], err)
    reader = _Reader(path, job["log_keep"])
    if not reader.begin(lines):
        raise Refused(f"there is no file {path}; it was moved, removed or never made", f"see: gshow {job['id']}")
    return _all_of(reader)


def _asked(link: Link, job_id: str, version: str = "", wait_s: float = 0) -> dict[str, Any]:
    query = f"ids={quote(job_id, safe='')}&since={quote(version)}&timeout_s={wait_s}"
    return link.call("GET", f"/v1/logs?{query}")


def _started(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in job["runs"] if one["start_at"] is not None]


def _no_run(job: dict[str, Any], run: int) -> NotFound:
    return NotFound(f"job {job['id']} has no run {run}", f"list its runs with: gshow {job['id']}")


def _path(run: dict[str, Any], err: bool) -> str:
    return str(run["stderr_path" if err else "stdout_path"])


def _all_of(reader: _Reader) -> Iterator[str]:
    with reader:
        yield from reader.lines()
        yield from reader.rest()


def _followed(link: Link, answer: dict[str, Any], err: bool, lines: int | None, only: int | None) -> Iterator[str]:
    job = answer["jobs"][0]
    # The last lines are those of the current run.
    number = 0 if lines is None or not job["runs"] else job["runs"][-1]["run"] - 1
    number = number if only is None else only - 1
    reader: _Reader | None = None
    try:
        while True:
            for run in _started(job):
                if run["run"] <= number or only not in (None, run["run"]):
                    continue
                if reader is not None:
                    yield from reader.lines()
                    yield from reader.rest()
                    reader.close()
                number = run["run"]
                reader = _Reader(_path(run, err), job["log_keep"])
                reader.begin(lines)
                lines = None
            is_over = answer["done"] or any(run["run"] == only and run["outcome"] for run in job["runs"])
            if reader is not None:
                # What a run wrote was in its file before its end was told.
                yield from reader.lines()
                if is_over:
                    yield from reader.rest()
            if is_over:
                if only is not None and number != only:
                    raise _no_run(job, only)
                return
            if reader is not None:
                time.sleep(_LOOK_S)
            answer = _asked(link, job["id"], answer["version"], _WAIT_S if reader is None else 0)
            job = answer["jobs"][0]
    finally:
        if reader is not None:
            reader.close()


class _Reader:
    """Whole lines of a file that may grow, be emptied, or be put aside."""

    def __init__(self, path: str, keep: int) -> None:
        self._tail = Tail(path, keep)
        self._pieces: list[bytes] = []
        self._begun = b""

    def begin(self, lines: int | None) -> bool:
        """Begin with the last this many lines, or with all of them; whether there is a file."""
        if lines is None:
            self._tail.begin_whole()
        else:
            self._tail.begin_last(lines)
        # Opens it if nothing has.
        self._tail.copy(self._pieces.append, 1)
        return self._tail.was_found

    def lines(self) -> Iterator[str]:
        """The lines that have been completed since the last call."""
        while True:
            while self._pieces:
                # Only what is new is searched: a line may be endless.
                head, newline, rest = self._pieces.pop(0).rpartition(b"\n")
                if newline:
                    for line in (self._begun + head).split(b"\n"):
                        yield line.decode(errors="replace") + "\n"
                    self._begun = rest
                else:
                    self._begun += rest
                if len(self._begun) > LONGEST:
                    place = _between_signs(self._begun)
                    part, self._begun = self._begun[:place], self._begun[place:]
                    yield part.decode(errors="replace")
            if not self._tail.copy(self._pieces.append, 1):
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


def _between_signs(data: bytes) -> int:
    """Where to cut near the end without cutting through a sign of UTF-8."""
    for place in range(len(data) - 1, len(data) - 5, -1):
        if data[place] & 0xC0 != 0x80:
            return place
    return len(data)
