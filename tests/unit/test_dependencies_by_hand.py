"""Dependencies in a daemon that is turned by hand: what is known of parents, and what nobody may wait for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from lab import ANN, BOB, Lab
from memory import check_memory

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.forecast import dry_run
from gpusched.daemon.verbs import submit
from gpusched.errors import Refused
from gpusched.model.commands import Cancel, Hold, Release, Requeue, Selection, Update
from gpusched.model.job import ArraySpec
from gpusched.model.mentions import render
from gpusched.model.states import JobState
from gpusched.testing import spec

THREE = ArraySpec("0-2")


def update(lab: Lab, job_id: int, **changes: Any) -> Any:
    (answer,) = lab.ask(Update(ANN, (job_id,), changes))
    return answer


def why(lab: Lab, job_id: int) -> str:
    job = lab.scheduler.state.find(job_id)
    reason = None if job is None else lab.scheduler.answers.reason_for(job)
    return "" if reason is None else render(reason.text)


# --- what is known of parents, over a restart ---------------------------------------------------------


def test_a_parent_that_ends_after_a_restart_is_recorded() -> None:
    """One that only a running job named was remembered as it was at the restart: later dependants waited for ever."""
    lab = Lab(gpus=0)
    lab.outcomes = {"2.1": SimulatedOutcome(runs_s=100), "3.1": SimulatedOutcome(runs_s=1000)}
    first, second = lab.submit(), lab.submit()
    either = lab.submit(dependency=f"afterok:{first}?afterok:{second}")
    lab.tick(11)
    assert lab.job(either).state is JobState.RUNNING
    lab.restart()
    lab.tick(100)
    assert lab.job(second).state is JobState.COMPLETED
    after = lab.submit(dependency=f"afterok:{second}")
    assert lab.job(after).state is JobState.RUNNING


def test_a_job_repeated_after_a_restart_keeps_its_parent() -> None:
    """When another dependant of the parent had ended meanwhile, the retry was cancelled: no such job any more."""
    lab = Lab(gpus=0)
    lab.outcomes = {"2.1": SimulatedOutcome(runs_s=100, exit_code=1)}
    parent = lab.submit()
    child = lab.submit(dependency=f"afterok:{parent}", retry={"retries": 1, "backoff_s": 0.0})
    lab.tick(11)
    lab.restart()
    lab.submit(dependency=f"afterok:{parent}")
    lab.tick(11)
    lab.tick(100)
    assert (lab.job(child).state, lab.job(child).run) == (JobState.RUNNING, 2)


def test_a_job_that_is_given_a_parent_is_not_released_by_time() -> None:
    """The end of its backoff or its begin time was still listed; after a restart it was not."""
    lab = Lab(gpus=0)
    lab.outcomes = {"1.1": SimulatedOutcome(runs_s=1, exit_code=1), "2.1": SimulatedOutcome(runs_s=1000)}
    child = lab.submit(retry={"retries": 1, "backoff_s": 100.0})
    parent = lab.submit()
    lab.tick(5)
    assert [job.id for _, job in lab.scheduler.state.timed_jobs(9)] == [child]
    update(lab, child, dependency=f"afterok:{parent}")
    assert lab.scheduler.state.timed_jobs(9) == []
    check_memory(lab)
    update(lab, child, dependency="")
    assert [job.id for _, job in lab.scheduler.state.timed_jobs(9)] == [child]


def test_a_parent_that_ended_long_ago_is_looked_up() -> None:
    lab = Lab(gpus=0)
    parent = lab.submit()
    for _ in range(3):
        lab.tick(11)
    lab.restart()
    assert lab.job(lab.submit(dependency=f"afterok:{parent}")).state is JobState.RUNNING
    never = lab.submit(dependency=f"afternotok:{parent}")
    assert (
        render(lab.job(never).reason_text or "") == f"depends on the failure of job {parent}, which ended as COMPLETED"
    )


def test_a_restarted_parent_does_not_block_released_dependants() -> None:
    lab = Lab(gpus=0, outcome=SimulatedOutcome(runs_s=50))
    parent = lab.submit()
    child = lab.submit(dependency=f"after:{parent}")
    lab.tick(1)
    lab.ask(Requeue(ANN, (parent,)))
    late = lab.submit(dependency=f"afterok:{parent}")
    lab.tick(1)
    assert (lab.job(parent).run, lab.job(child).run) == (2, 1)
    assert lab.job(late).state is JobState.PENDING
    for _ in range(3):
        lab.tick(50)
    assert {lab.job(job_id).state for job_id in (parent, child, late)} == {JobState.COMPLETED}


# --- changes after the submission -------------------------------------------------------------------


def test_an_unsatisfiable_dependency_waits_for_repair_when_configured() -> None:
    lab = Lab(gpus=0, outcome=SimulatedOutcome(runs_s=1, exit_code=1))
    failed = lab.submit()
    child = lab.submit(dependency=f"afterok:{failed}", never_satisfied="wait")
    grandchild = lab.submit(dependency=f"afterok:{child}")
    lab.tick(1)
    lab.tick(1)
    assert why(lab, child) == f"depends on the success of job {failed}, which ended as FAILED"
    assert why(lab, grandchild) == f"waits for job {child} to complete"
    lab.outcome = SimulatedOutcome(runs_s=1)
    update(lab, child, dependency=f"afterany:{failed}")
    lab.tick(1)
    lab.tick(1)
    assert lab.job(grandchild).state is JobState.COMPLETED


def test_a_held_dependant_waits_only_for_its_release_once_its_parent_ended() -> None:
    lab = Lab(gpus=0)
    parent = lab.submit()
    child = lab.submit(dependency=f"afterok:{parent}", hold=True)
    lab.tick(11)
    assert why(lab, child).startswith("held; ")
    lab.ask(Release(ANN, (child,)))
    assert lab.job(child).state is JobState.RUNNING


CIRCLES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a job of itself": ({}, "{id}", "2 -> 2"),
    "an array of itself": ({"array": THREE}, "{id}", "2 -> 2"),
    "an array of one of its tasks": ({"array": THREE}, "{task}", "2_0 -> 2_0"),
    "an array of a job that waits for one of its tasks": ({"array": THREE}, "{behind}", "6 -> 2_0 -> 6"),
}


@pytest.mark.parametrize(("parts", "on", "circle"), CIRCLES.values(), ids=CIRCLES)
def test_a_job_cannot_depend_on_itself(parts: dict[str, Any], on: str, circle: str) -> None:
    lab = Lab(gpus=0)
    held = lab.submit(hold=True)
    job = lab.submit(dependency=f"afterok:{held}", **parts)
    behind = lab.submit(dependency=f"afterok:{job + bool(parts)}")
    answer = update(lab, job, dependency="afterany:" + on.format(id=job, task=job + 1, behind=behind))
    assert isinstance(answer, Refused)
    assert answer.message == f"the jobs would wait for each other: {circle}"
    assert lab.job(job).spec.dependency == f"afterok:{held}"


def test_a_task_can_depend_on_another_task_but_not_on_its_array() -> None:
    lab = Lab(gpus=0)
    array = lab.submit(array=THREE, hold=True)
    answer = update(lab, array + 2, dependency=f"afterok:{array}")
    assert answer.message == f"the jobs would wait for each other: {array} -> {array}_1 -> {array}"
    update(lab, array + 2, dependency=f"afterok:{array + 1}")
    lab.ask(Release(ANN, (array,)))
    assert (lab.job(array + 1).state, lab.job(array + 2).state) == (JobState.RUNNING, JobState.PENDING)
    for _ in range(3):
        lab.tick(11)
    assert lab.job(array).state is JobState.COMPLETED


def test_a_started_task_cannot_get_a_dependency() -> None:
    lab = Lab(gpus=0, outcome=SimulatedOutcome(runs_s=1, exit_code=1))
    other = lab.submit(hold=True)
    array = lab.submit(array=THREE, retry={"retries": 1, "backoff_s": 100.0})
    lab.tick(1)
    answer = update(lab, array + 1, dependency=f"afterok:{other}")
    assert answer.message == f"task {array}_0 has already started and no longer depends on other jobs"


# --- others of the same name, task by task ------------------------------------------------------------


def test_a_singleton_covers_one_owner_and_follows_renames() -> None:
    lab = Lab(gpus=0)
    first = lab.submit(name="nightly", hold=True)
    (other,) = lab.ask(lab.submission(caller=BOB, name="nightly", dependency="singleton"))
    assert lab.job(other["ids"][0]).state is JobState.RUNNING
    second = lab.submit(name="nightly", dependency="singleton")
    assert why(lab, second) == f"waits for job {first}, which has the same name, to end"
    update(lab, first, name="old")
    assert lab.job(second).state is JobState.RUNNING


def test_a_renamed_singleton_waits_for_the_jobs_of_its_new_name() -> None:
    """It stayed as it was, waiting or not, until a job of the same name came or went."""
    lab = Lab(gpus=0, cpus=1)
    first = lab.submit(name="nightly", hold=True)
    running = lab.submit(name="other")
    waiting = lab.submit(name="nightly", dependency="singleton")
    update(lab, waiting, name="weekly")
    assert why(lab, waiting) != f"waits for job {first}, which has the same name, to end"
    assert lab.scheduler.state.class_of(waiting) is not None
    check_memory(lab)
    update(lab, waiting, name="nightly")
    assert why(lab, waiting) == f"waits for job {first}, which has the same name, to end"
    assert lab.scheduler.state.class_of(waiting) is None
    check_memory(lab)
    lab.ask(Cancel(ANN, Selection(ids=(running,))))
    lab.tick(1)
    assert lab.job(waiting).state is JobState.PENDING


def test_a_separately_held_task_still_waits_for_its_counterpart_alone() -> None:
    """It waited for the whole of the other array, and was cancelled when any task of that failed."""
    lab = Lab(gpus=0)
    first = lab.submit(array=THREE, hold=True)
    second = lab.submit(array=THREE, dependency=f"aftercorr:{first}")
    lab.outcomes = {f"{first + 3}.1": SimulatedOutcome(runs_s=1, exit_code=1)}
    lab.ask(Hold(ANN, (second + 1, second + 2)))
    lab.ask(Release(ANN, (first,)))
    lab.restart()
    lab.tick(1)
    lab.ask(Release(ANN, (second + 1,)))
    assert why(lab, second + 1) == f"waits for job {first}_0 to complete"
    for _ in range(3):
        lab.tick(11)
    lab.ask(Release(ANN, (second + 2,)))
    lab.tick(11)
    states = [lab.job(second + 1 + number).state for number in range(3)]
    assert states == [JobState.COMPLETED, JobState.COMPLETED, JobState.CANCELLED]


# --- tasks that never started ---------------------------------------------------------------------------


@pytest.mark.parametrize("has_ended", [False, True], ids=["the others still end", "all has ended"])
def test_a_task_that_will_never_start_counts_as_cancelled(has_ended: bool) -> None:
    """While the other tasks were ending, whoever came then waited for ever; afterwards there was no such job."""
    lab = Lab(gpus=0, cpus=1, outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=5))
    array = lab.submit(array=THREE)
    lab.ask(Cancel(ANN, Selection(ids=(array,))))
    assert lab.job(array).state is JobState.COMPLETING
    if has_ended:
        lab.tick(6)
    lab.outcome = SimulatedOutcome(runs_s=1)
    last = array + 3
    ids = [lab.submit(dependency=f"{kind}:{array}_2={last}") for kind in ("afterany", "afterok", "after")]
    for _ in range(4):
        lab.tick(6)
    assert [lab.job(job_id).state for job_id in ids] == [JobState.COMPLETED, JobState.CANCELLED, JobState.COMPLETED]
    text = render(lab.job(ids[1]).reason_text or "")
    assert text == f"depends on the success of job {array}_2, which ended as CANCELLED"
    lab.restart()
    assert lab.job(lab.submit(dependency=f"afterany:{array}_2={last}")).state is JobState.RUNNING


def test_a_counterpart_that_fails_is_nothing_to_an_array_that_was_given_up() -> None:
    """Its tasks that had never started were to be given up again, and every tick failed from then on."""
    lab = Lab(gpus=0, cpus=4, outcome=SimulatedOutcome(runs_s=3))
    first = lab.submit(array=ArraySpec("0-2", 1))
    second = lab.submit(array=THREE, dependency=f"aftercorr:{first}")
    lab.outcomes = {
        f"{first + 2}.1": SimulatedOutcome(runs_s=3, exit_code=1),
        f"{second + 1}.1": SimulatedOutcome(runs_s=100, stop_takes_s=20),
    }
    lab.tick(3)
    assert lab.job(second + 1).state is JobState.RUNNING
    lab.ask(Cancel(ANN, Selection(ids=(second,))))
    lab.tick(3)
    assert lab.job(first + 2).state is JobState.FAILED
    assert lab.job(second).state is JobState.COMPLETING
    check_memory(lab)
    lab.tick(20)
    lab.tick(3)
    assert [lab.job(one).state for one in (first, second)] == [JobState.FAILED, JobState.CANCELLED]
    assert not lab.scheduler.state.jobs


# --- what can never come true is said at submission ---------------------------------------------------


def failed(lab: Lab) -> int:
    lab.outcomes[f"{lab.scheduler.state.next_id}.1"] = SimulatedOutcome(exit_code=3, runs_s=1)
    job_id = lab.submit()
    lab.tick(2)
    assert lab.job(job_id).state is JobState.FAILED
    return job_id


def notes(lab: Lab, **parts: Any) -> list[str]:
    (answer,) = lab.ask(lab.submission(**parts))
    return list(map(render, answer["notes"]))


def test_a_dependency_on_success_of_a_failed_job_is_noted_at_submission() -> None:
    lab = Lab(gpus=0)
    parent = failed(lab)
    never = f"depends on the success of job {parent}, which ended as FAILED"
    assert notes(lab, dependency=f"afterok:{parent}") == [f"job 2 can never start: {never}; cancelled at once"]
    assert lab.job(2).state is JobState.CANCELLED
    waits = f"can never start: {never}; pending until the dependency is changed: gctl update 3 dependency="
    assert notes(lab, dependency=f"afterok:{parent}", never_satisfied="wait") == [f"job 3 {waits}"]
    assert lab.job(3).state is JobState.PENDING
    # An array is one submission, and so are the lines of a batch.
    assert notes(lab, dependency=f"afterok:{parent}", array=THREE)[0].startswith("job 4 can never start: ")
    one = lab.submission(dependency=f"afterok:{parent}")
    (answer,) = lab.ask(dataclasses.replace(one, specs=[*one.specs] * 5))
    assert answer["notes"][0].startswith("jobs 8, 9, 10 and 2 more can never start: ")
    chained = notes(lab, dependency=f"afterok:{answer['ids'][0]}")
    assert chained == [
        "job 13 can never start: depends on the success of job 8, which ended as CANCELLED; cancelled at once"
    ]


def test_the_dependency_of_a_batch_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(gpus=0)
    looks: list[object] = []
    real = submit.never_starts
    monkeypatch.setattr(submit, "never_starts", lambda spec, *rest: (looks.append(spec), real(spec, *rest))[1])
    one = lab.submission(dependency=f"afterok:{failed(lab)}")
    (answer,) = lab.ask(dataclasses.replace(one, specs=[*one.specs] * 100))
    assert answer["notes"][0].startswith("jobs 2, 3, 4 and 97 more can never start: ")
    assert len(looks) == 1


@pytest.mark.parametrize("kind", ["afterany", "afternotok", "after"])
def test_a_satisfied_dependency_is_not_noted(kind: str) -> None:
    lab = Lab(gpus=0)
    assert notes(lab, dependency=f"{kind}:{failed(lab)}") == []


def test_a_dependency_that_may_still_be_satisfied_is_not_noted() -> None:
    lab = Lab(gpus=0)
    parent, other = failed(lab), lab.submit(hold=True)
    assert notes(lab, dependency=f"afterok:{parent}?afterok:{other}") == []
    assert len(notes(lab, dependency=f"afterok:{parent},afterok:{other}")) == 1


def test_a_dependency_made_impossible_by_an_update_is_noted() -> None:
    lab = Lab(gpus=0)
    parent, child = failed(lab), lab.submit(hold=True)
    answer = update(lab, child, dependency=f"afterok:{parent}")
    assert list(map(render, answer["notes"])) == [
        f"job {child} can never start: depends on the success of job {parent}, which ended as FAILED; cancelled at once"
    ]
    assert "notes" not in update(lab, lab.submit(hold=True), nice=1)


def test_a_dry_run_reports_a_job_that_can_never_start() -> None:
    lab = Lab(gpus=0)
    parent = failed(lab)
    found = dry_run(spec(dependency=f"afterok:{parent}"), ANN, lab.scheduler)()
    assert (found.verdict, found.reason) == ("waits", "DependencyNeverSatisfied")
    assert render(found.text) == f"could never start: depends on the success of job {parent}, which ended as FAILED"
