"""What the daemon refuses at submission and update, what it fills in, and jobs whose deadline cannot be met."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.forecast import dry_run
from gpusched.daemon.state import DaemonState
from gpusched.errors import Refused
from gpusched.lifecycle.transitions import misses_deadline
from gpusched.model.commands import (
    Caller,
    Cancel,
    Hold,
    PipelineStep,
    Release,
    Reload,
    Selection,
    Submit,
    SubmitPipeline,
    Suspend,
    Update,
)
from gpusched.model.job import ArraySpec, Job
from gpusched.model.pipeline import StepNeeds
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings
from gpusched.model.settings import DefaultSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.ports import JobFilter
from gpusched.ports.tables import USAGE
from gpusched.testing import NOW, job, launch, request, spec

QUEUES = {
    "default": QueueSettings("default"),
    "short": QueueSettings("short", max_time_s=60, max_jobs=4, max_jobs_per_user=3),
    "ours": QueueSettings("ours", users=("bob",)),
}
QOS = {"rush": QosSettings("rush", tier=1, max_time_s=30, max_jobs_per_user=2), "day": QosSettings("day")}


def a_lab(**sections: Any) -> Lab:
    return Lab(**{"cpus": 1, "outcome": SimulatedOutcome(runs_s=1000), "queue": QUEUES, "qos": QOS, **sections})


def batch(count: int, **parts: Any) -> Submit:
    one = spec(**{"launch": launch("true"), **parts})
    return Submit(ANN, [replace(one, name=f"job{number}") for number in range(count)], {})


# --- what is filled in --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        pytest.param({}, ("ann", "", None), id="nothing but the user's own account"),
        pytest.param({"queue": "short"}, ("ann", "", 60), id="the longest that the queue allows"),
        pytest.param({"queue": "short", "qos": "rush"}, ("ann", "rush", 30), id="the smaller of queue and QOS"),
        pytest.param({"queue": "short", "time_limit_s": 7}, ("ann", "", 7), id="what is asked stays"),
    ],
)
def test_a_submission_is_completed(asked: dict[str, Any], wanted: tuple[str, str, int | None]) -> None:
    lab = a_lab()
    made = lab.job(lab.submit(**asked)).spec
    assert (made.account, made.qos, made.time_limit_s) == wanted


def test_defaults_of_the_settings_are_applied() -> None:
    accounts = {"lab": AccountSettings("lab", users={"ann": 1.0}), "other": AccountSettings("other")}
    lab = a_lab(default=DefaultSettings(qos="day", time_limit_s=3600), account=accounts)
    made = lab.job(lab.submit()).spec
    assert (made.account, made.qos, made.time_limit_s) == ("lab", "day", 3600)
    # The default is no wish of the job: it gives way to the limit of the queue.
    assert lab.job(lab.submit(queue="short")).spec.time_limit_s == 60


def test_an_update_of_the_queue_applies_its_limit() -> None:
    lab = a_lab()
    job_id = lab.submit(hold=True)
    lab.ask(Update(ANN, (job_id,), {"queue": "short"}))
    assert (lab.job(job_id).spec.queue, lab.job(job_id).spec.time_limit_s) == ("short", 60)
    lab.ask(Update(ANN, (job_id,), {"account": "", "qos": ""}))
    assert (lab.job(job_id).spec.account, lab.job(job_id).spec.qos) == ("ann", "")


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"queue": "shrot"}, "no queue 'shrot'"),
        ({"queue": "ours"}, "may not submit to queue ours"),
        ({"qos": "x"}, "no QOS 'x'"),
        ({"queue": "short", "time_limit_s": 61}, "at most 1:00"),
        ({"reservation": "class"}, "reservation 'class' is invalid"),
        ({"deadline_at": NOW - 5}, "before the job could start"),
        ({"deadline_at": NOW + 50, "time_limit_s": 51}, "its deadline is"),
        ({"deadline_at": NOW + 50, "queue": "short"}, "may run 1:00"),
        ({"deadline_at": NOW + 50, "begin_at": NOW + 60.0}, "before the job could start"),
    ],
    ids=[
        "an unknown queue",
        "a queue of others",
        "an unknown QOS",
        "more time than the queue allows",
        "a reservation that is not there",
        "a deadline that is over",
        "more time than there is until the deadline",
        "a limit that came from the queue counts too",
        "a begin time after the deadline",
    ],
)
def test_invalid_submissions_are_refused(asked: dict[str, Any], words: str) -> None:
    lab = a_lab()
    with pytest.raises(Refused, match=words):
        lab.submit(**asked)
    verdict = dry_run(spec(**asked), ANN, lab.scheduler)()
    assert verdict.verdict == "refused"
    assert words in verdict.text
    assert lab.store.jobs(JobFilter()) == []


def names_of(job: Job) -> tuple[str, str, str, str]:
    spec = job.spec
    return spec.account, spec.shown_account, spec.qos, spec.shown_qos


UNCONFIGURED: dict[str, Any] = {"qos": {}, "account": {}}
LABELLED = ("ann", "bob", "", "high")


@pytest.mark.parametrize("array", [None, ArraySpec("0-3")], ids=["a job", "an array"])
def test_names_are_labels_where_nothing_of_the_kind_is_configured(array: ArraySpec | None) -> None:
    lab = a_lab(**UNCONFIGURED)
    assert dry_run(spec(account="bob", qos="high"), ANN, lab.scheduler)().verdict == "starts_now"
    (answer,) = lab.ask(lab.submission(account="bob", qos="high", array=array))
    assert answer["notes"] == [
        "no accounts or QOS are configured, so account bob and QOS high are just names; use counts for ann"
    ]
    assert names_of(lab.job(answer["ids"][0])) == LABELLED
    (own,) = lab.ask(lab.submission(account="ann", qos="normal", array=array))
    assert (own["notes"], names_of(lab.job(own["ids"][0]))) == ([], ("ann", "ann", "", ""))


def test_labels_do_not_open_what_is_for_an_account() -> None:
    """Queues may list accounts that are not configured yet: a label must not be a key to them."""
    lab = a_lab(**UNCONFIGURED, queue={"default": QueueSettings("default", accounts=("lab",))})
    with pytest.raises(Refused, match="user ann of account ann may not submit to queue default"):
        lab.submit(account="lab")


def test_steps_of_pipelines_have_labels() -> None:
    lab = a_lab(**UNCONFIGURED)
    steps = [
        PipelineStep("one", spec(), StepNeeds(), "line 1"),
        PipelineStep("two", spec(account="bob", qos="high"), StepNeeds(), "line 5"),
    ]
    (answer,) = lab.ask(SubmitPipeline(ANN, "train", "text", steps, {}))
    assert names_of(lab.job(int(answer["jobs"]["two"]))) == LABELLED
    assert len(answer["notes"]) == 1


@pytest.mark.parametrize("caller", [ANN, ROOT], ids=["its owner", "root"])
def test_an_update_cannot_charge_another_user(caller: Caller) -> None:
    lab = a_lab(**UNCONFIGURED)
    job_id = lab.submit(hold=True)
    (answer,) = lab.ask(Update(caller, (job_id,), {"account": "bob"}))
    assert answer["notes"] == ["no accounts are configured, so account bob is just a name; use counts for ann"]
    assert names_of(lab.job(job_id)) == ("ann", "bob", "", "")
    lab.ask(Update(caller, (job_id,), {"qos": "high"}))
    assert names_of(lab.job(job_id)) == LABELLED
    lab.ask(Update(caller, (job_id,), {"account": "ann", "qos": ""}))
    assert names_of(lab.job(job_id)) == ("ann", "ann", "", "")


def test_use_under_a_label_counts_for_the_user() -> None:
    lab = a_lab(**UNCONFIGURED)
    for label in ("", "lab", "other"):
        lab.submit(account=label, request=request(cpus=0))
    lab.tick(1001)
    lab.tick(1001)
    assert set(lab.scheduler.state.rows[USAGE]) == {("ann", "ann")}


def test_a_label_outlives_accounts_that_are_configured_later() -> None:
    lab = a_lab(**UNCONFIGURED)
    job_id = lab.submit(account="lab", qos="high", hold=True)
    accounts = {"lab": AccountSettings("lab", users={"bob": 1.0}), "bio": AccountSettings("bio", users={"ann": 1.0})}
    lab.settings = replace(lab.settings, account=accounts, qos=QOS)
    (answer,) = lab.ask(Reload(ROOT))
    assert answer["notes"][-2:] == [
        f"job {job_id} named an account while none was configured; use still counts for the user; to move one: gctl "
        f"update {job_id} account=NAME",
        f"job {job_id} named a QOS while none was configured; none applies still; to give one: gctl update {job_id} "
        "qos=NAME",
    ]
    assert not any("named" in note for note in lab.ask(Reload(ROOT))[0]["notes"])
    lab.restart()
    assert names_of(lab.job(job_id)) == ("ann", "lab", "", "high")
    (refused,) = lab.ask(Update(ANN, (job_id,), {"account": "lab"}))
    assert refused.message == "user ann is not a member of account lab, only of bio"
    lab.ask(Update(ANN, (job_id,), {"account": "bio", "qos": "day"}))
    assert names_of(lab.job(job_id)) == ("bio", "bio", "day", "day")
    # An unknown account is refused again from then on.
    with pytest.raises(Refused, match="there is no account 'zoo'"):
        lab.submit(account="zoo")


def test_a_job_keeps_its_account_when_accounts_are_taken_out_of_the_settings() -> None:
    lab = a_lab(account={"vision": AccountSettings("vision")})
    job_id = lab.submit(hold=True, account="vision")
    lab.settings = replace(lab.settings, account={})
    lab.restart()
    lab.ask(Update(ANN, (job_id,), {"time_limit_s": 60}))
    assert (lab.job(job_id).spec.account, lab.job(job_id).spec.time_limit_s) == ("vision", 60)
    lab.ask(Release(ANN, (job_id,)))
    lab.tick(1)
    assert lab.job(job_id).state is JobState.RUNNING


RUNNING_LIMITS = {
    "lower": (ANN, 60, True),
    "the same": (ANN, 600, True),
    "higher": (ANN, 601, False),
    "none": (ANN, None, False),
    "higher by root": (ROOT, 7200, True),
    "higher by an operator of the queue": (BOB, 7200, True),
}


@pytest.mark.parametrize(("caller", "limit_s", "is_done"), RUNNING_LIMITS.values(), ids=RUNNING_LIMITS)
@pytest.mark.parametrize("is_suspended", [False, True], ids=["running", "suspended"])
def test_only_operators_raise_the_limit_a_run_was_placed_with(
    caller: Caller, limit_s: int | None, is_done: bool, is_suspended: bool
) -> None:
    lab = Lab(
        gpus=1, outcome=SimulatedOutcome(runs_s=1000), queue={"batch": QueueSettings("batch", operators=("bob",))}
    )
    job_id = lab.submit(queue="batch", time_limit_s=600)
    lab.tick()
    if is_suspended:
        lab.ask(Suspend(ANN, (job_id,)))
    (answer,) = lab.ask(Update(caller, (job_id,), {"time_limit_s": limit_s}))
    assert lab.job(job_id).spec.time_limit_s == (limit_s if is_done else 600)
    assert isinstance(answer, Refused) is not is_done
    if not is_done:
        assert "cannot be raised" in answer.message


def test_a_pending_job_and_an_unlimited_run_accept_any_limit() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=1000))
    free, waits = lab.submit(request=request(gpus=1)), lab.submit(request=request(gpus=1), time_limit_s=600)
    lab.tick()
    for job_id in (free, waits):
        lab.ask(Update(ANN, (job_id,), {"time_limit_s": 7200}))
        assert lab.job(job_id).spec.time_limit_s == 7200


def test_a_higher_limit_for_an_array_leaves_running_tasks_alone() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=1000))
    array = lab.submit(request=request(gpus=1), time_limit_s=600, array=ArraySpec("0-2"))
    lab.tick()
    (answer,) = lab.ask(Update(ANN, (array,), {"time_limit_s": 7200}))
    assert answer == {"changed": [str(array)]}
    running = [job for job in lab.scheduler.state.jobs.values() if job.array_id and job.state is JobState.RUNNING]
    assert [job.spec.time_limit_s for job in running] == [600]
    assert lab.job(array).spec.time_limit_s == 7200
    (refused,) = lab.ask(Update(ANN, (running[0].id,), {"time_limit_s": 7200}))
    assert isinstance(refused, Refused)


def test_jobs_are_counted_until_they_end() -> None:
    lab = a_lab()
    ids = [lab.submit(queue="short") for _ in range(3)]
    with pytest.raises(Refused, match="user ann may have 3 jobs in queue short and has 3"):
        lab.submit(queue="short")
    lab.ask(lab.submission(BOB, queue="short"))
    (answer,) = lab.ask(lab.submission(BOB, queue="short"))
    assert "queue short may hold 4 jobs and holds 4" in answer.message
    lab.ask(Cancel(ANN, Selection(ids=(ids[1],))))
    lab.submit(queue="short")


def test_a_restart_counts_existing_jobs() -> None:
    lab = a_lab()
    for _ in range(3):
        lab.submit(queue="short")
    lab.restart()
    with pytest.raises(Refused, match="and has 3"):
        lab.submit(queue="short")


def test_every_kind_of_job_in_a_submission_is_checked() -> None:
    lab = a_lab()
    parts = ({}, {"request": request(cpus=99.0)})
    specs = [spec(**{"launch": launch("true"), **one}) for one in parts]
    (answer,) = lab.ask(Submit(ANN, specs, {}))
    assert isinstance(answer, Refused)
    assert lab.store.jobs(JobFilter()) == []


def test_a_batch_is_accepted_whole_or_refused_with_the_possible_number() -> None:
    lab = a_lab()
    lab.submit(queue="short")
    (answer,) = lab.ask(batch(3, queue="short"))
    assert isinstance(answer, Refused)
    assert answer.message.startswith("only 2 of these 3 jobs would be accepted; then user ann may have 3 jobs")
    assert len(lab.store.jobs(JobFilter())) == 1
    (answer,) = lab.ask(batch(2, queue="short"))
    assert len(answer["ids"]) == 2


def test_submissions_of_one_tick_count_for_each_other() -> None:
    lab = a_lab()
    answers = lab.ask(*(lab.submission(qos="rush") for _ in range(3)))
    assert [isinstance(answer, Refused) for answer in answers] == [False, False, True]


def test_moving_a_job_within_its_full_queue_adds_no_job() -> None:
    lab = a_lab()
    ids = [lab.submit(queue="short", hold=True) for _ in range(3)]
    (answer,) = lab.ask(Update(ANN, (ids[0],), {"time_limit_s": 5}))
    assert answer["changed"] == [str(ids[0])]
    other = lab.submit(hold=True)
    (answer,) = lab.ask(Update(ANN, (other,), {"queue": "short"}))
    assert "has 3" in answer.message
    assert lab.job(other).spec.queue == "default"


def test_an_update_is_checked_like_a_submission() -> None:
    lab = a_lab()
    job_id = lab.submit(queue="short", hold=True)
    for changes, words in (
        ({"time_limit_s": 90}, "at most 1:00"),
        ({"queue": "ours"}, "may not submit"),
        ({"deadline_at": NOW + 10}, "its deadline is"),
    ):
        (answer,) = lab.ask(Update(ANN, (job_id,), changes))
        assert isinstance(answer, Refused)
        assert words in answer.message
    # What is not touched is not judged anew, whatever the settings say by now.
    lab.scheduler.settings = replace(lab.settings, queue={"other": QueueSettings("other")})
    (answer,) = lab.ask(Update(ANN, (job_id,), {"name": "renamed"}))
    assert answer["changed"] == [str(job_id)]


@given(data=st.data())
def test_the_tally_equals_the_active_jobs(data: st.DataObject) -> None:
    state = DaemonState()
    current: dict[int, Job] = {}
    for _ in range(data.draw(st.integers(1, 20))):
        job_id = data.draw(st.integers(1, 5))
        before = current.get(job_id)
        if before is not None and before.state.is_final:
            continue
        made = job(
            job_id,
            user=before.user if before else data.draw(st.sampled_from(["ann", "bob"])),
            queue=data.draw(st.sampled_from(["a", "b"])),
            qos=data.draw(st.sampled_from(["", "x"])),
            state=data.draw(st.sampled_from([JobState.PENDING, JobState.RUNNING, JobState.COMPLETED])),
        )
        current[job_id] = made
        state.put_job(made, NOW)
    active = [made for made in current.values() if not made.state.is_final]
    tally = state.active.tally
    assert dict(tally.by_queue) == count([made.spec.queue for made in active])
    assert dict(tally.by_queue_user) == count([(made.spec.queue, made.user) for made in active])
    assert dict(tally.by_qos_user) == count([(made.spec.qos, made.user) for made in active])


def count(marks: list[Any]) -> dict[Any, int]:
    return {mark: marks.count(mark) for mark in marks}


# --- deadlines ----------------------------------------------------------------------------------


def test_the_last_possible_instant_is_not_too_late() -> None:
    made = job(1, deadline_at=NOW + 60, time_limit_s=20)
    assert not misses_deadline(made, NOW + 40)
    assert misses_deadline(made, NOW + 40.001)
    assert not misses_deadline(replace(made, state=JobState.RUNNING), NOW + 99)
    assert not misses_deadline(job(1), NOW + 99)


def test_a_job_that_cannot_meet_its_deadline_ends() -> None:
    lab = a_lab()
    lab.submit()
    late = lab.submit(time_limit_s=20, deadline_at=NOW + 60)
    assert lab.scheduler.state.next_due() == pytest.approx(NOW + 40, abs=0.01)
    lab.tick(40)
    assert lab.job(late).state is JobState.PENDING
    lab.tick(0.5)
    ended = lab.job(late)
    assert (ended.state, ended.reason, ended.end_at) == (JobState.DEADLINE, ReasonCode.DEADLINE, NOW + 40.5)
    assert "time limit is 20s" in str(ended.reason_text) or "0:20" in str(ended.reason_text)
    assert lab.store.events(late)[-1].kind == "ended"
    assert lab.scheduler.state.next_due() is None


def test_without_a_limit_a_job_waits_until_its_deadline() -> None:
    lab = a_lab()
    lab.submit()
    late = lab.submit(deadline_at=NOW + 60)
    lab.tick(60)
    assert lab.job(late).state is JobState.PENDING
    lab.tick(1)
    assert lab.job(late).state is JobState.DEADLINE


def test_a_job_starts_at_the_last_possible_instant() -> None:
    lab = a_lab(outcome=SimulatedOutcome(runs_s=40))
    lab.submit()
    just = lab.submit(time_limit_s=20, deadline_at=NOW + 60)
    lab.tick(40)
    assert lab.job(just).state is JobState.RUNNING


def test_a_running_job_is_not_ended_by_its_deadline() -> None:
    lab = a_lab()
    job_id = lab.submit(deadline_at=NOW + 5)
    lab.tick(10)
    assert lab.job(job_id).state is JobState.RUNNING


def test_held_and_dependent_jobs_miss_their_deadlines_too() -> None:
    lab = a_lab()
    parent = lab.submit()
    held = lab.submit(deadline_at=NOW + 60)
    lab.ask(Hold(ANN, (held,)))
    child = lab.submit(deadline_at=NOW + 60, dependency=f"afterok:{parent}")
    grandchild = lab.submit(dependency=f"afterok:{child}")
    lab.tick(61)
    assert [lab.job(job_id).state for job_id in (held, child)] == [JobState.DEADLINE] * 2
    assert lab.job(grandchild).reason is ReasonCode.DEPENDENCY_NEVER_SATISFIED


def test_an_updated_deadline_is_honoured() -> None:
    lab = a_lab()
    lab.submit()
    first, second = lab.submit(deadline_at=NOW + 60), lab.submit(deadline_at=NOW + 60)
    lab.ask(Update(ANN, (first,), {"deadline_at": NOW + 90}), Update(ANN, (second,), {"deadline_at": NOW + 30}))
    lab.tick(31)
    assert lab.job(second).state is JobState.DEADLINE
    lab.tick(50)
    assert lab.job(first).state is JobState.PENDING
    lab.tick(10)
    assert lab.job(first).state is JobState.DEADLINE


def test_a_restart_remembers_deadlines() -> None:
    lab = a_lab()
    lab.submit()
    late = lab.submit(deadline_at=NOW + 60)
    lab.restart()
    assert lab.scheduler.state.next_due() == pytest.approx(NOW + 60, abs=0.01)
    lab.tick(61)
    assert lab.job(late).state is JobState.DEADLINE
