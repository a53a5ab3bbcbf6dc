"""Runs that make room or stand still, turned by hand: what is recorded, what is ordered, what comes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.daemon.reconcile import adopt_open_runs, pending_order
from gpusched.errors import Forbidden, NotFound, Refused, StoreFull
from gpusched.model.commands import Cancel, Hold, Release, Requeue, Resume, Selection, Suspend, Update
from gpusched.model.execution import OpenRun, Order, StopOrder, SuspendOrder
from gpusched.model.job import RetryRule
from gpusched.model.planner_settings import PreemptSettings
from gpusched.model.queue_settings import AccountSettings, QosSettings
from gpusched.model.settings import EpilogSettings
from gpusched.model.snapshot import Plan, Preempt, PreemptMode
from gpusched.model.snapshot import ResumeRun as ResumeIt
from gpusched.model.states import JobState, ReasonCode
from gpusched.ports.tables import USAGE
from gpusched.scheduler.invariants import check_invariants
from gpusched.testing import launch, request

QOS = {"low": QosSettings("low"), "high": QosSettings("high", tier=1, preempts=("low",))}
WHY = "made room for job 2 (its QOS goes first)"


def lab(mode: str = "requeue", **options: Any) -> Lab:
    """Jobs that run for long and leave at once when told; `high` may preempt `low`."""
    outcome = options.pop("outcome", SimulatedOutcome(runs_s=1000))
    return Lab(outcome=outcome, qos=QOS, preempt=PreemptSettings(mode=mode, min_run_s=0), **options)


def plan(one: Lab, made: Plan) -> bool:
    """Have a plan carried out as the tick does, with commit and orders."""
    moved = []

    def planned(tick: Any, extensions: Any) -> bool:
        moved.append(tick.carry_out(made))
        return False

    step = one.scheduler.decide_step
    usual, step._carry_out_plans = step._carry_out_plans, planned  # type: ignore[method-assign]
    one.scheduler.look_again()
    try:
        one.tick()
    finally:
        step._carry_out_plans = usual  # type: ignore[method-assign]
    return moved[0]


def preempt(one: Lab, job_id: int, mode: str = PreemptMode.REQUEUE) -> bool:
    return plan(one, Plan(preempts=(Preempt(job_id, mode, 2, WHY),)))


class Deaf:
    """An engine that no order reaches."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.orders: list[tuple[str, Order | None]] = []

    def reconcile(self, runs: Sequence[OpenRun], ended: Iterable[str] = ()) -> None:
        self.orders += [(known.run, known.pending_order) for known in runs]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def story(one: Lab, job_id: int) -> list[str]:
    return [event.text for event in one.store.events(job_id)]


def state(one: Lab, job_id: int) -> JobState:
    return one.job(job_id).state


# --- epilogs ------------------------------------------------------------------------------------


def expected_in(one: Lab, job_id: int) -> float | None:
    """Seconds until the start of the room that is reserved for a job."""
    found = next((kept.start_at for kept in one.scheduler.plan.reservations if kept.job_id == job_id), None)
    return None if found is None else found - one.clock.now()


def test_start_of_a_preempting_job_is_expected_when_the_epilogs_of_its_victim_have_ended() -> None:
    one = lab(epilog=EpilogSettings(path="/usr/local/sbin/epilog", timeout_s=200.0))
    one.outcome = SimulatedOutcome(runs_s=1000, stop_takes_s=5.0, epilog_s=60.0)
    low = one.submit(qos="low", request=request(gpus=2))
    one.tick()
    high = one.submit(qos="high", request=request(gpus=1))
    one.tick()
    assert state(one, low) is JobState.COMPLETING
    # Nothing is known of the epilog but its time limit.
    assert expected_in(one, high) == 230.0
    one.tick(30)
    assert expected_in(one, high) == 200.0
    reason = one.scheduler.answers.reason_for(one.job(high))
    assert reason is not None
    assert reason.facts["expected_at"] == one.clock.now() + 200.0
    one.tick(34)
    assert state(one, low) is JobState.COMPLETING
    for _ in range(3):
        one.tick(1)
    assert state(one, high) is JobState.RUNNING


