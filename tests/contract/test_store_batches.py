"""How every job table keeps batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.model.batch import Batch
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports import Changes, Store
from gpusched.ports.tables import BATCHES, ChangedRows
from gpusched.store.backup import backup, restore
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job, launch, request, spec

SHA = "b" * 64


@pytest.fixture
def store() -> Iterator[Store]:
    made = SqliteStore.in_memory()
    yield made
    made.close()


def batch(first_id: int, jobs: int = 3, key: str | None = None, made: int = 0) -> Batch:
    common = spec(request=request(gpus=2), launch=launch("/bin/sh", work_dir='/"zoë\udcff'))
    return Batch(first_id, jobs, 1000, "ann", NOW, common, SHA, "submitted by ann", key=key, made=made)


def put(store: Store, *batches: Batch) -> None:
    store.commit(Changes(rows=ChangedRows({BATCHES: {one.first_id: one for one in batches}})))


def test_batches_with_jobs_to_be_made_are_loaded_in_order(store: Store) -> None:
    put(store, batch(7), batch(1), batch(4, key="k", made=3))
    assert list(store.load(BATCHES).values()) == [batch(1), batch(7)]
    put(store, batch(1, made=2))
    assert list(store.load(BATCHES).values()) == [batch(1, made=2), batch(7)]
    store.commit(Changes(rows=ChangedRows({BATCHES: {1: None, 7: None, 99: None}})))
    assert store.load(BATCHES) == {}


def test_ids_of_jobs_to_be_made_are_taken(store: Store) -> None:
    store.commit(Changes(jobs={1: job(1)}, rows=ChangedRows({BATCHES: {1: batch(1, jobs=100, made=1)}})))
    assert store.next_job_id() == 101
    store.commit(Changes(jobs={2: job(2)}))
    assert store.next_job_id() == 101


def test_the_newest_batch_of_a_key_and_user_is_found(store: Store) -> None:
    put(store, batch(1, key="k", made=3), batch(4, key="k"), batch(7), batch(10, key="other"))
    assert store.batch_of_key(1000, "k") == batch(4, key="k")
    assert store.batch_of_key(1001, "k") is None
    assert store.batch_of_key(1000, "none") is None


def test_the_states_of_its_jobs_are_those_in_the_table(store: Store) -> None:
    ended = job(3, state=JobState.FAILED, end_at=NOW, run=1)
    store.commit(Changes(jobs={one.id: one for one in (job(1), job(2), ended, job(5))}))
    assert store.states_of_batch(batch(1)) == {JobState.PENDING, JobState.FAILED}
    assert store.states_of_batch(batch(3, jobs=2)) == {JobState.FAILED}
    assert store.states_of_batch(batch(8)) == set()


def test_a_batch_goes_with_the_last_of_its_jobs(store: Store) -> None:
    ended = {number: job(number, state=JobState.COMPLETED, end_at=NOW, run=1) for number in (1, 2)}
    store.commit(
        Changes(jobs=ended, rows=ChangedRows({BATCHES: {1: batch(1, 2, key="k", made=2), 3: batch(3, key="open")}}))
    )
    store.prune([1])
    assert store.batch_of_key(1000, "k") is not None
    store.prune([2])
    assert store.batch_of_key(1000, "k") is None
    assert store.batch_of_key(1000, "open") is not None, "its jobs are still to be made"


def test_its_lines_are_kept_until_its_jobs_are_made(store: Store) -> None:
    store.commit(Changes(payloads={SHA: b"[]", "c" * 64: b""}, rows=ChangedRows({BATCHES: {1: batch(1, key="k")}})))
    store.drop_payloads([SHA, "c" * 64])
    assert store.payload_shas("", 9) == [SHA]
    put(store, replace(batch(1, key="k"), made=3))
    store.drop_payloads([SHA])
    assert store.payload_shas("", 9) == []


@pytest.mark.parametrize("hold", [True, False])
def test_jobs_to_be_made_are_held_after_a_restore(tmp_path: Path, hold: bool) -> None:
    """As all that may have run since the backup was made."""
    table, copy = str(tmp_path / "gpusched.db"), str(tmp_path / "backup.db")
    store = SqliteStore.open(table)
    made = {number: job(number) for number in (1, 4, 5, 6)}
    store.commit(Changes(jobs=made, rows=ChangedRows({BATCHES: {1: batch(1, made=1), 4: batch(4, key="k", made=3)}})))
    store.close()
    backup(table, copy)
    restore(copy, table, hold=hold)
    store = SqliteStore.open(table)
    (found,) = store.load(BATCHES).values()
    assert found == replace(batch(1, made=1), spec=replace(batch(1).spec, hold=hold))
    assert store.next_job_id() == 7
    store.close()
