"""The client for Python programs: the functions of the commands, with typed results.

`gpusched.sdk.async_client` is made from this module by `python -m tools.reference`: whatever goes through `link` or
`self._link` is awaited there. What blocks otherwise goes through `link.run`, with `link.blocking` for its requests.
"""

from __future__ import annotations

import os
import time
import warnings
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload
from urllib.parse import quote, urlencode

from gpusched.errors import NotFound, Refused, UsageError, WaitTimeout
from gpusched.model.state_names import ACTIVE
from gpusched.model.units import plural
from gpusched.paths import MAX_REQUEST, read_at_most
from gpusched.sdk.link import Link
from gpusched.sdk.options import changes_of, missing_folder, spec_of
from gpusched.sdk.values import JobDetails, JobInfo, read_details, read_job
from gpusched.tail import NodeTail, Tail, tail_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gpusched.sdk.job_options import JobOptions


JobLike = JobInfo | str | int
"""A job, or its id: `42`, `"42_7"`, `"@"` for the user's last job."""
_IDS_AT_ONCE = 500
"""Limited by the length of a request line."""


class Client:
    """One scheduler: GPUSCHED_SOCKET, else the system daemon, else the personal one, which is started if necessary.

    Thread-safe. Every method raises the errors of `gpusched.errors`, each with a message and a hint.
    """

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, autostart: bool = True) -> None:
        self._link = Link(None if socket is None else os.fspath(socket), autostart)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Jobs keep running."""
        self._link.close()

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a raw API request, for operations without a method here; see docs/reference/openapi.json."""
        return self._link.call(method, path, body)

    # --- submitting -------------------------------------------------------------------------------

    def submit(
        self,
        command: Sequence[str] | str | None = None,
        *,
        script: str | os.PathLike[str] | None = None,
        args: Sequence[str] = (),
        key_again: str = "never",
        **options: Unpack[JobOptions],
    ) -> SubmittedJob:
        """Submit a job; it is on disk when this returns.

        Args:
            command: words that are passed on exactly, or one shell line.
            script: in place of a command, the path of a script, which is read now. Its #GSUB lines are ignored.
            args: arguments of the script.
            key_again: with `key`, when to submit another job: `never`, `failed`, `ended`.
            options: see JobOptions.
        Raises: UsageError, Refused; NotReady if the daemon became unreachable and there is no `key` to retry with.
        """
        own = ("command", "script", "args", "key_again")
        spec = {**spec_of(options, "submit", own), **_program(command, script, args)}
        if key_again != "never" and "key" not in spec:
            raise UsageError(f"key_again={key_again!r} needs a key", "pass key= as well")
        noted = self._link.run(lambda: _freeze(self._link.blocking, spec, options.get("snapshot")))
        body: dict[str, Any] = {"spec": spec, "key_again": key_again}
        answer = self._link.call("POST", "/v1/jobs", body, again="key" in spec)
        _warn(answer, [*missing_folder(options), *noted])
        return _submitted(self, answer)

    def submit_all(
        self,
        lines: Iterable[str],
        *,
        key_again: str = "never",
        **options: Unpack[JobOptions],
    ) -> list[str]:
        """Submit a job for each shell line, all or none; returns their ids in order.

        With `key`, that of all of them, the same lines make no other jobs; `key_again` as in `submit`.
        """
        if isinstance(lines, str):
            raise UsageError(
                "submit_all takes an iterable of lines, not one string", f"submit one job with: submit({lines[:40]!r})"
            )
        spec = spec_of(options, "submit_all", ("lines", "key_again"))
        if key_again != "never" and "key" not in spec:
            raise UsageError(f"key_again={key_again!r} needs a key", "pass key= as well")
        noted = self._link.run(lambda: _freeze(self._link.blocking, spec, options.get("snapshot")))
        body = {"spec": spec, "batch": list(lines), "key_again": key_again}
        answer = self._link.call("POST", "/v1/jobs", body, again="key" in spec)
        _warn(answer, [*missing_folder(options), *noted])
        return [str(job_id) for job_id in answer["ids"]]

    def resubmit(self, job: JobLike, **options: Unpack[JobOptions]) -> SubmittedJob:
        """Submit a job again, with the options given here in place of its own."""
        spec = spec_of(options, "resubmit", ("job",))
        for name, given in (("work_dir", "chdir"), ("env", "extra_env"), ("env_named", ""), ("umask", "")):
            if given not in options:
                del spec[name]
        if options.get("snapshot"):
            raise UsageError("a resubmitted job starts in its old snapshot", "leave snapshot= out")
        if options.get("env") is not None:
            raise UsageError("a resubmitted job keeps its environment", "add to it with extra_env=")
        if "env" in spec:
            spec["env"] = dict(options["extra_env"])
        if "work_dir" not in spec:
            from gpusched.snapshots.submission import keep_for_repetition  # as above

            self._link.run(lambda: keep_for_repetition(self._link.blocking.call, [_id(job)]))
        body = {"resubmit": [_id(job)], "spec": spec}
        answer = self._link.call("POST", "/v1/jobs", body, again="key" in spec)
        return _submitted(self, answer)

    # --- looking ----------------------------------------------------------------------------------

    def jobs(
        self,
        *,
        ids: Iterable[JobLike] | None = None,
        states: Iterable[str] = (),
        users: Iterable[str] = (),
        names: Iterable[str] = (),
        queues: Iterable[str] = (),
        since: float | None = None,
        limit: int | None = None,
    ) -> list[JobInfo]:
        """Jobs by id, ascending: unfinished ones, unless `ids` or `states` (or `["all"]`) select others.

        Args: since: only those unfinished, or ended at or after this time. limit: only this many of the newest.
        """
        words = {"states": states, "users": users, "names": names, "queues": queues}
        query: dict[str, Any] = {name: ",".join(given) for name, given in words.items() if given}
        query.update({name: value for name, value in (("since", since), ("limit", limit)) if value is not None})
        if ids is None:
            return self._listed(query)
        found: list[JobInfo] = []
        wanted = [_id(job) for job in ids]
        for at in range(0, len(wanted), _IDS_AT_ONCE):
            found += self._listed({**query, "ids": ",".join(wanted[at : at + _IDS_AT_ONCE])})
        return found if limit is None else found[-limit:]

    def _listed(self, query: Mapping[str, Any]) -> list[JobInfo]:
        return [read_job(job) for job in self.call("GET", f"/v1/jobs?{urlencode(query)}")["jobs"]]

    def job(self, job: JobLike) -> JobDetails:
        """Everything about one job in its current state. Raises: NotFound."""
        return read_details(self.call("GET", f"/v1/jobs/{quote(_id(job), safe='')}")["job"])

    def logs(
        self,
        job: JobLike,
        *,
        follow: bool = False,
        run: int | None = None,
        err: bool = False,
        lines: int | None = None,
        rank: int | None = None,
        pieces: bool = False,
    ) -> Iterator[str]:
        """A job's output line by line, of its last run unless `run` is given. A line beyond 1 MiB is returned in parts.

        Args:
            follow: wait for the job to start and follow its output, through retries, until it has ended; all runs
                unless `run` names one, and with `lines` from the current one on.
            err: its standard error, if that has a file of its own.
            lines: start at the last N lines.
            pieces: as it comes instead of by lines, so that progress bars move.
            rank: the file of this rank, of a job on several nodes or with several tasks; by default that of the first.
        Raises: NotFound; UsageError for an array; Refused if there is no output (yet) and `follow` is not set, and for
        a rank whose file has the output of others as well.
        """
        return read_logs(self._link, _id(job), follow, run, err, lines, rank, pieces)

    # --- waiting ----------------------------------------------------------------------------------

    @overload
    def wait(  # type: ignore[overload-overlap]  # a text is one id, never many
        self, jobs: JobLike, timeout_s: float | None = None
    ) -> JobDetails: ...
    @overload
    def wait(self, jobs: Iterable[JobLike], timeout_s: float | None = None) -> list[JobInfo]: ...

    def wait(
        self,
        jobs: JobLike | Iterable[JobLike],
        timeout_s: float | None = None,
    ) -> JobDetails | list[JobInfo]:
        """Block until the job, or all of these jobs, have ended; results in the order given. Raises: WaitTimeout."""
        is_one = isinstance(jobs, (JobInfo, str, int))
        ids = [_id(jobs)] if isinstance(jobs, (JobInfo, str, int)) else [_id(job) for job in jobs]
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for at in range(0, len(ids), _IDS_AT_ONCE):
            self._wait(ids[at : at + _IDS_AT_ONCE], deadline)
        if is_one:
            return self.job(ids[0])
        found = {job.id: job for job in self.jobs(ids=ids)}
        # Names such as `@` are not ids.
        return [found.get(job_id) or self.job(job_id) for job_id in ids]

    def _wait(self, ids: Sequence[str], deadline: float | None) -> None:
        while True:
            left_s = _left_s(self._link.wait_s, deadline)
            answer = self.call("GET", f"/v1/wait?ids={','.join(map(_quoted, ids))}&timeout_s={left_s:.3f}")
            if answer["done"]:
                return
            if deadline is not None and time.monotonic() >= deadline:
                open_ids = [job["id"] for job in answer["jobs"] if job["state"] in ACTIVE]
                raise WaitTimeout(
                    f"not ended in time: {', '.join(open_ids[:10])}{', ...' if len(open_ids) > 10 else ''}",
                    f"see why with: gq --why {open_ids[0]}" if open_ids else "",
                )

    def as_completed(self, jobs: Iterable[JobLike], timeout_s: float | None = None) -> Iterator[JobInfo]:
        """Yield each of these jobs once, as it ends. Raises: NotFound, WaitTimeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        cursor = self.call("GET", "/v1/ended")["cursor"]
        left = dict.fromkeys(_id(job) for job in jobs)
        if any(job_id.startswith("@") for job_id in left):
            last = self.job("@").id
            left = dict.fromkeys([last + job_id[1:] if job_id.startswith("@") else job_id for job_id in left])
        ended = self._left(left)
        while True:
            for job in ended:
                if left.pop(job.id, "gone") is None:
                    yield job
            if not left:
                return
            left_s = _left_s(self._link.wait_s, deadline)
            answer = self.call("GET", f"/v1/ended?after={cursor}&timeout_s={left_s:.3f}")
            cursor = answer["cursor"]
            now = [job["id"] for job in answer["jobs"] if job["id"] in left]
            ended = self._left(left) if answer["missed"] else self.jobs(ids=now)
            if not ended and deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(f"{plural(len(left), 'job')} not ended in time", "see them with: gq")

    def _left(self, ids: Iterable[str]) -> list[JobInfo]:
        """The ended jobs among these. Raises: NotFound if one does not exist."""
        known = self.jobs(ids=ids)
        gone = set(ids) - {job.id for job in known}
        if gone:
            raise NotFound(f"there is no job {min(gone)}", "list the jobs with: gq -a")
        return [job for job in known if job.is_final]

    # --- changing ---------------------------------------------------------------------------------

    def cancel(self, jobs: JobLike | Iterable[JobLike], *, signal: int | None = None) -> list[str]:
        """End jobs, or send them one signal; returns the ids of those that had not ended."""
        answer = self.call("POST", "/v1/jobs/cancel", {"ids": _ids(jobs), "signal": signal})
        return [str(job_id) for job_id in (*answer["cancelled"], *answer["signalled"])]

    def hold(self, jobs: JobLike | Iterable[JobLike]) -> None:
        """Keep jobs from starting; a running job is kept from its next run."""
        self.call("POST", "/v1/jobs/hold", {"ids": _ids(jobs)})

    def release(self, jobs: JobLike | Iterable[JobLike]) -> None:
        self.call("POST", "/v1/jobs/release", {"ids": _ids(jobs)})

    def requeue(self, jobs: JobLike | Iterable[JobLike], *, hold: bool = False) -> None:
        """End the runs of jobs and return them to the queue; with `hold` until they are released."""
        self.call("POST", "/v1/jobs/requeue", {"ids": _ids(jobs), "hold": hold})

    def update(self, jobs: JobLike | Iterable[JobLike], **changes: Any) -> None:
        """Change options of jobs, given as to `submit`: `time="2h"`, `mem="8G"`, `begin="now+1hour"`, `nice=5`.

        None resets an option. Raises: TypeError for an unknown name, UsageError, Refused.
        """
        self.call("POST", "/v1/jobs/update", {"ids": _ids(jobs), "changes": changes_of(changes)})


class SubmittedJob(JobInfo):
    """A job with the client that submitted it. As any job, it stays as it was at the time of the request."""

    _client: Client | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Connections stay with their process.
        return {name: value for name, value in self.__dict__.items() if name != "_client"}

    def wait(self, timeout_s: float | None = None) -> JobDetails:
        """See Client.wait."""
        return _client_of(self).wait(self, timeout_s)

    def logs(
        self,
        *,
        follow: bool = False,
        run: int | None = None,
        err: bool = False,
        lines: int | None = None,
        rank: int | None = None,
        pieces: bool = False,
    ) -> Iterator[str]:
        """See Client.logs."""
        return _client_of(self).logs(self, follow=follow, run=run, err=err, lines=lines, rank=rank, pieces=pieces)

    def cancel(self, *, signal: int | None = None) -> list[str]:
        """See Client.cancel."""
        return _client_of(self).cancel(self, signal=signal)


def _client_of(job: SubmittedJob) -> Client:
    if job._client is None:
        raise UsageError(f"job {job.id} is a copy without its client", f'ask one: client.wait("{job.id}")')
    return job._client


def _submitted(client: Client, answer: Mapping[str, Any]) -> SubmittedJob:
    job = read_job(answer["job"], answer.get("existing", False), SubmittedJob)
    # The values are frozen; the client is not one of them.
    object.__setattr__(job, "_client", client)
    return job


def _freeze(blocking: Link, spec: dict[str, Any], mode: object) -> list[str]:
    """Let the job start in a copy of the code if one is asked for; returns what the user should know."""
    if mode not in (None, True, False, "auto", "git", "copy", "no"):
        raise UsageError(f"snapshot={mode!r} must be True, False, 'git' or 'copy'", "True chooses between git and copy")
    if not mode or mode == "no":
        return []
    from gpusched.snapshots.submission import start_in_copy  # rarely needed

    return list(start_in_copy(blocking.call, blocking.socket_path, spec, "auto" if mode is True else str(mode)).notes)


def _warn(answer: Mapping[str, Any], noted: Iterable[str]) -> None:
    """Issue warnings for the scheduler's notes, and for variables of this process that the job will not have."""
    for note in (*noted, *answer.get("notes", ())):
        warnings.warn(note, stacklevel=3)
    if names := answer.get("env_excluded"):
        text = f"left out of the job's environment: {', '.join(names)}; pass them on with extra_env="
        warnings.warn(text, stacklevel=3)


