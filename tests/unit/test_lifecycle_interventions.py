"""What people and the policy do to a job: it is cancelled, held, makes room, stands still."""

from __future__ import annotations

from typing import Any

import pytest
from life_builders import PLACE, SETTINGS, end, kinds, lose, rule, started

from gpusched.errors import BrokenInvariant
from gpusched.lifecycle import arrays, run_transitions, transitions
from gpusched.model.execution import RunLost, RunNeverStarted, RunResumed, RunStopping, RunSuspended
from gpusched.model.job import Job, JobEvent, RetryRule, Run
from gpusched.model.states import FINAL_STATES, JobState, ReasonCode
from gpusched.testing import NOW, job, launch

# --- cancel -----------------------------------------------------------------------------------------


def test_a_pending_job_is_cancelled_at_once():
    one, events = transitions.cancel(job(7), NOW + 1, "ann")
    assert (one.state, one.end_at, one.reason, one.reason_text) == (
        JobState.CANCELLED,
        NOW + 1,
        ReasonCode.CANCELLED_BY_USER,
        "cancelled by ann",
    )
    assert kinds(events) == ["ended"]


def test_who_cancelled_a_job_is_a_field_of_it():
    waiting, running = job(7), started()[0]
    for one in (waiting, running):
        after, _ = transitions.cancel(one, NOW + 1, "ann through MCP", "ann")
        assert (after.reason_text, after.cancelled_by) == ("cancelled by ann through MCP", "ann")
    array, _ = arrays.stop(job(7), NOW + 1, ReasonCode.CANCELLED_BY_USER, "cancelled by ann", "ann")
    assert array.cancelled_by == "ann"


def test_a_job_in_its_backoff_is_cancelled_at_once():
    one, _, _ = end(*started(retry=rule()), exit_code=3)
    one, _ = transitions.cancel(one, NOW + 61, "ann")
    assert (one.state, one.end_at, one.reason_text) == (JobState.CANCELLED, NOW + 61, "cancelled by ann")


def test_a_cancelled_running_job_completes_first():
    one, run = started()
    one, events = transitions.cancel(one, NOW + 9, "ann")
    assert (one.state, one.cancel_at, one.end_at) == (JobState.COMPLETING, NOW + 9, None)
    assert kinds(events) == ["stopping"]
    one, run, _ = end(one, run, exit_code=None, signal=15, stopped_by="cancel")
    assert (one.state, one.reason_text) == (JobState.CANCELLED, "cancelled by ann")


def test_a_second_cancel_changes_nothing():
    one, _ = started()
    once, _ = transitions.cancel(one, NOW + 9, "ann")
    assert transitions.cancel(once, NOW + 10, "root") == (once, ())


def test_a_job_being_stopped_at_its_limit_can_be_cancelled():
    one, run = started(retry=rule(retry_on=("timeout",)), time_limit_s=60)
    one, run, _ = run_transitions.run_stopping(one, run, RunStopping("7.1", NOW + 60, "timeout"))
    one, _ = transitions.cancel(one, NOW + 61, "ann")
    assert (one.state, one.cancel_at) == (JobState.COMPLETING, NOW + 61)
    one, _, _ = end(one, run, exit_code=None, signal=15, stopped_by="timeout")
    assert one.state is JobState.CANCELLED


CANCELLED_WHILE = {
    "it completed": ({}, JobState.COMPLETED),
    "it failed and no retry was left": ({"exit_code": 3}, JobState.FAILED),
    "its command could not be started": ({"launch_error": "no"}, JobState.FAILED),
}


@pytest.mark.parametrize(("parts", "state"), CANCELLED_WHILE.values(), ids=CANCELLED_WHILE)
def test_an_end_before_the_cancel_reached_the_run_stands_when(parts, state):
    one, run = started()
    one, _ = transitions.cancel(one, NOW + 9, "ann")
    one, _, _ = end(one, run, **parts)
    assert one.state is state


