"""State of jobs for readers of their output: the runs, their files, and whether more is to come."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any

from aiohttp import web

from gpusched.access import Act
from gpusched.api.asked import Count, Number, OneJob, RequestQuery, Timeout, about
from gpusched.api.handlers.completions import FEED, UsersCompletions
from gpusched.api.requests import respond
from gpusched.api.service import ApiService
from gpusched.api.visibility import Viewer
from gpusched.errors import NotFound, Refused, UsageError
from gpusched.lifecycle.arrays import all_tasks, task_number
from gpusched.lifecycle.output_paths import OutputFile, output_files
from gpusched.model.job import Job, Run
from gpusched.model.layout import starts_ranks
from gpusched.model.states import JobState
from gpusched.model.units import is_digits
from gpusched.ports import JobFilter

LONGEST_WAIT_S = 20.0
"""Longest wait for output on another node."""
TAIL_BYTES = 1 << 16
_MOST_LINES = 2000
PAGE_BYTES = 1 << 16
LINE_BYTES = 1 << 12
"""How far behind the border of two pages the end of a line is looked for."""
_LONGEST_CURSOR = 300
_CURSOR = re.compile(r"\d{1,20}\.\d{1,20}\.[0-9a-f]*")
TASKS_AT_ONCE = 1000
"""Tasks of arrays in one answer: building a larger one would delay other requests."""


@dataclass(frozen=True, slots=True)
class LogVersion:
    """The reader's knowledge from an earlier answer, parsed from its version."""

    mark: str = ""
    """Changes with anything that can still change."""
    cursor: str = ""
    """Position in the feed of ends when the reader began to read."""
    place: int | None = 0
    """Number of tasks already sent; None once all are, and only changes are sent."""

    @classmethod
    def read(cls, text: str) -> LogVersion:
        """Parse a version; any other text gives one without knowledge."""
        mark, _, rest = text.partition("~")
        cursor, _, place = rest.partition("~")
        if not cursor or not (place == "" or (is_digits(place) and len(place) < 10)):
            return cls()
        return cls(mark, cursor, int(place) if place else None)

    def __str__(self) -> str:
        return f"{self.mark}~{self.cursor}~{'' if self.place is None else self.place}"


class LogsQuery(RequestQuery):
    ids: Annotated[str, about("comma-separated ids; @ is the caller's last job")] = ""
    since: Annotated[
        str,
        about(
            "the version of the previous answer: wait until something has changed; of arrays only those tasks "
            "that have not ended, or have since"
        ),
    ] = ""
    timeout_s: Timeout = 0.0


class RunQuery(OneJob):
    """One file of a run."""

    run: Annotated[Number | None, about("number of the run; the last one unless given")] = None
    file: Annotated[
        int, about("number of the file among outputs (with err, errors) of the run in /v1/logs, from 0", ge=0)
    ] = 0
    err: Annotated[bool, about("1: its error output")] = False


class OutputQuery(RunQuery):
    cursor: Annotated[str, about("of the previous answer, to continue after it")] = ""
    lines: Annotated[Count | None, about("begin at the last this many lines; with the oldest output unless given")] = (
        None
    )
    wait_s: Annotated[float, about("wait this long for new output", ge=0, le=LONGEST_WAIT_S)] = 0.0


class TailQuery(RunQuery):
    lines: Annotated[int, about("the last this many lines", ge=1, le=_MOST_LINES)] = 200


class PageQuery(RunQuery):
    page: Annotated[Number | None, about("from 1; the last one unless given")] = None


class SnapshotQuery(OneJob):
    at: Annotated[int, about("where the piece begins, in bytes; 0 unless given", ge=0, le=10**15)] = 0


