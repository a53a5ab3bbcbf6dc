"""Traces as CSV tables, told apart by the names of their columns.

Philly, Muri, Tiresias, Gavel   submit_s, duration_s (duration_v100_s), num_gpus, and what the job is or whose;
                                one's own may have user, queue, deadline_s and time_limit_s besides
Pollux                          several workloads in one table; run times are those it reports for one scheduler
openb                           tasks of the Alibaba cluster (`read_pods`) and its nodes (`cluster.read_nodes`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from csv import Error, reader
from pathlib import Path

from gpusched.model.units import closest, printable
from gpusched.simulate.trace import CUT, BadTrace, Trace, TraceJob, finished, lines_of, whole

Row = Mapping[str, str]

_JOB_COLUMNS = frozenset(
    {
        *("job_id", "name", "submit_s", "duration_s", "duration_v100_s", "jct_tiresias_s", "num_gpus", "workload"),
        *("model", "job_type", "application", "user", "queue", "vc", "deadline_s", "time_limit_s"),
    }
)
_OF_OTHERS = frozenset({"steps", "batch_size", "jct_optimus_s", "jct_pollux_s"})
"""Columns of the published tables that say nothing of a schedule."""
_RUN_TIMES = ("duration_s", "duration_v100_s", "jct_tiresias_s")
_PODS = {"name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"}
_POD_COLUMNS = frozenset({*_PODS, "gpu_spec", "qos", "pod_phase", "creation_time", "deletion_time", "scheduled_time"})


def rows_of(path: Path, wanted: frozenset[str] | set[str]) -> Iterator[tuple[int, Row]]:
    """The rows of a table with a first line of names, each with its line.

    Raises: BadTrace when a column that is wanted is missing, or a row is longer or shorter than the first line.
    """
    names: list[str] = []
    for number, line in lines_of(path):
        try:
            cells = next(reader([line]), [])
        except Error as error:
            raise BadTrace(f"{path} line {number} is no row of a table: {error}", f"sed -n {number}p {path}") from None
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
    """The names in the first line of a table, and those of them that are not known.

    Raises: BadTrace for one that is a slip of a known column, which would be missing without a word.
    """
    line = next((line for _, line in lines_of(path)), "")
    names = next(reader([line]), [])
    unknown = [name for name in names if name not in known]
    for name in unknown:
        near = closest(name, sorted(known - set(names)))
        if near is not None:
            raise BadTrace(
                f"{path} has a column {printable(name, 40)!r}, which is not known; did you mean {near}?",
                f"rename it in the first line: head -1 {path}",
            )
    return names, unknown


def _note_unknown(trace: Trace, unknown: list[str]) -> None:
    if unknown:
        trace.notes.append(f"columns that are not read: {', '.join(printable(name, 40) for name in unknown)}")


def read_table(path: Path, workload: int = 1) -> Trace:
    """The jobs of a table, by submission; of several workloads in one table the one with this number.

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
        # With a limit for some and none for others nobody could tell what is known of a job.
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
            trace.drop("asks for no GPU", name)
        else:
            kind = row.get("model") or row.get("job_type") or row.get("application") or ""
            trace.jobs.append(
                TraceJob(
                    id=name,
                    submit_s=submit_s,
                    # What would run on is ended at its limit.
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
    """The tasks of openb, in the order of their creation, or of the list where it does not say.

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
            trace.drop("asks for less than nothing", row["name"])
            continue
        if gpus == 1 and not gpu_milli:
            trace.drop("asks for nothing of a GPU", row["name"])
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