def test_a_cancel_forbids_a_retry():
    one, run = started(retry=rule())
    one, _ = transitions.cancel(one, NOW + 9, "ann")
    one, _, events = end(one, run, exit_code=3)
    assert (one.state, one.failures, one.reason) == (JobState.CANCELLED, 0, ReasonCode.CANCELLED_BY_USER)
    assert one.reason_text == "cancelled; its last run: exit code 3"
    assert kinds(events) == ["ended"]


@pytest.mark.parametrize("requeue", [True, False])
def test_a_cancel_forbids_a_requeue(requeue):
    one, run = started(retry=RetryRule(requeue=requeue))
    one, _ = transitions.cancel(one, NOW + 9, "ann")
    one, _, _ = lose(one, run)
    assert (one.state, one.requeues) == (JobState.CANCELLED, 0)


def test_a_cancel_while_gpus_are_being_cleaned_forbids_a_retry():
    one, run, _ = end(*started(retry=rule()), clean=False, exit_code=3)
    one, _ = transitions.cancel(one, NOW + 61, "ann")
    one, _ = run_transitions.finish(one, run, SETTINGS, NOW + 62)
    assert one.state is JobState.CANCELLED


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_an_ended_job_cannot_be_cancelled_held_or_released(state):
    done = job(7, state=state, end_at=NOW)
    for act in (transitions.cancel, transitions.hold, transitions.release):
        with pytest.raises(BrokenInvariant):
            act(done, NOW, "ann")


# --- hold, release, dependencies --------------------------------------------------------------------


def test_a_held_job_is_released():
    held, event = transitions.hold(job(7), NOW, "ann")
    assert (held.hold, event.kind, event.text) == ("user", "held", "held by ann")
    free, event = transitions.release(held, NOW, "ann")
    assert (free.hold, event.kind, event.text) == (None, "released", "released by ann")
    assert free == job(7)


def test_an_admin_hold_is_marked():
    held, _ = transitions.hold(job(7), NOW, "root", admin=True)
    assert held.hold == "admin"


def test_a_running_job_is_held_for_its_next_run():
    one, run = started(retry=rule())
    one, _ = transitions.hold(one, NOW, "ann")
    one, _, _ = end(one, run, exit_code=3)
    assert (one.state, one.hold) == (JobState.PENDING, "user")


def test_a_job_with_an_unsatisfiable_dependency_is_cancelled():
    one, events = transitions.give_up(
        job(7), NOW, ReasonCode.DEPENDENCY_NEVER_SATISFIED, "depends on the success of job 3"
    )
    assert (one.state, one.reason, one.end_at) == (
        JobState.CANCELLED,
        ReasonCode.DEPENDENCY_NEVER_SATISFIED,
        NOW,
    )
    assert events[0].text == "CANCELLED: depends on the success of job 3"
    with pytest.raises(BrokenInvariant):
        transitions.give_up(job(7, state=JobState.RUNNING), NOW, ReasonCode.DEPENDENCY_NEVER_SATISFIED, "x")


# --- making room --------------------------------------------------------------------------------------

WHY = "made room for job 12 (its QOS goes first)"


def preempted(**parts: Any) -> tuple[Job, Run]:
    """A job whose run was told to make room a minute after its start."""
    one, run = started(**parts)
    one, _ = transitions.preempt(one, NOW + 60, WHY)
    return one, run


def test_a_preempted_job_is_completing_and_names_the_preemptor():
    one, run = started()
    after, events = transitions.preempt(one, NOW + 60, WHY)
    assert (after.state, after.preempt_at) == (JobState.COMPLETING, NOW + 60)
    assert (after.reason, after.reason_text) == (ReasonCode.PREEMPTED, WHY)
    assert events == (JobEvent(7, NOW + 60, "stopping", f"preempted: {WHY}", run.number),)


def test_a_second_preemption_changes_nothing():
    one, _ = preempted()
    assert transitions.preempt(one, NOW + 70, "another") == (one, ())


