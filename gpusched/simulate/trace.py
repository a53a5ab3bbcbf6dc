"""What was submitted, by whom, when and for how long: one form of job for all kinds of traces.

Times are whole seconds of the trace's own clock. Nothing is dropped in silence: `Trace.dropped` counts and names what
was left out, and why. The readers of single formats are in `swf`, `tables` and `slurm`; which one a file needs is told
by its name and its first line.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpusched.errors import NotFound, UserError
from gpusched.model.job import JobSpec
from gpusched.model.units import plural, printable
from gpusched.model.value import Value, replace

_MOST = 10**15
"""No number of a trace is larger, be it seconds, cores or MiB."""
_NAMED = 5
"""So many jobs of one kind that was left out are named; the rest is counted."""


CUT = "timeout"
"""How a job ended that was ended at its time limit, in the words of `TraceJob.outcome`."""


class BadTrace(UserError):
    """A trace that cannot be read, with the line where that was seen."""

    code = "bad_trace"


class TraceJob(Value):
    """One job of a trace."""

    id: str
    """What the trace calls it."""
    submit_s: int
    run_s: int
    """How long it holds what it was given."""
    estimate_s: int
    """What its user said, and never less than it ran: the run would have been ended. `run_s` where nothing was said."""
    gpus: int = 0
    procs: int = 0
    """Processors of a rigid job that may lie anywhere; 0 of one whose cores are `cpus` of each of its nodes."""
    cpus: float = 0.0
    mem_mib: int = 0
    user: str = ""
    queue: str = ""
    name: str = ""
    """What kind of job it is, as far as the trace tells: a program, a model."""
    gpu_fraction: float | None = None
    """Of one card, where it asks for a part."""
    gpu_types: tuple[str, ...] = ()
    """Models it accepts; none: all."""
    outcome: str = ""
    """How it ended, in the trace's own words; empty when nobody knows."""
    spec: JobSpec | None = None
    """All that was asked, of a job that gpusched itself has run."""
    attempts: tuple[tuple[int, str], ...] = ()
    """Seconds and end of each run that ended by itself, first to last, where that is known; none: one, of `run_s`."""
    deadline_s: int | None = None
    """When it was to be over at the latest."""
    account: str = ""
    """Whose shares it uses; empty: no account's."""

    @property
    def mark(self) -> tuple[object, ...]:
        """Whose it is and what it asks for, but for how long: equal for jobs that are alike."""
        return self.user, self.account, self.queue, self.gpus, self.procs, self.cpus, self.mem_mib, self.gpu_fraction


@dataclass(slots=True)
class Dropped:
    """Jobs that were left out for one reason."""

    count: int = 0
    named: list[str] = field(default_factory=list)
    """The first few of them."""

    def __str__(self) -> str:
        more = self.count - len(self.named)
        return f"{self.count} ({', '.join(self.named)}{f' and {more} more' if more else ''})"


@dataclass(slots=True)
class Trace:
    """The jobs of a trace in the order of the file, which decides between those of one instant."""

    name: str
    jobs: list[TraceJob]
    dropped: dict[str, Dropped] = field(default_factory=dict)
    """By reason."""
    procs: int | None = None
    """Processors of the machine that the trace is of, where it says."""
    notes: list[str] = field(default_factory=list)
    """What was put right, a sentence each."""

    def drop(self, why: str, name: str) -> None:
        """Count a job that is left out."""
        one = self.dropped.setdefault(why, Dropped())
        one.count += 1
        if len(one.named) < _NAMED:
            one.named.append(name)

    def keep_those_that_fit(self, *, gpus: int, procs: int) -> None:
        """Leave out, counted and named, what is larger than the cluster. Raises: BadTrace when nothing is left."""
        kept = []
        for job in self.jobs:
            if job.gpus > gpus:
                self.drop(f"asks for more than the {plural(gpus, 'GPU')} of the cluster", job.id)
            elif job.procs > procs:
                self.drop(f"asks for more than the {procs} processors of the cluster", job.id)
            else:
                kept.append(job)
        self.jobs = kept
        if not kept:
            raise BadTrace(f"no job of {self.name} fits on the cluster", "give a larger one with --nodes")


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, plain or gzip, each with its number from 1.

    Raises: NotFound; BadTrace for a file that is cut short, is no gzip in spite of its name, or is not UTF-8.
    """
    number = 0
    # A table that Excel has written begins with a mark.
    marks = "\ufeff"
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            lines: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if is_packed else raw
            for line in lines:
                number += 1
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
    """A number of whole units; fractions are rounded down. Raises: BadTrace with the place and the value."""
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
    """The trace, read to its end. Raises: BadTrace when it holds no job that can be replayed."""
    if not trace.jobs:
        why = "; ".join(f"{reason}: {one}" for reason, one in trace.dropped.items())
        raise BadTrace(f"{path} holds no job to replay{f' ({why})' if why else ''}", f"head {path}")
    late = sum(after.submit_s < before.submit_s for before, after in zip(trace.jobs, trace.jobs[1:], strict=False))
    if late:
        trace.notes.append(f"{plural(late, 'job')} submitted before the one above; each arrives at its own instant")
    twice = len(trace.jobs) - len({job.id for job in trace.jobs})
    if twice:
        trace.notes.append(f"{plural(twice, 'job')} with the id of one above; each line is a job of its own")
    return trace


def with_estimates(jobs: Iterable[TraceJob], estimate: str) -> list[TraceJob]:
    """The same jobs with other estimates: `exact`, what each ran; `given`, as they are."""
    return [replace(job, estimate_s=job.run_s) for job in jobs] if estimate == "exact" else list(jobs)


def read_trace(path: Path, **options: int) -> Trace:
    """The trace of a file, by its name and first line.

    Raises: NotFound, BadTrace.
    """
    from gpusched.simulate import slurm, swf, tables

    name = path.name.removesuffix(".gz")
    if name.endswith(".swf"):
        return swf.read_swf(path)
    first = next((line for _, line in lines_of(path)), "")
    if not first:
        raise BadTrace(f"{path} is empty", f"ls -l {path}")
    if first.startswith(";"):
        return swf.read_swf(path)
    if "|" in first and "JobID" in first.split("|"):
        return slurm.read_sacct(path)
    return tables.read_table(path, **options)
