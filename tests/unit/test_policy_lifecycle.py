"""The state machine, one event at a time: what goes in, what comes out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpusched.errors import BrokenInvariant
from gpusched.model.execution import (
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunResumed,
    RunStarted,
    RunStopping,
    RunSuspended,
)
from gpusched.model.job import Job, JobEvent, RetryRule, Run
from gpusched.model.settings import LifeSettings, Settings
from gpusched.model.snapshot import Placement
from gpusched.model.states import ACTIVE_STATES, FINAL_STATES, JobState, ReasonCode, RunState
from gpusched.policy.life import lifecycle, transitions, yielding
from gpusched.policy.life.retry import backoff_s
from gpusched.testing import NOW, job, share

SETTINGS = Settings()
PLACE = Placement("n1", (share(0), share(2)), 4.0, 2048)


def started(**parts: Any) -> tuple[Job, Run]:
    """A job whose first run lives."""
    one, run, _ = lifecycle.start_run(job(7, **parts), PLACE, "boot1", NOW, "out", None)
    one, run, _ = lifecycle.run_started(one, run, RunStarted("7.1", NOW + 0.5, 100, 5000, 101))
    return one, run


def end(one: Job, run: Run, *, clean: bool = True, at: float = NOW + 60, **parts: Any) -> lifecycle.Step:
    """The run ends, by itself with exit code 0 unless said otherwise."""
    fields: dict[str, Any] = {"start_at": NOW + 0.5, "end_at": at, "exit_code": 0}
    event = RunEnded(run.id, **{**fields, **parts})
    return lifecycle.run_ended(one, run, event, SETTINGS, at + 0.1, gpus_clean=clean)


def rule(**parts: Any) -> RetryRule:
    return RetryRule(**{"retries": 2, **parts})


def kinds(events: tuple[JobEvent, ...]) -> list[str]:
    return [event.kind for event in events]


# --- the table --------------------------------------------------------------------------------------


def test_a_final_state_never_moves():
    assert not [pair for pair in transitions.TRANSITIONS if pair[0] in FINAL_STATES]


def test_every_move_leads_somewhere_else_and_to_a_state_that_can_be_left_or_is_final():
    left = {one for one, _ in transitions.TRANSITIONS}
    assert left <= ACTIVE_STATES
    assert all(one is not other for one, other in transitions.TRANSITIONS)
    assert {other for _, other in transitions.TRANSITIONS} <= left | FINAL_STATES


def test_a_move_that_is_not_in_the_table_raises_with_the_story():
    done = job(7, state=JobState.COMPLETED, start_at=5.0, end_at=9.0, run=3, failures=1)
    with pytest.raises(BrokenInvariant, match=r"job 7 cannot go from COMPLETED to RUNNING") as error:
        transitions.check_transition(done, JobState.RUNNING)
    assert "run 3, start_at 5.0, end_at 9.0, failures 1, requeues 0" in str(error.value)


@pytest.mark.parametrize(("one", "other"), sorted(transitions.TRANSITIONS))
def test_a_move_that_is_in_the_table_passes(one, other):
    transitions.check_transition(job(state=one), other)


# --- start ------------------------------------------------------------------------------------------


def test_a_start_records_the_intent():
    before = job(7, run=2, reason=ReasonCode.NON_ZERO_EXIT_CODE, reason_text="exit code 1", exit_code=1)
    one, run, events = lifecycle.start_run(before, PLACE, "boot1", NOW, "/tmp/o", "/tmp/e")
    assert (one.state, one.run, one.start_at) == (JobState.RUNNING, 3, NOW)
    assert (one.reason, one.reason_text, one.exit_code) == (None, None, None)
    assert run == Run(
        job_id=7,
        number=3,
        state=RunState.STARTING,
        node="n1",
        boot_id="boot1",
        intent_at=NOW,
        gpus=PLACE.gpus,
        cpus=4.0,
        mem_mib=2048,
        stdout_path="/tmp/o",
        stderr_path="/tmp/e",
    )
    assert events == (JobEvent(7, NOW, "started", "started on n1, GPU 0,2", 3),)


def test_a_start_without_gpus_names_the_node_alone():
    _, _, events = lifecycle.start_run(job(7), Placement("n1", (), 1.0, 0), "boot1", NOW)
    assert events[0].text == "started on n1"


@pytest.mark.parametrize("state", sorted(set(JobState) - {JobState.PENDING}))
def test_only_a_pending_job_starts(state):
    with pytest.raises(BrokenInvariant):
        lifecycle.start_run(job(7, state=state), PLACE, "boot1", NOW)


def test_a_confirmed_start_changes_the_run_alone():
    one, run, _ = lifecycle.start_run(job(7), PLACE, "boot1", NOW)
    after, lives, events = lifecycle.run_started(one, run, RunStarted("7.1", NOW + 0.5, 100, 5000, 101))
    assert after is one
    assert events == ()
    assert (lives.state, lives.start_at, lives.pid) == (RunState.RUNNING, NOW + 0.5, 101)
    assert (lives.supervisor_pid, lives.supervisor_start_ticks) == (100, 5000)


def test_a_start_confirmed_again_after_a_restart_changes_nothing():
    one, run = started()
    again = lifecycle.run_started(one, run, RunStarted("7.1", NOW + 0.5, 100, 5000, 101))
    assert again == (one, run, ())


# --- ends -------------------------------------------------------------------------------------------

ENDS = {
    "exit code 0": ({}, JobState.COMPLETED, ReasonCode.NONE, "exit code 0"),
    "exit code 3": ({"exit_code": 3}, JobState.FAILED, ReasonCode.NON_ZERO_EXIT_CODE, "exit code 3"),
    "a signal": (
        {"exit_code": None, "signal": 11},
        JobState.FAILED,
        ReasonCode.RAISED_SIGNAL,
        "ended by signal 11",
    ),
    "a command that could not be started": (
        {"exit_code": None, "start_at": None, "launch_error": "/x: no such directory"},
        JobState.FAILED,
        ReasonCode.JOB_LAUNCH_FAILURE,
        "/x: no such directory",
    ),
    "GPU memory that ran out": (
        {"exit_code": 1, "gpu_oom": True},
        JobState.OUT_OF_MEMORY,
        ReasonCode.OUT_OF_MEMORY,
        "GPU memory ran out (exit code 1)",
    ),
    "GPU memory that ran out, with a signal": (
        {"exit_code": None, "signal": 6, "gpu_oom": True},
        JobState.OUT_OF_MEMORY,
        ReasonCode.OUT_OF_MEMORY,
        "GPU memory ran out (signal 6)",
    ),
    "GPU memory that ran out in a job that coped": (
        {"gpu_oom": True},
        JobState.COMPLETED,
        ReasonCode.NONE,
        "exit code 0",
    ),
    "its limit of host memory": (
        {"exit_code": None, "signal": 9, "oom_kills": 3, "at_mem_limit": True, "mem_limit_mib": 2048},
        JobState.OUT_OF_MEMORY,
        ReasonCode.MEM_LIMIT,
        "needed more than its 2G of host memory: the kernel killed it (signal 9)",
    ),
    "its limit of host memory, told by its shell": (
        {"exit_code": 137, "oom_kills": 1, "at_mem_limit": True, "mem_limit_mib": 2048, "gpu_oom": True},
        JobState.OUT_OF_MEMORY,
        ReasonCode.MEM_LIMIT,
        "needed more than its 2G of host memory: the kernel killed a process of it (exit code 137)",
    ),
    "the machine's memory, whatever its own limit": (
        {"exit_code": None, "signal": 9, "oom_kills": 1, "mem_limit_mib": 2048, "peak_mem_mib": 1024.0},
        JobState.OUT_OF_MEMORY,
        ReasonCode.HOST_OUT_OF_MEMORY,
        "the machine's memory ran out: the kernel killed it, which had used 1G (signal 9)",
    ),
    "a job that did without a process that was killed": (
        {"oom_kills": 1, "at_mem_limit": True, "mem_limit_mib": 2048},
        JobState.COMPLETED,
        ReasonCode.NONE,
        "exit code 0",
    ),
    "a cancel outweighs host memory that ran out": (
        {"exit_code": None, "signal": 9, "stopped_by": "cancel", "oom_kills": 1},
        JobState.CANCELLED,
        ReasonCode.CANCELLED_BY_USER,
        "cancelled",
    ),
    "the time limit": (
        {"exit_code": None, "signal": 15, "stopped_by": "timeout"},
        JobState.TIMEOUT,
        ReasonCode.TIME_LIMIT,
        "reached its time limit of 1:00",
    ),
    "the time limit, with exit code 0 after the signal": (
        {"stopped_by": "timeout"},
        JobState.TIMEOUT,
        ReasonCode.TIME_LIMIT,
        "reached its time limit of 1:00",
    ),
    "a cancel": (
        {"exit_code": None, "signal": 15, "stopped_by": "cancel"},
        JobState.CANCELLED,
        ReasonCode.CANCELLED_BY_USER,
        "cancelled",
    ),
    "a cancel, with exit code 0 after the signal": (
        {"stopped_by": "cancel"},
        JobState.CANCELLED,
        ReasonCode.CANCELLED_BY_USER,
        "cancelled",
    ),
    "a cancel outweighs GPU memory that ran out": (
        {"exit_code": 1, "stopped_by": "cancel", "gpu_oom": True},
        JobState.CANCELLED,
        ReasonCode.CANCELLED_BY_USER,
        "cancelled",
    ),
}


def test_what_the_kernel_killed_is_told_also_when_it_was_not_the_end_of_it():
    parts = {"oom_kills": 1, "at_mem_limit": True, "mem_limit_mib": 2048}
    _, _, events = end(*started(), **parts)
    assert [event.text for event in events] == [
        "COMPLETED: exit code 0",
        "needed more than its 2G of host memory: the kernel killed a process of it",
    ]


@pytest.mark.parametrize(("parts", "state", "reason", "text"), ENDS.values(), ids=ENDS)
def test_a_run_ends_by(parts, state, reason, text):
    one, run, events = end(*started(time_limit_s=60), **parts)
    assert (one.state, one.reason, one.reason_text, one.end_at) == (state, reason, text, NOW + 60)
    assert (run.state, run.outcome, run.reason, run.reason_text) == (RunState.ENDED, state, reason, text)
    assert (one.exit_code, one.signal) == (parts.get("exit_code", 0), parts.get("signal"))
    is_noted = "oom_kills" in parts and state is not JobState.OUT_OF_MEMORY
    assert kinds(events) == ["ended", "note"] if is_noted else ["ended"]
    assert events[0].text == f"{state}: {text}"


def test_a_preempted_run_waits_again_without_counting():
    one, run, events = end(*started(), stopped_by="preempt", exit_code=None, signal=15)
    assert (one.state, one.requeues, one.failures, run.outcome) == (
        JobState.PENDING,
        0,
        0,
        JobState.PREEMPTED,
    )
    assert kinds(events) == ["ended", "requeued"]
    one, _, _ = end(*started(retry=rule(requeue=False)), stopped_by="preempt", exit_code=None, signal=15)
    assert (one.state, one.end_at) == (JobState.PREEMPTED, NOW + 60)


def test_a_run_that_ended_with_the_machine_waits_again_as_after_its_loss():
    one, run, events = end(*started(), stopped_by="shutdown", exit_code=None, signal=15)
    assert (one.state, one.requeues, one.failures) == (JobState.PENDING, 1, 0)
    assert (run.outcome, run.reason, run.reason_text) == (
        JobState.NODE_FAIL,
        ReasonCode.NODE_DOWN,
        "the machine was being shut down",
    )
    assert kinds(events) == ["ended", "requeued"]
    one, _, _ = end(*started(retry=rule(requeue=False, retries=0)), stopped_by="shutdown", exit_code=1)
    assert (one.state, one.reason) == (JobState.NODE_FAIL, ReasonCode.NODE_DOWN)


def test_a_run_that_finished_in_the_grace_of_a_shutdown_has_completed():
    one, _, _ = end(*started(), stopped_by="shutdown", exit_code=0)
    assert one.state is JobState.COMPLETED


def test_a_cancel_during_a_shutdown_is_kept():
    one, run = started()
    one, _ = lifecycle.cancel(one, NOW + 50, "ann")
    after, _, _ = end(one, run, stopped_by="shutdown", exit_code=None, signal=15)
    assert after.state is JobState.CANCELLED


def test_measurements_are_kept():
    _, run, _ = end(*started(), cpu_s=12.5, peak_mem_mib=300.0)
    assert (run.cpu_s, run.peak_mem_mib, run.start_at, run.end_at) == (12.5, 300.0, NOW + 0.5, NOW + 60)


def test_processes_left_behind_are_named():
    _, _, events = end(*started(), leftovers=("sleep(12)", "python(13)"))
    assert kinds(events) == ["ended", "note"]
    assert events[1].text == "ended what it left behind: sleep(12), python(13)"


def test_the_job_starts_when_its_run_really_did():
    one, _, _ = end(*started())
    assert one.start_at == NOW + 0.5
    one, run, _ = lifecycle.start_run(job(7), PLACE, "boot1", NOW)
    one, _, _ = end(one, run, start_at=None, launch_error="no")
    assert one.start_at == NOW


def test_a_run_cannot_end_twice():
    one, run, _ = end(*started(), clean=False)
    with pytest.raises(BrokenInvariant, match="run 7.1"):
        end(one, run)


def test_news_of_an_older_run_are_not_taken_for_the_current_one():
    one, run = started()
    with pytest.raises(BrokenInvariant, match="run 7.1"):
        end(replace(one, run=2), run)
    with pytest.raises(BrokenInvariant):
        lifecycle.run_started(replace(one, id=8), run, RunStarted("7.1", NOW, 1, 1, 1))


# --- completing -------------------------------------------------------------------------------------


def test_until_its_gpus_are_clean_a_job_is_completing():
    one, run, events = end(*started(), clean=False, exit_code=3)
    assert (one.state, one.end_at) == (JobState.COMPLETING, None)
    assert (run.state, run.outcome) == (RunState.ENDED, JobState.FAILED)
    assert kinds(events) == ["ended"]
    one, events = lifecycle.finish(one, run, SETTINGS, NOW + 65)
    assert (one.state, one.end_at, one.exit_code) == (JobState.FAILED, NOW + 60, 3)
    assert events == ()


def test_a_retry_waits_for_clean_gpus_too_and_counts_from_the_end_of_the_run():
    one, run, _ = end(*started(retry=rule()), clean=False, exit_code=3)
    assert one.failures == 0
    one, events = lifecycle.finish(one, run, SETTINGS, NOW + 65)
    assert (one.state, one.failures) == (JobState.PENDING, 1)
    assert one.eligible_at == NOW + 60 + backoff_s(rule(), 1, 7)
    assert kinds(events) == ["retry"]
    late, _ = lifecycle.finish(replace(one, state=JobState.COMPLETING, failures=0), run, SETTINGS, NOW + 900)
    assert late.eligible_at == NOW + 900


def test_finishing_a_run_that_has_not_ended_is_a_bug():
    with pytest.raises(BrokenInvariant, match="has not ended"):
        lifecycle.finish(*started(), SETTINGS, NOW)


STOPPING = {
    "cancel": "is being cancelled",
    "preempt": "is being preempted",
    "shutdown": "is being ended because the machine is being shut down",
    "timeout": "reached its time limit and is being stopped",
    "leftovers": "its first process ended; waiting for others that it left behind",
    "power": "is being stopped: power",
}


@pytest.mark.parametrize(("why", "text"), STOPPING.items())
def test_a_run_that_is_being_stopped_makes_its_job_completing(why, text):
    one, run = started()
    after, same, events = lifecycle.run_stopping(one, run, RunStopping("7.1", NOW + 9, why))
    assert (after.state, same) == (JobState.COMPLETING, run)
    assert events == (JobEvent(7, NOW + 9, "stopping", text, 1),)
    assert lifecycle.run_stopping(after, run, RunStopping("7.1", NOW + 9, why)) == (after, run, ())


def test_a_stopped_run_ends_from_completing():
    one, run = started(time_limit_s=60)
    one, run, _ = lifecycle.run_stopping(one, run, RunStopping("7.1", NOW + 60, "timeout"))
    one, run, _ = end(one, run, exit_code=None, signal=15, stopped_by="timeout")
    assert one.state is JobState.TIMEOUT


# --- retries ----------------------------------------------------------------------------------------


def test_a_failed_run_is_tried_again_after_its_backoff():
    one, _, events = end(*started(retry=rule()), exit_code=3)
    wait_s = backoff_s(rule(), 1, 7)
    assert (one.state, one.failures, one.run, one.end_at) == (JobState.PENDING, 1, 1, None)
    assert one.eligible_at == NOW + 60 + wait_s
    assert one.queued_at == NOW
    assert (one.reason, one.reason_text, one.exit_code) == (ReasonCode.NON_ZERO_EXIT_CODE, "exit code 3", 3)
    assert kinds(events) == ["ended", "retry"]
    assert events[1].text == f"retry 1 of 2 in {wait_s:.1f}s"


def test_after_the_last_retry_the_job_fails():
    one, run = started(retry=rule(), failures=2)
    one, _, events = end(one, run, exit_code=3)
    assert (one.state, one.failures) == (JobState.FAILED, 2)
    assert kinds(events) == ["ended"]


NOT_RETRIED = {
    "a success": {},
    "a cancel": {"stopped_by": "cancel"},
    "a command that cannot be started": {"launch_error": "no such file"},
    "a time limit that the rule does not name": {"stopped_by": "timeout"},
}


@pytest.mark.parametrize("parts", NOT_RETRIED.values(), ids=NOT_RETRIED)
def test_no_retry_after(parts):
    one, _, _ = end(*started(retry=rule(retries=9)), **parts)
    assert one.state.is_final
    assert one.failures == 0


def test_a_time_limit_is_tried_again_when_the_rule_names_it():
    one, _, _ = end(*started(retry=rule(retry_on=("timeout",))), stopped_by="timeout")
    assert (one.state, one.failures) == (JobState.PENDING, 1)


# --- runs lost to the machine -----------------------------------------------------------------------

LOST = RunLost("7.1", NOW + 60, "its supervisor is gone")


def lose(one: Job, run: Run, *, clean: bool = True, **parts: Any) -> lifecycle.Step:
    return lifecycle.run_lost(one, run, LOST, SETTINGS, NOW + 61, gpus_clean=clean, **parts)


def test_a_lost_run_is_repeated_for_free():
    one, run, events = lose(*started())
    assert (one.state, one.requeues, one.failures, one.eligible_at) == (JobState.PENDING, 1, 0, NOW + 61)
    assert (run.outcome, run.reason, run.end_at) == (
        JobState.NODE_FAIL,
        ReasonCode.SUPERVISOR_LOST,
        NOW + 60,
    )
    assert kinds(events) == ["ended", "requeued"]


def test_a_lost_run_keeps_its_job_completing_until_its_gpus_are_clean():
    one, run, events = lose(*started(), clean=False)
    assert (one.state, run.state, kinds(events)) == (JobState.COMPLETING, RunState.ENDED, ["ended"])
    one, _ = lifecycle.finish(one, run, SETTINGS, NOW + 70)
    assert (one.state, one.requeues, one.eligible_at) == (JobState.PENDING, 1, NOW + 70)


def test_a_lost_run_of_another_boot_is_the_machines_restart():
    _, run, _ = lose(*started(), boot_id="boot2")
    assert run.reason is ReasonCode.NODE_DOWN
    _, run, _ = lose(*started(), boot_id="boot1")
    assert run.reason is ReasonCode.SUPERVISOR_LOST


def test_repeating_for_free_ends_at_the_settings_limit():
    one, run = started(requeues=SETTINGS.life.max_requeues, retry=rule(retries=9))
    one, _, _ = lose(one, run)
    assert (one.state, one.reason, one.failures) == (JobState.NODE_FAIL, ReasonCode.SUPERVISOR_LOST, 0)
    assert one.end_at == NOW + 60


def test_without_requeue_a_lost_run_uses_a_retry_when_the_rule_names_it():
    one, _, _ = lose(*started(retry=rule(requeue=False)))
    assert (one.state, one.failures, one.requeues) == (JobState.PENDING, 1, 0)
    one, _, _ = lose(*started(retry=rule(requeue=False, retry_on=("exit",))))
    assert one.state is JobState.NODE_FAIL
    one, _, _ = lose(*started(retry=rule(requeue=False, retries=0)))
    assert one.state is JobState.NODE_FAIL


def test_with_no_requeue_allowed_by_the_settings_the_job_ends():
    one, run = started()
    none = replace(SETTINGS, life=LifeSettings(max_requeues=0))
    one, _, _ = lifecycle.run_lost(one, run, LOST, none, NOW + 61, gpus_clean=True)
    assert one.state is JobState.NODE_FAIL


# --- runs that never started ------------------------------------------------------------------------

NEVER = RunNeverStarted("7.1", NOW + 5, "the claim was revoked")


def test_a_run_that_never_started_counts_for_nothing_but_its_number():
    one, run, _ = lifecycle.start_run(job(7), PLACE, "boot1", NOW)
    one, run, events = lifecycle.run_never_started(one, run, NEVER, SETTINGS, NOW + 5)
    assert (one.state, one.run, one.failures, one.requeues, one.start_at) == (
        JobState.PENDING,
        1,
        0,
        0,
        None,
    )
    assert (run.state, run.outcome, run.start_at) == (RunState.ENDED, JobState.CANCELLED, None)
    assert [(event.kind, event.text) for event in events] == [("requeued", "was not started: the claim was revoked")]
    _, run, _ = lifecycle.start_run(one, PLACE, "boot1", NOW + 6)
    assert run.id == "7.2"


def test_an_engine_that_cannot_start_anything_is_asked_once_per_poll():
    one, run, _ = lifecycle.start_run(job(7), PLACE, "boot1", NOW)
    soon = replace(NEVER, at=NOW + 0.01)
    one, _, _ = lifecycle.run_never_started(one, run, soon, SETTINGS, NOW + 0.01)
    assert one.eligible_at == NOW + SETTINGS.daemon.poll_s


def test_a_cancel_that_met_a_run_that_never_started_ends_the_job():
    one, run, _ = lifecycle.start_run(job(7), PLACE, "boot1", NOW)
    one, _ = lifecycle.cancel(one, NOW + 1, "ann")
    one, run, _ = lifecycle.run_never_started(one, run, NEVER, SETTINGS, NOW + 5)
    assert (one.state, one.end_at, one.reason) == (
        JobState.CANCELLED,
        NOW + 5,
        ReasonCode.CANCELLED_BY_USER,
    )


# --- cancel -----------------------------------------------------------------------------------------


def test_a_pending_job_is_cancelled_at_once():
    one, events = lifecycle.cancel(job(7), NOW + 1, "ann")
    assert (one.state, one.end_at, one.reason, one.reason_text) == (
        JobState.CANCELLED,
        NOW + 1,
        ReasonCode.CANCELLED_BY_USER,
        "cancelled by ann",
    )
    assert kinds(events) == ["ended"]


def test_a_job_that_waits_for_its_retry_is_cancelled_at_once():
    one, _, _ = end(*started(retry=rule()), exit_code=3)
    one, _ = lifecycle.cancel(one, NOW + 61, "ann")
    assert (one.state, one.end_at, one.reason_text) == (JobState.CANCELLED, NOW + 61, "cancelled by ann")


def test_a_running_job_completes_first():
    one, run = started()
    one, events = lifecycle.cancel(one, NOW + 9, "ann")
    assert (one.state, one.cancel_at, one.end_at) == (JobState.COMPLETING, NOW + 9, None)
    assert kinds(events) == ["stopping"]
    one, run, _ = end(one, run, exit_code=None, signal=15, stopped_by="cancel")
    assert (one.state, one.reason_text) == (JobState.CANCELLED, "cancelled by ann")


def test_a_second_cancel_changes_nothing():
    one, _ = started()
    once, _ = lifecycle.cancel(one, NOW + 9, "ann")
    assert lifecycle.cancel(once, NOW + 10, "root") == (once, ())


def test_a_job_that_is_being_stopped_for_its_limit_can_be_cancelled():
    one, run = started(retry=rule(retry_on=("timeout",)), time_limit_s=60)
    one, run, _ = lifecycle.run_stopping(one, run, RunStopping("7.1", NOW + 60, "timeout"))
    one, _ = lifecycle.cancel(one, NOW + 61, "ann")
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
    one, _ = lifecycle.cancel(one, NOW + 9, "ann")
    one, _, _ = end(one, run, **parts)
    assert one.state is state


def test_a_cancel_forbids_a_retry():
    one, run = started(retry=rule())
    one, _ = lifecycle.cancel(one, NOW + 9, "ann")
    one, _, events = end(one, run, exit_code=3)
    assert (one.state, one.failures, one.reason) == (JobState.CANCELLED, 0, ReasonCode.CANCELLED_BY_USER)
    assert one.reason_text == "cancelled; its last run: exit code 3"
    assert kinds(events) == ["ended"]


@pytest.mark.parametrize("requeue", [True, False])
def test_a_cancel_forbids_a_requeue(requeue):
    one, run = started(retry=RetryRule(requeue=requeue))
    one, _ = lifecycle.cancel(one, NOW + 9, "ann")
    one, _, _ = lose(one, run)
    assert (one.state, one.requeues) == (JobState.CANCELLED, 0)


def test_a_cancel_while_gpus_are_being_cleaned_forbids_a_retry():
    one, run, _ = end(*started(retry=rule()), clean=False, exit_code=3)
    one, _ = lifecycle.cancel(one, NOW + 61, "ann")
    one, _ = lifecycle.finish(one, run, SETTINGS, NOW + 62)
    assert one.state is JobState.CANCELLED


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_a_job_that_has_ended_cannot_be_cancelled_held_or_released(state):
    done = job(7, state=state, end_at=NOW)
    for act in (lifecycle.cancel, lifecycle.hold, lifecycle.release):
        with pytest.raises(BrokenInvariant):
            act(done, NOW, "ann")


# --- hold, release, dependencies --------------------------------------------------------------------


def test_hold_and_release():
    held, event = lifecycle.hold(job(7), NOW, "ann")
    assert (held.hold, event.kind, event.text) == ("user", "held", "held by ann")
    free, event = lifecycle.release(held, NOW, "ann")
    assert (free.hold, event.kind, event.text) == (None, "released", "released by ann")
    assert free == job(7)


def test_an_admin_hold_is_marked():
    held, _ = lifecycle.hold(job(7), NOW, "root", admin=True)
    assert held.hold == "admin"


def test_a_running_job_is_held_for_its_next_run():
    one, run = started(retry=rule())
    one, _ = lifecycle.hold(one, NOW, "ann")
    one, _, _ = end(one, run, exit_code=3)
    assert (one.state, one.hold) == (JobState.PENDING, "user")


def test_a_job_whose_dependency_cannot_come_true_is_cancelled():
    one, events = lifecycle.give_up(
        job(7), NOW, ReasonCode.DEPENDENCY_NEVER_SATISFIED, "depends on the success of job 3"
    )
    assert (one.state, one.reason, one.end_at) == (
        JobState.CANCELLED,
        ReasonCode.DEPENDENCY_NEVER_SATISFIED,
        NOW,
    )
    assert events[0].text == "CANCELLED: depends on the success of job 3"
    with pytest.raises(BrokenInvariant):
        lifecycle.give_up(job(7, state=JobState.RUNNING), NOW, ReasonCode.DEPENDENCY_NEVER_SATISFIED, "x")


# --- making room --------------------------------------------------------------------------------------

WHY = "made room for job 12 (its QOS goes first)"


def preempted(**parts: Any) -> tuple[Job, Run]:
    """A job whose run was told to make room a minute after its start."""
    one, run = started(**parts)
    one, _ = yielding.preempt(one, NOW + 60, WHY)
    return one, run


def test_a_preempted_job_is_completing_and_says_for_whom():
    one, run = started()
    after, events = yielding.preempt(one, NOW + 60, WHY)
    assert (after.state, after.preempt_at) == (JobState.COMPLETING, NOW + 60)
    assert (after.reason, after.reason_text) == (ReasonCode.PREEMPTED, WHY)
    assert events == (JobEvent(7, NOW + 60, "stopping", f"preempted: {WHY}", run.number),)


def test_a_second_preemption_changes_nothing():
    one, _ = preempted()
    assert yielding.preempt(one, NOW + 70, "another") == (one, ())


PREEMPTED_ENDS = {
    "ended by the signal": ({"exit_code": None, "signal": 15}, JobState.PENDING, JobState.PREEMPTED),
    "killed after its grace": ({"exit_code": None, "signal": 9}, JobState.PENDING, JobState.PREEMPTED),
    "saved its work and left with exit code 7": ({"exit_code": 7}, JobState.PENDING, JobState.PREEMPTED),
    "came to its own good end within the grace": ({"exit_code": 0}, JobState.COMPLETED, JobState.COMPLETED),
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
def test_what_becomes_of_a_preempted_job_that(parts, state, outcome, clean):
    one, run = preempted()
    after, run, _ = end(one, run, clean=clean, at=NOW + 65, **{"stopped_by": "preempt", **parts})
    if not clean:
        assert after.state is JobState.COMPLETING
        after, _ = lifecycle.finish(after, run, SETTINGS, NOW + 70)
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
    again, _, _ = lifecycle.start_run(after, PLACE, "boot1", NOW + 100)
    assert (again.run, again.is_front, again.preempt_at, again.reason) == (2, False, None, None)


def test_a_preempted_job_that_must_not_run_again_ends_so():
    one, run = preempted(retry=rule(requeue=False))
    after, run, _ = end(one, run, stopped_by="preempt", exit_code=None, signal=15)
    assert (after.state, after.reason, after.reason_text) == (JobState.PREEMPTED, ReasonCode.PREEMPTED, WHY)
    assert (after.end_at, after.is_front) == (NOW + 60, False)


@pytest.mark.parametrize("stopped_by", ["preempt", "cancel"])
def test_a_cancel_during_the_grace_cancels(stopped_by):
    one, run = preempted()
    one, _ = lifecycle.cancel(one, NOW + 61, "ann")
    after, _, _ = end(one, run, stopped_by=stopped_by, exit_code=None, signal=15)
    assert after.state is JobState.CANCELLED


def test_a_job_preempted_before_it_was_started_waits_at_the_front():
    one, run, _ = lifecycle.start_run(job(7), PLACE, "boot1", NOW)
    one, _ = yielding.preempt(one, NOW + 1, WHY)
    event = RunNeverStarted("7.1", NOW + 2, "the fork server ended")
    after, _, _ = lifecycle.run_never_started(one, run, event, SETTINGS, NOW + 2)
    assert (after.state, after.is_front, after.preempt_at, after.reason) == (JobState.PENDING, True, None, None)


def test_a_preempted_run_lost_with_its_supervisor_counts_as_lost():
    one, run = preempted()
    after, run, _ = lifecycle.run_lost(one, run, RunLost("7.1", NOW + 61, "gone"), SETTINGS, NOW + 61, gpus_clean=True)
    assert (after.state, after.requeues, run.outcome) == (JobState.PENDING, 1, JobState.NODE_FAIL)


def test_a_requeue_says_who_asked_for_it():
    one, run = started()
    one, events = yielding.requeue(one, NOW + 60, "ann")
    assert events[0].text == "requeued by ann"
    after, run, _ = end(one, run, stopped_by="preempt", exit_code=None, signal=15)
    assert (after.state, after.is_front) == (JobState.PENDING, True)
    assert (run.outcome, run.reason, run.reason_text) == (JobState.PREEMPTED, ReasonCode.REQUEUED, "requeued by ann")


def test_only_a_run_whose_work_was_taken_by_the_policy_is_not_charged():
    charged = {}
    for name, act in {
        "preempted": lambda one: yielding.preempt(one, NOW + 60, WHY)[0],
        "requeued": lambda one: yielding.requeue(one, NOW + 60, "ann")[0],
    }.items():
        one, run = started()
        _, run, _ = end(act(one), run, stopped_by="preempt", exit_code=None, signal=15)
        charged[name] = yielding.counts_for_usage(run)
    one, run = preempted()
    _, run, _ = end(one, run, stopped_by="preempt", exit_code=0)
    charged["preempted and completed"] = yielding.counts_for_usage(run)
    _, run, _ = end(*started(), exit_code=3)
    charged["failed"] = yielding.counts_for_usage(run)
    assert charged == {"preempted": False, "requeued": True, "preempted and completed": True, "failed": True}


# --- standing still -----------------------------------------------------------------------------------


def suspended(by: str = "user", **parts: Any) -> tuple[Job, Run]:
    one, run = started(**parts)
    return yielding.suspend(one, NOW + 60, by, "suspended by ann")[0], run


@pytest.mark.parametrize(("by", "reason"), [("user", None), ("policy", ReasonCode.PREEMPTED)])
def test_a_suspended_job_says_since_when_and_why(by, reason):
    one, run = started()
    after, events = yielding.suspend(one, NOW + 60, by, "suspended by ann")
    assert (after.state, after.suspended_at, after.suspended_by) == (JobState.SUSPENDED, NOW + 60, by)
    assert (after.reason, after.reason_text) == (reason, "suspended by ann")
    assert events == (JobEvent(7, NOW + 60, "suspended", "suspended by ann", run.number),)
    assert yielding.suspend(after, NOW + 90, by, "again") == (after, ())


def test_a_resumed_job_runs_and_its_run_knows_how_long_it_stood():
    one, run = suspended()
    after, run, events = yielding.resume(one, run, NOW + 100, "resumed by ann")
    assert (after.state, after.suspended_at, after.suspended_by) == (JobState.RUNNING, None, None)
    assert (after.reason, after.reason_text, run.suspended_s) == (None, None, 40)
    assert kinds(events) == ["resumed"]
    _, run, _ = lifecycle.run_resumed(after, run, RunResumed("7.1", NOW + 100, 39.5))
    assert run.suspended_s == 39.5
    _, run, _ = end(after, run, at=NOW + 200, suspended_s=39.6)
    assert run.suspended_s == 39.6


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.COMPLETING, JobState.COMPLETED])
def test_only_a_running_job_is_suspended(state):
    with pytest.raises(BrokenInvariant):
        yielding.suspend(job(7, state=state), NOW, "user", "why")


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING, JobState.COMPLETING])
def test_only_a_suspended_job_is_resumed(state):
    _, run = started()
    with pytest.raises(BrokenInvariant):
        yielding.resume(job(7, state=state), run, NOW, "why")


SUSPENDED_ENDS = {
    "is cancelled": lambda one, run: lifecycle.cancel(one, NOW + 70, "ann")[0],
    "is preempted": lambda one, run: yielding.preempt(one, NOW + 70, WHY)[0],
    "is stopped because its GPU was lost": lambda one, run: lifecycle.run_stopping(
        one, run, RunStopping("7.1", NOW + 70, "gpu_lost")
    )[0],
    "is killed by somebody else": lambda one, run: end(one, run, clean=False, exit_code=None, signal=9)[0],
}


@pytest.mark.parametrize("act", SUSPENDED_ENDS.values(), ids=SUSPENDED_ENDS)
def test_a_suspended_job_moves_to_its_end_when_it(act):
    after = act(*suspended())
    assert (after.state, after.suspended_at, after.suspended_by) == (JobState.COMPLETING, None, None)


def test_a_run_lost_while_it_stood_still_is_not_charged_for_the_standstill():
    one, run = suspended()
    event = RunLost("7.1", NOW + 100, "gone")
    after, run, _ = lifecycle.run_lost(one, run, event, SETTINGS, NOW + 100, gpus_clean=True)
    assert (after.state, run.suspended_s) == (JobState.PENDING, 40)


def test_news_that_a_run_stands_still_change_nothing_but_the_story():
    one, run = suspended()
    after, same, events = lifecycle.run_suspended(one, run, RunSuspended("7.1", NOW + 60.5))
    assert (after, same) == (one, run)
    assert kinds(events) == ["note"]
