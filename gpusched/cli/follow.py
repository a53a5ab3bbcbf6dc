"""Following the output of jobs: while they wait, run and are retried, until all have ended."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import deque

from gpusched.cli import output
from gpusched.cli.gwait import call_patiently, ending, patiently
from gpusched.cli.query import quote
from gpusched.client import DaemonConnection
from gpusched.errors import GpuschedError, NotFound, Refused
from gpusched.model.state_names import FINAL
from gpusched.model.units import printable
from gpusched.tail import NodeTail, Tail, tail_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.tail import Sink


ASK_S = 0.05
ASK_S_PER_JOB = 0.0005
"""Interval between requests to the daemon, which answers on a change."""


class LogPoller:
    """Polls the daemon in a thread, so that output is printed meanwhile, also while the daemon is down."""

    def __init__(self, client: DaemonConnection, ids: list[str]) -> None:
        self._client = client
        self._ids = ",".join(ids)
        self._answers: deque[dict[str, Any] | Exception] = deque()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._rest = threading.Event()
        threading.Thread(target=self._ask, daemon=True).start()

    def fileno(self) -> int:
        """A descriptor that is readable when an answer has arrived."""
        return self._reader

    def take(self) -> list[dict[str, Any]]:
        """Answers since the last call. Raises: the error that the daemon's answer failed with."""
        try:
            os.read(self._reader, 4096)
        except BlockingIOError:
            return []
        found = []
        while self._answers:
            answer = self._answers.popleft()
            if isinstance(answer, Exception):
                raise answer
            found.append(answer)
        return found

    def _ask(self) -> None:
        version = ""
        while True:
            path = f"/v1/logs?ids={quote(self._ids)}&since={version}&timeout_s=60"
            try:
                answer = call_patiently(self._client, path)
            except (GpuschedError, OSError) as error:
                self._tell(error)
                return
            self._tell(answer)
            if answer["done"]:
                return
            version = answer["version"]
            if answer["more"]:
                continue
            self._rest.wait(ASK_S + ASK_S_PER_JOB * len(answer["jobs"]))

    def _tell(self, answer: dict[str, Any] | Exception) -> None:
        self._answers.append(answer)
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            pass  # wake-ups are already pending


LINE_BYTES = 1 << 16
"""Longer lines are printed in parts."""
COLOURS = (36, 33, 32, 35, 34, 31)


class PrefixedOutput:
    """Sink of a job's bytes: stdout unchanged, as the user's program wrote them, or line by line with a prefix."""

    def __init__(self, prefix: str = "", colour: int = 0) -> None:
        self._prefix = f"\x1b[{colour}m{prefix}\x1b[0m".encode() if prefix and colour else prefix.encode()
        self._rest = b""
        # On a terminal a redrawn progress bar would overwrite the prefix.
        self._is_terminal = bool(prefix) and sys.stdout.isatty()

    def write(self, piece: bytes) -> None:
        """Print; an incomplete line that needs a prefix is held back."""
        if not self._prefix:
            sys.stdout.buffer.write(piece)
            return
        *lines, self._rest = (self._rest + piece).split(b"\n")
        sys.stdout.buffer.write(b"".join(map(self._line, lines)))
        if len(self._rest) > LINE_BYTES:
            self.finish()

    def finish(self) -> None:
        """Print the rest of an incomplete line."""
        if self._rest:
            sys.stdout.buffer.write(self._line(self._rest))
            self._rest = b""

    def _line(self, line: bytes) -> bytes:
        if self._is_terminal and b"\r" in line:
            line = line.rstrip(b"\r").rpartition(b"\r")[2]
        return self._prefix + line + b"\n"


def printer_for(job: dict[str, Any], place: int, has_prefix: bool, label: str = "") -> PrefixedOutput:
    """A printer with the job's prefix, `[42 train] `, in its own colour on a terminal.

    Args: label: of one file of several, behind it: `[lab2] `, or for a rank `[3] `.
    """
    prefix = f"[{job['id']} {printable(job['name'], 24)}] " if has_prefix else ""
    prefix += f"[{printable(label)}] " if label else ""
    if not prefix:
        return PrefixedOutput()
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return PrefixedOutput(prefix, COLOURS[place % len(COLOURS)] if is_coloured else 0)


