"""`python -m benchmarks.store`: what the job table costs, beside what the disk costs.

A database of its own below TMPDIR, removed at the end.
"""

from __future__ import annotations

import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

from benchmarks.harness import fsync_floor, machine, show
from gpusched.model.job import GpuShare, Job, JobEvent, JobSpec, Launch, Request, RetryRule, Run
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter
from gpusched.store.sqlite import SqliteStore

NOW = 1_000_000.0
SLOTS = 4
"""Runs that end, and runs that start, in one tick."""


def main(jobs: int = 10_000, ticks: int = 500) -> None:
    """Print the cost of submissions, ticks and loads in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="gpusched-bench-") as folder:
        show("floor: write and fsync", fsync_floor(folder))
        path = os.path.join(folder, "gpusched.db")
        show("open, new database", [_timed(lambda: SqliteStore.open(path).close())])
        show("open, current database", [_timed(lambda: SqliteStore.open(path).close()) for _ in range(20)])
        store = SqliteStore.open(path)
        try:
            for what, shared in (("one spec", True), ("a spec each", False)):
                show(f"commit of 1,000 new jobs, {what}", _submissions(store, shared, jobs // 2000))
            show("commit of one new job", _single_submissions(store, 200))
            count, samples, mib = _loads(store)
            show(f"load of {count:,} pending jobs", samples)
            print(f"{'memory of these jobs':<44} {mib * 1024 / count:.2f} KiB each")
            show(f"commit of a tick: {SLOTS} ends, {SLOTS} starts", _ticks(store, ticks))
            show("look for one job", [_timed(lambda: store.jobs(JobFilter(ids=frozenset({9})))) for _ in range(200)])
            show("list the newest 100", [_timed(lambda: store.jobs(JobFilter(limit=100))) for _ in range(50)])
            show("ask whether the table was changed", [_timed(store.changed) for _ in range(200)])
            recorded = store.next_job_id() - 1
        finally:
            store.close()
        print(f"{'database file':<44} {os.path.getsize(path) / (1 << 20):.1f} MiB for {recorded:,} jobs")


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def _spec(number: int = 0) -> JobSpec:
    launch = Launch(("python", "train.py", f"--seed={number}"), None, None, "e" * 64, "/home/ann/experiments/vision")
    return JobSpec("train", Request(gpus=1, cpus=4.0, mem_mib=16384), launch, RetryRule(retries=2), account="ann")


def _job(job_id: int, spec: JobSpec) -> Job:
    return Job(job_id, 1000, "ann", spec, JobState.PENDING, NOW, NOW, NOW)


def _new_jobs(store: SqliteStore, count: int, make_spec: Callable[[int], JobSpec]) -> Changes:
    first = store.next_job_id()
    made = [_job(job_id, make_spec(job_id)) for job_id in range(first, first + count)]
    events = [JobEvent(job.id, NOW, "submitted", "submitted by ann") for job in made]
    return Changes(jobs={job.id: job for job in made}, events=events)


def _submissions(store: SqliteStore, shared: bool, rounds: int) -> list[float]:
    spec = _spec()
    samples = []
    for _ in range(rounds):
        changes = _new_jobs(store, 1000, lambda number: spec if shared else _spec(number))
        samples.append(_timed(partial(store.commit, changes)))
    return samples


def _single_submissions(store: SqliteStore, rounds: int) -> list[float]:
    samples = []
    for _ in range(rounds):
        changes = _new_jobs(store, 1, _spec)
        samples.append(_timed(partial(store.commit, changes)))
    return samples


def _ticks(store: SqliteStore, ticks: int) -> list[float]:
    """Each tick records the ends of the runs that the one before it started, and starts as many."""
    waiting = store.load_active()[0]
    running: list[tuple[Job, Run]] = []
    samples = []
    for tick in range(min(ticks, len(waiting) // SLOTS)):
        changes = Changes()
        for job, run in running:
            ended = replace(job, state=JobState.COMPLETED, end_at=NOW + 9, exit_code=0, reason=ReasonCode.NONE)
            changes.jobs[job.id] = ended
            changes.runs[run.id] = replace(
                run, state=RunState.ENDED, end_at=NOW + 9, exit_code=0, outcome=JobState.COMPLETED, cpu_s=1.5
            )
            changes.events.append(JobEvent(job.id, NOW + 9, "ended", "COMPLETED: exit code 0", run.number))
        running = []
        for slot in range(SLOTS):
            job = waiting[tick * SLOTS + slot]
            run = Run(job.id, 1, RunState.STARTING, "node1", "boot", NOW, (GpuShare(f"GPU-{slot}", slot),), 4.0, 16384)
            job = replace(job, state=JobState.RUNNING, run=1, start_at=NOW)
            changes.jobs[job.id], changes.runs[run.id] = job, run
            changes.events.append(JobEvent(job.id, NOW, "started", f"started on node1, GPU {slot}", 1))
            running.append((job, run))
        samples.append(_timed(partial(store.commit, changes)))
    return samples[1:]


def _loads(store: SqliteStore) -> tuple[int, list[float], float]:
    samples = [_timed(store.load_active) for _ in range(5)]
    tracemalloc.start()
    loaded = store.load_active()
    mib = tracemalloc.get_traced_memory()[0] / (1 << 20)
    tracemalloc.stop()
    return len(loaded[0]), samples, mib


if __name__ == "__main__":
    print(machine())
    main()