async def logs(viewer: Viewer, query: LogsQuery, request: web.Request) -> web.Response:
    """Where the runs of jobs write, and whether more output may follow; for an array, all tasks that have run."""
    service, feed = viewer.service, request.app[FEED]
    ids = service.job_ids(query.ids, viewer.caller)
    if not ids:
        raise UsageError("no jobs given", "list the jobs with: gq")
    are_named = frozenset(ids)
    known = LogVersion.read(query.since)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + query.timeout_s
    while True:
        named = _find(viewer, ids)
        arrays = [job for job in named if job.is_array]
        # Unfinished jobs are checked each time, finished ones once.
        active = [
            task for array in arrays for task in service.scheduler.state.tasks_of(array) if task.id not in are_named
        ]
        mark = _mark((*named, *active), _runs_of(service, [job for job in (*named, *active) if job.run]))
        # A caller who may read several users' output can follow their arrays together.
        ends = feed.of_all([array.uid for array in arrays] or [viewer.caller.uid])
        tasks, after = _tasks(service, arrays, active, known, mark, ends)
        left_s = deadline - loop.time()
        has_news = mark != known.mark or known.place is not None or len(tasks) > len(active)
        if has_news or left_s <= 0:
            break
        await service.changed([job.id for job in (*named, *active)], left_s, viewer.caller)
    singles = [job for job in named if not job.is_array]
    tasks = [task for task in tasks if task.run and task.id not in are_named]
    runs = _runs_of(service, [*[job for job in singles if job.run], *tasks])
    # An array means its tasks with output.
    shown = [*singles, *[task for task in tasks if any(run.start_at is not None for run in runs.get(task.id, ()))]]
    # If tasks are spread over several answers, earlier ones may have changed since.
    is_current = after.place is None and after.mark == mark
    are_over = all(job.state.is_final for job in (*singles, *active)) and not any(map(_has_more, arrays))
    return respond(
        version=str(after),
        more=not is_current,
        done=are_over and is_current,
        arrays=[_head(viewer, job) for job in arrays],
        jobs=[_job_json(viewer, job, runs.get(job.id, [])) for job in shown],
    )


async def output(viewer: Viewer, query: OutputQuery) -> web.Response:
    """Output of a run on another node: a line of JSON with the cursor behind it, then its bytes; none if nothing new
    was written. Runs on the daemon's own node are read from their files."""
    service = viewer.service
    job = viewer.read(query.path_id, Act.OUTPUT)
    run = _run_named(service, job, query.run)
    is_error = query.err
    wanted_file = _file_named(output_files(job, run, service.settings.default.output, is_error=is_error), query.file)
    cursor = query.cursor
    if len(cursor) > _LONGEST_CURSOR or (cursor and _CURSOR.fullmatch(cursor) is None):
        raise UsageError("the cursor is not from an earlier answer", "leave it out to begin")
    node = wanted_file.node
    if node == service.scheduler.cluster.head.name:
        raise Refused(f"run {run.number} of job {job.shown_id} writes on the daemon's own node {node}", "read its file")
    facts, data = await service.daemon.read_output(
        job,
        run,
        wanted_file,
        is_error=is_error,
        cursor=cursor,
        lines=query.lines,
        wait_s=query.wait_s,
    )
    body = json.dumps(facts, separators=(",", ":")).encode() + b"\n" + data
    return web.Response(body=body, content_type="application/octet-stream")


async def tail(viewer: Viewer, query: TailQuery) -> web.Response:
    """The end of what a run wrote, at most 64 KiB, on whatever node; read with the rights of the job's user."""
    service = viewer.service
    job = viewer.read(query.path_id, Act.OUTPUT)
    run = _run_named(service, job, query.run)
    is_error, lines = query.err, query.lines
    files = output_files(job, run, service.settings.default.output, is_error=is_error)
    wanted = _file_named(files, query.file)
    if wanted.node == service.scheduler.cluster.head.name:
        own = await service.daemon.read_own_output(job, wanted.path, -TAIL_BYTES, TAIL_BYTES)
        data, is_found = b"" if own is None else own[1], own is not None
    else:
        facts, data = await service.daemon.read_output(
            job, run, wanted, is_error=is_error, cursor="", lines=lines, wait_s=0.0
        )
        is_found = bool(facts["is_found"])
    kept = data[-TAIL_BYTES:]
    shown = b"".join(kept.splitlines(keepends=True)[-lines:])
    return respond(
        run=run.number,
        path=wanted.path,
        node=wanted.node,
        files=len(files),
        is_found=is_found,
        is_cut=len(data) >= TAIL_BYTES or len(shown) < len(kept),
        text=shown.decode("utf-8", "replace"),
    )


async def log_page(viewer: Viewer, query: PageQuery) -> web.Response:
    """What a run wrote, in pages of 64 KiB that end with a line where lines are short; read with the rights of the
    job's user. Files that were put aside are left out."""
    service = viewer.service
    job = viewer.read(query.path_id, Act.OUTPUT)
    run = _run_named(service, job, query.run)
    default, is_error = service.settings.default.output, query.err
    files = output_files(job, run, default, is_error=is_error)
    others = output_files(job, run, default, is_error=not is_error)
    file = _file_named(files, query.file)
    found = await _page_of(service, job, run, file, query.page, is_error)
    return respond(
        run=run.number,
        path=file.path,
        node=file.node,
        files=[one.label for one in files],
        has_other=[one.path for one in files] != [one.path for one in others],
        is_found=found is not None,
        page=1 if found is None else found.page,
        pages=1 if found is None else found.pages,
        size=0 if found is None else found.size,
        text="" if found is None else found.text.decode("utf-8", "replace"),
    )