NODE_WAIT_S, TRY_AGAIN_S = 10.0, 1.0
"""How long a request waits for output on another node, and the pause after one that failed."""
LOOK_S = (0.02, 0.25)
"""Minimum and maximum interval between reads of the files; the minimum applies while they grow."""
ROUND_BYTES = 1 << 20
"""Bytes printed of one job before the next one's turn."""


class OutputRequest:
    """The part of the output to print, and its form."""

    __slots__ = ("command", "err", "has_prefix", "is_quiet", "lines", "rank", "run", "since_run")

    def __init__(
        self,
        command: str,
        err: bool = False,
        lines: int | None = None,
        run: int | None = None,
        since_run: int | None = None,
        is_quiet: bool = False,
        has_prefix: bool = True,
        rank: int | None = None,
    ) -> None:
        """Args: lines: start at the last N lines; run: this run only; since_run: this run and all later ones.

        rank: what this rank wrote, of a job with several.
        """
        self.command = command
        self.err = err
        self.lines = lines
        self.run = run
        self.since_run = since_run
        self.is_quiet = is_quiet
        self.has_prefix = has_prefix
        self.rank = rank


def follow_job(client: DaemonConnection, job_id: str, command: str) -> int:
    """Print the output of a new job until it ends; returns the job's own exit code."""
    return follow(client, [job_id], OutputRequest(command, since_run=1))


def follow(client: DaemonConnection, ids: list[str], wish: OutputRequest) -> int:
    """Print the output of jobs until all have ended.

    Returns: of one job its own exit code, of several 0 only if all COMPLETED, as gwait.
    """
    following = Follower(wish, len(ids) > 1, client.socket_path)
    try:
        following.until_done(client, ids)
    except KeyboardInterrupt:
        if not wish.is_quiet:
            one = len(ids) == 1
            go_on = (
                f"job {ids[0]} is not affected; cancel it with: gcancel {ids[0]}"
                if one
                else "the jobs are not affected"
            )
            output.note(wish.command, f"stopped following; {go_on}")
        return 130
    return following.exit_code()


def selected_runs(job: dict[str, Any], wish: OutputRequest) -> list[dict[str, Any]]:
    """The selected runs of a job that have started, by number; by default the last one."""
    runs = [run for run in job["runs"] if run["start_at"] is not None]
    if wish.run is not None:
        return [run for run in runs if run["run"] == wish.run]
    if wish.since_run is not None:
        return [run for run in runs if run["run"] >= wish.since_run]
    return runs[-1:]


def path_of(run: dict[str, Any], wish: OutputRequest) -> str:
    """The file that a run writes to."""
    return str(run["stderr_path"] if wish.err else run["stdout_path"])


class RunFile:
    """One of the files that a run writes to. Args: place: its number in the answer of /v1/logs."""

    __slots__ = ("is_remote", "label", "path", "place")

    def __init__(self, place: int, path: str, label: str, is_remote: bool) -> None:
        self.place = place
        self.path = path
        self.label = label
        """For its lines; empty for the only one."""
        self.is_remote = is_remote


def files_of(job: dict[str, Any], run: dict[str, Any], wish: OutputRequest) -> list[RunFile]:
    """The files of a run to print.

    Raises: NotFound for a rank that it does not have; Refused for one that shares its file with others.
    """
    found = run["errors" if wish.err else "outputs"]
    if not found:
        if wish.rank:
            raise NotFound(f"job {job['id']} has no rank {wish.rank}", f"it has only one process: glogs {job['id']}")
        return [RunFile(0, path_of(run, wish), "", run["is_remote"])]
    files = []
    for place, one in enumerate(found):
        if wish.rank is None or wish.rank in one["ranks"]:
            files.append(RunFile(place, one["path"], one["label"], one["is_remote"]))
        if wish.rank in one["ranks"] and len(one["ranks"]) > 1:
            first, last = one["ranks"][0], one["ranks"][-1]
            raise Refused(
                f"rank {wish.rank} of job {job['id']} writes to one file with ranks {first} to {last} of {one['node']}",
                "give each rank a file with %t: gsub -o gpusched-%j.%t.out",
            )
    if not files:
        last = found[-1]["ranks"][-1]
        raise NotFound(f"job {job['id']} has no rank {wish.rank}", f"its ranks are 0 to {last}")
    if len(files) == 1 or not wish.has_prefix:
        for one in files:
            one.label = ""
    return files


