"""Following a job's output: through its wait, its runs and its retries, until it has ended."""

from __future__ import annotations

import os
import select
import sys

from gpusched.cli import output
from gpusched.cli.gwait import call_patiently, ending
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.client import Client

_LOOK_S = 0.2
_FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "DEADLINE"}


def follow_job(client: Client, job_id: str, command: str, err: bool = False, skip_to: int | None = None) -> int:
    """Print a job's output as it comes; returns the job's own code once it has ended.

    Args: skip_to: begin with the last this many lines of what is there already.
    """
    try:
        return _follow(client, job_id, command, err, skip_to)
    except KeyboardInterrupt:
        output.note(command, f"stopped following; job {job_id} goes on, end it with: gcancel {job_id}")
        return 130


def _follow(client: Client, job_id: str, command: str, err: bool, skip_to: int | None) -> int:
    run = 0
    reader: Reader | None = None
    while True:
        job = call_patiently(client, f"/v1/jobs/{job_id}")["job"]
        for attempt in job["runs"]:
            if attempt["run"] > run and attempt["start_at"] is not None:
                if reader is not None:
                    reader.drain()
                    reader.close()
                    output.note(command, f"run {run} ended; run {attempt['run']} begins")
                run = attempt["run"]
                reader = Reader(path_of(job, attempt, err))
                if skip_to is not None:
                    reader.skip_to_last(skip_to)
                    skip_to = None
        if job["state"] in _FINAL:
            break
        if reader is None:
            path = f"/v1/wait?ids={job_id}&timeout_s=60&state_not={job['state']}&run_not={job['run']}"
            call_patiently(client, path)
            if job["state"] != "PENDING":
                # Recorded as running, its process is a moment away.
                select.select([], [], [], 0.01)
            continue
        reader.drain()
        select.select([], [], [], _LOOK_S)
    if reader is not None:
        reader.drain()
        reader.close()
    if job["state"] != "COMPLETED":
        output.note(command, ending(job))
    return output.exit_code_of(job)


def path_of(job: dict[str, Any], run: dict[str, Any], err: bool) -> str:
    """The file a run writes to."""
    path = run["stderr_path"] if err and run["stderr_path"] else run["stdout_path"]
    return str(path or job["stdout_path"])


class Reader:
    """Copies a file that grows to stdout, raw: it is what the user's own program wrote."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: int | None = None

    def skip_to_last(self, lines: int) -> None:
        """Begin with the last this many lines."""
        if self._open():
            assert self._fd is not None
            os.lseek(self._fd, tail_offset(self._fd, lines), os.SEEK_SET)

    def drain(self) -> None:
        """Print what has been added."""
        if not self._open():
            return
        assert self._fd is not None
        if os.fstat(self._fd).st_size < os.lseek(self._fd, 0, os.SEEK_CUR):
            os.lseek(self._fd, 0, os.SEEK_SET)  # emptied under us
        while piece := os.read(self._fd, 1 << 16):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Let go of the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> bool:
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                return False
        return True


def tail_offset(fd: int, lines: int) -> int:
    """Offset of the last this many lines of an open file."""
    end = at = os.fstat(fd).st_size
    found = 0
    while at > 0:
        step = min(at, 1 << 16)
        at -= step
        piece = os.pread(fd, step, at)
        place = len(piece)
        while (place := piece.rfind(b"\n", 0, place)) != -1:
            # A newline at the very end closes the last line and begins none.
            found += at + place != end - 1
            if found == lines:
                return at + place + 1
        if lines == 0:
            return end
    return 0


def missing(path: str, job: dict[str, Any]) -> str:
    """Why there is no output file, in a sentence."""
    if job["state"] == "PENDING":
        return f"job {job['id']} has not started: {printable(job['reason_text'] or '')}"
    return f"there is no file {printable(path)}; it was moved or removed, or the job could not create it"