PREEMPTED_ENDS = {
    "ended by the signal": ({"exit_code": None, "signal": 15}, JobState.PENDING, JobState.PREEMPTED),
    "killed after its grace": ({"exit_code": None, "signal": 9}, JobState.PENDING, JobState.PREEMPTED),
    "saved its work and left with exit code 7": ({"exit_code": 7}, JobState.PENDING, JobState.PREEMPTED),
    "saved its work and left with exit code 0": ({"exit_code": 0}, JobState.PENDING, JobState.PREEMPTED),
    "said that it is done": ({"exit_code": 0, "is_done": True}, JobState.COMPLETED, JobState.COMPLETED),
    "said that it is done, and failed": ({"exit_code": 1, "is_done": False}, JobState.PENDING, JobState.PREEMPTED),
    "had succeeded by itself before the signal came": (
        {"exit_code": 0, "stopped_by": None},
        JobState.COMPLETED,
        JobState.COMPLETED,
    ),
    "had failed by itself before the signal came": (
        {"exit_code": 7, "stopped_by": None},
        JobState.FAILED,
        JobState.FAILED,
    ),
    "had reached its time limit before": (
        {"exit_code": None, "signal": 15, "stopped_by": "timeout"},
        JobState.TIMEOUT,
        JobState.TIMEOUT,
    ),
}


@pytest.mark.parametrize(("parts", "state", "outcome"), PREEMPTED_ENDS.values(), ids=PREEMPTED_ENDS)
@pytest.mark.parametrize("clean", [True, False])
def test_a_preempted_job_ends_when_it(parts, state, outcome, clean):
    one, run = preempted()
    after, run, _ = end(one, run, clean=clean, at=NOW + 65, **{"stopped_by": "preempt", **parts})
    if not clean:
        assert after.state is JobState.COMPLETING
        after, _ = run_transitions.finish(after, run, SETTINGS, NOW + 70)
    assert (after.state, run.outcome) == (state, outcome)
    assert after.preempt_at is None
    assert after.is_front is (state is JobState.PENDING)


def test_a_preempted_job_waits_at_the_front_with_its_age_and_uncounted():
    one, run = preempted(queued_at=NOW - 900, failures=1, requeues=2, retry=rule())
    after, run, events = end(one, run, stopped_by="preempt", exit_code=None, signal=15)
    assert (after.state, after.is_front, after.queued_at) == (JobState.PENDING, True, NOW - 900)
    assert (after.failures, after.requeues, after.eligible_at) == (1, 2, NOW + 60.1)
    assert (run.reason, run.reason_text) == (ReasonCode.PREEMPTED, WHY)
    assert kinds(events) == ["ended", "requeued"]
    again, _, _ = run_transitions.start_run(after, PLACE, {"n1": "boot1"}, NOW + 100)
    assert (again.run, again.is_front, again.preempt_at, again.reason) == (2, False, None, None)


def test_a_preempted_job_without_requeue_ends():
    one, run = preempted(retry=rule(requeue=False))
    after, run, _ = end(one, run, stopped_by="preempt", exit_code=None, signal=15)
    assert (after.state, after.reason, after.reason_text) == (JobState.PREEMPTED, ReasonCode.PREEMPTED, WHY)
    assert (after.end_at, after.is_front) == (NOW + 60, False)


@pytest.mark.parametrize("stopped_by", ["preempt", "cancel"])
def test_a_cancel_during_the_grace_cancels(stopped_by):
    one, run = preempted()
    one, _ = transitions.cancel(one, NOW + 61, "ann")
    after, _, _ = end(one, run, stopped_by=stopped_by, exit_code=None, signal=15)
    assert after.state is JobState.CANCELLED


def test_a_job_preempted_before_it_was_started_waits_at_the_front():
    one, run, _ = run_transitions.start_run(job(7), PLACE, {"n1": "boot1"}, NOW)
    one, _ = transitions.preempt(one, NOW + 1, WHY)
    event = RunNeverStarted("7.1", NOW + 2, "the fork server ended")
    after, _, _ = run_transitions.run_never_started(one, run, event, SETTINGS, NOW + 2)
    assert (after.state, after.is_front, after.preempt_at, after.reason) == (JobState.PENDING, True, None, None)