def node_query(job: dict[str, Any], run: dict[str, Any], file: RunFile, wish: OutputRequest) -> str:
    """Path of the request for the output of a run on another node."""
    return f"/v1/jobs/{quote(job['id'])}/output?run={run['run']}&file={file.place}&err={int(wish.err)}"


def open_tail(
    client: DaemonConnection, job: dict[str, Any], run: dict[str, Any], file: RunFile, wish: OutputRequest
) -> Tail | NodeTail:
    """A file of a run, wherever it is. Raises: NotReady when its node does not answer."""
    query = node_query(job, run, file, wish) if file.is_remote else None
    return tail_of(client.raw, query, job, file.path)


class FollowedNodeOutput:
    """Output of a run on another node, read in a thread; takes the place of a `Tail` that is followed.

    Args: file: the output as it is here if the machines share a file system.
    """

    def __init__(self, socket_path: str, query: str, file: Tail, lines: int | None) -> None:
        self._socket_path, self._query = socket_path, query
        self._file, self._lines = file, lines
        self._here: Tail | None = None
        self._pieces: deque[tuple[str, bytes]] = deque()
        """Output, and the cursor behind it."""
        self._cursor = ""
        self._trouble: str | None = None
        self._is_over = False
        self.skipped = False
        threading.Thread(target=self._read, daemon=True).start()

    def take_trouble(self) -> str | None:
        """Why nothing can be read, once."""
        trouble, self._trouble = self._trouble, None
        return trouble

    def copy(self, sink: Sink, most: int | None = None) -> int:
        """Copy output that has arrived; as `Tail.copy`."""
        copied = 0
        while self._pieces and (most is None or copied < most):
            self._cursor, data = self._pieces.popleft()
            copied += len(data)
            sink(data)
        if self._here is None and not self._cursor and self._trouble is not None and os.path.isfile(self._file.path):
            # A shared file system: the same file is here.
            self._is_over, self._trouble = True, None
            self._here = self._file
            begin(self._here, self._lines)
        return copied + (0 if self._here is None else self._here.copy(sink, most))

    def copy_rest(self, sink: Sink) -> None:
        """Copy everything, once the run has ended."""
        self.copy(sink)
        self._is_over = True
        if self._here is not None:
            return
        # What the thread still waits for is left to it.
        with DaemonConnection(self._socket_path) as client:
            rest = self._tail(client)
            rest.cursor = self._cursor
            try:
                rest.copy(sink)
            except GpuschedError as error:
                self._trouble = error.message
                self.copy(sink)
        self.skipped = self.skipped or rest.skipped

    def close(self) -> None:
        self._is_over = True
        if self._here is not None:
            self._here.close()

    def _tail(self, client: DaemonConnection) -> NodeTail:
        tail = NodeTail(lambda query: patiently(lambda: client.raw(query)), self._query)
        begin(tail, self._lines)
        return tail

    def _read(self) -> None:
        with DaemonConnection(self._socket_path) as client:
            tail = self._tail(client)
            while not self._is_over:
                try:
                    data = tail.read(NODE_WAIT_S)
                except (GpuschedError, OSError) as error:
                    self._trouble = error.message if isinstance(error, GpuschedError) else str(error)
                    time.sleep(TRY_AGAIN_S)
                    continue
                self.skipped = tail.skipped
                if data:
                    self._pieces.append((tail.cursor, data))


def begin(tail: Tail | NodeTail, lines: int | None) -> None:
    """Start at the last N lines, or at the beginning of what is kept."""
    if lines is None:
        tail.begin_whole()
    else:
        tail.begin_last(lines)