def test_length_of_epilogs_is_learned_from_earlier_ones_up_to_their_limits() -> None:
    one = lab(gpus=3, epilog=EpilogSettings(path="/usr/local/sbin/epilog", timeout_s=200.0, job_timeout_s=50.0))
    one.outcome = SimulatedOutcome(runs_s=10.0, epilog_s=40.0)
    first = one.submit(qos="low", request=request(gpus=1))
    one.tick()
    one.tick(10)
    one.tick(40)
    for _ in range(3):
        one.tick(1)
    assert first not in one.scheduler.state.jobs
    one.outcome = SimulatedOutcome(runs_s=1000, epilog_s=40.0)
    plain = one.submit(qos="low", request=request(gpus=1))
    own = one.submit(qos="low", request=request(gpus=1), launch=launch("true", epilog="tidy.sh"))
    one.tick()
    held = {allocation.job_id: allocation.epilog_s for allocation in one.scheduler.state.holds.values()}
    assert held == {plain: 40.0, own: 250.0}
    # What was learned is not in the table.
    adopt_open_runs(one.restart().state, one.engine)
    held = {allocation.job_id: allocation.epilog_s for allocation in one.scheduler.state.holds.values()}
    assert held == {plain: 200.0, own: 250.0}


# --- preemption --------------------------------------------------------------------------------------


def test_a_preemption_is_recorded_before_the_signal_and_requeued_at_the_end() -> None:
    one = lab(outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=5))
    job_id = one.submit()
    one.tick(60)
    preempt(one, job_id)
    assert (state(one, job_id), one.job(job_id).preempt_at) == (JobState.COMPLETING, one.clock.now())
    assert one.engine._runs["1.1"].stopped_by == "preempt"
    one.scheduler.decide_step._carry_out_plans = lambda tx, extensions: False  # type: ignore[method-assign]
    one.tick(5)
    after = one.job(job_id)
    assert (after.state, after.is_front, after.reason) == (JobState.PENDING, True, ReasonCode.PREEMPTED)
    assert (after.failures, after.requeues, after.preempt_at) == (0, 0, None)
    assert [run.outcome for run in one.store.runs([job_id])] == [JobState.PREEMPTED]
    assert f"preempted: {WHY}" in story(one, job_id)


def test_a_preempted_run_is_not_charged_and_a_requeued_one_is() -> None:
    for act, is_charged in ((preempt, False), (lambda one, job_id: one.ask(Requeue(ANN, (job_id,))), True)):
        one = lab(account={"lab": AccountSettings("lab")})
        job_id = one.submit(account="lab")
        one.tick(60)
        act(one, job_id)
        one.tick()
        assert one.job(job_id).run == 2
        assert bool(list(one.store.load(USAGE).values())) is is_charged


def test_a_job_without_requeue_ends_as_preempted() -> None:
    one = lab()
    job_id = one.submit(retry={"requeue": False})
    one.tick()
    preempt(one, job_id, PreemptMode.CANCEL)
    one.tick()
    assert (state(one, job_id), one.job(job_id).reason) == (JobState.PREEMPTED, ReasonCode.PREEMPTED)


def test_a_preempted_gpu_job_waits_until_its_gpus_are_clean() -> None:
    one = lab(gpus=1)
    job_id = one.submit(request=request(1))
    one.tick()
    one.used[0] = 4000
    preempt(one, job_id)
    one.tick(1)
    assert state(one, job_id) is JobState.COMPLETING
    one.used[0] = 0
    one.tick(1)
    assert (state(one, job_id), one.job(job_id).run) == (JobState.RUNNING, 2)


