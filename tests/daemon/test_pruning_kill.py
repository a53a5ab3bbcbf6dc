"""kill -9 of a daemon that forgets old jobs, again and again until none is left."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from harness import Daemon
from support import wait_until

from gpusched.errors import GpuschedError
from gpusched.model.job import ArraySpec, Job, JobEvent
from gpusched.model.pipeline import Pipeline
from gpusched.model.states import JobState, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter
from gpusched.ports.tables import PIPELINES, ChangedRows
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import job, launch, run

MANY = 3000
CONFIG = "[history]\nkeep_days = 30\n"


def fill(path: Path) -> set[int]:
    """A table with a long past; the ids that must stay."""
    now = time.time()
    old = now - 100 * 86400
    jobs: dict[int, Job] = {}
    pipelines = {}

    def ended(made: Job) -> None:
        jobs[made.id] = replace(made, state=JobState.COMPLETED, start_at=old, end_at=old + made.id, run=1)

    for number in range(1, MANY + 1):
        sha = f"{number % 100:064d}"
        parts = {"launch": launch("true", env_sha=sha), "submit_at": old, "uid": 0, "user": "root"}
        if number % 10 == 0:
            pipeline = Pipeline(number // 10, 0, "root", "x", old, "")
            pipelines[pipeline.number] = pipeline
        if number % 10 in (8, 9) and number > 10:
            parts |= {"pipeline": f"p{number // 10}", "step": f"s{number}"}
        ended(job(number, **parts))
    first = MANY + 1
    array = job(
        first, array=ArraySpec("0-99"), tasks_left="", launch=launch("true", env_sha="0" * 64), uid=0, user="root"
    )
    for task in range(100):
        ended(job(first + 1 + task, spec=array.spec, array_id=first, task=task, uid=0, user="root"))
    ended(array)
    waiting = job(first + 101, dependency=f"afterok:500:{MANY - 1}", hold="user", uid=0, user="root", queued_at=now)
    stays = {500, waiting.id}
    stays |= {one.id for one in jobs.values() if one.spec.pipeline == f"p{(MANY - 1) // 10}"}
    jobs[waiting.id] = waiting
    store = SqliteStore.open(path)
    over = {"state": RunState.ENDED, "outcome": JobState.COMPLETED, "end_at": old}
    store.commit(
        Changes(
            jobs=dict(sorted(jobs.items())),
            runs={f"{one.id}.1": replace(run(one), **over) for one in jobs.values() if one.run},  # type: ignore[arg-type]
            events=[JobEvent(one.id, old, "submitted", "once") for one in jobs.values()],
            payloads={f"{number:064d}": b"x" * 2000 for number in range(100)},
            rows=ChangedRows({PIPELINES: pipelines}),
        )
    )
    store.close()
    return stays


def ask(path: Path, query: str) -> set[int]:
    """The first column, as somebody else sees it while the daemon writes."""
    db = sqlite3.connect(path)
    try:
        return {row[0] for row in db.execute(query)}
    finally:
        db.close()


def count(path: Path, table: str) -> int:
    return ask(path, f"SELECT count(*) FROM {table}").pop()


def test_pruning_survives_a_kill_at_any_time(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(config=CONFIG)
    path = Path(str(daemon.call("GET", "/v1/status")["daemon"]["database"]))
    daemon.stop()
    for name in path.parent.glob(path.name + "*"):
        name.unlink()
    stays = fill(path)
    last_id = max(stays)
    kills = 0
    while kills < 6 and (before := count(path, "jobs")) > len(stays):
        daemon.start()
        wait_until(partial(has_fewer, path, before), timeout_s=60, what="some jobs to go")
        daemon.kill()
        kills += 1
        store = SqliteStore.open(path)
        try:
            ids = {one.id for one in store.jobs(JobFilter())}
            assert stays <= ids
            assert store.check() is None
            assert store.next_job_id() == last_id + 1
            assert all(len(store.events(job_id)) == 1 for job_id in stays), "stories are whole"
        finally:
            store.close()
    assert kills >= 2
    daemon.start()
    wait_until(lambda: ask(path, "SELECT id FROM jobs") == stays, timeout_s=60, what="all others to go")
    wait_until(lambda: count(path, "payloads") < 10, timeout_s=60, what="what they ran to go")
    assert (count(path, "runs"), count(path, "job_events")) == (len(stays) - 1, len(stays))
    with pytest.raises(GpuschedError, match="no job 7 any more"):
        daemon.call("GET", "/v1/jobs/7")
    assert daemon.call("GET", "/v1/history?ids=7,500&states=all")["pruned"] == ["7"]
    assert int(daemon.submit("/bin/true", stdout="/dev/null")) == last_id + 1


def has_fewer(path: Path, before: int) -> bool:
    return count(path, "jobs") < before