def test_a_preempted_run_lost_with_its_supervisor_counts_as_lost():
    one, run = preempted()
    after, run, _ = run_transitions.run_lost(
        one, run, RunLost("7.1", NOW + 61, "gone"), SETTINGS, NOW + 61, gpus_clean=True
    )
    assert (after.state, after.requeues, run.outcome) == (JobState.PENDING, 1, JobState.NODE_FAIL)


def test_a_requeue_names_its_requester():
    one, run = started()
    before = one.queued_at
    one, events = transitions.requeue(one, NOW + 60, "root", is_owner=False)
    assert events[0].text == "requeued by root"
    after, run, _ = end(one, run, stopped_by="preempt", exit_code=None, signal=15)
    assert (after.state, after.is_front, after.queued_at) == (JobState.PENDING, True, before)
    assert (run.outcome, run.reason, run.reason_text) == (JobState.PREEMPTED, ReasonCode.REQUEUED, "requeued by root")


@pytest.mark.parametrize(
    ("stopped_by", "code", "number"),
    [
        (None, 255, None),
        (None, 0, None),
        (None, None, 9),
        ("requeue", 0, None),
        ("requeue", 3, None),
        ("timeout", 1, None),
    ],
)
def test_a_requeued_job_waits_again_however_its_run_ended(stopped_by, code, number):
    # A script that requeues itself exits at once, before any order reaches its run.
    one, run = started(launch=launch("true", slurm=True))
    one, _ = transitions.requeue(one, NOW + 60, "ann", is_owner=True)
    after, run, _ = end(one, run, stopped_by=stopped_by, exit_code=code, signal=number)
    assert (after.state, after.failures, after.reason_text) == (JobState.PENDING, 0, "requeued by ann")
    assert (run.outcome, run.reason, run.exit_code) == (JobState.PREEMPTED, ReasonCode.REQUEUED, code)


def test_a_requeued_job_of_gsub_is_completed_only_by_a_run_that_was_not_told_or_says_that_it_is_done():
    one, run = started()
    one, _ = transitions.requeue(one, NOW + 60, "ann", is_owner=True)
    assert end(one, run, stopped_by="requeue", exit_code=0)[0].state is JobState.PENDING
    assert end(one, run, stopped_by="requeue", exit_code=0, is_done=True)[0].state is JobState.COMPLETED
    assert end(one, run, stopped_by=None, exit_code=0)[0].state is JobState.COMPLETED
    assert end(one, run, stopped_by=None, exit_code=1)[0].state is JobState.PENDING


# --- exit code 0 of a run that was told to stop ------------------------------------------------------------

ORDERED = {
    "a requeue by hand": ("requeue", lambda one: transitions.requeue(one, NOW + 60, "root", is_owner=False)[0]),
    "a preemption": ("preempt", lambda one: transitions.preempt(one, NOW + 60, WHY)[0]),
    "a requeue for idle GPUs": ("preempt", lambda one: transitions.requeue_idle(one, NOW + 60, "its GPU is idle")[0]),
    "a shutdown of its node": ("shutdown", lambda one: one),
    "a lost contact": ("head_lost", lambda one: one),
    "a lost GPU": ("gpu_lost", lambda one: transitions.lose_gpu(one, NOW + 60, "GPU 0")[0]),
}
NOT_DONE = (
    "run 1 ended with exit code 0 after it was told to stop for a requeue, which does not complete its job; "
    'a run that has nothing left to do says so before it ends: echo done > "$GPUSCHED_CHECKPOINT_FILE"'
)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("why", "order"), ORDERED.values(), ids=ORDERED)
def test_exit_code_0_of_a_run_told_to_stop_for_a_requeue_does_not_complete_its_job(why, order, clean):
    one, run = started(retry=rule(retries=1), failures=1)
    after, run, events = end(order(one), run, clean=clean, at=NOW + 65, stopped_by=why, exit_code=0)
    if not clean:
        assert after.state is JobState.COMPLETING
        after, more = run_transitions.finish(after, run, SETTINGS, NOW + 70)
        events += more
    assert (after.state, after.failures) == (JobState.PENDING, 1)
    assert (run.exit_code, run.outcome) != (0, JobState.COMPLETED)
    assert kinds(events)[-1] == "requeued"
    if why != "gpu_lost":
        assert NOT_DONE in [event.text for event in events]


