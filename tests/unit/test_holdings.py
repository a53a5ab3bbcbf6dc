"""What runs hold, as the policy is told: from their rows, from what their jobs asked for, from what is done to them."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched.daemon.state import DaemonState
from gpusched.daemon.state_settings import StateSettings
from gpusched.model.cluster import Allocation, JobTerms
from gpusched.model.job import Job, Run
from gpusched.model.states import JobState, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job, launch, request, run, share, spec

CARDS = (share(0), share(1))


def started(**parts: Any) -> tuple[Job, Run]:
    asked = request(gpus=2, cpus=3.0, mem_mib=7, is_exclusive=True, licenses=(("matlab", 2),), resources=(("nvme", 1),))
    fields = {"request": asked, "account": "lab", "queue": "vision", "qos": "rush", "reservation": "class", **parts}
    made = job(1, spec=spec(**fields), state=JobState.RUNNING, run=1)
    return made, run(made, state=RunState.RUNNING, start_at=NOW + 1, gpus=CARDS)


def a_state(made: Job, its_run: Run) -> DaemonState:
    state = DaemonState(StateSettings(grace_s=20.0))
    state.put_job(made, NOW)
    state.put_run(its_run)
    return state


def held(state: DaemonState) -> Allocation:
    (found,) = state.holds.values()
    return found


def test_an_open_run_holds_its_bookings_and_is_known_by_its_job() -> None:
    made, its_run = started(time_limit_s=60)
    state = a_state(made, its_run)
    assert held(state) == Allocation(
        job_id=1,
        terms=JobTerms(1000, "ann", "lab", "vision", "rush", made.spec.request, "class", True, False),
        node="n1",
        gpus=CARDS,
        cpus=3.0,
        mem_mib=7,
        start_at=NOW + 1,
        expected_end_at=NOW + 61,
        resources=(("nvme", 1),),
        licenses=(("matlab", 2),),
        is_exclusive=True,
        grace_s=20.0,
    )


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"retry": {"requeue": False}}, {"can_requeue": False}),
        ({"request": request(cpus=1.0)}, {"can_suspend": True}),
        ({"launch": launch("true", grace_s=3.0)}, {"grace_s": 3.0}),
    ],
    ids=["one that must not be run again", "one without GPUs can stand still", "its own grace"],
)
def test_a_job_declares_what_it_accepts(asked: dict[str, Any], wanted: dict[str, Any]) -> None:
    one = held(a_state(*started(**asked)))
    found = {"grace_s": one.grace_s, "can_requeue": one.terms.can_requeue, "can_suspend": one.terms.can_suspend}
    assert {name: found[name] for name in wanted} == wanted


STOPPED = [
    ("is cancelled", {"state": JobState.COMPLETING, "cancel_at": NOW + 5}, NOW + 25),
    ("makes room", {"preempt_at": NOW + 6}, NOW + 26),
    (
        "makes room and is cancelled then",
        {"state": JobState.COMPLETING, "preempt_at": NOW, "cancel_at": NOW + 9},
        NOW + 20,
    ),
    ("reached its limit", {"state": JobState.COMPLETING}, NOW + 30),
]


@pytest.mark.parametrize(("changes", "end_at"), [case[1:] for case in STOPPED], ids=[case[0] for case in STOPPED])
def test_a_run_being_stopped_is_gone_after_its_grace(changes: dict[str, Any], end_at: float) -> None:
    made, its_run = started(time_limit_s=3600)
    state = a_state(made, its_run)
    assert not held(state).is_stopping
    after = replace(made, **changes)
    state.put_job(after, NOW + 10)
    # However often it is told of afterwards.
    state.put_job(replace(after, reason_text="again"), NOW + 15)
    state.put_run(replace(its_run, peak_vram_mib=1))
    assert (held(state).is_stopping, held(state).expected_end_at) == (True, end_at)
    assert held(state).gpus == CARDS


def test_a_finished_preemption_leaves_no_mark_on_the_next_run() -> None:
    made, its_run = started(time_limit_s=60)
    state = a_state(replace(made, preempt_at=NOW), its_run)
    state.put_run(replace(its_run, state=RunState.ENDED, outcome=JobState.PREEMPTED, end_at=NOW + 2))
    state.put_job(replace(made, state=JobState.PENDING), NOW + 2)
    state.put_job(replace(made, run=2), NOW + 3)
    state.put_run(replace(its_run, number=2, start_at=NOW + 3))
    assert (held(state).is_stopping, held(state).expected_end_at) == (False, NOW + 63)


def test_host_resources_are_free_at_the_end_and_gpus_once_clean() -> None:
    made, its_run = started(time_limit_s=60)
    state = a_state(made, its_run)
    ended = replace(its_run, state=RunState.ENDED, outcome=JobState.COMPLETED, end_at=NOW + 9)
    state.put_job(replace(made, state=JobState.COMPLETING), NOW + 9)
    state.begin_release(ended)
    left = held(state)
    assert left.gpus == CARDS
    assert (left.cpus, left.mem_mib, left.licenses, left.resources, left.is_exclusive) == (0.0, 0, (), (), False)
    # As good as back, not to be stopped, and not charged again for the time before.
    assert (left.expected_end_at, left.is_stopping, left.start_at) == (NOW + 9, True, NOW + 9)


def test_suspension_moves_the_limit_and_the_usage_unless_gpus_were_kept() -> None:
    for gpus, start_at in (((), NOW + 101), (CARDS, NOW + 1)):
        made, its_run = started(time_limit_s=60)
        state = a_state(made, replace(its_run, suspended_s=100.0, gpus=gpus))
        assert (held(state).start_at, held(state).expected_end_at) == (start_at, NOW + 161)


def test_a_run_suspended_by_the_policy_returns_its_cores_and_has_no_end() -> None:
    made, its_run = started(request=request(cpus=3.0, mem_mib=7), time_limit_s=60)
    state = a_state(made, its_run)
    state.put_job(replace(made, state=JobState.SUSPENDED, suspended_at=NOW + 5, suspended_by="policy"), NOW + 5)
    still = held(state)
    assert (still.is_suspended, still.cpus, still.mem_mib, still.expected_end_at) == (True, 0.0, 7, None)
    state.put_job(made, NOW + 9)
    assert (held(state).is_suspended, held(state).cpus) == (False, 3.0)


def test_a_new_limit_applies_at_once() -> None:
    made, its_run = started(time_limit_s=60)
    state = a_state(made, its_run)
    state.put_job(replace(made, spec=replace(made.spec, time_limit_s=600)), NOW)
    assert held(state).expected_end_at == NOW + 601


def test_a_restart_knows_since_when_a_run_is_being_stopped() -> None:
    made, its_run = started()
    store = SqliteStore.in_memory()
    stopped = replace(made, state=JobState.COMPLETING, cancel_at=NOW + 5)
    store.commit(Changes(jobs={1: stopped}, runs={its_run.id: its_run}))
    state = DaemonState.load(store, NOW + 100, StateSettings(grace_s=20.0))
    assert (held(state).is_stopping, held(state).expected_end_at) == (True, NOW + 25)


def test_a_run_of_an_unknown_job_holds_its_bookings() -> None:
    _, its_run = started()
    state = DaemonState()
    state.put_run(its_run)
    assert (held(state).gpus, held(state).cpus, held(state).terms.can_requeue) == (CARDS, 3.0, False)
