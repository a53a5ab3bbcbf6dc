"""Traces of submissions: one representation of jobs for all formats, and their readers.

Times are whole seconds of the trace's own clock. Nothing is dropped silently: `Trace.dropped` counts and names omitted
jobs with reasons. The format of a file follows from its name and first line:

SWF      18 numbers a line, comments behind `;`, -1 is unknown. Source: Chapin et al., Benchmarks and Standards for the
         Evaluation of Parallel Job Schedulers (1999)
sacct    output of `sacct -P`: JobID, Submit, Start, End (or Elapsed) are required; User, Partition, JobName, State,
         Timelimit, ReqTRES (or AllocTRES), ReqCPUS, ReqMem and NNodes optional. Steps (`12.batch`) are left out
tables   CSV, identified by column names: Philly, Muri, Tiresias, Gavel (submit_s, duration_s or duration_v100_s,
         num_gpus, and the kind of job or its owner; your own may add user, queue, deadline_s and time_limit_s), Pollux
         (several workloads in one table), openb (tasks of the Alibaba cluster; its nodes: `cluster.read_nodes`)

`select_rows` replays parts of a trace one after another, each on an empty machine, as in studies that draw sequences of
jobs from a log (RLScheduler, SC'20).
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from csv import Error, reader
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from gpusched.errors import NotFound, UsageError, UserError
from gpusched.model.cluster import NodeView
from gpusched.model.job import JobSpec, Request
from gpusched.model.units import closest, plural, printable
from gpusched.model.value import Value, replace

_MOST = 10**15
_LONGEST_LINE = 1 << 20
_MOST_LINES = 20_000_000
"""Several times the longest trace of the archives; a pipe may never end."""
"""Maximum of any number in a trace: seconds, cores or MiB."""
_NAMED = 5
"""Number of omitted jobs named per reason; further ones are only counted."""


CUT = "timeout"
"""Value of `TraceJob.outcome` for a job ended at its time limit."""


class BadTrace(UserError):
    """An unreadable trace, with the offending line."""

    code = "bad_trace"


class TraceJob(Value):
    id: str
    """Its name in the trace."""
    submit_s: int
    run_s: int
    """Run time."""
    estimate_s: int
    """The user's estimate, at least the run time, since it would have ended the run; `run_s` if none was given."""
    gpus: int = 0
    procs: int = 0
    """Processors of a rigid job that may be anywhere; 0 for a job with `cpus` cores on each of its nodes."""
    cpus: float = 0.0
    mem_mib: int = 0
    user: str = ""
    queue: str = ""
    name: str = ""
    """Kind of job, if the trace has it: a program, a model."""
    gpu_fraction: float | None = None
    """Fraction of one card, if requested."""
    gpu_types: tuple[str, ...] = ()
    """Acceptable models; empty for all."""
    outcome: str = ""
    """How it ended, in the trace's own words; empty if unknown."""
    spec: JobSpec | None = None
    """The complete submission, for a job that gpusched itself has run."""
    attempts: tuple[tuple[int, str], ...] = ()
    """Length and outcome of each run that ended by itself, in order, if known; empty: one run of `run_s`."""
    deadline_s: int | None = None
    """Latest end."""
    account: str = ""
    """Account whose share it uses; empty for none."""

    @property
    def mark(self) -> tuple[object, ...]:
        """Owner and request without the run time: equal for similar jobs."""
        return self.user, self.account, self.queue, self.gpus, self.procs, self.cpus, self.mem_mib, self.gpu_fraction


@dataclass(slots=True)
class Dropped:
    """Jobs omitted for one reason."""

    count: int = 0
    named: list[str] = field(default_factory=list)
    """Names of the first few."""

    def __str__(self) -> str:
        more = self.count - len(self.named)
        return f"{self.count} ({', '.join(self.named)}{f' and {more} more' if more else ''})"


