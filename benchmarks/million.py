"""`python -m benchmarks.million [JOBS [KEPT]]`: how large the job table is over very many jobs, most forgotten.

Every job has a run that ended, a story of three lines and a seed of its own on the command line; half of them have a
script of their own. They are written 1,000 at a time, and all but the last KEPT are forgotten by the store's own
steps, those of the daemon's pruning. A database of its own below TMPDIR, removed at the end. Takes some minutes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time

from benchmarks.harness import machine
from gpusched.model.job import GpuShare, Job, JobEvent, JobSpec, Launch, Request, RetryRule, Run
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter
from gpusched.store.sqlite import SqliteStore

AT_ONCE = 1000
LINES = 10
"""Of the table that is printed."""


def main(jobs: int = 1_000_000, kept: int = 100_000) -> None:
    """Print the size of the file as the jobs come and go, in MiB."""
    print(f"{jobs:,} jobs, the last {kept:,} of which are remembered")
    print(f"{'jobs so far':>12} {'file MiB':>9} {'log MiB':>8} {'remembered':>11} {'bytes each':>11}")
    with tempfile.TemporaryDirectory(prefix="gpusched-bench-") as folder:
        path = os.path.join(folder, "gpusched.db")
        store = SqliteStore.open(path)
        began = time.perf_counter()
        try:
            for first in range(1, jobs + 1, AT_ONCE):
                store.commit(ended_jobs(first, min(AT_ONCE, jobs + 1 - first)))
                done = min(first + AT_ONCE - 1, jobs)
                _forget(store, before_at=float(done - kept + 1))
                if first % (jobs // LINES or 1) < AT_ONCE or done == jobs:
                    size, wal = os.path.getsize(path), os.path.getsize(f"{path}-wal")
                    remembered = len(store.jobs(JobFilter()))
                    mib = f"{size / (1 << 20):9.1f} {wal / (1 << 20):8.1f}"
                    print(f"{done:12,} {mib} {remembered:11,} {size / remembered:11.0f}", flush=True)
        finally:
            store.close()
    print(f"took {time.perf_counter() - began:.0f} s")


def ended_jobs(first: int, count: int) -> Changes:
    """Jobs that ended at the instant of their own number, so that the oldest are the first."""
    changes = Changes()
    for job_id in range(first, first + count):
        script = f"#!/bin/sh\n# experiment {job_id}\npython train.py --seed {job_id}\n".encode() if job_id % 2 else None
        sha = None if script is None else hashlib.sha256(script).hexdigest()
        if script is not None and sha is not None:
            changes.payloads[sha] = script
        environment = b'{"PATH": "/usr/bin", "HOME": "/home/ann"}'
        env_sha = hashlib.sha256(environment).hexdigest()
        changes.payloads[env_sha] = environment
        argv = () if script else ("python", "train.py", f"--seed={job_id}")
        launch = Launch(argv, sha, "train.sh" if script else None, env_sha, "/home/ann/experiments/vision")
        spec = JobSpec("train", Request(gpus=1, cpus=4.0, mem_mib=16384), launch, RetryRule(), account="ann")
        at = float(job_id)
        job = Job(job_id, 1000, "ann", spec, JobState.COMPLETED, at - 3, at - 3, at - 3)
        gpus = (GpuShare("GPU-0", 0),)
        run = Run(job_id, 1, RunState.ENDED, "node1", "boot", at - 2, gpus, 4.0, 16384)
        out = f"/home/ann/experiments/vision/gpusched-{job_id}.out"
        changes.jobs[job_id] = replace(job, run=1, start_at=at - 2, end_at=at, exit_code=0, reason=ReasonCode.NONE)
        changes.runs[run.id] = replace(
            run,
            start_at=at - 2,
            end_at=at,
            exit_code=0,
            outcome=JobState.COMPLETED,
            cpu_s=1.5,
            peak_mem_mib=900.0,
            stdout_path=out,
        )
        changes.events.append(JobEvent(job_id, at - 3, "submitted", "submitted by ann"))
        changes.events.append(JobEvent(job_id, at - 2, "started", "started on node1, GPU 0", 1))
        changes.events.append(JobEvent(job_id, at, "ended", "COMPLETED: exit code 0", 1))
    return changes


def _forget(store: SqliteStore, before_at: float) -> None:
    """Forget what ended before this instant, then scripts that nobody needs, and give the space back."""
    gone = False
    while jobs := store.ended_jobs(before_at, (float("-inf"), 0), 512):
        store.prune([job.id for job in jobs])
        gone = True
    # The daemon looks for scripts once a day; here a day has 50,000 jobs.
    if gone and int(before_at) % 50_000 < AT_ONCE:
        used: set[str] = set()
        last = 0
        while (found := store.used_payloads(last, 4096))[0] is not None:
            last, shas = found[0], found[1]
            used |= shas
        after = ""
        while stored := store.payload_shas(after, 512):
            after = stored[-1]
            store.drop_payloads([sha for sha in stored if sha not in used])
    while store.give_back(512):
        pass


if __name__ == "__main__":
    print(machine())
    main(*map(int, sys.argv[1:3]))