def test_the_policy_preempts_a_lower_job_and_it_restarts_first() -> None:
    one = lab(cpus=2)
    low = one.submit(qos="low", request=request(cpus=2))
    waiting = one.submit(qos="low", request=request(cpus=2))
    one.tick(60)
    one.outcome = SimulatedOutcome(runs_s=10)
    high = one.submit(qos="high", request=request(cpus=2))
    one.tick()
    one.tick()
    assert (state(one, low), state(one, waiting), state(one, high)) == (
        JobState.PENDING,
        JobState.PENDING,
        JobState.RUNNING,
    )
    assert not check_invariants(one.scheduler.snapshot(one.clock.now()))
    one.tick(11)
    assert (state(one, high), state(one, low), state(one, waiting)) == (
        JobState.COMPLETED,
        JobState.RUNNING,
        JobState.PENDING,
    )


def test_a_run_being_ended_is_left_alone() -> None:
    one = lab(outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=5))
    job_id = one.submit()
    one.tick()
    one.ask(Cancel(ANN, Selection(ids=(job_id,))))
    preempt(one, job_id)
    preempt(one, job_id, PreemptMode.SUSPEND)
    assert one.job(job_id).preempt_at is None
    one.tick(5)
    assert state(one, job_id) is JobState.CANCELLED


def test_a_cancel_wins_over_a_preemption() -> None:
    one = lab(outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=5))
    job_id = one.submit()
    one.tick()
    preempt(one, job_id)
    one.ask(Cancel(ANN, Selection(ids=(job_id,))))
    one.tick(5)
    assert state(one, job_id) is JobState.CANCELLED
    assert len(one.store.runs([job_id])) == 1


def test_a_failed_commit_stops_no_run() -> None:
    one = lab()
    job_id = one.submit()
    one.tick()
    one.store.is_full = True
    preempt(one, job_id)
    assert one.engine._runs["1.1"].stopped_by is None
    one.store.is_full = False
    assert state(one, job_id) is JobState.RUNNING
    preempt(one, job_id)
    assert one.engine._runs["1.1"].stopped_by == "preempt"


@pytest.mark.parametrize("mode", [PreemptMode.REQUEUE, PreemptMode.SUSPEND])
def test_a_stop_lost_in_a_crash_is_ordered_on_adoption(mode: str) -> None:
    one = lab(outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=1))
    job_id = one.submit()
    one.tick()
    deaf = Deaf(one.engine)
    one.scheduler.engine = deaf
    preempt(one, job_id, mode)
    expected = StopOrder("preempt") if mode == PreemptMode.REQUEUE else SuspendOrder()
    assert deaf.orders == [("1.1", expected)]
    adopt_open_runs(one.restart().state, one.engine)
    run = one.engine._runs["1.1"]
    assert (run.stopped_by, run.still_since is not None) == (
        ("preempt", False) if mode == PreemptMode.REQUEUE else (None, True)
    )
    if mode == PreemptMode.REQUEUE:
        one.tick(1)
        assert (one.job(job_id).run, len(one.store.runs([job_id]))) == (2, 2)


# --- suspension by the policy ----------------------------------------------------------------------------


def test_a_job_suspended_by_the_policy_returns_its_cores_at_once_and_resumes_by_itself() -> None:
    one = lab("suspend", cpus=2)
    low = one.submit(qos="low", request=request(cpus=2, mem_mib=100), time_limit_s=600)
    one.tick(60)
    one.outcome = SimulatedOutcome(runs_s=100)
    high = one.submit(qos="high", request=request(cpus=2))
    after = one.job(low)
    assert (after.state, after.suspended_by, state(one, high)) == (JobState.SUSPENDED, "policy", JobState.RUNNING)
    assert "resumes by itself" in (after.reason_text or "")
    (still,) = [held for held in one.scheduler.state.holds.values() if held.job_id == low]
    assert (still.cpus, still.suspended_cpus, still.mem_mib, still.is_suspended) == (0, 2, 100, True)
    assert not check_invariants(one.scheduler.snapshot(one.clock.now()))
    one.tick(100)
    one.tick()
    assert (state(one, high), state(one, low)) == (JobState.COMPLETED, JobState.RUNNING)
    one.tick(1)
    (run,) = one.store.runs([low])
    assert 100 <= one.scheduler.state.open_runs[run.id].suspended_s <= 101
    one.tick(530)
    assert state(one, low) is JobState.RUNNING
    one.tick(20)
    assert state(one, low) is JobState.TIMEOUT