def _id(job: JobLike) -> str:
    return job.id if isinstance(job, JobInfo) else str(job)


def _ids(jobs: JobLike | Iterable[JobLike]) -> list[str]:
    return [_id(jobs)] if isinstance(jobs, (JobInfo, str, int)) else [_id(job) for job in jobs]


def _left_s(wait_s: float, deadline: float | None) -> float:
    return wait_s if deadline is None else max(0.0, min(wait_s, deadline - time.monotonic()))


def _quoted(job_id: str) -> str:
    return quote(job_id, safe="@")


def _program(
    command: Sequence[str] | str | None, script: str | os.PathLike[str] | None, args: Sequence[str]
) -> dict[str, Any]:
    if (command is None) == (script is None):
        raise UsageError("give either a command or a script", 'for example: submit(["python", "train.py"])')
    if script is not None:
        path = os.fspath(script)
        try:
            with open(path, "rb") as file:
                content = read_at_most(file, MAX_REQUEST, f"the script {path}", "keep data in files of their own")
        except OSError as error:
            raise Refused(f"the script {path} cannot be read: {error.strerror}", f"see: ls -l {path}") from None
        named = {"script_name": os.path.basename(path), "script_path": os.path.abspath(path)}
        text = content.decode("utf-8", "surrogateescape")
        return {"script": text, **named, "argv": [str(word) for word in args]}
    if args:
        raise UsageError("args needs a script", "put the words of a command into one list")
    if isinstance(command, str):
        if not command.strip():
            raise UsageError("the command is empty", 'for example: submit("python train.py")')
        return {"script": f"#!/bin/sh\n{command}\n", "script_name": "wrap", "argv": []}
    assert command is not None
    return {"argv": [os.fspath(word) for word in command]}


