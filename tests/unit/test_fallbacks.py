"""What follows a job's last failure: when, with what request, what it is told, and never twice."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.lifecycle.fallback import make_fallback, wants_fallback
from gpusched.model.commands import Cancel, Selection
from gpusched.model.execution import Ticket
from gpusched.model.job import ArraySpec, Job, RetryRule
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.testing import NOW, job, launch, request

LINE = "echo sorry"


def ended(state: JobState, **parts: Any) -> Job:
    return job(7, **{"fallback": LINE, "state": state, "end_at": NOW, **parts})


@pytest.mark.parametrize(
    ("what", "ended_job", "expected"),
    [
        ("failed", ended(JobState.FAILED), True),
        ("reached its time limit", ended(JobState.TIMEOUT), True),
        ("ran out of GPU memory", ended(JobState.OUT_OF_MEMORY), True),
        ("was lost with its machine", ended(JobState.NODE_FAIL), True),
        ("did well", ended(JobState.COMPLETED), False),
        ("was cancelled", ended(JobState.CANCELLED), False),
        ("failed while somebody was cancelling it", ended(JobState.FAILED, cancel_at=NOW), False),
        ("made room for another job", ended(JobState.PREEMPTED), False),
        ("came too late", ended(JobState.DEADLINE), False),
        ("has a fallback already", ended(JobState.FAILED, fallback_id=8), False),
        ("asked for none", ended(JobState.FAILED, fallback=None), False),
        ("waits for its next try", job(7, fallback=LINE, state=JobState.PENDING, failures=1), False),
        ("is an array", ended(JobState.FAILED, array=ArraySpec("0-3")), False),
        ("is a task of an array", ended(JobState.FAILED, array=ArraySpec("0-3"), array_id=6, task=0), True),
    ],
)
def test_jobs_declare_a_fallback(what: str, ended_job: Job, expected: bool) -> None:
    assert wants_fallback(ended_job) is expected, what


@pytest.mark.parametrize(
    ("asked", "default", "expected"),
    [
        (None, "gpusched-%j.out", None),
        (None, "out.txt", "out.txt.fallback"),
        ("train.log", "gpusched-%j.out", "train.log.fallback"),
        ("train-%j.log", "out.txt", "train-%j.log"),
        ("/dev/null", "out.txt", "/dev/null"),
    ],
)
def test_the_log_of_the_failed_job_is_kept(asked: str | None, default: str, expected: str | None) -> None:
    failed = ended(JobState.FAILED, launch=launch(stdout=asked, stderr=asked))
    _, made, _ = make_fallback(failed, 8, NOW, default)
    assert made.spec.launch.stdout == expected
    assert made.spec.launch.stderr == (None if asked is None else expected)


def test_a_fallback_has_the_same_requests_and_no_fallback_or_retries() -> None:
    failed = ended(
        JobState.FAILED,
        request=request(gpus=1, vram_mib=9000),
        retry=RetryRule(retries=5, requeue=False),
        dependency="afterok:1",
        deadline_at=NOW,
        key="k",
        array=ArraySpec("0-3"),
        array_id=6,
        task=2,
        submit_at=NOW - 500,
    )
    before, made, _ = make_fallback(failed, 8, NOW, "gpusched-%j.out")
    assert (before.fallback_id, made.spec.fallback_of) == (8, 7)
    assert before == replace(failed, fallback_id=8)
    assert (made.spec.request, made.queued_at, made.submit_at) == (failed.spec.request, NOW - 500, NOW)
    assert made.spec.launch.argv == ("/bin/sh", "-c", LINE)
    asked = made.spec
    taken = (asked.fallback, asked.dependency, asked.deadline_at, asked.key, asked.array, made.array_id)
    assert taken == (None,) * 6
    assert asked.retry == RetryRule(retries=0, requeue=False)


def test_a_fallback_waits_from_the_end_of_a_timed_out_job() -> None:
    failed = ended(JobState.TIMEOUT, submit_at=NOW - 500)
    _, made, _ = make_fallback(failed, 8, NOW, "gpusched-%j.out")
    assert made.queued_at == NOW


def test_a_fallback_belongs_to_the_pipeline_and_inherits_the_hold() -> None:
    failed = replace(ended(JobState.FAILED, pipeline="p1", step="train"), hold="user")
    _, made, _ = make_fallback(failed, 8, NOW, "gpusched-%j.out")
    assert (made.spec.pipeline, made.spec.step, made.hold) == ("p1", "train", "user")
    assert make_fallback(replace(failed, hold=None), 8, NOW, "gpusched-%j.out")[1].hold is None


def test_a_fallback_is_created_after_the_last_failure_in_the_same_commit() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=1, exit_code=3))
    failing = lab.submit(fallback=LINE, retry=RetryRule(retries=1, backoff_s=0))
    commits = lab.store.commits
    lab.tick(1)
    assert (lab.job(failing).run, lab.job(failing).fallback_id) == (2, None)
    lab.tick(1)
    assert lab.job(failing).state is JobState.FAILED
    assert lab.store.commits == commits + 2
    follower = lab.job(failing).fallback_id
    assert follower == failing + 1
    assert lab.job(follower).state is JobState.RUNNING
    assert lab.submit() == follower + 1
    lab.tick(1)
    assert lab.job(follower).state is JobState.FAILED
    assert lab.job(follower).fallback_id is None


def test_a_failed_commit_neither_loses_nor_doubles_the_fallback() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=1, exit_code=3))
    failing = lab.submit(fallback=LINE)
    lab.store.is_full = True
    lab.tick(2)
    lab.tick(1)
    lab.store.is_full = False
    lab.tick(1)
    lab.restart()
    lab.tick(1)
    assert lab.job(failing).fallback_id == failing + 1
    assert lab.store.next_job_id() == failing + 2


def test_a_job_cancelled_before_its_fallback_was_due_has_none() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=100))
    failing = lab.submit(fallback=LINE)
    lab.ask(Cancel(ANN, Selection(ids=(failing,))))
    lab.tick(40)
    assert lab.job(failing).state is JobState.CANCELLED
    assert lab.store.next_job_id() == failing + 1


def test_runs_know_their_previous_runs() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=1, exit_code=3))
    lab.submit(fallback=LINE, retry=RetryRule(retries=1, backoff_s=0))
    tickets = []

    def outcome(ticket: Ticket) -> SimulatedOutcome:
        tickets.append(ticket)
        return lab.outcome

    lab.engine.outcome = outcome
    lab.tick(1)
    lab.outcome = SimulatedOutcome(runs_s=1)
    lab.tick(1)
    again, follower = tickets
    known = {name: value for name, value in again.env.items() if "PREVIOUS" in name}
    assert known == {
        "GPUSCHED_PREVIOUS_EXIT_CODE": "3",
        "GPUSCHED_PREVIOUS_REASON": "NonZeroExitCode",
        "GPUSCHED_PREVIOUS_STATE": "FAILED",
    }
    assert (again.env["GPUSCHED_RESTART_COUNT"], again.env["SLURM_RESTART_COUNT"]) == ("1", "1")
    assert follower.env["GPUSCHED_FAILED_JOB_ID"] == "1"
    assert follower.env["GPUSCHED_EXIT_CODE"] == "3"
    assert follower.env["GPUSCHED_REASON"] == "NonZeroExitCode"
    assert "GPUSCHED_PREVIOUS_EXIT_CODE" not in follower.env