def test_the_owner_cannot_resume_or_suspend_a_job_suspended_by_the_policy() -> None:
    one = lab("suspend", cpus=2)
    job_id = one.submit(qos="low", request=request(cpus=2))
    one.tick(60)
    one.submit(qos="high", request=request(cpus=2))
    for command in (Suspend(ANN, (job_id,)), Resume(ANN, (job_id,))):
        (answer,) = one.ask(command)
        assert isinstance(answer, Refused)
        assert "by itself" in answer.message


def test_a_job_suspended_by_the_policy_holds_no_cores_while_it_is_ended() -> None:
    one = lab("suspend", cpus=2, outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=5))
    low = one.submit(qos="low", request=request(cpus=2))
    one.tick(60)
    high = one.submit(qos="high", request=request(cpus=2))
    assert (state(one, low), state(one, high)) == (JobState.SUSPENDED, JobState.RUNNING)
    one.ask(Cancel(ANN, Selection(ids=(low,))))
    assert state(one, low) is JobState.COMPLETING
    assert not check_invariants(one.scheduler.snapshot(one.clock.now()))
    one.tick(5)
    assert state(one, low) is JobState.CANCELLED


def test_resuming_a_running_job_changes_nothing() -> None:
    one = lab()
    job_id = one.submit()
    one.tick()
    preempt(one, job_id, PreemptMode.SUSPEND)
    assert plan(one, Plan(resumes=(ResumeIt(job_id),)))
    assert not plan(one, Plan(resumes=(ResumeIt(job_id),)))
    assert state(one, job_id) is JobState.RUNNING


# --- what owners ask for ---------------------------------------------------------------------------------


def test_an_owner_suspends_and_resumes_without_losing_resources() -> None:
    one = lab(cpus=2, gpus=1)
    job_id = one.submit(request=request(1, cpus=2))
    waiting = one.submit(request=request(cpus=1))
    one.tick(10)
    (answer,) = one.ask(Suspend(ANN, (job_id,)))
    assert answer == {"changed": [str(job_id)], "unchanged": [], "kept": [{"id": str(job_id), "gpus": 1}]}
    assert (state(one, job_id), state(one, waiting)) == (JobState.SUSPENDED, JobState.PENDING)
    one.tick(100)
    assert (state(one, job_id), state(one, waiting)) == (JobState.SUSPENDED, JobState.PENDING)
    assert one.ask(Suspend(ANN, (job_id,)))[0]["unchanged"] == [str(job_id)]
    assert one.ask(Resume(ANN, (job_id,))) == [{"changed": [str(job_id)], "unchanged": []}]
    assert one.ask(Resume(ANN, (job_id,))) == [{"changed": [], "unchanged": [str(job_id)]}]
    assert state(one, job_id) is JobState.RUNNING
    assert one.scheduler.state.open_runs["1.1"].suspended_s == pytest.approx(100, abs=1)


def test_a_requeued_job_restarts_before_its_peers() -> None:
    one = lab(cpus=1)
    ids = [one.submit() for _ in range(3)]
    one.tick(10)
    (answer,) = one.ask(Requeue(ANN, (ids[0],)))
    assert answer == {"changed": [str(ids[0])]}
    one.tick()
    assert [(state(one, job_id), one.job(job_id).run) for job_id in ids] == [
        (JobState.RUNNING, 2),
        (JobState.PENDING, 0),
        (JobState.PENDING, 0),
    ]
    assert "requeued by ann" in story(one, ids[0])