_LOOK_S = 0.2
LONGEST = 1 << 20
"""Maximum bytes of a line; longer ones are returned in parts."""


def read_logs(
    link: Link,
    job_id: str,
    follow: bool,
    run: int | None,
    err: bool,
    lines: int | None,
    rank: int | None,
    pieces: bool,
) -> Iterator[str]:
    """See Client.logs. Errors are raised at once, not with the first line."""
    answer = _asked(link, job_id)
    if answer["arrays"]:
        array_id = answer["arrays"][0]["id"]
        raise UsageError(
            f"job {array_id} is an array; each of its tasks has its own output", f'name one: logs("{array_id}_0")'
        )
    job = answer["jobs"][0]
    if follow:
        return _followed(link, answer, err, lines, run, rank, pieces)
    runs = {one["run"]: one for one in _started(job)}
    number = max(runs, default=0) if run is None else run
    if number not in runs:
        if run is not None:
            raise _no_run(job, run)
        why = job["reason_text"] or job["state"]
        if answer["done"]:
            raise Refused(f"job {job['id']} has no output: {why}", f"see: gshow {job['id']}")
        raise Refused(f"job {job['id']} has not started: {why}", "wait for it with follow=True")
    path, _, _ = _file(job, runs[number], err, rank)
    reader = _Reader(link.run(partial(_tail_of, link.blocking, job, runs[number], err, rank)), pieces)
    if not link.run(partial(reader.begin, lines)):
        raise Refused(f"there is no file {path}; it was moved, removed or never created", f"see: gshow {job['id']}")
    return _all_of(link, reader)


