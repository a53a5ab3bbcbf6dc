"""`python -m gpusched.bench simulate`: jobs a second of the fast simulation, through the policy of the daemon.

CPU time of one process beside a floor, a plain loop in the same interpreter just before and after each. Memory is what
the process has grown by, each case in one of its own. Logs that do not come with the package are taken from the folder
that GPUSCHED_TRACES names; without it there is one small trace.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path

from gpusched.model.settings import PrioritySettings, Settings
from gpusched.simulate import examples, runner
from gpusched.simulate.choices import choices_of
from gpusched.simulate.cluster import nodes_of, processors
from gpusched.simulate.trace import read_trace

_STEPS = 3_000_000

PROPOSAL = Settings(
    priority=PrioritySettings(
        weight_age=4000, max_age_s=28 * 86400.0, weight_fairshare=1000, weight_short=2500, weight_whole=1500
    )
)
"""That of docs/decisions/0021."""


@dataclass(frozen=True, slots=True)
class Case:
    """One trace on one cluster under one policy."""

    trace: str
    nodes: str = ""
    """Empty: the processors of the log."""
    policy: str = "fcfs+easy"
    predict: str | None = None
    settings: Settings | None = None

    def __str__(self) -> str:
        cluster = f"@{self.nodes}" if self.nodes else ""
        how = f", {self.predict}" if self.predict else ""
        return f"{self.trace.partition('.')[0]}{cluster} {'proposal' if self.settings else self.policy}{how}"


SHIPPED = (Case("muri_trace1.csv.gz", "8x8", "default"),)
CASES = (
    Case("kth_sp2.swf.gz"),
    Case("hpc2n.swf.gz"),
    *(Case("philly_jobs.csv.gz", nodes, "default") for nodes in ("64x8", "48x8", "40x8")),
    *(Case("philly_jobs.csv.gz", nodes, "default", "similar") for nodes in ("64x8", "48x8", "40x8")),
    *(Case("philly_jobs.csv.gz", nodes, "default", "similar", PROPOSAL) for nodes in ("64x8", "48x8", "40x8")),
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
    (choice,) = choices_of([case.policy])
    if case.settings is not None:
        choice = replace(choice, settings=case.settings)
    floor_s, before = floor(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    outcome = runner.run(
        trace.jobs,
        nodes,
        choice.settings,
        orders_by_run_time=choice.orders_by_run_time,
        predict=case.predict,
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
    folder, cases = (Path(named), CASES) if named else (examples.FOLDER, SHIPPED)
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
