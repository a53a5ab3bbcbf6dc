"""The Standard Workload Format: 18 numbers a line, comments behind `;`.

Source: Chapin et al., Benchmarks and Standards for the Evaluation of Parallel Job Schedulers (1999). -1 is unknown.
"""

from __future__ import annotations

from pathlib import Path

from gpusched.simulate.trace import BadTrace, Trace, TraceJob, finished, lines_of, whole

_FIELDS = 18
_OUTCOMES = {0: "failed", 1: "completed", 5: "cancelled"}


def read_swf(path: Path) -> Trace:
    """The jobs of a log, by submission; the size of the machine is MaxProcs of its header.

    Processors are those that were asked for, or else those that were given; an estimate is never less than the run.
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
            _take(trace, path, number, line.split())
    return finished(trace, path)


def _take(trace: Trace, path: Path, number: int, fields: list[str]) -> None:
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
        trace.drop("asks for no processor", fields[0])
    elif trace.procs is not None and procs > trace.procs:
        trace.drop(f"asks for more than the {trace.procs} processors of the machine", fields[0])
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
