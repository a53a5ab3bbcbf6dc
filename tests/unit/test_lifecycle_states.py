"""The state machine, one event at a time: how runs start, end, are lost, and what is tried again."""

from __future__ import annotations

import pytest
from life_builders import LOST, PLACE, SETTINGS, end, kinds, lose, rule, started

from gpusched.errors import BrokenInvariant
from gpusched.lifecycle import run_transitions, transitions
from gpusched.lifecycle.retry import backoff_s
from gpusched.model.execution import RunNeverStarted, RunStarted, RunStopping
from gpusched.model.job import JobEvent, Run
from gpusched.model.settings import LifeSettings
from gpusched.model.snapshot import Placement
from gpusched.model.states import ACTIVE_STATES, FINAL_STATES, JobState, ReasonCode, RunState
from gpusched.model.value import replace
from gpusched.testing import NOW, job

# --- the table --------------------------------------------------------------------------------------


def test_a_final_state_never_moves():
    assert not [pair for pair in transitions.TRANSITIONS if pair[0] in FINAL_STATES]


def test_every_transition_leads_to_another_final_or_nonfinal_state():
    left = {one for one, _ in transitions.TRANSITIONS}
    assert left <= ACTIVE_STATES
    assert all(one is not other for one, other in transitions.TRANSITIONS)
    assert {other for _, other in transitions.TRANSITIONS} <= left | FINAL_STATES


def test_an_unlisted_transition_raises_with_the_history():
    done = job(7, state=JobState.COMPLETED, start_at=5.0, end_at=9.0, run=3, failures=1)
    with pytest.raises(BrokenInvariant, match=r"job 7 cannot go from COMPLETED to RUNNING") as error:
        transitions.check_transition(done, JobState.RUNNING)
    assert "run 3, start_at 5.0, end_at 9.0, failures 1, requeues 0" in str(error.value)


@pytest.mark.parametrize(("one", "other"), sorted(transitions.TRANSITIONS))
def test_a_listed_transition_passes(one, other):
    transitions.check_transition(job(state=one), other)


# --- start ------------------------------------------------------------------------------------------


def test_a_start_records_the_intent():
    before = job(7, run=2, reason=ReasonCode.NON_ZERO_EXIT_CODE, reason_text="exit code 1", exit_code=1)
    boots = {"n1": "boot1"}
    one, run, events = run_transitions.start_run(before, PLACE, boots, NOW, "/tmp/o", "/tmp/e", priority=2.5)
    assert (one.state, one.run, one.start_at) == (JobState.RUNNING, 3, NOW)
    assert (one.reason, one.reason_text, one.exit_code) == (None, None, None)
    assert run == Run(
        job_id=7,
        number=3,
        state=RunState.STARTING,
        node="n1",
        boot_id="boot1",
        intent_at=NOW,
        priority=2.5,
        gpus=PLACE.gpus,
        cpus=4.0,
        mem_mib=2048,
        stdout_path="/tmp/o",
        stderr_path="/tmp/e",
    )
    assert events == (JobEvent(7, NOW, "started", "started on n1, GPU 0,2", 3),)


def test_a_start_without_gpus_names_the_node_alone():
    _, _, events = run_transitions.start_run(job(7), Placement("n1", (), 1.0, 0), {"n1": "boot1"}, NOW)
    assert events[0].text == "started on n1"


@pytest.mark.parametrize("state", sorted(set(JobState) - {JobState.PENDING}))
def test_only_a_pending_job_starts(state):
    with pytest.raises(BrokenInvariant):
        run_transitions.start_run(job(7, state=state), PLACE, {"n1": "boot1"}, NOW)


def test_a_confirmed_start_changes_the_run_alone():
    one, run, _ = run_transitions.start_run(job(7), PLACE, {"n1": "boot1"}, NOW)
    after, lives, events = run_transitions.run_started(one, run, RunStarted("7.1", NOW + 0.5, 100, 5000, 101))
    assert after is one
    assert events == ()
    assert (lives.state, lives.start_at, lives.pid) == (RunState.RUNNING, NOW + 0.5, 101)
    assert (lives.supervisor_pid, lives.supervisor_start_ticks) == (100, 5000)


def test_a_start_confirmed_again_after_a_restart_changes_nothing():
    one, run = started()
    again = run_transitions.run_started(one, run, RunStarted("7.1", NOW + 0.5, 100, 5000, 101))
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


