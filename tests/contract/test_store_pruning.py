"""How every job table lets go of old jobs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.model.alerts import Alert
from gpusched.model.job import ArraySpec, Job, JobEvent
from gpusched.model.pipeline import Pipeline
from gpusched.model.resources import Resources
from gpusched.model.snapshot import Estimate, Usage
from gpusched.model.states import JobState, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter, Store
from gpusched.ports.tables import ALERTS, ESTIMATES, PIPELINES, USAGE, ChangedRows
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job, launch, run

OLD = float("-inf"), 0


@pytest.fixture
def store() -> Iterator[Store]:
    made = SqliteStore.in_memory()
    yield made
    made.close()


def ended(job_id: int, at: float, **parts: object) -> Job:
    return job(job_id, state=JobState.COMPLETED, end_at=at, run=1, **parts)


def put(store: Store, *jobs: Job) -> None:
    store.commit(Changes(jobs={one.id: one for one in jobs}))


def test_ended_jobs_are_ordered_by_end_and_id(store: Store) -> None:
    put(store, ended(1, NOW + 5), ended(2, NOW), job(3), ended(4, NOW), ended(5, NOW + 9), ended(6, NOW - 1))
    first = store.ended_jobs(NOW + 9, OLD, 3)
    assert [one.id for one in first] == [6, 2, 4]
    assert [one.id for one in store.ended_jobs(NOW + 9, (NOW, 4), 3)] == [1]
    assert [one.id for one in store.ended_jobs(NOW + 9, (NOW, 2), 1)] == [4]
    assert store.ended_jobs(NOW - 1, OLD, 3) == []
    assert first[0] == ended(6, NOW - 1)


def test_a_job_is_pruned_with_all_its_rows(store: Store) -> None:
    gone, stays = ended(1, NOW), ended(2, NOW)
    over = {"state": RunState.ENDED, "outcome": JobState.COMPLETED, "end_at": NOW}
    runs = [replace(run(one), **over) for one in (gone, stays)]  # type: ignore[arg-type]
    usage = Usage("vision", "ann", Resources(1.0, 2.0, 3.0, 4.0), NOW)
    store.commit(
        Changes(
            jobs={1: gone, 2: stays},
            runs={one.id: one for one in runs},
            events=[JobEvent(1, NOW, "ended", "one"), JobEvent(2, NOW, "ended", "two")],
            rows=ChangedRows(
                {
                    ESTIMATES: {number: Estimate(number, NOW, NOW, NOW) for number in (1, 2)},
                    ALERTS: {
                        f"{number} end": Alert(f"{number} end", "end", ("end",), 1000, NOW, job_id=number)
                        for number in (1, 2)
                    },
                    USAGE: {("vision", "ann"): usage},
                }
            ),
        )
    )
    store.prune([1, 77])
    assert [one.id for one in store.jobs(JobFilter())] == [2]
    assert [one.job_id for one in store.runs([1, 2])] == [2]
    assert (store.events(1), len(store.events(2))) == ([], 1)
    assert [one.job_id for one in list(store.load(ESTIMATES, 9).values())] == [2]
    assert [one.job_id for one in store.load(ALERTS).values()] == [2]
    assert list(store.load(USAGE).values()) == [usage], "who has used how much is remembered"
    assert store.check() is None


def test_ids_and_numbers_are_not_reused(store: Store) -> None:
    array = ended(3, NOW, array=ArraySpec("0-4"), tasks_left="")
    pipelines = {number: Pipeline(number, 1000, "ann", "night", NOW, "") for number in (1, 2)}
    store.commit(Changes(jobs={1: ended(1, NOW), 2: ended(2, NOW), 3: array}, rows=ChangedRows({PIPELINES: pipelines})))
    store.prune([1, 2, 3], [2])
    assert (store.next_job_id(), store.next_pipeline()) == (9, 3)
    assert store.find(PIPELINES, [1, 2]) == {1: pipelines[1]}
    assert store.last_job_id(1000) is None
    assert store.array_around(5) is None
    put(store, job(9))
    assert (store.next_job_id(), store.last_job_id(1000)) == (10, 9)
    store.prune([9])
    assert store.load_active() == ([], [])


def test_pipeline_ends_are_found(store: Store) -> None:
    put(
        store,
        ended(1, NOW, pipeline="p1", step="a"),
        job(2, pipeline="p1", step="b"),
        ended(3, NOW, pipeline="p2", step="a"),
    )
    assert store.pipeline_ends("p1") == [(1, NOW), (2, None)]
    assert store.pipeline_ends("p3") == []


def test_unreferenced_scripts_are_dropped(store: Store) -> None:
    shas = {letter: letter * 64 for letter in "abcd"}
    needs = launch("true", script_sha=shas["a"], env_sha=shas["b"])
    put(store, job(1, launch=needs), job(2, launch=launch("true", env_sha=shas["c"])))
    store.commit(Changes(payloads=dict.fromkeys(shas.values(), b"#!")))
    assert store.used_payloads(0, 1) == (1, {shas["a"], shas["b"]})
    assert store.used_payloads(1, 9) == (2, {shas["c"]})
    assert store.used_payloads(2, 9) == (None, set())
    assert store.payload_shas("", 3) == [shas["a"], shas["b"], shas["c"]]
    assert store.payload_shas(shas["c"], 3) == [shas["d"]]
    store.drop_payloads([shas["d"]])
    assert store.payload_shas("", 9) == [shas["a"], shas["b"], shas["c"]]
    with pytest.raises(KeyError):
        store.payload(shas["d"])


def test_pruning_shrinks_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gpusched.db"
    store = SqliteStore.open(path)
    body = b"x" * 4000
    put(store, *(ended(number, NOW) for number in range(1, 2001)))
    store.commit(Changes(payloads={f"{number:064d}": body for number in range(1000)}))
    before = pages(path)
    store.prune(range(1, 2001))
    store.drop_payloads([f"{number:064d}" for number in range(1000)])
    steps = 0
    while store.give_back(50):
        steps += 1
    assert before // 100 < steps <= before // 50
    assert pages(path) < before // 4
    assert store.check() is None
    store.close()
    assert path.stat().st_size < before * 4096 // 4


def test_an_older_table_reuses_its_free_space(tmp_path: Path) -> None:
    path = tmp_path / "gpusched.db"
    SqliteStore.open(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = DELETE")
    db.execute("PRAGMA auto_vacuum = NONE")
    db.execute("VACUUM")
    db.close()
    store = SqliteStore.open(path)
    put(store, *(ended(number, NOW) for number in range(1, 1001)))
    store.prune(range(1, 1001))
    assert store.give_back(50) is False
    full = pages(path)
    put(store, *(ended(number, NOW) for number in range(1001, 2001)))
    assert pages(path) <= full + full // 20
    store.close()


def pages(path: Path) -> int:
    db = sqlite3.connect(path)
    try:
        return int(db.execute("PRAGMA page_count").fetchone()[0])
    finally:
        db.close()