@pytest.mark.parametrize(
    ("why", "order"), [(why, order) for why, order in ORDERED.values() if why != "gpu_lost"], ids=[*ORDERED][:-1]
)
@pytest.mark.parametrize(
    ("parts", "spec", "says"),
    [
        ({"is_done": True}, {}, "ended with exit code 0 after it was told to stop, and had said that it was done"),
        (
            {},
            {"retry": RetryRule(requeue=False)},
            "ended with exit code 0 after it was told to stop, which completes a job with --no-requeue",
        ),
    ],
    ids=["says done", "no requeue"],
)
def test_exit_code_0_of_a_run_told_to_stop_completes_its_job_if_it(why, order, parts, spec, says):
    one, run = started(**spec)
    after, _, events = end(order(one), run, stopped_by=why, exit_code=0, **parts)
    assert (after.state, after.exit_code) == (JobState.COMPLETED, 0)
    assert f"run 1 {says}" in [event.text for event in events]


def test_a_run_that_ended_before_it_could_be_told_says_so():
    one, run = preempted()
    after, _, events = end(one, run, stopped_by=None, exit_code=0)
    assert after.state is JobState.COMPLETED
    assert "run 1 had ended by itself before it was told to stop" in [event.text for event in events]
    _, _, events = end(*started(), exit_code=0)
    assert kinds(events) == ["ended"]


@pytest.mark.parametrize("is_done", [True, False])
def test_a_cancel_that_finds_the_run_told_to_stop_lets_no_other_run_follow(is_done):
    one, run = preempted()
    one, _ = transitions.cancel(one, NOW + 61, "ann")
    after, _, _ = end(one, run, stopped_by="preempt", exit_code=0, is_done=is_done)
    assert after.state is (JobState.COMPLETED if is_done else JobState.CANCELLED)
    assert end(one, run, stopped_by="cancel", exit_code=0)[0].state is JobState.CANCELLED


def test_a_cancel_after_a_requeue_cancels():
    one, run = started()
    one, _ = transitions.requeue(one, NOW + 60, "ann", is_owner=True)
    one, _ = transitions.cancel(one, NOW + 61, "ann")
    after, _, _ = end(one, run, stopped_by="requeue", exit_code=None, signal=15)
    assert after.state is JobState.CANCELLED


def test_a_job_requeued_by_its_owner_waits_from_now_without_precedence():
    one, run = started(time_limit_s=600)
    one, _ = transitions.requeue(one, NOW + 60, "ann", is_owner=True)
    again, nothing = transitions.requeue(one, NOW + 61, "ann", is_owner=True)
    assert (again, nothing) == (one, ())
    after, _, _ = end(one, run, stopped_by="preempt", exit_code=None, signal=15)
    assert (after.state, after.is_front, after.queued_at) == (JobState.PENDING, False, NOW + 60)


def test_a_job_retried_at_its_time_limit_waits_from_then():
    one, run = started(retry=rule(retries=3, retry_on=("timeout",)), time_limit_s=60, queued_at=NOW - 900)
    after, _, _ = end(one, run, stopped_by="timeout", exit_code=None, signal=15)
    assert after.state is JobState.PENDING
    assert after.queued_at == after.eligible_at > NOW
    one, run = started(retry=rule(retries=3, retry_on=("exit",)), queued_at=NOW - 900)
    after, _, _ = end(one, run, exit_code=3)
    assert (after.state, after.queued_at) == (JobState.PENDING, NOW - 900)


def test_only_runs_preempted_by_the_policy_are_not_charged():
    charged = {}
    for name, act in {
        "preempted": lambda one: transitions.preempt(one, NOW + 60, WHY)[0],
        "requeued": lambda one: transitions.requeue(one, NOW + 60, "ann", is_owner=True)[0],
    }.items():
        one, run = started()
        _, run, _ = end(act(one), run, stopped_by="preempt", exit_code=None, signal=15)
        charged[name] = run_transitions.counts_for_usage(run)
    one, run = preempted()
    _, done, _ = end(one, run, stopped_by="preempt", exit_code=0, is_done=True)
    charged["preempted and completed"] = run_transitions.counts_for_usage(done)
    _, run, _ = end(one, run, stopped_by="preempt", exit_code=0)
    charged["preempted with exit code 0"] = run_transitions.counts_for_usage(run)
    _, run, _ = end(*started(), exit_code=3)
    charged["failed"] = run_transitions.counts_for_usage(run)
    assert charged == {
        "preempted": False,
        "requeued": True,
        "preempted and completed": True,
        "preempted with exit code 0": False,
        "failed": True,
    }