def test_an_oom_kill_is_reported_even_if_the_run_continued():
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


def test_a_run_ended_by_a_shutdown_waits_like_a_lost_one():
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


def test_a_run_that_finished_within_the_shutdown_grace_is_completed_if_it_says_so():
    one, _, _ = end(*started(), stopped_by="shutdown", exit_code=0, is_done=True)
    assert one.state is JobState.COMPLETED
    one, _, _ = end(*started(), stopped_by="shutdown", exit_code=0)
    assert (one.state, one.requeues, one.failures) == (JobState.PENDING, 1, 0)


def test_a_cancel_during_a_shutdown_is_kept():
    one, run = started()
    one, _ = transitions.cancel(one, NOW + 50, "ann")
    after, _, _ = end(one, run, stopped_by="shutdown", exit_code=None, signal=15)
    assert after.state is JobState.CANCELLED


def test_measurements_are_kept():
    _, run, _ = end(*started(), cpu_s=12.5, system_cpu_s=2.5, peak_mem_mib=300.0)
    assert (run.cpu_s, run.system_cpu_s, run.peak_mem_mib, run.start_at, run.end_at) == (
        12.5,
        2.5,
        300.0,
        NOW + 0.5,
        NOW + 60,
    )


def test_processes_left_behind_are_named():
    _, _, events = end(*started(), leftovers=("sleep(12)", "python(13)"))
    assert kinds(events) == ["ended", "note"]
    assert events[1].text == "ended leftover processes: sleep(12), python(13)"


def test_the_start_time_is_that_of_the_run():
    one, _, _ = end(*started())
    assert one.start_at == NOW + 0.5
    one, run, _ = run_transitions.start_run(job(7), PLACE, {"n1": "boot1"}, NOW)
    one, _, _ = end(one, run, start_at=None, launch_error="no")
    assert one.start_at == NOW


def test_a_run_cannot_end_twice():
    one, run, _ = end(*started(), clean=False)
    with pytest.raises(BrokenInvariant, match="run 7.1"):
        end(one, run)


def test_events_of_an_older_run_do_not_apply_to_the_current_one():
    one, run = started()
    with pytest.raises(BrokenInvariant, match="run 7.1"):
        end(replace(one, run=2), run)
    with pytest.raises(BrokenInvariant):
        run_transitions.run_started(replace(one, id=8), run, RunStarted("7.1", NOW, 1, 1, 1))


# --- completing -------------------------------------------------------------------------------------


def test_a_job_is_completing_until_its_gpus_are_clean():
    one, run, events = end(*started(), clean=False, exit_code=3)
    assert (one.state, one.end_at) == (JobState.COMPLETING, None)
    assert (run.state, run.outcome) == (RunState.ENDED, JobState.FAILED)
    assert kinds(events) == ["ended"]
    one, events = run_transitions.finish(one, run, SETTINGS, NOW + 65)
    assert (one.state, one.end_at, one.exit_code) == (JobState.FAILED, NOW + 60, 3)
    assert events == ()


def test_a_retry_waits_for_clean_gpus_and_counts_from_the_end_of_the_run():
    one, run, _ = end(*started(retry=rule()), clean=False, exit_code=3)
    assert one.failures == 0
    one, events = run_transitions.finish(one, run, SETTINGS, NOW + 65)
    assert (one.state, one.failures) == (JobState.PENDING, 1)
    assert one.eligible_at == NOW + 60 + backoff_s(rule(), 1, 7)
    assert kinds(events) == ["retry"]
    late, _ = run_transitions.finish(replace(one, state=JobState.COMPLETING, failures=0), run, SETTINGS, NOW + 900)
    assert late.eligible_at == NOW + 900


def test_finishing_a_run_that_has_not_ended_is_a_bug():
    with pytest.raises(BrokenInvariant, match="has not ended"):
        run_transitions.finish(*started(), SETTINGS, NOW)


STOPPING = {
    "cancel": "is being cancelled",
    "preempt": "is being preempted",
    "shutdown": "is being ended because the machine is being shut down",
    "timeout": "reached its time limit and is being stopped",
    "leftovers": "its first process ended; waiting for the processes it left behind",
    "power": "is being stopped: power",
}


