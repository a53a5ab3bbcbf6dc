"""Where the memory differed from the one that a restart loads: found by `test_memory_properties`, one by one."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, BOB, ROOT, Lab
from memory import check_memory

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.errors import BrokenInvariant, GpuschedError, Refused
from gpusched.lifecycle.dependencies import Never, Satisfied, Unsatisfied
from gpusched.model.commands import Cancel, Drain, Hold, PauseQueue, Release, Requeue, Selection, Update
from gpusched.model.job import Alerting, ArraySpec, RetryRule
from gpusched.model.mentions import render
from gpusched.model.states import JobState, ReasonCode
from gpusched.ports.tables import ALERTS
from gpusched.testing import request


def fail(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("a bug")


def array_of_five(lab: Lab, **parts: Any) -> int:
    """An array with tasks 0 to 4, of which one fits at a time."""
    return lab.submit(array=ArraySpec("0-4", None, parts.pop("max_fails", None)), request=request(cpus=1), **parts)


def test_a_dependant_of_a_task_without_a_row_keeps_waiting_after_a_restart() -> None:
    """It was cancelled: the tasks that are left of an array were learned too late."""
    lab = Lab(cpus=1, outcome=SimulatedOutcome(runs_s=3))
    array = array_of_five(lab)
    waiting = lab.submit(dependency=f"afterok:{array}_3={array + 4}", request=request(cpus=1))
    lab.restart()
    check_memory(lab)
    lab.tick(1)
    assert lab.job(waiting).state is JobState.PENDING
    for _ in range(7):
        lab.tick(3)
    assert lab.job(waiting).state is JobState.COMPLETED


def test_a_task_in_its_backoff_is_not_among_the_pending_tasks() -> None:
    """Asking for it raised ValueError, and its reason was that of the others."""
    lab = Lab(cpus=1, outcome=SimulatedOutcome(runs_s=3, exit_code=1))
    array = array_of_five(lab, retry=RetryRule(retries=1, backoff_s=1000.0))
    lab.tick(3)
    task = lab.job(array + 1)
    assert task.state is JobState.PENDING
    assert lab.scheduler.answers.position(task) == 0
    reason = lab.scheduler.answers.reason_for(task)
    assert reason is not None
    assert reason.code is ReasonCode.RETRY_DELAY
    check_memory(lab)


def test_a_dependant_of_a_task_is_released_when_its_array_has_too_many_failures() -> None:
    """It waited for a task that would never have a row, until a restart."""
    lab = Lab(cpus=1, outcome=SimulatedOutcome(runs_s=3, exit_code=1))
    array = array_of_five(lab, max_fails=0)
    waiting = lab.submit(dependency=f"afterany:{array}_3={array + 4}", request=request(cpus=1))
    lab.tick(3)
    lab.tick(1)
    assert lab.job(array).reason is ReasonCode.MAX_FAILS
    assert lab.job(array + 4).state is JobState.CANCELLED
    assert lab.job(waiting).state is JobState.RUNNING
    check_memory(lab)


def test_a_task_has_not_started_because_a_sibling_has() -> None:
    lab = Lab(cpus=1, outcome=SimulatedOutcome(runs_s=3))
    array = array_of_five(lab)
    lab.tick(1)
    assert lab.job(array).start_at is not None
    waiting = lab.submit(dependency=f"after:{array}_3={array + 4}", request=request(cpus=1))
    for _ in range(2):
        assert isinstance(lab.scheduler.state.dependency_state(lab.job(waiting)), Unsatisfied)
        lab.restart()
    for _ in range(4):
        lab.tick(3)
    assert lab.job(array + 4).start_at is not None
    assert isinstance(lab.scheduler.state.dependency_state(lab.job(waiting)), Satisfied)


@pytest.mark.parametrize("is_made", [True, False])
def test_all_rows_decide_whether_a_raising_commit_was_made(is_made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To undrain what nobody had drained looked as if it were recorded, though its clearance was not."""
    lab = Lab()
    commit = lab.store.commit

    def broken(changes: Any) -> None:
        if is_made:
            commit(changes)
        fail()

    answers: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(lab.store, "commit", broken)
        lab.ticker.submit(Drain(ROOT, ("0",), None), answers.append)
        if is_made:
            lab.ticker.tick()
        else:
            with pytest.raises(RuntimeError):
                lab.ticker.tick()
    (answer,) = answers
    assert isinstance(answer, BrokenInvariant) is not is_made
    check_memory(lab)