# --- standing still -----------------------------------------------------------------------------------


def suspended(by: str = "user", **parts: Any) -> tuple[Job, Run]:
    one, run = started(**parts)
    return transitions.suspend(one, NOW + 60, by, "suspended by ann")[0], run


@pytest.mark.parametrize(("by", "reason"), [("user", None), ("policy", ReasonCode.PREEMPTED)])
def test_a_suspended_job_shows_since_when_and_why(by, reason):
    one, run = started()
    after, events = transitions.suspend(one, NOW + 60, by, "suspended by ann")
    assert (after.state, after.suspended_at, after.suspended_by) == (JobState.SUSPENDED, NOW + 60, by)
    assert (after.reason, after.reason_text) == (reason, "suspended by ann")
    assert events == (JobEvent(7, NOW + 60, "suspended", "suspended by ann", run.number),)
    assert transitions.suspend(after, NOW + 90, by, "again") == (after, ())


def test_a_resumed_job_runs_and_its_run_knows_its_suspended_time():
    one, run = suspended()
    after, run, events = transitions.resume(one, run, NOW + 100, "resumed by ann")
    assert (after.state, after.suspended_at, after.suspended_by) == (JobState.RUNNING, None, None)
    assert (after.reason, after.reason_text, run.suspended_s) == (None, None, 40)
    assert kinds(events) == ["resumed"]
    _, run, _ = run_transitions.run_resumed(after, run, RunResumed("7.1", NOW + 100, 39.5))
    assert run.suspended_s == 39.5
    _, run, _ = end(after, run, at=NOW + 200, suspended_s=39.6)
    assert run.suspended_s == 39.6


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.COMPLETING, JobState.COMPLETED])
def test_only_a_running_job_is_suspended(state):
    with pytest.raises(BrokenInvariant):
        transitions.suspend(job(7, state=state), NOW, "user", "why")


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING, JobState.COMPLETING])
def test_only_a_suspended_job_is_resumed(state):
    _, run = started()
    with pytest.raises(BrokenInvariant):
        transitions.resume(job(7, state=state), run, NOW, "why")


SUSPENDED_ENDS = {
    "is cancelled": lambda one, run: transitions.cancel(one, NOW + 70, "ann")[0],
    "is preempted": lambda one, run: transitions.preempt(one, NOW + 70, WHY)[0],
    "is stopped because its GPU was lost": lambda one, run: run_transitions.run_stopping(
        one, run, RunStopping("7.1", NOW + 70, "gpu_lost")
    )[0],
    "is killed by somebody else": lambda one, run: end(one, run, clean=False, exit_code=None, signal=9)[0],
}


@pytest.mark.parametrize("act", SUSPENDED_ENDS.values(), ids=SUSPENDED_ENDS)
def test_a_suspended_job_moves_to_its_end_when_it(act):
    after = act(*suspended())
    assert (after.state, after.suspended_at, after.suspended_by) == (JobState.COMPLETING, None, None)


def test_a_run_lost_during_suspension_is_not_charged_for_it():
    one, run = suspended()
    event = RunLost("7.1", NOW + 100, "gone")
    after, run, _ = run_transitions.run_lost(one, run, event, SETTINGS, NOW + 100, gpus_clean=True)
    assert (after.state, run.suspended_s) == (JobState.PENDING, 40)


def test_a_suspension_event_only_adds_to_the_history():
    one, run = suspended()
    after, same, events = run_transitions.run_suspended(one, run, RunSuspended("7.1", NOW + 60.5))
    assert (after, same) == (one, run)
    assert kinds(events) == ["note"]
