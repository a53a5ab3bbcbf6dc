"""Which alerts a change of a job raises: rows before and after, and what is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.lifecycle import alerts
from gpusched.lifecycle.alerts import AlertCause
from gpusched.model.alert_events import EACH_TASK, EVENTS, FACTS, parse_events
from gpusched.model.job import Alerting, ArraySpec, Job, Run
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import replace
from gpusched.testing import NOW, job, run, share

ALL = Alerting(tuple(sorted(EVENTS)))


def asked(*words: str) -> Alerting:
    return Alerting(tuple(sorted(words)))


def pending(**parts: object) -> Job:
    return job(7, **{"alerting": ALL, **parts})


def running(**parts: object) -> Job:
    return pending(**{"state": JobState.RUNNING, "run": 1, "start_at": NOW, **parts})


def ended(state: JobState, text: str = "why", **parts: object) -> Job:
    return running(**{"state": state, "end_at": NOW + 9, "reason_text": text, **parts})


def closed(of: Job, outcome: JobState, number: int = 1, text: str = "exit code 3") -> Run:
    return run(of, number=number, state=RunState.ENDED, start_at=NOW, end_at=NOW + 9, outcome=outcome, reason_text=text)


def told(before: Job | None, after: Job, *runs: Run) -> list[AlertCause]:
    numbered = {one.number: one for one in runs}
    return list(alerts.alert_causes(before, after, numbered, numbered))


def words(before: Job | None, after: Job, *runs: Run) -> list[str]:
    return [f"{what.event} {what.run}" for what in told(before, after, *runs)]


def test_a_start_event_is_the_begin_of_a_run_with_its_place() -> None:
    after = running()
    assert told(pending(), after, run(after, gpus=(share(0), share(1)))) == [
        AlertCause("begin", "run 1 has started on n1, GPU 0,1", 1)
    ]


def test_a_job_that_starts_in_its_submission_tick_begins_too() -> None:
    assert words(None, running(), run(running())) == ["begin 1"]


@pytest.mark.parametrize("state", [state for state in JobState if state.is_final])
def test_every_end_is_sent_once(state: JobState) -> None:
    good = state in (JobState.COMPLETED, JobState.CANCELLED)
    assert words(running(), ended(state)) == ["end 1" if good else "fail 1"]


def test_an_end_matching_two_events_counts_as_both() -> None:
    (what,) = told(running(), ended(JobState.FAILED))
    assert (what.event, what.counts_as) == ("fail", ("end",))
    assert what.message == "FAILED: why"


def test_subscribers_to_the_end_alone_get_a_failure_as_the_end() -> None:
    wish = asked("end")
    (what,) = told(running(alerting=wish), ended(JobState.TIMEOUT, alerting=wish))
    assert (what.event, what.counts_as) == ("end", ())


def test_subscribers_to_failures_alone_get_no_successful_end() -> None:
    wish = asked("fail")
    assert told(running(alerting=wish), ended(JobState.COMPLETED, alerting=wish)) == []
    assert told(running(alerting=wish), ended(JobState.CANCELLED, alerting=wish)) == []


def test_an_unsatisfiable_dependency_is_a_failure() -> None:
    after = pending(state=JobState.CANCELLED, end_at=NOW, reason=ReasonCode.DEPENDENCY_NEVER_SATISFIED)
    assert words(pending(), after) == ["fail 0"]


def test_a_retry_names_the_failed_run_even_when_the_next_starts_in_the_same_tick() -> None:
    before = running(retry={"retries": 3})
    after = running(retry={"retries": 3}, run=2, failures=1)
    found = told(before, after, closed(before, JobState.FAILED), run(after, number=2))
    assert [f"{what.event} {what.run}" for what in found] == ["retry 1", "begin 2"]
    assert found[0].message == "run 1 FAILED: exit code 3; will be retried, 1 of 3 retries used"


def test_a_lost_run_is_sent_as_a_retry() -> None:
    before = running()
    after = pending(run=1, requeues=1)
    assert words(before, after, closed(before, JobState.NODE_FAIL)) == ["retry 1"]


def test_a_preemption_is_sent_at_its_end_and_not_again_when_its_gpus_are_clean() -> None:
    before = running()
    completing = running(state=JobState.COMPLETING)
    assert words(before, completing, closed(before, JobState.PREEMPTED)) == ["preempt 1"]
    assert words(completing, pending(run=1, is_front=True)) == []


def test_a_suspension_by_the_policy_is_sent_and_one_by_the_user_is_not() -> None:
    for by, expected in (("policy", ["preempt 1"]), ("user", [])):
        after = running(state=JobState.SUSPENDED, suspended_at=NOW, suspended_by=by)
        assert words(running(), after) == expected
        assert words(after, replace(after, hold="user")) == []


def test_unrequested_events_are_not_sent() -> None:
    assert told(pending(alerting=None), running(alerting=None), run(running())) == []
    assert words(pending(alerting=asked("end")), running(alerting=asked("end")), run(running())) == []


ARRAY = {"array": ArraySpec("0-9"), "tasks_left": "0-9"}


def test_an_array_sends_its_first_start_and_end_and_not_those_of_tasks() -> None:
    before = pending(**ARRAY)
    after = replace(before, start_at=NOW, tasks_left="1-9")
    assert words(before, after) == ["begin 0"]
    assert words(after, replace(after, tasks_left="2-9")) == []
    assert words(after, replace(after, state=JobState.FAILED, end_at=NOW)) == ["fail 0"]
    task = replace(running(array=ArraySpec("0-9")), id=8, array_id=7, task=0)
    assert told(None, task, run(task)) == []
    assert told(task, replace(task, state=JobState.FAILED, end_at=NOW)) == []


def test_a_failed_array_says_how_many_and_how_to_list_them() -> None:
    before = replace(pending(**ARRAY), start_at=NOW - 90)
    text = "9997 COMPLETED, 3 FAILED"
    (what,) = told(before, replace(before, state=JobState.FAILED, end_at=NOW, reason_text=text))
    assert what.message == f"FAILED: {text}; see which with: gq -j {before.id} -s F,TO,OOM,NF"
    facts = dict(alerts.facts_of(replace(before, end_at=NOW), what, None, NOW))
    assert (facts["start_at"], facts["elapsed"]) == (NOW - 90, "1:30")
    (what,) = told(before, replace(before, state=JobState.COMPLETED, end_at=NOW, reason_text="10000 COMPLETED"))
    assert what.message == "COMPLETED: 10000 COMPLETED"


def test_per_task_events_replace_those_of_the_array() -> None:
    each = asked("all", *EVENTS, EACH_TASK)
    before = pending(alerting=each, **ARRAY)
    after = replace(before, start_at=NOW, tasks_left="1-9")
    assert words(before, after) == []
    task = replace(running(alerting=each, array=ArraySpec("0-9")), id=8, array_id=7, task=0)
    assert words(None, task, run(task)) == ["begin 1"]
    assert words(task, replace(task, state=JobState.FAILED, end_at=NOW)) == ["fail 1"]


# --- time ---------------------------------------------------------------------------------------------


def test_the_limit_warning_counts_from_the_start_without_suspended_time() -> None:
    limited = running(time_limit_s=100)
    going = run(limited, state=RunState.RUNNING, start_at=NOW + 1)
    assert alerts.limit_alert_at(limited, going) == NOW + 81
    assert alerts.limit_alert_at(limited, replace(going, suspended_s=30)) == NOW + 111
    assert alerts.limit_alert_at(limited, replace(going, start_at=None)) == NOW + 80
    stopped = replace(limited, state=JobState.SUSPENDED, suspended_at=NOW + 5)
    assert alerts.limit_alert_at(stopped, going) is None
    assert alerts.limit_alert_at(running(), going) is None
    assert alerts.limit_alert_at(running(time_limit_s=100, alerting=asked("end")), going) is None


def test_a_long_wait_counts_from_eligibility() -> None:
    assert alerts.pending_alert_at(pending(eligible_at=NOW + 50), 60) == NOW + 110
    assert alerts.pending_alert_at(pending(hold="user"), 60) is None
    assert alerts.pending_alert_at(running(), 60) is None
    assert alerts.pending_alert_at(pending(alerting=asked("end")), 60) is None
    assert alerts.pending_alert_at(pending(**ARRAY), 60) == NOW + 60
    assert alerts.pending_alert_at(pending(start_at=NOW, **ARRAY), 60) is None


# --- rows ---------------------------------------------------------------------------------------------


def test_an_outbox_row_is_one_event_of_one_run() -> None:
    after = ended(JobState.FAILED, exit_code=3)
    (what,) = told(running(), after)
    found = alerts.alert_of(after, what, closed(after, JobState.FAILED), NOW + 9)
    assert found.key == "7.1 fail"
    assert found.counts_as == ("fail", "end")
    assert (found.uid, found.job_id, found.run, found.state) == (1000, 7, 1, "waiting")
    facts = dict(found.facts)
    assert facts["exit_code"] == "3"
    assert facts["elapsed"] == "0:09"
    assert facts["message"] == "FAILED: why"


def test_every_job_fact_is_documented_and_every_documented_one_exists() -> None:
    after = ended(JobState.FAILED, exit_code=3, signal=9, account="lab", time_limit_s=60)
    ran = replace(closed(after, JobState.FAILED), gpus=(share(0),), stdout_path="/out")
    (what,) = told(running(), after)
    # The report of the end is added where all runs are known.
    assert {name for name, _ in alerts.facts_of(after, what, ran, NOW)} | {"report"} == set(FACTS)


# --- words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("end,fail", ("end", "fail")),
        ("END,FAIL,end", ("end", "fail")),
        ("TIME_LIMIT_80", ("time_limit_80",)),
        ("time-limit-80, gpu-idle", ("gpu_idle", "time_limit_80")),
        ("all", tuple(sorted(EVENTS))),
        ("REQUEUE", ("preempt", "retry")),
        ("NONE", ()),
        ("", ()),
        ("end,ARRAY_TASKS", (EACH_TASK, "end")),
    ],
)
def test_words_are_read_in_any_case_and_spelling(text: str, found: tuple[str, ...]) -> None:
    assert parse_events(text) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ends", "'ends' is not an event; write begin, end"),
        ("STAGE_OUT", "'STAGE_OUT' is not an event"),
        ("TIME_LIMIT_90", "the nearest is time_limit_80"),
        ("end,TIME_LIMIT", "'TIME_LIMIT' is not an event; the nearest is fail"),
    ],
)
def test_unknown_words_are_refused_with_the_nearest(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_events(text)


@given(st.lists(st.sampled_from([*EVENTS, EACH_TASK])))
def test_parsed_events_parse_as_themselves(some: list[str]) -> None:
    found = parse_events(",".join(some))
    assert set(found) == set(some)
    assert parse_events(",".join(found)) == found