def test_an_empty_queue_is_sent_once_when_several_jobs_end_in_one_tick() -> None:
    """A second row stayed armed for ever, and told of the next empty queue, too."""
    lab = Lab(outcome=SimulatedOutcome(runs_s=3))
    words = Alerting(("queue_empty",))
    lab.ask(*(lab.submission(ANN, alerting=words) for _ in range(3)), lab.submission(BOB, alerting=words))
    lab.tick(3)
    rows = [(row.uid, row.state) for row in lab.store.load(ALERTS).values()]
    assert sorted(rows) == [(ANN.uid, "waiting"), (BOB.uid, "waiting")]
    check_memory(lab)


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        (lambda task: Update(ROOT, (task,), {"throttle": 1}), "has ended"),
        (lambda task: Update(ROOT, (task,), {"name": "x"}), "has ended"),
        (lambda task: Hold(ROOT, (task,)), "has ended"),
        (lambda task: Requeue(ROOT, (task,)), "is CANCELLED and cannot be requeued"),
        (lambda task: Cancel(ROOT, Selection(ids=(task,))), None),
    ],
    ids=["throttle", "update", "hold", "requeue", "cancel"],
)
def test_a_task_that_was_given_up_has_ended_while_the_others_still_end(command: Any, refused: str | None) -> None:
    """A change of it gave it a row without a run, which nothing ever ended, and its array waited for it for ever."""
    lab = Lab(cpus=1, outcome=SimulatedOutcome(runs_s=100, stop_takes_s=5))
    array = array_of_five(lab)
    lab.ask(Cancel(ANN, Selection(ids=(array,))))
    assert lab.job(array).state is JobState.COMPLETING
    (answer,) = lab.ask(command(array + 4))
    if refused is None:
        assert answer["ended"] == [f"{array}_3"]
    else:
        assert isinstance(answer, Refused)
        assert f"job {array}_3 {refused}" in str(answer)
    check_memory(lab)
    assert lab.job(array).tasks_left == "1-4"
    lab.tick(6)
    assert lab.job(array).state is JobState.CANCELLED
    assert not lab.scheduler.state.jobs


@pytest.mark.parametrize("is_late", [False, True], ids=["paused", "paused while it waits"])
def test_an_array_that_waits_for_its_counterparts_waits_for_no_queue(is_late: bool) -> None:
    """A restart counted its tasks as kept by the pause, which the list of jobs said of none of them."""
    lab = Lab(cpus=1, outcome=SimulatedOutcome(runs_s=3))
    pause = PauseQueue(ROOT, "default")
    if not is_late:
        lab.ask(pause)
    first = array_of_five(lab)
    second = array_of_five(lab, dependency=f"aftercorr:{first}")
    if is_late:
        lab.ask(pause)
    check_memory(lab)
    code_of = lab.scheduler.answers.reason_codes()
    assert code_of(lab.job(second)) is ReasonCode.DEPENDENCY
    counts = lab.scheduler.state.waiting_reasons(lab.scheduler.plan.reasons)
    assert counts[ReasonCode.DEPENDENCY] == 5
    lab.ask(PauseQueue(ROOT, "default", is_resumed=True))
    for _ in range(11):
        lab.tick(3)
    assert lab.job(second).state is JobState.COMPLETED


def test_a_task_that_has_started_depends_on_nothing_any_more() -> None:
    """One that had a row of its own before it started still did, until a restart."""
    lab = Lab(cpus=2, outcome=SimulatedOutcome(runs_s=3))
    parent = lab.submit(request=request(cpus=2))
    array = array_of_five(lab, dependency=f"after:{parent}", hold=True)
    lab.ask(Update(ANN, (array + 2,), {"name": "x"}))
    assert lab.scheduler.state.dependents.children_of(parent) == (array, array + 2)
    lab.ask(Release(ANN, (array,)))
    lab.tick(3)
    assert lab.job(array + 2).state is JobState.RUNNING
    assert lab.scheduler.state.dependents.children_of(parent) == (array,)
    check_memory(lab)


@pytest.mark.parametrize("ended_as", [JobState.COMPLETED, JobState.CANCELLED])
def test_a_task_knows_how_and_when_its_counterpart_ended(ended_as: JobState) -> None:
    """After a restart it had waited for itself all the time, and any counterpart that had not completed had failed."""
    lab = Lab(cpus=1, outcome=SimulatedOutcome(runs_s=3))
    first = array_of_five(lab)
    second = array_of_five(lab, dependency=f"aftercorr:{first}", never_satisfied="wait")
    lab.ask(Hold(ANN, (second + 1,)), PauseQueue(ROOT, "default"))
    if ended_as is JobState.CANCELLED:
        lab.ask(Cancel(ANN, Selection(ids=(first + 1,))))
    lab.tick(3)
    counterpart = lab.job(first + 1)
    assert counterpart.state is ended_as
    check_memory(lab)
    lab.restart()
    task, state = lab.job(second + 1), lab.scheduler.state
    assert state.free_at(task) == counterpart.end_at
    verdict = state.dependency_state(task)
    if ended_as is JobState.CANCELLED:
        assert isinstance(verdict, Never)
        assert render(verdict.text) == f"depends on the success of job {first}_0, which ended as CANCELLED"
    else:
        assert isinstance(verdict, Satisfied)


def test_a_look_of_the_doctor_does_not_make_the_next_commit_write_specs_again() -> None:
    lab = Lab()
    ids = [lab.submit(request=request(gpus=2), time_limit_s=60) for _ in range(3)]
    written: list[str] = []

    def hold() -> int:
        written.clear()
        lab.store._db.set_trace_callback(written.append)
        assert not isinstance(lab.ask(Hold(ANN, tuple(ids[1:])))[0], GpuschedError)
        lab.ask(Release(ANN, tuple(ids[1:])))
        lab.store._db.set_trace_callback(None)
        return sum(statement.startswith("INSERT INTO jobs") for statement in written)

    assert hold() == 0
    assert lab.ticker.check_planner() == []
    assert hold() == 0, "the specs are those in the table"
    lab.ticker.reload()
    assert hold() == 0