class FollowedJob:
    """One job. Args: place: among all jobs, for its colour."""

    def __init__(self, place: int, wish: OutputRequest, is_one_of_several: bool, socket_path: str) -> None:
        self._socket_path = socket_path
        self.job: dict[str, Any] = {}
        self._wish = wish
        self._lines = wish.lines
        self._is_one_of_several = is_one_of_several
        self._place = place
        self._tails: list[tuple[Tail | FollowedNodeOutput, PrefixedOutput]] = []
        """The files of the current run."""
        self._troubles: set[str] = set()
        self._run = 0
        self._waiting: deque[dict[str, Any]] = deque()
        self._known = 0
        self._told = ""
        self.is_done = False

    def learn(self, job: dict[str, Any]) -> None:
        """Update from the daemon's description of the job."""
        wish = self._wish
        if not self.job and wish.lines is not None and wish.run is None and wish.since_run is None:
            # The last N lines are taken from the current run.
            self._known = job["runs"][-1]["run"] - 1 if job["runs"] else 0
        self.job = job
        for run in job["runs"]:
            number = run["run"]
            if number <= self._known or run["start_at"] is None:
                continue
            self._known = number
            if wish.run in (None, number) and number >= (wish.since_run or 1):
                self._waiting.append(run)

    def copy(self) -> int:
        """Print new output; returns its size."""
        copied = 0
        while True:
            if self._tails:
                # What each has now, so that none of them keeps the others waiting.
                pieces = [tail.copy(printer.write, ROUND_BYTES) for tail, printer in self._tails]
                copied += sum(pieces)
                if any(piece >= ROUND_BYTES for piece in pieces):
                    return copied
                if not self._has_run_ended():
                    for tail, _ in self._tails:
                        self._tell_trouble(tail)
                    return copied
                # All output was in the files before the end was reported; this reads what came since the last read.
                for tail, printer in self._tails:
                    if isinstance(tail, FollowedNodeOutput):
                        tail.copy_rest(printer.write)
                        self._tell_trouble(tail)
                    else:
                        tail.copy(printer.write)
                self._close()
            if not self._waiting:
                self.is_done = self.is_done or self._is_over()
                return copied
            self._begin(self._waiting.popleft())

    def _begin(self, run: dict[str, Any]) -> None:
        if self._run:
            self._note(f"run {self._run} ended; run {run['run']} started")
        self._run = run["run"]
        for file in files_of(self.job, run, self._wish):
            here = Tail.of_job(self.job, file.path)
            tail: Tail | FollowedNodeOutput = here
            if file.is_remote:
                query = node_query(self.job, run, file, self._wish)
                tail = FollowedNodeOutput(self._socket_path, query, here, self._lines)
            else:
                begin(here, self._lines)
            has_prefix = self._is_one_of_several and self._wish.has_prefix
            self._tails.append((tail, printer_for(self.job, self._place, has_prefix, file.label)))
        self._lines = None

    def _tell_trouble(self, tail: Tail | FollowedNodeOutput) -> None:
        trouble = tail.take_trouble() if isinstance(tail, FollowedNodeOutput) else None
        if trouble is not None and trouble not in self._troubles:
            self._troubles.add(trouble)
            self._note(trouble)

    def _close(self) -> None:
        for tail, printer in self._tails:
            printer.finish()
            if tail.skipped:
                self._note("some of the output was rotated away before it could be read")
            tail.close()
        self._tails = []

    def _has_run_ended(self) -> bool:
        if self._waiting or self._is_over():
            return True
        run = self.run_of(self._run)
        return run is not None and run["outcome"] is not None

    def _is_over(self) -> bool:
        if self.job["state"] in FINAL:
            return True
        run = self.run_of(self._wish.run)
        return run is not None and run["outcome"] is not None

    def run_of(self, number: int | None) -> dict[str, Any] | None:
        """The known facts about one run."""
        return next((run for run in self.job["runs"] if run["run"] == number), None)

    def tell_wait(self) -> None:
        """Say why there is no output, once for each reason."""
        job = self.job
        reason = job["reason"] or "None"
        if job["state"] != "PENDING" or self._tails or reason in ("None", self._told):
            return
        self._told = reason
        text = f"job {job['id']} is pending ({job['reason']}): {printable(job['reason_text'] or '')}"
        self._note(text, names_job=True)

    def _note(self, text: str, *, names_job: bool = False) -> None:
        if not self._wish.is_quiet:
            sys.stdout.flush()
            about = f"job {self.job['id']}: " if self._is_one_of_several and not names_job else ""
            output.note(self._wish.command, about + text)

    def tell_end(self) -> None:
        """Say how the job ended, unless it COMPLETED."""
        run = self.run_of(self._wish.run)
        if self._wish.run is not None and run is not None:
            if run["outcome"] != "COMPLETED":
                self._note(f"run {run['run']} is {run['outcome']}: {printable(run['reason_text'] or '')}")
        elif self.job["state"] != "COMPLETED":
            self._note(ending(self.job), names_job=True)

    def exit_code(self) -> int:
        """The job's own, or that of the selected run."""
        run = self.run_of(self._wish.run)
        return output.exit_code_of(self.job if run is None else {**run, "state": run["outcome"]})