@pytest.mark.parametrize(("why", "text"), STOPPING.items())
def test_a_run_being_stopped_makes_its_job_completing(why, text):
    one, run = started()
    after, same, events = run_transitions.run_stopping(one, run, RunStopping("7.1", NOW + 9, why))
    assert (after.state, same) == (JobState.COMPLETING, run)
    assert events == (JobEvent(7, NOW + 9, "stopping", text, 1),)
    assert run_transitions.run_stopping(after, run, RunStopping("7.1", NOW + 9, why)) == (after, run, ())


def test_a_stopped_run_ends_from_completing():
    one, run = started(time_limit_s=60)
    one, run, _ = run_transitions.run_stopping(one, run, RunStopping("7.1", NOW + 60, "timeout"))
    one, run, _ = end(one, run, exit_code=None, signal=15, stopped_by="timeout")
    assert one.state is JobState.TIMEOUT


# --- retries ----------------------------------------------------------------------------------------


def test_a_failed_run_is_retried_after_its_backoff():
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
def test_no_retry_follows(parts):
    one, _, _ = end(*started(retry=rule(retries=9)), **parts)
    assert one.state.is_final
    assert one.failures == 0


def test_a_timeout_is_retried_when_the_rule_names_it():
    one, _, _ = end(*started(retry=rule(retry_on=("timeout",))), stopped_by="timeout")
    assert (one.state, one.failures) == (JobState.PENDING, 1)


# --- runs lost to the machine -----------------------------------------------------------------------


def test_a_lost_run_is_repeated_free():
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
    one, _ = run_transitions.finish(one, run, SETTINGS, NOW + 70)
    assert (one.state, one.requeues, one.eligible_at) == (JobState.PENDING, 1, NOW + 70)


def test_a_lost_run_of_another_boot_is_a_machine_restart():
    _, run, _ = lose(*started(), boot_id="boot2")
    assert run.reason is ReasonCode.NODE_DOWN
    _, run, _ = lose(*started(), boot_id="boot1")
    assert run.reason is ReasonCode.SUPERVISOR_LOST


def test_free_repeats_end_at_the_configured_limit():
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


def test_with_requeue_disabled_in_the_settings_the_job_ends():
    one, run = started()
    none = replace(SETTINGS, life=LifeSettings(max_requeues=0))
    one, _, _ = run_transitions.run_lost(one, run, LOST, none, NOW + 61, gpus_clean=True)
    assert one.state is JobState.NODE_FAIL


# --- runs that never started ------------------------------------------------------------------------

NEVER = RunNeverStarted("7.1", NOW + 5, "the claim was revoked")


def test_a_run_that_never_started_consumes_only_its_number():
    one, run, _ = run_transitions.start_run(job(7), PLACE, {"n1": "boot1"}, NOW)
    one, run, events = run_transitions.run_never_started(one, run, NEVER, SETTINGS, NOW + 5)
    assert (one.state, one.run, one.failures, one.requeues, one.start_at) == (
        JobState.PENDING,
        1,
        0,
        0,
        None,
    )
    assert (run.state, run.outcome, run.start_at) == (RunState.ENDED, JobState.CANCELLED, None)
    assert [(event.kind, event.text) for event in events] == [("requeued", "was not started: the claim was revoked")]
    _, run, _ = run_transitions.start_run(one, PLACE, {"n1": "boot1"}, NOW + 6)
    assert run.id == "7.2"


def test_an_engine_that_cannot_start_is_asked_once_per_poll():
    one, run, _ = run_transitions.start_run(job(7), PLACE, {"n1": "boot1"}, NOW)
    soon = replace(NEVER, at=NOW + 0.01)
    one, _, _ = run_transitions.run_never_started(one, run, soon, SETTINGS, NOW + 0.01)
    assert one.eligible_at == NOW + SETTINGS.daemon.poll_s


def test_cancelling_a_run_that_never_started_ends_the_job():
    one, run, _ = run_transitions.start_run(job(7), PLACE, {"n1": "boot1"}, NOW)
    one, _ = transitions.cancel(one, NOW + 1, "ann")
    one, run, _ = run_transitions.run_never_started(one, run, NEVER, SETTINGS, NOW + 5)
    assert (one.state, one.end_at, one.reason) == (
        JobState.CANCELLED,
        NOW + 5,
        ReasonCode.CANCELLED_BY_USER,
    )
