"""Priority inheritance in the daemon's memory: who hurries for whom, and that it ends with its cause."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.daemon.state import DaemonState
from gpusched.daemon.state_settings import StateSettings
from gpusched.model.job import Job
from gpusched.model.snapshot import Urgency
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job

TIERS = {"rush": 2, "day": 1, "idle": -1}


def a_state(*jobs: Job) -> DaemonState:
    state = DaemonState(StateSettings(tiers=TIERS))
    for made in jobs:
        state.put_job(made, NOW)
    state.settle_dependencies(NOW)
    return state


def end(state: DaemonState, job_id: int, ended_as: JobState = JobState.CANCELLED) -> None:
    state.put_job(replace(state.jobs[job_id], state=ended_as, end_at=NOW), NOW)
    state.settle_dependencies(NOW)


SCENES: list[tuple[str, list[Job], dict[int, Urgency | None]]] = [
    (
        "a parent is as urgent as the child that waits for it",
        [job(1, nice=50), job(2, nice=-5, dependency="afterok:1")],
        {1: Urgency(-5, ""), 2: None},
    ),
    (
        "a lazier child passes nothing on",
        [job(1, nice=-50), job(2, nice=5, dependency="afterok:1")],
        {1: None},
    ),
    (
        "each part comes from the child that has more of it",
        [
            job(1, nice=3, qos="day"),
            job(2, nice=-5, qos="idle", dependency="afterany:1"),
            job(3, nice=9, qos="rush", dependency="afternotok:1"),
        ],
        {1: Urgency(-5, "rush")},
    ),
    (
        "a QOS of the same tier changes nothing",
        [job(1, qos="day"), job(2, qos="day", dependency="afterok:1")],
        {1: None},
    ),
    (
        "a QOS that nobody configured is as no QOS",
        [job(1), job(2, qos="other", dependency="afterok:1")],
        {1: None},
    ),
    (
        "it goes up a chain, past a link that is lazy by itself",
        [job(1, nice=7), job(2, nice=9, dependency="afterok:1"), job(3, nice=-1, dependency="afterok:2")],
        {1: Urgency(-1, ""), 2: Urgency(-1, ""), 3: None},
    ),
    (
        "it goes up both sides of a diamond",
        [
            job(1, nice=4),
            job(2, nice=5, dependency="afterok:1"),
            job(3, nice=-2, dependency="afterok:1"),
            job(4, nice=-3, qos="rush", dependency="afterok:2:3"),
        ],
        {1: Urgency(-3, "rush"), 2: Urgency(-3, "rush"), 3: Urgency(-3, "rush"), 4: None},
    ),
    (
        "nobody hurries for a held child",
        [job(1), job(2, nice=-5, dependency="afterok:1", hold="user")],
        {1: None},
    ),
    (
        "a child that waits for its begin time hurries its parent all the same",
        [job(1), job(2, nice=-5, dependency="afterok:1", eligible_at=NOW + 60)],
        {1: Urgency(-5, "")},
    ),
    (
        "either of two parents may end the wait, so both hurry",
        [job(1), job(2), job(3, nice=-5, dependency="afterok:1?afterok:2")],
        {1: Urgency(-5, ""), 2: Urgency(-5, "")},
    ),
]


@pytest.mark.parametrize(("jobs", "wanted"), [scene[1:] for scene in SCENES], ids=[scene[0] for scene in SCENES])
def test_parents_inherit_priority(jobs: list[Job], wanted: dict[int, Urgency | None]) -> None:
    state = a_state(*jobs)
    assert {job_id: state.inheritance.inherited(job_id) for job_id in wanted} == wanted


def test_a_job_that_inherits_waits_in_another_class() -> None:
    state = a_state(job(1, nice=50), job(2, nice=50))
    ((first,), before) = ([view.key for view in state.eligible.views()], state.class_of(1))
    assert first == before == state.class_of(2)
    state.put_job(job(3, nice=-5, dependency="afterok:1"), NOW)
    key = state.class_of(1)
    assert key is not None
    assert (key.nice, key.inherited) == (50, Urgency(-5, ""))
    assert state.class_of(2) == before
    assert {view.key for view in state.eligible.views()} == {key, before}


def test_inheritance_ends_when_the_child_is_cancelled() -> None:
    state = a_state(job(1, nice=7), job(2, nice=9, dependency="afterok:1"), job(3, nice=-1, dependency="afterok:2"))
    before = a_state(job(1, nice=7)).class_of(1)
    end(state, 3)
    assert (state.inheritance.inherited(1), state.inheritance.inherited(2)) == (None, None)
    assert state.class_of(1) == before


def test_inheritance_lasts_while_another_child_waits() -> None:
    state = a_state(job(1), job(2, nice=-5, dependency="afterok:1"), job(3, nice=-5, dependency="afterok:1"))
    end(state, 2)
    assert state.inheritance.inherited(1) == Urgency(-5, "")
    end(state, 3)
    assert state.inheritance.inherited(1) is None


def test_inheritance_follows_an_update_of_the_child() -> None:
    child = job(2, nice=-5, dependency="afterok:1")
    state = a_state(job(1), job(3), child)
    state.put_job(replace(child, spec=replace(child.spec, nice=-9)), NOW)
    assert state.inheritance.inherited(1) == Urgency(-9, "")
    moved = replace(child, spec=replace(child.spec, dependency="afterok:3"))
    state.forget_dependency(moved.id)
    state.put_job(moved, NOW)
    assert (state.inheritance.inherited(1), state.inheritance.inherited(3)) == (None, Urgency(-5, ""))
    state.put_job(replace(moved, hold="user"), NOW)
    assert state.inheritance.inherited(3) is None


def test_a_child_that_no_longer_waits_passes_on_no_priority() -> None:
    state = a_state(job(1), job(2), job(3, nice=-5, dependency="afterok:1?afterok:2"))
    end(state, 1, JobState.COMPLETED)
    assert state.inheritance.inherited(2) is None
    assert state.class_of(3) is not None


def test_a_requeued_parent_waits_with_its_inherited_priority() -> None:
    state = a_state(job(1, nice=3), job(2, nice=-5, dependency="afterok:1"))
    pending = state.jobs[1]
    state.put_job(replace(pending, state=JobState.RUNNING, run=1), NOW)
    assert state.class_of(1) is None
    state.put_job(replace(pending, run=1), NOW)
    key = state.class_of(1)
    assert key is not None
    assert key.inherited == Urgency(-5, "")


def test_a_long_chain_is_climbed_without_recursion() -> None:
    state = a_state(job(1), *(job(number, dependency=f"afterok:{number - 1}") for number in range(2, 3000)))
    state.put_job(job(3000, nice=-1, dependency="afterok:2999"), NOW)
    assert state.inheritance.inherited(1) == Urgency(-1, "")
    end(state, 3000)
    assert state.inheritance.inherited(1) is None


@given(data=st.data())
def test_after_any_story_inheritance_equals_a_fresh_memory(data: st.DataObject) -> None:
    """Jobs name earlier ones; they are changed, held, started, ended and cancelled in any order."""
    count = data.draw(st.integers(2, 7))
    current: dict[int, Job] = {}
    for job_id in range(1, count + 1):
        parents = data.draw(st.lists(st.integers(1, job_id - 1), unique=True, max_size=3)) if job_id > 1 else []
        current[job_id] = job(
            job_id,
            nice=data.draw(st.integers(-2, 2)),
            qos=data.draw(st.sampled_from(["", *TIERS])),
            dependency=f"afterany:{':'.join(map(str, parents))}" if parents else None,
        )
    state = a_state(*current.values())
    for _ in range(data.draw(st.integers(0, 12))):
        job_id = data.draw(st.sampled_from(sorted(current)))
        before = current[job_id]
        if before.state.is_final:
            continue
        job_state = data.draw(st.sampled_from([JobState.PENDING, JobState.RUNNING, JobState.COMPLETED]))
        after = replace(
            before,
            state=job_state,
            hold=data.draw(st.sampled_from([None, "user"])),
            spec=replace(before.spec, nice=data.draw(st.integers(-2, 2))),
            end_at=NOW if job_state.is_final else None,
        )
        current[job_id] = after
        state.put_job(after, NOW)
        state.settle_dependencies(NOW)
    store = SqliteStore.in_memory()
    store.commit(Changes(jobs=current))
    fresh = DaemonState.load(store, NOW, StateSettings(tiers=TIERS))
    fresh.settle_dependencies(NOW)
    assert {job_id: state.inheritance.inherited(job_id) for job_id in current} == {
        job_id: fresh.inheritance.inherited(job_id) for job_id in current
    }
    assert {job_id: state.class_of(job_id) for job_id in current} == {
        job_id: fresh.class_of(job_id) for job_id in current
    }
    assert {job_id: state.inheritance.inherited(job_id) for job_id in current} == {
        job_id: by_definition(current, job_id) for job_id in current
    }


def by_definition(jobs: dict[int, Job], job_id: int) -> Urgency | None:
    """The most urgent parts of a job and all that wait for it, found by walking down."""
    made = jobs[job_id]
    if made.state.is_final:
        return None
    found = [Urgency(made.spec.nice, made.spec.qos)]
    work = [job_id]
    while work:
        parent = work.pop()
        if jobs[parent].state.is_final:
            continue
        for child in jobs.values():
            names = (child.spec.dependency or ":").split(":")[1:]
            if str(parent) in names and child.state is JobState.PENDING and child.hold is None:
                found.append(Urgency(child.spec.nice, child.spec.qos))
                work.append(child.id)
    tier, qos = min((-TIERS.get(urgency.qos, 0), urgency.qos) for urgency in found)
    own_qos = made.spec.qos
    joined = Urgency(min(urgency.nice for urgency in found), qos if -tier > TIERS.get(own_qos, 0) else own_qos)
    return None if joined == found[0] else joined
