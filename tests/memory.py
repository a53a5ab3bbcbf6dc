"""The daemon's memory beside the one that a restart would load from the same table."""

from __future__ import annotations

from typing import Any

from lab import Lab

from gpusched.daemon.alerts import AlertOutbox
from gpusched.daemon.state import DaemonState
from gpusched.model.job import run_id
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.ports.tables import CALENDAR, CLEARANCES, DRAINERS, DRAINS, MIG_LAYOUTS, USAGE


def state_facts(state: DaemonState) -> dict[str, Any]:
    """What a memory says that anything goes by, in a form that can be compared and read."""
    jobs = state.jobs
    pending = [job for job in jobs.values() if job.state is JobState.PENDING]
    arrays = [state.arrays.group(array_id) for array_id in state.arrays.ids]
    return {
        "jobs": dict(sorted(jobs.items())),
        "open runs": dict(sorted(state.open_runs.items())),
        "steps": state.steps.all(),
        "batches": dict(state.batches),
        "releasing": dict(sorted(state.releasing.items())),
        "holds": {handle: held(state, handle) for handle in sorted(state.holds)},
        "drains": dict(state.rows[DRAINS]),
        "drainers": dict(state.rows[DRAINERS]),
        "clearances": dict(state.rows[CLEARANCES]),
        "mig layouts": dict(state.rows[MIG_LAYOUTS]),
        "usage": dict(sorted(state.rows[USAGE].items())),
        "calendar": dict(state.rows[CALENDAR]),
        "next ids": (state.next_id, state.next_pipeline),
        "jobs of users": {uid: state.jobs_of[uid] for uid in {job.uid for job in jobs.values()}},
        "tally": vars_of(state.active.tally),
        "census": (dict(state.census.by_queue), dict(state.census.by_user), dict(state.census.held)),
        "asleep": dict(state.census.asleep),
        "lines": {view.key: list(view.jobs) for view in state.eligible.views()},
        "places": {job.id: state.position_in_class(job) for job in pending if state.class_of(job.id)},
        "dependencies": {job.id: state.dependency_state(job) for job in pending},
        "urgency": {job_id: state.inheritance.inherited(job_id) for job_id in jobs},
        "children": {job_id: state.dependents.children_of(job_id) for job_id in jobs},
        "ready at": {job.id: (state.ready_at(job), state.free_at(job)) for job in pending},
        "arrays": [(list(one.left), sorted(one.open), vars_of(one.ended), ready(one)) for one in arrays],
        "counterparts": {job.id: state.waits_for_counterparts(job) for job in pending if job.is_array},
        "timed": [(at, job.id) for at, job in state.timed_jobs(1000)],
    }


def held(state: DaemonState, handle: str) -> Any:
    """What a run holds. No row says since when a run is stopped for its time limit: its end is guessed from now on."""
    found = state.holds[handle]
    return replace(found, expected_end_at=None) if found.is_stopping else found


def vars_of(value: Any) -> dict[str, Any]:
    names = getattr(value, "__slots__", None) or getattr(value, "__mypyc_attrs__", None) or vars(value)
    return {name: getattr(value, name) for name in names}


def ready(group: Any) -> list[int] | None:
    return None if group.ready is None else sorted(group.ready)


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What is not the same in both, by name; of mappings only the entries in question."""
    found = {}
    for name, left in one.items():
        right = other[name]
        if isinstance(left, dict):
            keys = [key for key in {**left, **right} if left.get(key) != right.get(key)]
            if keys:
                found[name] = ({key: left.get(key) for key in keys}, {key: right.get(key) for key in keys})
        elif left != right:
            found[name] = (left, right)
    return found


def check_memory(lab: Lab) -> None:
    """The memory between two ticks is the one that a restart would load; raises AssertionError with what differs."""
    scheduler = lab.scheduler
    if lab.ticker._is_behind:
        # It says so itself, and builds on nothing until it could be read.
        return
    # Confirmed starts wait for the next commit; the spool has them, too.
    lab.store.commit(lab.ticker._carried)
    lab.ticker._carried = Changes()
    now = lab.clock.now()
    state = DaemonState.load(lab.store, now, scheduler.state_settings())
    # A restart settles in its first tick what follows from others.
    state.settle(now)
    found = differences(state_facts(scheduler.state), state_facts(state))
    assert not found, f"memory, after a restart: {found}"
    ordered = [
        [job.id for job in jobs]
        for jobs in (scheduler.answers.active_in_order(), scheduler.answers.in_queue_order(state.jobs.values()))
    ]
    assert ordered[0] == ordered[1], "all active jobs are ordered otherwise than each of them"
    alerts = AlertOutbox(lab.store, scheduler.guard, scheduler.end_report)
    found = differences(alert_facts(scheduler.alerts), alert_facts(alerts))
    assert not found, f"memory, after a restart: {found}"
    ended = {handle for handle, run in state.releasing.items() if scheduler.cluster.is_released(run)}
    assert ended == state.releasing.keys(), "a card of an ended run is not watched"
    for run in state.open_runs.values():
        assert run.id == run_id(run.job_id, state.jobs[run.job_id].run)


def alert_facts(alerts: AlertOutbox) -> dict[str, Any]:
    """What a memory of the outbox says."""
    return {
        "rows": alerts.rows,
        "waiting": {uid: list(rows) for uid, rows in alerts.waiting().items()},
        "waiting by user": dict(+alerts._waiting),
        "armed": alerts._armed,
        "of jobs": alerts._of_job,
    }
