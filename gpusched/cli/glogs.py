"""glogs: print or follow the output of jobs."""

from __future__ import annotations

import sys

from gpusched.cli import output
from gpusched.cli.follow import OutputRequest, begin, files_of, follow, open_tail, printer_for, selected_runs
from gpusched.cli.options import glogs_table
from gpusched.cli.query import ids_in, quote
from gpusched.client import connect
from gpusched.errors import GpuschedError, NotFound, Refused, UsageError
from gpusched.model.state_names import FINAL
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.client import DaemonConnection


def main() -> int:
    return output.run("glogs", body)


@output.command(glogs_table)
def body(values: Values, operands: list[str]) -> int:
    """Print; with -f, returns of one job its own exit code, of several 0 only if all COMPLETED."""
    if "run" in values and "since_run" in values:
        raise UsageError("--run and --since-run were both given", "give one of them")
    ids = ids_in(operands) or ["@"]
    wish = OutputRequest(
        "glogs",
        err=bool(values.get("err")),
        lines=values.get("lines"),
        run=values.get("run"),
        since_run=values.get("since_run"),
        is_quiet=bool(values.get("quiet")),
        has_prefix=not values.get("no_prefix"),
        rank=values.get("rank"),
    )
    with connect() as client:
        if values.get("follow"):
            return follow(client, ids, wish)
        path = f"/v1/logs?ids={quote(','.join(ids))}"
        answer = client.call("GET", path)
        jobs = {job["id"]: job for job in answer["jobs"]}
        while answer["more"]:
            answer = client.call("GET", f"{path}&since={quote(answer['version'])}")
            jobs.update({job["id"]: job for job in answer["jobs"]})
    is_several = len(ids) > 1 or bool(answer["arrays"]) or len(jobs) > 1
    if not jobs:
        names = ", ".join(array["id"] for array in answer["arrays"])
        raise Refused(f"no task of {names} has started", f"wait for them with: glogs -f {names}")
    problem: GpuschedError | None = None
    for place, job in enumerate(jobs.values()):
        try:
            _print_job(client, job, place, wish, is_several)
        except GpuschedError as error:
            if not is_several:
                raise
            # Errors of earlier jobs are printed first; the last one is raised.
            if problem is not None:
                output.fail("glogs", problem)
            problem = error
    if problem is not None:
        raise problem
    return 0


def _print_job(
    client: DaemonConnection, job: dict[str, Any], place: int, wish: OutputRequest, is_several: bool
) -> None:
    """Print the stored output of one job.

    Raises: NotFound for an unknown run; Refused if there is no output.
    """
    runs = selected_runs(job, wish)
    if not runs and (wish.run is not None or (wish.since_run or 1) > 1):
        raise NotFound(
            f"job {job['id']} has no run {wish.run or wish.since_run}", f"list its runs with: gshow {job['id']}"
        )
    if not runs:
        is_over = job["state"] in FINAL
        raise Refused(_why_nothing(job), f"{'see: gshow' if is_over else 'wait for it with: glogs -f'} {job['id']}")
    is_missing = True
    paths: list[str] = []
    problem: GpuschedError | None = None
    for run in runs:
        for file in files_of(job, run, wish):
            printer = printer_for(job, place, is_several and wish.has_prefix, file.label)
            try:
                tail = open_tail(client, job, run, file, wish)
            except GpuschedError as error:
                # Its node does not answer; others may.
                if problem is not None:
                    output.fail("glogs", problem)
                problem = error
                continue
            try:
                begin(tail, wish.lines)
                tail.copy(printer.write)
            finally:
                tail.close()
            printer.finish()
            paths.append(file.path)
            is_missing = is_missing and not tail.was_found
    sys.stdout.flush()
    if problem is not None:
        raise problem
    if is_missing:
        path = printable(paths[0])
        raise Refused(
            f"cannot open {path}: it was moved or removed, is not a regular file, or the job could not create it",
            f"see where it writes with: gshow {job['id']}",
        )


def _why_nothing(job: dict[str, Any]) -> str:
    if job["state"] == "PENDING":
        return f"job {job['id']} has not started: {printable(job['reason_text'] or '')}"
    return f"job {job['id']} has no output: {printable(job['reason_text'] or job['state'])}"
