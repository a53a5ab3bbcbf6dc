"""What `sacct -P` prints: a table with `|` between its columns, jobs and their steps.

Wanted are JobID, Submit, Start, End (or Elapsed); read where they are there are User, Partition, JobName, State,
Timelimit, ReqTRES (or AllocTRES), ReqCPUS, ReqMem and NNodes. Steps (`12.batch`) are part of their job and left out.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from gpusched.model.units import printable
from gpusched.model.value import replace
from gpusched.simulate.trace import BadTrace, Trace, TraceJob, finished, lines_of, whole

_MOST = 10**10
"""No job has run for so many seconds, or asked for so many of anything."""
_UNKNOWN = ("", "Unknown", "None", "N/A")
_MEM = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}


def read_sacct(path: Path) -> Trace:
    """The jobs that ran, by submission, on a clock that begins with the first of them.

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
            _take(trace, path, number, dict(zip(names, cells, strict=True)))
    finished(trace, path)
    first_s = min(job.submit_s for job in trace.jobs)
    trace.jobs = [replace(job, submit_s=job.submit_s - first_s) for job in trace.jobs]
    return trace


def _take(trace: Trace, path: Path, number: int, row: dict[str, str]) -> None:
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
        trace.drop("has no instant of submission", job_id)
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
        if not (0 <= gpus <= _MOST and 0 <= cpus <= _MOST and 0 <= mem_mib <= _MOST):
            raise ValueError
    except (ValueError, OverflowError):
        text = printable(row.get("ReqTRES") or row.get("AllocTRES") or row.get("ReqCPUS") or "", 60)
        raise BadTrace(f"{path} line {number}: {text!r} are no resources", f"sed -n {number}p {path}") from None
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
    """`cpu=4,mem=16G,gres/gpu=2,gres/gpu:a100=2` by name."""
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


def _mib(text: str) -> int:
    number, unit = (text[:-1], text[-1]) if text and text[-1].isalpha() else (text, "M")
    return int(float(number or 0) * _MEM.get(unit.upper(), 1.0))


def _instant(text: str, path: Path, number: int) -> int | None:
    """Slurm prints local time without a zone; only differences matter here."""
    if text in _UNKNOWN:
        return None
    try:
        if text.isdigit():
            return whole(text, "an instant", path, number)
        return int(datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp())
    except (ValueError, OverflowError):
        shown = printable(text, 40)
        raise BadTrace(f"{path} line {number}: {shown!r} is no instant", f"sed -n {number}p {path}") from None


def _span_s(text: str, path: Path, number: int) -> int:
    """`[DD-]HH:MM:SS` or `MM:SS` in seconds."""
    days, _, clock = text.rpartition("-")
    try:
        parts = [int(float(part)) for part in clock.split(":")]
        if not 2 <= len(parts) <= 3:
            raise ValueError(text)
        hours, minutes, seconds = (0, *parts)[-3:]
        found_s = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
        if not 0 <= found_s <= _MOST:
            raise ValueError(text)
    except (ValueError, OverflowError):
        shown = printable(text, 40)
        raise BadTrace(f"{path} line {number}: {shown!r} is no time span", f"sed -n {number}p {path}") from None
    return found_s
