"""`python -m benchmarks simulate`: jobs a second of the fast simulation, through the policy of the daemon.

CPU time of one process beside a floor, a plain loop in the same interpreter just before and after each. Memory is what
the process has grown by, each case in one of its own. Logs that do not come with the package are taken from the folder
that GPUSCHED_TRACES names; without it there is one small trace.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import EXAMPLES
from gpusched.addons.simulate import planner_run
from gpusched.addons.simulate.cluster import nodes_of, processors
from gpusched.addons.simulate.policies import policies_of
from gpusched.addons.simulate.trace import read_trace

_STEPS = 3_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """One trace on one cluster under one policy."""

    trace: str
    nodes: str = ""
    """Empty: the processors of the log."""
    policy: str = "fcfs+easy"

    def __str__(self) -> str:
        cluster = f"@{self.nodes}" if self.nodes else ""
        return f"{self.trace.partition('.')[0]}{cluster} {self.policy}"


SHIPPED = (Case("muri_trace1.csv.gz", "8x8", "default"),)
CASES = (
    Case("kth_sp2.swf.gz"),
    Case("hpc2n.swf.gz"),
    Case("philly_jobs.csv.gz", "64x8"),
    *(Case("philly_jobs.csv.gz", nodes, "default") for nodes in ("64x8", "48x8", "40x8")),
)


def floor() -> float:
    """CPU seconds of three million steps that put a number into a dictionary."""
    began, known = time.process_time(), {}
    for number in range(_STEPS):
        known[number & 1023] = number
    return time.process_time() - began


def measure(case: Case, folder: Path) -> str:
    """One line: what this case costs. The memory is right in a process that has done nothing else."""
    trace = read_trace(folder / case.trace)
    nodes = nodes_of(case.nodes) if case.nodes else processors(trace.procs or 1)
    (policy,) = policies_of([case.policy])
    floor_s, before = floor(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    outcome = planner_run.run(
        trace.jobs,
        nodes,
        policy.settings,
        orders_by_run_time=policy.orders_by_run_time,
        predict=policy.predict,
    )
    cpu_s = time.process_time() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    floor_s, count = (floor_s + floor()) / 2, len(trace.jobs)
    return (
        f"{case!s:<38} {count:7} jobs {cpu_s:7.2f} s {count / cpu_s:7.0f} jobs/s   floor {floor_s:5.3f} s"
        f"   {cpu_s / floor_s:6.1f} floors   {grown / count:5.0f} bytes a job   {outcome.starts_sha}"
    )


def main() -> None:
    """Print a line for each case."""
    named = os.environ.get("GPUSCHED_TRACES")
    folder, cases = (Path(named), CASES) if named else (EXAMPLES, SHIPPED)
    for case in cases:
        child = os.fork()
        if not child:
            code = 1
            try:
                print(measure(case, folder), flush=True)
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{case} could not be simulated from {folder}")


if __name__ == "__main__":
    main()
