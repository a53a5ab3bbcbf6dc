"""Traces cut into cases on which an order of the queue has to be good, each on a cluster of its own.

An order that was fitted to one trace is seldom good on another. So each trace of a folder becomes several cases:

    gangs        each virtual cluster with enough jobs alone, and all of them month by month; a log of one queue as it
                 is, also on a cluster that is too small for it
    processors   each log without its users' estimates: nobody gives a time limit

Gangs run on as many nodes of 8 GPUs as make a load; processors on the machine of the log. One replay is chaotic, a job
that comes a minute later can turn a schedule over: `disturbed` makes others like it, to be averaged over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import ceil
from pathlib import Path
from random import Random

import gpusched.addons.simulate
from gpusched.addons.simulate.cluster import nodes_of, processors
from gpusched.addons.simulate.trace import Trace, TraceJob, read_trace
from gpusched.errors import UsageError
from gpusched.model.cluster import NodeView
from gpusched.model.value import Value, replace

LOADS = (0.5, 0.7, 0.85)
MONTH_LOADS = (0.6, 0.8)
SINGLE_LOADS = (0.85, 1.5)
LEAST_JOBS = 500
"""A virtual cluster with fewer jobs is no case of its own."""
LEAST_MONTH_JOBS = 2000
LEAST_LOAD = 0.3
"""On an emptier cluster hardly anybody waits, whatever the order."""

GPUS_A_NODE = 8
_MONTH_S = 30 * 86400
_SHIFT_S = 300.0
_STRETCH = 0.1
_LEFT_OUT = 0.02


class Case(Value):
    """Jobs and the machines that they are to run on."""

    name: str
    jobs: tuple[TraceJob, ...]
    nodes: tuple[NodeView, ...]
    source: str = ""
    """What it is cut or drawn from. Cases of one source are in the same half."""
    grain_s: float = 600.0
    """A mean wait, or longest wait, below this says nothing."""


def cases_of(folder: Path) -> Iterator[Case]:
    """The cases of all traces in a folder, by name. Raises: UsageError for a folder without any."""
    found = False
    for path in sorted((*folder.glob("*.csv*"), *folder.glob("*.swf*"))):
        if "openb" in path.name:
            continue  # pods on cards of other kinds, and the table of its nodes
        found = True
        yield from cut(read_trace(path))
    if not found:
        raise UsageError(f"{folder} holds no traces", "GPUSCHED_TRACES=FOLDER")


def cut(trace: Trace) -> Iterator[Case]:
    """The cases of one trace."""
    name = trace.name.partition(".")[0]
    if any(job.procs for job in trace.jobs):
        jobs = tuple(without_estimate(job) for job in trace.jobs)
        machines = processors(trace.procs or max(job.procs for job in jobs))
        yield Case(f"{name} without estimates", jobs, machines, name)
        return
    by_queue: dict[str, list[TraceJob]] = {}
    for job in map(without_estimate, trace.jobs):
        by_queue.setdefault(job.queue, []).append(job)
    if len(by_queue) < 2:
        yield from _on_nodes(name, next(iter(by_queue.values())), SINGLE_LOADS)
        return
    for queue, jobs_of_queue in sorted(by_queue.items()):
        if len(jobs_of_queue) >= LEAST_JOBS:
            yield from _on_nodes(f"{name} {queue}", jobs_of_queue, LOADS)
    first_s = min(job.submit_s for job in trace.jobs)
    ordered = sorted(map(without_estimate, trace.jobs), key=lambda job: job.submit_s)
    for month, of_month in groupby(ordered, key=lambda job: (job.submit_s - first_s) // _MONTH_S):
        jobs_of_month = list(of_month)
        if len(jobs_of_month) > LEAST_MONTH_JOBS:
            yield from _on_nodes(f"{name} month {month + 1}", jobs_of_month, MONTH_LOADS)


def without_estimate(job: TraceJob) -> TraceJob:
    """The same job of a user who does not say how long it will run."""
    return replace(job, estimate_s=job.run_s)


def _on_nodes(name: str, jobs: Sequence[TraceJob], loads: Sequence[float]) -> Iterator[Case]:
    start_s = min(job.submit_s for job in jobs)
    moved = tuple(replace(job, submit_s=job.submit_s - start_s) for job in jobs)
    for count in node_counts(moved, loads):
        yield Case(f"{name} @{count}x{GPUS_A_NODE}", moved, nodes_of(f"{count}x{GPUS_A_NODE}"), name)


def half(cases: Sequence[Case], number: int) -> list[Case]:
    """The cases of every other source: 1 for choosing constants, 2 for reporting what they are worth."""
    sources = list(dict.fromkeys(case.source for case in cases))
    return [case for case in cases if sources.index(case.source) % 2 == number - 1]


def node_counts(jobs: Sequence[TraceJob], loads: Sequence[float]) -> list[int]:
    """Nodes on which these jobs make about these loads, at least as many as the widest job needs."""
    span_s = max(job.submit_s for job in jobs) - min(job.submit_s for job in jobs)
    busy_gpus = sum(job.run_s * job.gpus for job in jobs) / max(1, span_s)
    least = ceil(max(job.gpus for job in jobs) / GPUS_A_NODE)
    found = {max(least, 1, round(busy_gpus / load / GPUS_A_NODE)) for load in loads}
    return sorted(count for count in found if busy_gpus > LEAST_LOAD * GPUS_A_NODE * count)


def disturbed(jobs: Sequence[TraceJob], seed: str, shift_s: float = _SHIFT_S) -> list[TraceJob]:
    """The same jobs submitted up to 5 minutes sooner or later, a tenth longer or shorter, one in fifty left out."""
    dice, kept = Random(seed), []
    for job in jobs:
        if dice.random() < _LEFT_OUT:
            continue
        submit_s = max(0, round(job.submit_s + dice.uniform(-shift_s, shift_s)))
        stretch = dice.uniform(1 - _STRETCH, 1 + _STRETCH)
        run_s = max(1, round(job.run_s * stretch))
        estimate_s = max(run_s, round(job.estimate_s * stretch))
        kept.append(replace(job, submit_s=submit_s, run_s=run_s, estimate_s=estimate_s))
    kept.sort(key=lambda job: job.submit_s)
    return kept


EXAMPLES = Path(gpusched.addons.simulate.__file__).parent / "traces"
"""The traces that come with the package; `traces/README.md` there names their authors."""


def example_names() -> tuple[str, ...]:
    """File names of all of them, sorted."""
    return tuple(sorted(path.name for path in EXAMPLES.glob("*.gz")))