class Follower:
    """All followed jobs, with the daemon's news about them."""

    def __init__(self, wish: OutputRequest, is_several: bool, socket_path: str) -> None:
        self._socket_path = socket_path
        self._wish = wish
        self._is_several = is_several
        self._jobs: dict[str, FollowedJob] = {}
        self._arrays: list[dict[str, Any]] = []
        self._told: dict[str, str] = {}
        self._is_complete = False
        """Whether the daemon has reported everything that will ever come."""

    def until_done(self, client: DaemonConnection, ids: list[str]) -> None:
        """Print until all jobs have ended and their output is printed. Raises: the daemon's errors; BrokenPipeError."""
        news = LogPoller(client, ids)
        poll = select.poll()
        poll.register(news.fileno(), select.POLLIN)
        try:
            # Without events, poll reports only that the reader of a pipe has closed.
            poll.register(sys.stdout.fileno(), 0)
        except (OSError, ValueError):
            pass  # no descriptor, so no reader that could close
        pause_s = 0.0
        while not (self._is_complete and all(one.is_done for one in self._jobs.values())):
            for fd, _ in poll.poll(pause_s * 1000):
                if fd != news.fileno():
                    raise BrokenPipeError
            for answer in news.take():
                self._learn(answer)
                pause_s = 0.0
            most = max([one.copy() for one in self._jobs.values() if not one.is_done], default=0)
            sys.stdout.flush()
            pause_s = min(LOOK_S[1], 2 * pause_s or LOOK_S[0])
            if most:
                pause_s = 0.0 if most >= ROUND_BYTES else LOOK_S[0]
        for one in self._jobs.values():
            one.tell_end()
        for array in self._arrays:
            if array["state"] != "COMPLETED" and not self._wish.is_quiet:
                output.note(self._wish.command, ending(array, "array"))

    def _learn(self, answer: dict[str, Any]) -> None:
        self._arrays = answer["arrays"]
        self._is_several = self._is_several or bool(self._arrays) or len(answer["jobs"]) > 1
        for job in answer["jobs"]:
            one = self._jobs.get(job["id"])
            if one is None:
                place = len(self._jobs)
                one = self._jobs[job["id"]] = FollowedJob(place, self._wish, self._is_several, self._socket_path)
            one.learn(job)
        self._is_complete = answer["done"] or self._is_past(self._wish.run)
        self._tell_waits()

    def _is_past(self, number: int | None) -> bool:
        """Whether the one selected run has ended in all jobs."""
        if number is None or self._arrays or not self._jobs:
            return False
        runs = [one.run_of(number) for one in self._jobs.values()]
        return all(run is not None and run["outcome"] is not None for run in runs)

    def _tell_waits(self) -> None:
        waiting = [one for one in self._jobs.values() if one.job["state"] == "PENDING"]
        for one in waiting[:3]:
            one.tell_wait()
        for array in [] if self._jobs or self._wish.is_quiet else self._arrays:
            reason = array["reason"] or "None"
            if array["state"] == "PENDING" and reason not in ("None", self._told.get(array["id"])):
                self._told[array["id"]] = reason
                output.note(
                    self._wish.command,
                    f"array {array['id']} is pending ({reason}): {printable(array['reason_text'] or '')}",
                )

    def exit_code(self) -> int:
        """See `follow`. Raises: NotFound if the selected run does not exist."""
        for one in self._jobs.values():
            if self._wish.run is not None and one.run_of(self._wish.run) is None:
                raise NotFound(
                    f"job {one.job['id']} has no run {self._wish.run}", f"list its runs with: gshow {one.job['id']}"
                )
        codes = [one.exit_code() for one in self._jobs.values()]
        if len(codes) == 1 and not self._is_several:
            return codes[0]
        return int(any(codes) or any(array["state"] != "COMPLETED" for array in self._arrays))
