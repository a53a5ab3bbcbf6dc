"""Parts of a trace, replayed one after another: what is measured is then the mean over all of them.

Each begins on an empty machine, as in the studies that draw sequences of jobs from a log (RLScheduler, SC'20).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gpusched.errors import UsageError
from gpusched.model.value import replace
from gpusched.simulate.trace import Trace, TraceJob

Segment = tuple[int, int]
"""The place of the first job in the trace, from 0, and how many there are."""


def segments_of(texts: Iterable[str]) -> list[Segment]:
    """Parts named `FIRST:COUNT`. Raises: UsageError for a text that is none."""
    found = []
    for text in texts:
        match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", text)
        if match is None or not int(match[2]):
            raise UsageError(f"{text!r} names no rows of a trace", "the first from 0, and how many: --rows 0:1024")
        found.append((int(match[1]), int(match[2])))
    return found


def pick(trace: Trace, rows: Sequence[Segment]) -> None:
    """Leave these parts alone in the trace, each so late that all that came before it has ended by then.

    Raises: UsageError for rows that it does not have.
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
        # If none ever ran beside another, this is when the last would end.
        start_s = max(job.submit_s for job in jobs[-count:]) + sum(max(job.run_s, job.estimate_s) for job in part)
    trace.jobs = jobs
    if len(rows) > 1:
        trace.notes.append(
            f"{len(rows)} parts, one after another: times from first to last count the gaps between them"
        )