@dataclass(slots=True)
class Trace:
    """Jobs of a trace in file order, which breaks ties between equal submission times."""

    name: str
    jobs: list[TraceJob]
    dropped: dict[str, Dropped] = field(default_factory=dict)
    """By reason."""
    procs: int | None = None
    """Processors of the traced machine, if stated."""
    notes: list[str] = field(default_factory=list)
    """Corrections made, one sentence each."""
    begins_at: float = 0.0
    """UTC epoch seconds of its second 0, if known: periods of budgets are the calendar's."""

    def drop(self, why: str, name: str) -> None:
        """Count an omitted job."""
        one = self.dropped.setdefault(why, Dropped())
        one.count += 1
        if len(one.named) < _NAMED:
            one.named.append(name)

    def document(self) -> dict[str, Any]:
        """JSON object."""
        dropped = {why: {"count": one.count, "first": one.named} for why, one in self.dropped.items()}
        return {"trace": self.name, "dropped": dropped, "notes": self.notes}

    def keep_those_that_fit(self, *, gpus: int, procs: int) -> None:
        """Remove, count and name jobs larger than the cluster. Raises: BadTrace if no job remains."""
        kept = []
        for job in self.jobs:
            if job.gpus > gpus:
                self.drop(f"requests more than the {plural(gpus, 'GPU')} of the cluster", job.id)
            elif job.procs > procs:
                self.drop(f"requests more than the {procs} processors of the cluster", job.id)
            else:
                kept.append(job)
        self.jobs = kept
        if not kept:
            raise BadTrace(f"no job of {self.name} fits on the cluster", "give a larger one with --nodes")


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a text file, plain or gzip, each with its number from 1.

    Raises: NotFound; BadTrace for a truncated file, one that is not gzip despite its name, or one that is not UTF-8.
    """
    number = 0
    # Tables written by Excel start with a byte order mark.
    marks = "\ufeff"
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            lines: BinaryIO | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if is_packed else raw
            while line := lines.readline(_LONGEST_LINE + 1):
                number += 1
                if len(line) > _LONGEST_LINE:
                    raise BadTrace(f"{path} line {number} is longer than {_LONGEST_LINE >> 10} KiB", f"file {path}")
                if number > _MOST_LINES:
                    raise BadTrace(f"{path} has more than {_MOST_LINES} lines", f"head -n 1000000 {path} > part")
                text = line.decode("utf-8").rstrip("\r\n")
                yield number, text.lstrip(marks) if number == 1 else text
    except FileNotFoundError:
        raise NotFound(f"there is no trace {path}", "give the path of a trace") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise BadTrace(f"{path} is cut short or damaged after line {number}", f"gzip -t {path}") from None
    except UnicodeDecodeError:
        raise BadTrace(f"{path} line {number} is not text in UTF-8", f"file {path}") from None
    except IsADirectoryError:
        raise BadTrace(f"{path} is a folder, not a trace", f"ls {path}") from None
    except OSError as error:
        raise BadTrace(f"{path} cannot be read: {(error.strerror or str(error)).lower()}", f"ls -l {path}") from None


def whole(text: str, what: str, path: Path, number: int) -> int:
    """Parse a number, rounding fractions down. Raises: BadTrace with the location and the value."""
    try:
        found = int(text) if text.lstrip("-").isdecimal() else int(float(text))
    except (ValueError, OverflowError):
        raise BadTrace(
            f"{path} line {number}: {what} is {printable(text, 40)!r}, not a number", f"sed -n {number}p {path}"
        ) from None
    if abs(found) > _MOST:
        raise BadTrace(
            f"{path} line {number}: {what} is {printable(text, 40)}, which is out of range", f"sed -n {number}p {path}"
        )
    return found


def finished(trace: Trace, path: Path) -> Trace:
    """Check a trace after reading. Raises: BadTrace if it has no job that can be replayed."""
    if not trace.jobs:
        why = "; ".join(f"{reason}: {one}" for reason, one in trace.dropped.items())
        raise BadTrace(f"{path} holds no job to replay{f' ({why})' if why else ''}", f"head {path}")
    late = sum(after.submit_s < before.submit_s for before, after in zip(trace.jobs, trace.jobs[1:], strict=False))
    if late:
        trace.notes.append(f"{plural(late, 'job')} submitted before the one above; each arrives at its own time")
    twice = len(trace.jobs) - len({job.id for job in trace.jobs})
    if twice:
        trace.notes.append(f"{plural(twice, 'job')} with a duplicate id; each line is a separate job")
    return trace


def request_of(job: TraceJob, nodes: Sequence[NodeView]) -> Request:
    """Policy request of a trace's job on these machines.

    More GPUs than any node has become a gang: whole nodes, and one more for the remainder.
    """
    if job.procs and not job.gpus:
        return Request(cpus=float(job.procs))
    size = max(len(node.gpus) for node in nodes)
    fields = {"cpus": job.cpus, "mem_mib": job.mem_mib}
    if job.gpus <= size:
        return Request(gpus=job.gpus, gpu_fraction=job.gpu_fraction, **fields)  # type: ignore[arg-type]
    return Request(gpus=size, nodes=job.gpus // size, tail_gpus=job.gpus % size, **fields)  # type: ignore[arg-type]


def with_estimates(jobs: Iterable[TraceJob], estimate: str) -> list[TraceJob]:
    """The same jobs with other estimates: `exact`, the run time of each; `given`, unchanged."""
    return [replace(job, estimate_s=job.run_s) for job in jobs] if estimate == "exact" else list(jobs)


def read_trace(path: Path, **options: int) -> Trace:
    """Read a trace in the format given by the file's name and first line.

    Raises: NotFound, BadTrace.
    """

    name = path.name.removesuffix(".gz")
    if name.endswith(".swf"):
        return read_swf(path)
    first = next((line for _, line in lines_of(path)), "")
    if not first:
        raise BadTrace(f"{path} is empty", f"ls -l {path}")
    if first.startswith(";"):
        return read_swf(path)
    if "|" in first and "JobID" in first.split("|"):
        return read_sacct(path)
    return read_table(path, **options)


RowRange = tuple[int, int]
"""Index of the first job in the trace, from 0, and number of jobs."""


def parse_rows(texts: Iterable[str]) -> list[RowRange]:
    """Parse `FIRST:COUNT`. Raises: UsageError for invalid text."""
    found = []
    for text in texts:
        match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", text)
        if match is None or not int(match[2]):
            raise UsageError(f"{text!r} is not a range of rows", "first row (from 0) and count: --rows 0:1024")
        found.append((int(match[1]), int(match[2])))
    return found


def select_rows(trace: Trace, rows: Sequence[RowRange]) -> None:
    """Reduce a trace to these parts, each starting after all earlier jobs have ended.

    Raises: UsageError for rows beyond the trace.
    """
    jobs: list[TraceJob] = []
    start_s = 0
    for first, count in rows:
        part = trace.jobs[first : first + count]
        if len(part) < count:
            text = f"{trace.name} has {len(trace.jobs)} jobs, and not those of rows {first}:{count}"
            raise UsageError(text, f"--rows 0:{min(count, len(trace.jobs))}")
        later_s = start_s - min(job.submit_s for job in part)
        jobs += [replace(job, submit_s=job.submit_s + later_s) for job in part]
        # If all ran sequentially, the last would end here.
        start_s = max(job.submit_s for job in jobs[-count:]) + sum(max(job.run_s, job.estimate_s) for job in part)
    trace.jobs = jobs
    if len(rows) > 1:
        trace.notes.append(
            f"{len(rows)} parts, replayed one after another: the makespan includes the gaps between them"
        )


_FIELDS = 18
_OUTCOMES = {0: "failed", 1: "completed", 5: "cancelled"}


def read_swf(path: Path) -> Trace:
    """Jobs of an SWF log, by submission; the size of the machine is MaxProcs of its header.

    Takes the requested processors, or else the allocated ones; estimates are at least the run time.
    Raises: NotFound, BadTrace.
    """
    trace = Trace(path.name, [])
    for number, line in lines_of(path):
        if line.startswith(";"):
            name, _, value = line[1:].partition(":")
            if name.strip() == "MaxProcs":
                trace.procs = whole(value.strip(), "MaxProcs", path, number)
            continue
        if line.strip():
            _take_swf(trace, path, number, line.split())
    return finished(trace, path)


def _take_swf(trace: Trace, path: Path, number: int, fields: list[str]) -> None:
    if len(fields) != _FIELDS:
        text = f"{path} line {number} has {len(fields)} columns, a line of SWF has {_FIELDS}"
        raise BadTrace(text, f"sed -n {number}p {path}")
    submit_s, run_s = whole(fields[1], "the submission", path, number), whole(fields[3], "the run time", path, number)
    asked, given = whole(fields[7], "the processors", path, number), whole(fields[4], "the processors", path, number)
    estimate_s = whole(fields[8], "the time asked for", path, number)
    procs = asked if asked > 0 else given
    if submit_s < 0:
        trace.drop("submitted before the trace begins", fields[0])
    elif run_s <= 0:
        trace.drop("did not run", fields[0])
    elif procs <= 0:
        trace.drop("requests no processor", fields[0])
    elif trace.procs is not None and procs > trace.procs:
        trace.drop(f"requests more than the {trace.procs} processors of the machine", fields[0])
    else:
        trace.jobs.append(
            TraceJob(
                id=fields[0],
                submit_s=submit_s,
                run_s=run_s,
                estimate_s=max(run_s, estimate_s),
                procs=procs,
                user=fields[11] if fields[11] != "-1" else "",
                queue=fields[14] if fields[14] != "-1" else "",
                outcome=_OUTCOMES.get(whole(fields[10], "the status", path, number), ""),
            )
        )


_SACCT_MOST = 10**10
"""Maximum plausible run time in seconds, and amount of any resource."""
_UNKNOWN = ("", "Unknown", "None", "N/A")
_MEM = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}


def read_sacct(path: Path) -> Trace:
    """Jobs with a start, by submission, on a clock that starts with the first of them.

    Raises: NotFound, BadTrace.
    """
    trace = Trace(path.name, [])
    names: list[str] = []
    for number, line in lines_of(path):
        cells = line.split("|")
        if not names:
            names = cells
            missing = [name for name in ("JobID", "Submit", "Start") if name not in names]
            if "End" not in names and "Elapsed" not in names:
                missing.append("End")
            if missing:
                text = f"{path} has no column {', '.join(missing)}"
                raise BadTrace(text, "sacct -P -o JobID,User,Partition,Submit,Start,End,Timelimit,ReqTRES,State")
        elif line:
            if len(cells) != len(names):
                text = f"{path} line {number} has {len(cells)} columns, its first line {len(names)}"
                raise BadTrace(text, f"sed -n {number}p {path}")
            _take_sacct(trace, path, number, dict(zip(names, cells, strict=True)))
    finished(trace, path)
    first_s = min(job.submit_s for job in trace.jobs)
    trace.jobs = [replace(job, submit_s=job.submit_s - first_s) for job in trace.jobs]
    return trace


def _take_sacct(trace: Trace, path: Path, number: int, row: dict[str, str]) -> None:
    job_id = row["JobID"]
    if "." in job_id:
        return
    submit_s, start_s = _instant(row["Submit"], path, number), _instant(row["Start"], path, number)
    if row.get("Elapsed", "") not in _UNKNOWN:
        run_s: int | None = _span_s(row["Elapsed"], path, number)
    else:
        end_s = _instant(row.get("End", ""), path, number)
        run_s = None if end_s is None or start_s is None else end_s - start_s
    if submit_s is None:
        trace.drop("has no submission time", job_id)
        return
    if start_s is None or not run_s:
        trace.drop("did not run", job_id)
        return
    if run_s < 0:
        trace.drop("ended before it began", job_id)
        return
    limit = row.get("Timelimit", "")
    limit_s = None if limit in (*_UNKNOWN, "UNLIMITED", "Partition_Limit") else _span_s(limit, path, number)
    tres = _tres(row.get("ReqTRES") or row.get("AllocTRES") or "")
    try:
        gpus, cpus = int(tres.get("gres/gpu", "0")), float(tres.get("cpu") or row.get("ReqCPUS") or "0")
        mem_mib = _mib(tres.get("mem", ""))
        if not (0 <= gpus <= _SACCT_MOST and 0 <= cpus <= _SACCT_MOST and 0 <= mem_mib <= _SACCT_MOST):
            raise ValueError
    except (ValueError, OverflowError):
        text = printable(row.get("ReqTRES") or row.get("AllocTRES") or row.get("ReqCPUS") or "", 60)
        raise BadTrace(
            f"{path} line {number}: {text!r} is not a list of resources", f"sed -n {number}p {path}"
        ) from None
    trace.jobs.append(
        TraceJob(
            id=job_id,
            submit_s=submit_s,
            run_s=run_s,
            estimate_s=max(run_s, limit_s or 0),
            gpus=gpus,
            cpus=cpus,
            mem_mib=mem_mib,
            user=row.get("User", ""),
            queue=row.get("Partition", ""),
            name=row.get("JobName", ""),
            outcome=row.get("State", "").split(" ")[0].lower(),
        )
    )


def _tres(text: str) -> dict[str, str]:
    """Parse `cpu=4,mem=16G,gres/gpu=2,gres/gpu:a100=2` by name."""
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


def _mib(text: str) -> int:
    number, unit = (text[:-1], text[-1]) if text and text[-1].isalpha() else (text, "M")
    return int(float(number or 0) * _MEM.get(unit.upper(), 1.0))


def _instant(text: str, path: Path, number: int) -> int | None:
    """Parse an instant of sacct: local time without a zone, as only differences matter here."""
    if text in _UNKNOWN:
        return None
    try:
        if text.isdigit():
            return whole(text, "an instant", path, number)
        return int(datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp())
    except (ValueError, OverflowError):
        shown = printable(text, 40)
        raise BadTrace(f"{path} line {number}: {shown!r} is not a time", f"sed -n {number}p {path}") from None


def _span_s(text: str, path: Path, number: int) -> int:
    """Parse `[DD-]HH:MM:SS` or `MM:SS` to seconds."""
    days, _, clock = text.rpartition("-")
    try:
        parts = [int(float(part)) for part in clock.split(":")]
        if not 2 <= len(parts) <= 3:
            raise ValueError(text)
        hours, minutes, seconds = (0, *parts)[-3:]
        found_s = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
        if not 0 <= found_s <= _SACCT_MOST:
            raise ValueError(text)
    except (ValueError, OverflowError):
        shown = printable(text, 40)
        raise BadTrace(f"{path} line {number}: {shown!r} is not a duration", f"sed -n {number}p {path}") from None
    return found_s


Row = Mapping[str, str]

_JOB_COLUMNS = frozenset(
    {
        *("job_id", "name", "submit_s", "duration_s", "duration_v100_s", "jct_tiresias_s", "num_gpus", "workload"),
        *("model", "job_type", "application", "user", "queue", "vc", "deadline_s", "time_limit_s"),
    }
)
_OF_OTHERS = frozenset({"steps", "batch_size", "jct_optimus_s", "jct_pollux_s"})
"""Columns of the published tables that are irrelevant to schedules."""
_RUN_TIMES = ("duration_s", "duration_v100_s", "jct_tiresias_s")
_PODS = {"name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"}
_POD_COLUMNS = frozenset({*_PODS, "gpu_spec", "qos", "pod_phase", "creation_time", "deletion_time", "scheduled_time"})


def rows_of(path: Path, wanted: frozenset[str] | set[str]) -> Iterator[tuple[int, Row]]:
    """Rows of a table with a header, each with its line number.

    Raises: BadTrace if a wanted column is missing, or a row is longer or shorter than the header.
    """
    names: list[str] = []
    for number, line in lines_of(path):
        try:
            cells = next(reader([line]), [])
        except Error as error:
            raise BadTrace(
                f"{path} line {number} is not a row of a table: {error}", f"sed -n {number}p {path}"
            ) from None
        if not names:
            names = cells
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise BadTrace(f"{path} has two columns {printable(twice, 40)!r}", f"head -1 {path}")
            missing = sorted(wanted - set(names))
            if missing:
                text = f"{path} has no column {', '.join(missing)}; it has {', '.join(names) or 'none'}"
                raise BadTrace(text, f"head -1 {path}")
        elif len(cells) != len(names) and cells:
            text = f"{path} line {number} has {len(cells)} columns, its first line {len(names)}"
            raise BadTrace(text, f"sed -n {number}p {path}")
        elif cells:
            yield number, dict(zip(names, cells, strict=True))


def columns_of(path: Path, known: frozenset[str]) -> tuple[list[str], list[str]]:
    """Columns in the header of a table, and the unknown ones among them.

    Raises: BadTrace for a misspelt known column, which would otherwise be ignored silently.
    """
    line = next((line for _, line in lines_of(path)), "")
    names = next(reader([line]), [])
    unknown = [name for name in names if name not in known]
    for name in unknown:
        near = closest(name, sorted(known - set(names)))
        if near is not None:
            raise BadTrace(
                f"{path} has a column {printable(name, 40)!r}; did you mean {near}?",
                f"rename it in the first line: head -1 {path}",
            )
    return names, unknown


def _note_unknown(trace: Trace, unknown: list[str]) -> None:
    if unknown:
        trace.notes.append(f"ignored columns: {', '.join(printable(name, 40) for name in unknown)}")


def read_table(path: Path, workload: int = 1) -> Trace:
    """Jobs of a table, by submission; from a table of several workloads, the one with this number.

    Raises: NotFound, BadTrace.
    """
    first = next((line for _, line in lines_of(path)), "")
    if set(first.split(",")) >= _PODS:
        return read_pods(path)
    names, unknown = columns_of(path, _JOB_COLUMNS | _OF_OTHERS)
    trace = Trace(path.name, [])
    _note_unknown(trace, unknown)
    run_time = next((name for name in _RUN_TIMES if name in names), _RUN_TIMES[0])
    for number, row in rows_of(path, {"submit_s", run_time, "num_gpus"}):
        if "workload" in row and row["workload"] != str(workload):
            continue
        submit_s = whole(row["submit_s"], "submit_s", path, number)
        run_s, gpus = whole(row[run_time], run_time, path, number), whole(row["num_gpus"], "num_gpus", path, number)
        name = row.get("job_id") or row.get("name") or str(number - 1)
        # If only some jobs had limits, the knowledge about each job would be ambiguous.
        limit_s = whole(row["time_limit_s"], "time_limit_s", path, number) if "time_limit_s" in row else None
        if submit_s < 0:
            trace.drop("submitted before the trace begins", name)
        elif limit_s is not None and limit_s < 1:
            trace.drop("has a time limit of less than a second", name)
        elif run_s < 0:
            trace.drop("ended before it began", name)
        elif run_s < 1:
            trace.drop("did not run", name)
        elif gpus < 1:
            trace.drop("requests no GPU", name)
        else:
            kind = row.get("model") or row.get("job_type") or row.get("application") or ""
            trace.jobs.append(
                TraceJob(
                    id=name,
                    submit_s=submit_s,
                    # A longer run is ended at its limit.
                    run_s=run_s if limit_s is None else min(run_s, limit_s),
                    estimate_s=limit_s or run_s,
                    gpus=gpus,
                    user=row.get("user", ""),
                    queue=row.get("queue") or row.get("vc", ""),
                    name=kind,
                    outcome=CUT if limit_s is not None and run_s > limit_s else "",
                    deadline_s=whole(row["deadline_s"], "deadline_s", path, number) if row.get("deadline_s") else None,
                )
            )
    return finished(trace, path)


def read_pods(path: Path) -> Trace:
    """Tasks of openb, in order of creation, or of the file if unknown.

    Raises: NotFound, BadTrace.
    """
    trace = Trace(path.name, [])
    _note_unknown(trace, columns_of(path, _POD_COLUMNS)[1])
    for number, row in rows_of(path, _PODS):
        gpus, gpu_milli, cpu_milli, mem_mib = (
            whole(row[name], name, path, number) for name in ("num_gpu", "gpu_milli", "cpu_milli", "memory_mib")
        )
        created_s, began_s, ended_s = (
            whole(row.get(name) or "0", name, path, number)
            for name in ("creation_time", "scheduled_time", "deletion_time")
        )
        if min(gpus, gpu_milli, cpu_milli, mem_mib, created_s) < 0:
            trace.drop("requests a negative amount", row["name"])
            continue
        if gpus == 1 and not gpu_milli:
            trace.drop("requests nothing of a GPU", row["name"])
            continue
        run_s = max(1, ended_s - (began_s or created_s))
        trace.jobs.append(
            TraceJob(
                id=row["name"],
                submit_s=created_s,
                run_s=run_s,
                estimate_s=run_s,
                gpus=gpus,
                cpus=cpu_milli / 1000,
                mem_mib=mem_mib,
                queue=row.get("qos", ""),
                gpu_fraction=gpu_milli / 1000 if gpus == 1 and gpu_milli < 1000 else None,
                gpu_types=tuple(filter(None, row.get("gpu_spec", "").split("|"))),
                outcome=row.get("pod_phase", ""),
            )
        )
    return finished(trace, path)
