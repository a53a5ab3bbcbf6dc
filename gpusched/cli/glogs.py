"""glogs: print or follow a job's output."""

from __future__ import annotations

import os
import sys

from gpusched.cli import output
from gpusched.cli.follow import follow_job, missing, path_of, tail_offset
from gpusched.cli.options import glogs_table
from gpusched.cli.parse import parse
from gpusched.cli.query import quote
from gpusched.client import connect
from gpusched.errors import NotFound, Refused, UsageError


def main() -> int:
    """Entry point."""
    return output.run("glogs", body)


def body(words: list[str]) -> int:
    """Print; with -f returns the job's own code."""
    table = glogs_table()
    values, operands, _ = parse(table, words, operands_first=True)
    if output.common(table, values):
        return 0
    if len(operands) > 1:
        raise UsageError(f"one job at a time, not {len(operands)}", "for example: glogs -f 42")
    asked = operands[0] if operands else "@"
    with connect() as client:
        job = client.call("GET", f"/v1/jobs/{quote(asked)}")["job"]
        if values.get("follow") and "run" not in values:
            return follow_job(client, job["id"], "glogs", bool(values.get("err")), values.get("lines"))
    runs = {run["run"]: run for run in job["runs"]}
    number = values.get("run", max(runs, default=0))
    if number not in runs:
        if "run" in values:
            raise NotFound(f"job {job['id']} has no run {number}", f"list its runs with: gshow {job['id']}")
        raise Refused(missing("", job), f"wait for it with: glogs -f {job['id']}")
    path = path_of(job, runs[number], bool(values.get("err")))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise Refused(missing(path, job), f"see where it writes with: gshow {job['id']}") from None
    try:
        if "lines" in values:
            os.lseek(fd, tail_offset(fd, values["lines"]), os.SEEK_SET)
        while piece := os.read(fd, 1 << 16):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    finally:
        os.close(fd)
    return 0
