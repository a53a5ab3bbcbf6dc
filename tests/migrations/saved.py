"""What the databases in this folder hold, and how they are made.

Before a release, `python tests/migrations/saved.py > tests/migrations/release_X_Y_Z.sql` keeps a database
as that release writes it. A file that is kept never changes; every later release must load it.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpusched.model.cluster import DrainEntry, GpuReading, GpuSample
from gpusched.model.job import GpuShare, Job, JobEvent, JobSpec, Launch, Notice, Request, RetryRule, Run
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.ports import Changes, tables
from gpusched.ports.tables import ChangedRows
from gpusched.store.sqlite import SqliteStore

NOW = 1_790_000_000.0

PLAIN = JobSpec("train", Request(), Launch(("python", "train.py"), None, None, "e" * 64, "/home/ann"), account="ann")
FULL = JobSpec(
    name='"quoted" and \udcff undecodable',
    request=Request(gpus=1, gpu_type="a100", vram_mib=8192, min_vram_mib=16384, cpus=2.5, mem_mib=4096),
    launch=Launch(
        argv=("\udcff", "--name", "zoë"),
        script_sha="a" * 64,
        script_name="train.sh",
        env_sha="e" * 64,
        work_dir="/home/zoë",
        umask=0o077,
        stdout="%j.out",
        stderr="%j.err",
        open_mode="append",
        notice=Notice(10, 60, True),
        stop_signal=2,
        grace_s=1.5,
        gpu_ids="uuid",
    ),
    retry=RetryRule(3, 0.5, 3.0, 60.0, ("3", "10-20", "SIGSEGV"), False),
    account="vision",
    queue="night",
    nice=-5,
    time_limit_s=3600,
    begin_at=NOW + 5,
    dependency="afterok:1",
    hold=True,
)
JOBS = (
    Job(1, 1000, "ann", PLAIN, JobState.COMPLETED, NOW, NOW, NOW, start_at=NOW + 1, end_at=NOW + 2, run=2, failures=1,
        exit_code=0, reason=ReasonCode.NONE, reason_text="exit code 0"),
    Job(2, 1000, "ann", PLAIN, JobState.PENDING, NOW, NOW, NOW),
    Job(3, 1001, "zoë", FULL, JobState.PENDING, NOW, NOW + 5, NOW + 5, hold="user"),
    Job(4, 1001, "zoë", FULL, JobState.COMPLETING, NOW, NOW, NOW, start_at=NOW + 3, run=1, requeues=1,
        reason=ReasonCode.CANCELLED_BY_USER, reason_text="cancelled by zoë", cancel_at=NOW + 4, cancelled_by="zoë"),
)  # fmt: skip
RUNS = (
    Run(1, 1, RunState.ENDED, "n1", "boot", NOW, start_at=NOW, end_at=NOW + 1, supervisor_pid=9, pid=10,
        supervisor_start_ticks=77, signal=9, outcome=JobState.FAILED, reason=ReasonCode.RAISED_SIGNAL,
        reason_text="ended by signal 9", cpu_s=0.5, peak_mem_mib=9.5, stdout_path="/home/ann/gpusched-1.out"),
    Run(1, 2, RunState.ENDED, "n1", "boot", NOW + 1, start_at=NOW + 1, end_at=NOW + 2, exit_code=0,
        outcome=JobState.COMPLETED, reason=ReasonCode.NONE, reason_text="exit code 0"),
    Run(4, 1, RunState.RUNNING, "n1", "boot", NOW + 3, gpus=(GpuShare("GPU-1", 0, vram_mib=8192),), cpus=2.5,
        mem_mib=4096, start_at=NOW + 3, supervisor_pid=11, supervisor_start_ticks=78, pid=12),
)  # fmt: skip
EVENTS = (
    JobEvent(1, NOW, "submitted", "submitted by ann"),
    JobEvent(1, NOW + 2, "ended", "COMPLETED: exit code 0", 2),
    JobEvent(4, NOW + 4, "stopping", "cancelled by zoë", 1),
)
PAYLOADS = {"a" * 64: b"#!/bin/sh\ntrue\xff\n", "e" * 64: b"PATH=/bin\0"}
DRAINS = {"GPU-2": DrainEntry("the fan is loud"), "n9": DrainEntry("")}
GPUS = GpuReading(NOW, "nvml", (GpuSample("GPU-1", 0, "NVIDIA A100", 40960),), driver_version="550.54")
PRUNED_ID = 9
"""A job that was there once: the ids go on after it."""


def dump() -> Iterator[str]:
    """The statements that make the database anew."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gpusched.db")
        store = SqliteStore.open(path)
        pruned = Job(PRUNED_ID, 1000, "ann", PLAIN, JobState.CANCELLED, NOW, NOW, NOW, end_at=NOW)
        store.commit(Changes(jobs={PRUNED_ID: pruned}))
        store.commit(
            Changes(
                {job.id: job for job in JOBS},
                {run.id: run for run in RUNS},
                list(EVENTS),
                PAYLOADS,
                ChangedRows({tables.DRAINS: {**DRAINS}}),
            )
        )
        store.save_gpus("n1", GPUS)
        store.close()
        connection = sqlite3.connect(path)
        connection.execute(f"DELETE FROM jobs WHERE id = {PRUNED_ID}")
        connection.commit()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        yield from connection.iterdump()
        yield f"PRAGMA user_version = {version};"
        connection.close()


if __name__ == "__main__":
    sys.stdout.write("\n".join(dump()) + "\n")