def test_a_suspended_job_can_be_requeued_cancelled_signalled_and_given_another_limit() -> None:
    one = lab()
    ids = [one.submit() for _ in range(2)]
    one.tick()
    one.ask(Suspend(ANN, tuple(ids)))
    assert one.ask(Cancel(ANN, Selection(ids=(ids[0],)), signal=10))[0]["signalled"] == [str(ids[0])]
    (answer,) = one.ask(Cancel(ANN, Selection(ids=(ids[0],)), signal=18))
    assert f"gctl resume {ids[0]}" in answer.hint
    assert one.ask(Update(ANN, (ids[0],), {"time_limit_s": 50})) == [{"changed": [str(ids[0])]}]
    one.ask(Requeue(ANN, (ids[0],)), Cancel(ANN, Selection(ids=(ids[1],))))
    one.tick()
    assert (state(one, ids[0]), one.job(ids[0]).run) == (JobState.RUNNING, 2)
    assert state(one, ids[1]) is JobState.CANCELLED


def test_a_held_job_that_is_requeued_stays_held() -> None:
    one = lab()
    job_id = one.submit()
    one.tick()
    one.ask(Hold(ANN, (job_id,)), Requeue(ANN, (job_id,)))
    one.tick()
    assert state(one, job_id) is JobState.PENDING
    assert one.scheduler.answers.reason_for(one.job(job_id)).code is ReasonCode.JOB_HELD_USER


def test_requeue_with_hold_ends_the_run_and_keeps_the_job() -> None:
    one = lab()
    job_id = one.submit()
    one.tick()
    one.ask(Requeue(ANN, (job_id,), hold=True))
    one.tick()
    assert (state(one, job_id), one.job(job_id).hold) == (JobState.PENDING, "user")
    one.ask(Release(ANN, (job_id,)))
    one.tick()
    assert state(one, job_id) is JobState.RUNNING
    one.ask(Requeue(ROOT, (job_id,), hold=True))
    assert one.job(job_id).hold == "admin"


def test_hold_of_a_running_job_says_that_it_keeps_running() -> None:
    one = lab()
    job_id, once = one.submit(), one.submit(retry=RetryRule(requeue=False))
    waits = one.submit(hold=True)
    one.tick()
    held, refused, no_requeue = one.ask(
        Hold(ANN, (job_id, waits)), Hold(ANN, (once,)), Requeue(ANN, (waits,), hold=True)
    )
    assert held == {"changed": [str(job_id)], "unchanged": [str(waits)], "running": [str(job_id)]}
    assert f"job {once} is RUNNING and has no further run to hold" in refused.message
    assert f"gctl suspend {once}" in refused.hint
    assert f"gctl hold {waits}" in no_requeue.hint
    assert (state(one, job_id), state(one, once)) == (JobState.RUNNING, JobState.RUNNING)


REFUSED = {
    "suspend a job that waits": (Suspend, "held", Refused, "job 2 is PENDING"),
    "resume a job that waits": (Resume, "held", Refused, "job 2 is PENDING"),
    "requeue a job that waits": (Requeue, "held", Refused, "it is already pending"),
    "requeue a job that must not run again": (Requeue, "once", Refused, "--no-requeue"),
    "suspend a job that is being ended": (Suspend, "ending", Refused, "job 4 is COMPLETING"),
    "requeue a job that is being ended": (Requeue, "ending", Refused, "job 4 is COMPLETING"),
    "suspend a job of somebody else": (Suspend, "bob's", Forbidden, "belongs to bob"),
    "requeue a job of somebody else": (Requeue, "bob's", Forbidden, "belongs to bob"),
    "resume a job that is not there": (Resume, "nothing", NotFound, "no job 99"),
}


