"""The daemon's memory: classes, waiting for time and for others, what runs hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.daemon.state import DaemonState
from gpusched.model.cluster import DrainEntry
from gpusched.model.job import GpuShare, Job, Run
from gpusched.model.states import JobState, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.ports.tables import DRAINS, ChangedRows
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import job, request

NOW = 1000.0


def a_job(job_id: int, **parts: object) -> Job:
    spec_parts = {key: parts.pop(key) for key in ("dependency", "nice", "time_limit_s") if key in parts}
    made = job(job_id)
    times = {"submit_at": NOW, "queued_at": NOW, "eligible_at": NOW}
    return replace(made, spec=replace(made.spec, **spec_parts), **{**times, **parts})  # type: ignore[arg-type]


def waiting_ids(state: DaemonState) -> list[list[int]]:
    return [[waiting.id for waiting in view.jobs] for view in state.eligible.views()]


def test_equal_jobs_form_a_class_ordered_by_age() -> None:
    state = DaemonState()
    for made in (
        a_job(1, queued_at=30),
        a_job(2, queued_at=20),
        a_job(3, nice=5, queued_at=10),
        a_job(4, queued_at=30),
    ):
        state.put_job(made, NOW)
    assert waiting_ids(state) == [[3], [2, 1, 4]]


def test_a_class_shows_only_so_many_but_counts_all() -> None:
    state = DaemonState()
    for job_id in range(1, 211):
        state.put_job(a_job(job_id), NOW)
    (view,) = state.eligible.views(200)
    assert (len(view.jobs), view.total) == (200, 210)


def test_held_and_future_jobs_are_not_offered() -> None:
    state = DaemonState()
    state.put_job(a_job(1, hold="user"), NOW)
    state.put_job(a_job(2, eligible_at=NOW + 5), NOW)
    assert waiting_ids(state) == []
    assert state.next_due() == NOW + 5
    assert not state.promote(NOW + 4.9)
    assert state.promote(NOW + 5)
    assert waiting_ids(state) == [[2]]
    state.put_job(a_job(1), NOW)
    assert waiting_ids(state) == [[1, 2]]


def test_a_started_job_leaves_its_class_and_returns_to_its_old_place() -> None:
    state = DaemonState()
    first, second = a_job(1, queued_at=10), a_job(2, queued_at=20)
    state.put_job(first, NOW)
    state.put_job(second, NOW)
    state.put_job(replace(first, state=JobState.RUNNING, run=1), NOW)
    assert waiting_ids(state) == [[2]]
    state.put_job(replace(first, run=1), NOW)
    assert waiting_ids(state) == [[1, 2]]


def test_a_dependant_is_offered_when_its_parent_succeeded() -> None:
    state = DaemonState()
    parent, child = a_job(1), a_job(2, dependency="afterok:1")
    state.put_job(parent, NOW)
    state.put_job(child, NOW)
    assert state.settle_dependencies(NOW) == []
    assert waiting_ids(state) == [[1]]
    state.put_job(replace(parent, state=JobState.COMPLETED, end_at=NOW), NOW)
    assert state.settle_dependencies(NOW) == []
    assert waiting_ids(state) == [[2]]


def test_an_unsatisfiable_dependant_is_named_once_its_parent_failed() -> None:
    state = DaemonState()
    parent, child = a_job(1), a_job(2, dependency="afterok:1")
    state.put_job(parent, NOW)
    state.put_job(child, NOW)
    state.settle_dependencies(NOW)
    state.put_job(replace(parent, state=JobState.FAILED, end_at=NOW), NOW)
    ((hopeless, verdict),) = state.settle_dependencies(NOW)
    assert hopeless.id == 2
    assert "1" in verdict.text


def test_a_load_from_the_table_rebuilds_the_same_memory() -> None:
    store = SqliteStore.in_memory()
    card = GpuShare("GPU-0", 0)
    jobs = {
        1: replace(a_job(1), state=JobState.COMPLETED, end_at=NOW),
        2: a_job(2, dependency="afterok:1"),
        3: replace(a_job(3), state=JobState.RUNNING, run=1),
        4: replace(a_job(4), state=JobState.COMPLETING, run=2),
        5: a_job(5, hold="user"),
        6: a_job(6, eligible_at=NOW + 9),
    }
    runs = [
        Run(3, 1, RunState.RUNNING, "n1", "boot", NOW, gpus=(card,), cpus=2, mem_mib=5),
        Run(4, 1, RunState.ENDED, "n1", "boot", NOW, end_at=NOW, outcome=JobState.FAILED),
        Run(4, 2, RunState.ENDED, "n1", "boot", NOW, gpus=(card,), cpus=1, end_at=NOW, outcome=JobState.COMPLETED),
    ]
    store.commit(
        Changes(jobs=jobs, runs={run.id: run for run in runs}, rows=ChangedRows({DRAINS: {"GPU-9": DrainEntry("fan")}}))
    )
    state = DaemonState.load(store, NOW)
    state.settle_dependencies(NOW)
    assert sorted(state.jobs) == [2, 3, 4, 5, 6]
    assert waiting_ids(state) == [[2]]
    assert sorted(state.open_runs) == ["3.1"]
    assert sorted(state.releasing) == ["4.2"]
    assert (state.holds["3.1"].cpus, state.holds["3.1"].gpus) == (2, (card,))
    assert (state.holds["4.2"].cpus, state.holds["4.2"].gpus) == (0, (card,))
    assert state.rows[DRAINS] == {"GPU-9": DrainEntry("fan")}
    assert state.next_id == 7
    assert state.counts() == {"pending": 3, "running": 1, "suspended": 0, "completing": 1}


def test_a_run_holds_until_its_end_and_its_gpus_until_they_are_clean() -> None:
    state = DaemonState()
    state.put_job(replace(a_job(1, time_limit_s=60), state=JobState.RUNNING, run=1), NOW)
    run = Run(1, 1, RunState.STARTING, "n1", "boot", NOW, gpus=(GpuShare("GPU-0", 0),), cpus=4, mem_mib=100)
    state.put_run(run)
    assert state.holds[run.id].expected_end_at == NOW + 60
    state.put_run(replace(run, state=RunState.RUNNING, start_at=NOW + 2))
    assert state.holds[run.id].expected_end_at == NOW + 62
    ended = replace(run, state=RunState.ENDED, outcome=JobState.COMPLETED, end_at=NOW)
    state.begin_release(ended)
    assert (state.holds[run.id].cpus, state.holds[run.id].mem_mib) == (0, 0)
    assert state.holds[run.id].gpus
    state.end_release(ended)
    assert not state.holds


@pytest.mark.parametrize("seed", range(3))
@settings(deadline=None)  # how long it takes says more of what else the machine does
@given(data=st.data())
def test_every_eligible_job_is_offered_exactly_once(seed: int, data: st.DataObject) -> None:
    state = DaemonState()
    current: dict[int, Job] = {}
    now = NOW
    for _ in range(data.draw(st.integers(1, 40))):
        job_id = data.draw(st.integers(1, 8))
        before = current.get(job_id, a_job(job_id, nice=job_id % 2))
        if before.state.is_final:
            continue
        after = replace(
            before,
            hold=data.draw(st.sampled_from([None, "user"])),
            eligible_at=data.draw(st.sampled_from([NOW, NOW + 5, NOW + 50])),
            state=data.draw(st.sampled_from([JobState.PENDING, JobState.RUNNING, JobState.COMPLETED])),
            spec=replace(before.spec, request=request(cpus=data.draw(st.sampled_from([1.0, 2.0])))),
        )
        current[job_id] = after
        state.put_job(after, now)
        now += data.draw(st.sampled_from([0, 3]))
        state.promote(now)
    wanted = sorted(
        made.id
        for made in current.values()
        if made.state is JobState.PENDING and made.hold is None and made.eligible_at <= now
    )
    assert sorted(job_id for ids in waiting_ids(state) for job_id in ids) == wanted