def _asked(link: Link, job_id: str, version: str = "", wait_s: float = 0) -> dict[str, Any]:
    query = f"ids={quote(job_id, safe='')}&since={quote(version)}&timeout_s={wait_s}"
    return link.call("GET", f"/v1/logs?{query}")


def _started(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in job["runs"] if one["start_at"] is not None]


def _no_run(job: dict[str, Any], run: int) -> NotFound:
    return NotFound(f"job {job['id']} has no run {run}", f"list its runs with: gshow {job['id']}")


def _file(job: dict[str, Any], run: dict[str, Any], err: bool, rank: int | None) -> tuple[str, bool, int]:
    """Path of a rank's file, whether it is on another node, and its number in the answer. Raises: NotFound, Refused."""
    files = run["errors" if err else "outputs"]
    if rank is None or (rank == 0 and not files):
        return str(run["stderr_path" if err else "stdout_path"]), run["is_remote"], 0
    for place, one in enumerate(files):
        if rank in one["ranks"] and len(one["ranks"]) > 1:
            raise Refused(
                f"rank {rank} of job {job['id']} writes to one file with others, {one['path']}",
                "give each rank a file: submit(..., output='%j.%t.out')",
            )
        if rank in one["ranks"]:
            return one["path"], one["is_remote"], place
    raise NotFound(f"job {job['id']} has no rank {rank}", f"list its runs with: gshow {job['id']}")


