"""Whatever is done to arrays, in whatever order: no task is lost, run twice, or run beyond the limits."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from lab import ANN, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.indexes import ArrayTasks, PendingTasks
from gpusched.lifecycle import arrays
from gpusched.model.commands import Cancel, Hold, Release, Selection, Update
from gpusched.model.job import ArraySpec, RetryRule
from gpusched.model.states import JobState
from gpusched.model.tasks import TaskSet, parse_tasks
from gpusched.ports import JobFilter

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.integers(1, 12)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.sampled_from(["cancel", "hold", "release"]), st.integers(0, 11)),
        st.tuples(st.just("throttle"), st.integers(1, 4)),
    ),
    max_size=12,
)


@given(
    tasks=st.sampled_from(["0-11", "0-22:2", "3,5,8-17"]),
    throttle=st.one_of(st.none(), st.integers(1, 4)),
    max_fails=st.one_of(st.none(), st.integers(0, 3)),
    failing=st.sets(st.integers(2, 13), max_size=6),
    steps=STEPS,
)
def test_every_task_ends_once(
    tasks: str, throttle: int | None, max_fails: int | None, failing: set[int], steps: list[tuple[str, int]]
) -> None:
    lab = Lab(cpus=5)
    for job_id in failing:
        for run in (1, 2):
            lab.outcomes[f"{job_id}.{run}"] = SimulatedOutcome(runs_s=3, exit_code=job_id)
    rule = RetryRule(retries=1, backoff_s=0.0)
    array = lab.submit(array=ArraySpec(tasks, throttle, max_fails), retry=rule)
    running = check(lab, array, frozenset())
    for step, number in steps:
        if step == "turn":
            lab.tick(number)
        elif step == "restart":
            lab.restart()
        elif step == "throttle":
            lab.ask(Update(ANN, (array,), {"throttle": number}))
        elif step == "cancel":
            lab.ask(Cancel(ANN, Selection(ids=(array + 1 + number,))))
        else:
            lab.ask((Hold if step == "hold" else Release)(ANN, (array + 1 + number,)))
        running = check(lab, array, running)
    for job in lab.store.jobs(JobFilter()):
        if job.hold:
            lab.ask(Release(ANN, (job.id,)))
    for _ in range(200):
        if not lab.scheduler.state.jobs:
            break
        lab.tick(11)
        running = check(lab, array, running)
    row = lab.job(array)
    rows = lab.store.jobs(JobFilter(arrays=frozenset({array})))
    assert row.state.is_final
    assert len(rows) + len(arrays.tasks_left(row)) == 12
    assert {job.task for job in rows}.isdisjoint(arrays.tasks_left(row))
    states = Counter(job.state for job in rows)
    if row.state is JobState.COMPLETED:
        assert states == {JobState.COMPLETED: 12}
    assert max((job.run for job in rows), default=0) <= 2
    assert not lab.scheduler.state.holds


def check(lab: Lab, array: int, before: frozenset[str]) -> frozenset[str]:
    """What runs now, run by run; whatever began since `before` kept the limit."""
    rows = lab.store.jobs(JobFilter(arrays=frozenset({array})))
    row = lab.job(array)
    running = [job for job in rows if job.state in (JobState.RUNNING, JobState.COMPLETING)]
    assert len(running) <= 5
    limit = row.spec.array.throttle if row.spec.array else None
    runs = frozenset(f"{job.id}.{job.run}" for job in running)
    if limit is not None and runs - before:
        assert len(running) <= limit
    assert lab.scheduler.state.active.tally.by_queue.get("default", 0) == (
        sum(not job.state.is_final for job in rows) + (0 if row.state.is_final else len(arrays.tasks_left(row)))
    )
    return runs


@given(
    tasks=st.sampled_from(["0-19", "3-41:2", "5", "1-30:7", "3,5,8-17"]),
    gone=st.sets(st.integers(0, 41), max_size=30),
    ready=st.one_of(st.none(), st.sets(st.integers(0, 41))),
)
def test_tasks_in_line_are_the_remaining_ones_in_order(tasks: str, gone: set[int], ready: set[int] | None) -> None:
    everything = parse_tasks(tasks)
    left = TaskSet.of(number for number in everything if number not in gone)
    if ready is not None:
        ready &= set(left)
    line = PendingTasks(100, ArrayTasks(everything, left, ready=ready))
    waiting = [number for number in left if ready is None or number in ready]
    assert list(line) == [101 + everything.position(number) for number in waiting]
    assert line.first(3) == list(line)[:3]
    assert len(line) == len(waiting)
    assert [line.position(number) for number in waiting] == list(range(len(waiting)))