@pytest.mark.parametrize(("kind", "name", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_invalid_actions_are_refused(kind: Any, name: str, error: type[Exception], says: str) -> None:
    one = lab(outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=50))
    ids = {
        "running": one.submit(),
        "held": one.submit(hold=True),
        "once": one.submit(retry={"requeue": False}),
        "ending": one.submit(),
        "bob's": one.ask(one.submission(BOB))[0]["ids"][0],
        "nothing": 99,
    }
    one.tick()
    one.ask(Cancel(ANN, Selection(ids=(ids["ending"],))))
    # With one that could be: all or none.
    (answer,) = one.ask(kind(ANN, (ids["running"], ids[name])))
    assert isinstance(answer, error)
    assert says in answer.message
    assert answer.hint
    assert state(one, ids["running"]) is JobState.RUNNING


def test_a_full_disk_suspends_nothing() -> None:
    one = lab()
    job_id = one.submit()
    one.tick()
    one.store.is_full = True
    (answer,) = one.ask(Suspend(ANN, (job_id,)))
    assert isinstance(answer, StoreFull)
    assert one.engine._runs["1.1"].still_since is None


def test_the_record_determines_the_repeated_order() -> None:
    one = lab(outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=50))
    ids = [one.submit() for _ in range(4)]
    one.tick()
    one.ask(Cancel(ANN, Selection(ids=(ids[0],))), Requeue(ANN, (ids[1],)), Suspend(ANN, (ids[2],)))
    found = [pending_order(one.job(job_id), one.settings) for job_id in ids]
    assert found == [StopOrder("cancel"), StopOrder("requeue"), SuspendOrder(), None]
    one.ask(Cancel(ANN, Selection(ids=(ids[1],))))
    assert pending_order(one.job(ids[1]), one.settings) == StopOrder("cancel")


def test_a_checkpoint_of_a_run_is_known_to_the_policy_and_forgotten_with_it() -> None:
    one = lab()
    job_id = one.submit()
    one.tick()
    assert one.scheduler.state.holds["1.1"].checkpoint_at is None
    for saved_at, known_at in ((-5, -5), (5, 0)):
        one.engine.saved_at["1.1"] = one.clock.now() + saved_at
        one.scheduler.observe_checkpoints()
        assert one.scheduler.state.holds["1.1"].checkpoint_at == one.clock.now() + known_at
    one.ask(Requeue(ANN, (job_id,)))
    one.tick()
    one.scheduler.observe_checkpoints()
    assert (one.scheduler.state.checkpoints, one.scheduler.state.holds["1.2"].checkpoint_at) == ({}, None)


def test_a_resume_lost_in_a_crash_is_ordered_on_adoption() -> None:
    one = lab()
    job_id = one.submit()
    one.tick()
    one.ask(Suspend(ANN, (job_id,)))
    one.scheduler.engine = Deaf(one.engine)
    one.ask(Resume(ANN, (job_id,)))
    assert one.engine._runs["1.1"].still_since is not None
    adopt_open_runs(one.restart().state, one.engine)
    assert (state(one, job_id), one.engine._runs["1.1"].still_since) == (JobState.RUNNING, None)


@pytest.mark.parametrize(("says_done", "ends"), [(False, JobState.RUNNING), (True, JobState.COMPLETED)])
def test_what_depends_on_the_success_of_a_job_waits_until_it_is_done(says_done: bool, ends: JobState) -> None:
    one = lab(outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=5, stop_code=0, says_done=says_done))
    job_id = one.submit(retry=RetryRule(retries=1, backoff_s=0.0))
    after = one.submit(dependency=f"afterok:{job_id}")
    one.tick()
    one.ask(Requeue(ROOT, (job_id,)))
    # Killed within the grace, the daemon judges the end by what it had committed.
    adopt_open_runs(one.restart().state, one.engine)
    one.tick(5)
    one.tick()
    assert (state(one, job_id), one.job(job_id).failures) == (ends, 0)
    assert state(one, after) is (JobState.PENDING if ends is JobState.RUNNING else JobState.RUNNING)