def _tail_of(blocking: Link, job: dict[str, Any], run: dict[str, Any], err: bool, rank: int | None) -> Tail | NodeTail:
    """The output of a run, wherever it is."""
    path, is_remote, place = _file(job, run, err, rank)
    query = f"/v1/jobs/{quote(job['id'], safe='')}/output?run={run['run']}&file={place}&err={int(err)}"
    return tail_of(blocking.raw, query if is_remote else None, job, path)


def _all_of(link: Link, reader: _Reader) -> Iterator[str]:
    with reader:
        while link.run(reader.fill):
            for line in reader.completed():
                yield line
        for line in reader.rest():
            yield line


def _followed(
    link: Link,
    answer: dict[str, Any],
    err: bool,
    lines: int | None,
    only: int | None,
    rank: int | None,
    pieces: bool,
) -> Iterator[str]:
    job = answer["jobs"][0]
    # The last N lines are taken from the current run.
    number = 0 if lines is None or not job["runs"] else job["runs"][-1]["run"] - 1
    number = number if only is None else only - 1
    reader: _Reader | None = None
    try:
        while True:
            for run in _started(job):
                if run["run"] <= number or only not in (None, run["run"]):
                    continue
                if reader is not None:
                    while link.run(reader.fill):
                        for line in reader.completed():
                            yield line
                    for line in reader.rest():
                        yield line
                    reader.close()
                number = run["run"]
                reader = _Reader(link.run(partial(_tail_of, link.blocking, job, run, err, rank)), pieces)
                link.run(partial(reader.begin, lines))
                lines = None
            is_over = answer["done"] or any(run["run"] == only and run["outcome"] for run in job["runs"])
            if reader is not None:
                # A run's output was in its file before its end was reported.
                while link.run(reader.fill):
                    for line in reader.completed():
                        yield line
                if is_over:
                    for line in reader.rest():
                        yield line
            if is_over:
                if only is not None and number != only:
                    raise _no_run(job, only)
                return
            if reader is not None:
                link.sleep(_LOOK_S)
            answer = _asked(link, job["id"], answer["version"], link.wait_s if reader is None else 0)
            job = answer["jobs"][0]
    finally:
        if reader is not None:
            reader.close()