@dataclass(frozen=True, slots=True)
class LogPage:
    """One page of a file, counted from 1."""

    page: int
    pages: int
    size: int
    """Of the file, in bytes."""
    text: bytes


def cut_page(data: bytes, page: int, size: int) -> LogPage:
    """A page of a file: from the first line that begins on it to the first one of the next, where lines are short.

    All pages together are the file. Args: data: PAGE_BYTES + LINE_BYTES from the page's begin on, or the rest.
    """
    pages = pages_of(size)
    start = _border(data, 0) if page > 1 else 0
    end = _border(data, PAGE_BYTES) if page < pages else len(data)
    return LogPage(page, pages, size, data[start:end])


def pages_of(size: int) -> int:
    """Number of pages of a file of that many bytes."""
    return max(1, -(-size // PAGE_BYTES))


def _border(data: bytes, at: int) -> int:
    """Where a page begins that would begin at this byte."""
    place = data.find(b"\n", at, at + LINE_BYTES)
    if place != -1:
        return place + 1
    # Not within a character of UTF-8.
    return next((spot for spot in range(at, min(at + 4, len(data))) if data[spot] & 0xC0 != 0x80), min(at, len(data)))


async def _page_of(
    service: ApiService, job: Job, run: Run, file: OutputFile, page: int | None, is_error: bool
) -> LogPage | None:
    """A page, by default the last one; None without a file. Raises: NotFound, NotReady, Refused, TooMany."""
    most = PAGE_BYTES + LINE_BYTES
    if file.node == service.scheduler.cluster.head.name:
        # The last page is somewhere in the last PAGE_BYTES.
        asked_at = -PAGE_BYTES if page is None else (page - 1) * PAGE_BYTES
        found = await service.daemon.read_own_output(job, file.path, asked_at, most)
        if found is None:
            return None
        size, data = found
        begin = max(0, size - PAGE_BYTES) if page is None else asked_at
    else:
        facts, _ = await service.daemon.read_output(job, run, file, is_error=is_error, cursor="", lines=0, wait_s=0.0)
        if not facts["is_found"]:
            return None
        inode, end, _ = facts["cursor"].split(".")
        size = int(end)
        begin = ((page or pages_of(size)) - 1) * PAGE_BYTES
        _, data = await service.daemon.read_output(
            job, run, file, is_error=is_error, cursor=f"{inode}.{begin}.", lines=None, wait_s=0.0
        )
    pages = pages_of(size)
    if page is not None and page > pages:
        raise NotFound(f"{file.path} has {pages} pages, not {page}", f"see: glogs {job.shown_id}")
    number_of_it = page or pages
    # What was written after the look at its size is left to the next one.
    kept = data[: max(0, size - begin)][(number_of_it - 1) * PAGE_BYTES - begin :]
    return cut_page(kept[:most], number_of_it, size)


async def snapshot(viewer: Viewer, query: SnapshotQuery) -> web.Response:
    """A piece of a tar archive of the job's code snapshot, for nodes that do not have it; one of less than 8 MiB is the
    last. For the job's owner."""
    job = viewer.read(query.path_id, Act.OUTPUT)
    body = await viewer.service.daemon.read_snapshot(job, query.at)
    return web.Response(body=body, content_type="application/octet-stream")


def _file_named(files: Sequence[OutputFile], number: int) -> OutputFile:
    """One of the files of a run. Raises: UsageError."""
    if number >= len(files):
        raise UsageError(f"file is {number}; it must be a number from 0 to {len(files) - 1}", "leave it out")
    return files[number]


def _run_named(service: ApiService, job: Job, number: int | None) -> Run:
    """The run of that number, by default the last one. Raises: NotFound, UsageError."""
    wanted = job.run if number is None else number
    run = next((one for one in _runs_of(service, [job]).get(job.id, ()) if one.number == wanted), None)
    if run is None or run.stdout_path is None:
        raise NotFound(f"job {job.shown_id} has no run {wanted}", f"list its runs with: gshow {job.shown_id}")
    return run


def _find(viewer: Viewer, ids: list[int]) -> list[Job]:
    """The named jobs in the given order. Raises: NotFound; Forbidden for jobs whose output the caller must not read."""
    found = viewer.find_all(ids)
    for job_id in ids:
        if job_id not in found:
            raise viewer.missing(job_id)
        viewer.check(found[job_id])
    return [found[job_id] for job_id in ids]


def _tasks(
    service: ApiService, arrays: list[Job], active: list[Job], known: LogVersion, mark: str, feed: UsersCompletions
) -> tuple[list[Job], LogVersion]:
    """The tasks to report, by array and number, and the reader's knowledge afterwards."""
    now = feed.cursor()
    ended = feed.after(known.cursor) if arrays and known.cursor else []
    if ended is None:
        # From another daemon, or too old: start over.
        known = LogVersion()
    if known.place is None:
        wanted = [job_id for job_id in ended or () if any(task_number(array, job_id) is not None for array in arrays)]
        found = service.find_all(wanted)
        return sorted({**{task.id: task for task in active}, **found}.values(), key=_place), LogVersion(mark, now, None)
    ids = _page(arrays, known.place)
    rows = service.scheduler.store.jobs(JobFilter(ids=frozenset(ids))) if ids else ()
    state = service.scheduler.state.jobs
    told = known.place + len(ids)
    is_last = len(ids) < TASKS_AT_ONCE
    return (
        sorted((state.get(job.id, job) for job in rows), key=_place),
        # The cursor is the initial one: later changes follow in the next answer.
        LogVersion("" if is_last and known.place else mark, known.cursor or now, None if is_last else told),
    )


def _page(arrays: list[Job], place: int) -> list[int]:
    """Ids of one answer's tasks, starting at a place counted over all arrays."""
    ids: list[int] = []
    for array in arrays:
        size = len(all_tasks(array))
        first = array.id + 1
        ids += range(first + min(place, size), first + min(place + TASKS_AT_ONCE - len(ids), size))
        place = max(0, place - size)
    return ids


def _place(job: Job) -> tuple[int, int]:
    return job.array_id or 0, job.task or 0


def _runs_of(service: ApiService, jobs: list[Job]) -> dict[int, list[Run]]:
    """Every run of these jobs by number; open runs include facts not yet stored."""
    state = service.scheduler.state
    ids = [job.id for job in jobs]
    runs = {(run.job_id, run.number): run for run in service.scheduler.store.runs(ids)} if ids else {}
    wanted = set(ids)
    for run in (*state.open_runs.values(), *state.releasing.values()):
        if run.job_id in wanted:
            runs[run.job_id, run.number] = run
    found: dict[int, list[Run]] = {}
    for job_id, run_number in sorted(runs):
        found.setdefault(job_id, []).append(runs[job_id, run_number])
    return found


def _mark(jobs: tuple[Job, ...], runs: dict[int, list[Run]]) -> str:
    """A mark that changes with everything relevant to a reader of output."""
    marks = []
    for job in jobs:
        started = [run.start_at is not None for run in runs.get(job.id, ())]
        marks.append((job.id, job.state.value, job.run, sum(started), job.tasks_left))
    return blake2b(repr(marks).encode(), digest_size=8).hexdigest()


def _has_more(array: Job) -> bool:
    return bool(array.tasks_left) and not array.state.is_final


def _head(viewer: Viewer, job: Job) -> dict[str, Any]:
    reason = str(job.reason) if job.reason else None
    text = job.reason_text
    if job.state is JobState.PENDING:
        waits = viewer.service.scheduler.answers.reason_for(job)
        reason, text = (None, None) if waits is None else (str(waits.code), waits.text)
    return {
        "id": job.shown_id,
        "name": job.spec.name,
        "state": job.state.value,
        "reason": reason,
        "reason_text": text,
    }


def _job_json(viewer: Viewer, job: Job, runs: list[Run]) -> dict[str, Any]:
    return {
        **_head(viewer, job),
        "exit_code": job.exit_code,
        "signal": job.signal,
        "run": job.run,
        "log_keep": job.spec.launch.kept_files,
        "runs": [
            {
                "run": run.number,
                "start_at": run.start_at,
                "outcome": None if run.outcome is None else run.outcome.value,
                "exit_code": run.exit_code,
                "signal": run.signal,
                "reason_text": run.reason_text,
                "stdout_path": run.stdout_path,
                "stderr_path": run.stderr_path or run.stdout_path,
                "node": run.node,
                "is_remote": run.node != viewer.service.scheduler.cluster.head.name,
                "outputs": _files_json(viewer, job, run, is_error=False),
                "errors": _files_json(viewer, job, run, is_error=True),
            }
            for run in runs
        ],
    }


def _files_json(viewer: Viewer, job: Job, run: Run, *, is_error: bool) -> list[dict[str, Any]]:
    """The files of one stream of a run; empty if there is only the one of its path."""
    if not (run.parts or starts_ranks(job.spec)):
        return []
    service = viewer.service
    files = output_files(job, run, service.settings.default.output, is_error=is_error)
    head = service.scheduler.cluster.head.name
    return [
        {
            "node": one.node,
            "ranks": list(one.ranks),
            "label": one.label,
            "path": one.path,
            "is_remote": one.node != head,
        }
        for one in files
    ]
