"""What every job table promises of arrays and their tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpusched.lifecycle import arrays
from gpusched.model.job import ArraySpec, Job
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter, Store
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job


@pytest.fixture
def store() -> Iterator[Store]:
    made = SqliteStore.in_memory()
    yield made
    made.close()


def array(array_id: int, tasks: str, left: str | None = None) -> Job:
    return replace(job(array_id, array=ArraySpec(tasks)), tasks_left=tasks if left is None else left)


def ended(of: Job, number: int, state: JobState, code: int | None = None) -> Job:
    return replace(arrays.task(of, number), state=state, end_at=NOW + 1, exit_code=code)


def put(store: Store, *jobs: Job) -> None:
    store.commit(Changes(jobs={one.id: one for one in jobs}))


def ids(store: Store, **restrictions: object) -> list[int]:
    return [one.id for one in store.jobs(JobFilter(**restrictions))]  # type: ignore[arg-type]


def test_ids_of_tasks_without_a_row_are_not_reused(store: Store) -> None:
    put(store, array(5, "0-99"))
    assert store.next_job_id() == 106
    put(store, array(106, "1,5"), job(109))
    assert store.next_job_id() == 110
    put(store, replace(array(5, "0-99"), tasks_left="7-99"))
    assert store.next_job_id() == 110


def test_ended_tasks_are_counted_by_state_with_the_largest_code(store: Store) -> None:
    one, other = array(1, "0-9", "4-9"), array(20, "0-1", "")
    put(
        store,
        one,
        other,
        ended(one, 0, JobState.COMPLETED, 0),
        ended(one, 1, JobState.FAILED, 3),
        ended(one, 2, JobState.FAILED, 7),
        arrays.task(one, 3),
        ended(other, 0, JobState.CANCELLED),
    )
    assert sorted(store.task_tallies([1])) == [(1, JobState.COMPLETED, 1, 0), (1, JobState.FAILED, 2, 7)]
    assert store.task_tallies([20]) == [(20, JobState.CANCELLED, 1, None)]
    assert store.task_tallies([]) == []


def test_tasks_are_found_by_their_array(store: Store) -> None:
    one = array(1, "0-9", "2-9")
    put(store, one, arrays.task(one, 0), ended(one, 1, JobState.COMPLETED), job(30))
    assert ids(store, arrays=frozenset({1})) == [2, 3]
    assert ids(store, arrays=frozenset({1}), ids=frozenset({30})) == [2, 3, 30]
    assert ids(store, arrays=frozenset({1}), states=frozenset({JobState.COMPLETED})) == [3]


def test_tasks_of_a_sweep_are_found_by_the_name_of_their_array_and_their_own(store: Store) -> None:
    one = replace(job(1, name="sw", array=ArraySpec("0-2", sweep=(("x", ("a", "b", "c")),))), tasks_left="2")
    put(store, one, arrays.task(one, 0), ended(one, 1, JobState.COMPLETED), job(30, name="sw"), job(31, name="other"))
    assert ids(store, names=frozenset({"sw"})) == [1, 2, 3, 30]
    assert ids(store, names=frozenset({"sw x=b", "other"})) == [3, 31]
    assert ids(store, names=frozenset({"sw"}), states=frozenset({JobState.COMPLETED}), since=NOW) == [3]
    assert ids(store, names=frozenset({"sw"}), ids=frozenset({2, 31}), before=31, limit=5) == [2]
    assert store.usage_sums("user", JobFilter(names=frozenset({"sw"})), NOW, NOW + 1) == []


def test_arrays_without_pending_tasks_can_be_excluded(store: Store) -> None:
    put(store, array(1, "0-1", ""), array(10, "0-1", "1"), job(20))
    assert ids(store, leaves_out_arrays=True) == [10, 20]
    assert ids(store) == [1, 10, 20]


def test_an_id_finds_its_array(store: Store) -> None:
    put(store, array(1, "0-9"), job(12), array(13, "3-4", ""))
    around = {one: store.array_around(one) for one in (1, 2, 11, 12, 13, 14, 15, 16)}
    assert {one: found.id if found else None for one, found in around.items()} == {
        1: None,
        2: 1,
        11: 1,
        12: None,
        13: None,
        14: 13,
        15: 13,
        16: None,
    }