class _Reader:
    """Reads whole lines of a file that may grow, be truncated or be rotated."""

    def __init__(self, tail: Tail | NodeTail, in_pieces: bool = False) -> None:
        """Args: in_pieces: return what was read at once, whether or not it ends a line."""
        self._tail = tail
        self._decoder = getincrementaldecoder("utf-8")("replace") if in_pieces else None
        self._pieces: list[bytes] = []
        self._begun = b""

    def begin(self, lines: int | None) -> bool:
        """Start at the last N lines, or at the beginning; returns whether the file exists."""
        if lines is None:
            self._tail.begin_whole()
        else:
            self._tail.begin_last(lines)
        # Opens the file if it is not open yet.
        self._tail.copy(self._pieces.append, 1)
        return self._tail.was_found

    def fill(self) -> bool:
        """Read a piece of what is new; returns whether there was any."""
        return bool(self._pieces or self._tail.copy(self._pieces.append, 1))

    def completed(self) -> Iterator[str]:
        """The lines that what was read has completed."""
        if self._decoder is not None:
            text = "".join(self._decoder.decode(self._pieces.pop(0)) for _ in range(len(self._pieces)))
            if text:
                yield text
        while self._pieces:
            # Only new bytes are searched: a line may be very long.
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

    def rest(self) -> Iterator[str]:
        """The incomplete last line, if any."""
        if self._decoder is not None and (text := self._decoder.decode(b"", final=True)):
            yield text
        if self._begun:
            line, self._begun = self._begun, b""
            yield line.decode(errors="replace")

    def close(self) -> None:
        self._tail.close()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _between_signs(data: bytes) -> int:
    """Position near the end at which to split without splitting a UTF-8 character."""
    for place in range(len(data) - 1, len(data) - 5, -1):
        if data[place] & 0xC0 != 0x80:
            return place
    return len(data)
