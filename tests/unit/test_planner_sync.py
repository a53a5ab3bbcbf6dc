"""The daemon's planner beside the memory and the job table: what it had wrong, and what is done where it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lab import ANN, BOB, ROOT, Lab
from memory import check_memory
from planners import check_planner

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.daemon.checks import daemon_checks
from gpusched.daemon.failures import check_every
from gpusched.daemon.forecast import QueueForecast, dry_run
from gpusched.errors import UsageError
from gpusched.model.commands import Resume, Suspend
from gpusched.model.execution import EngineEvent, RunStarted
from gpusched.model.mentions import render
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.resources import NOTHING
from gpusched.model.snapshot import Usage
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.scheduler import events
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.state import PlannerState
from gpusched.testing import request


def test_gpus_that_are_not_clean_yet_are_not_charged_to_the_ended_job() -> None:
    """They were, from the end of the run on, until the daemon was started again."""
    by_share = PrioritySettings(order="fairshare", calc_period_s=0.0)
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=3), priority=by_share)
    lab.submit(request=request(gpus=1))
    lab.ask(lab.submission(BOB, request=request(gpus=1)))
    lab.submit(request=request(gpus=1))
    lab.used[0] = 9000
    lab.tick(3)
    for _ in range(4):
        lab.tick(3)
    lab.used[0] = 0
    lab.tick(1)
    used = {one.user: one.used.gpus for one in lab.scheduler.planner().state.fairshare.used()}
    assert used["ann"] < 4
    check_planner(lab)


def test_suspended_time_is_not_charged() -> None:
    by_share = PrioritySettings(order="fairshare", calc_period_s=0.0)
    lab = Lab(gpus=0, cpus=1, outcome=SimulatedOutcome(runs_s=500), priority=by_share)
    job = lab.submit()
    lab.ask(lab.submission(BOB))
    lab.submit()
    lab.tick(3)
    lab.ask(Suspend(ROOT, (job,)))
    for _ in range(4):
        lab.tick(3)
        check_planner(lab)
    lab.ask(Resume(ROOT, (job,)))
    lab.tick(3)
    check_planner(lab)
    used = {one.user: one.used.cpus for one in lab.scheduler.planner().state.fairshare.used()}
    fresh = Planner.from_snapshot(lab.scheduler.snapshot_with_queue(lab.clock.now()), lab.settings)
    fresh.state.move_to(lab.clock.now())
    assert used == pytest.approx({one.user: one.used.cpus for one in fresh.state.fairshare.used()})
    assert used["ann"] < 8


def test_runs_that_start_later_than_planned_are_moved_and_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    by_share = PrioritySettings(order="fairshare", calc_period_s=0.0)
    lab = Lab(gpus=2, cpus=8, outcome=SimulatedOutcome(runs_s=500), priority=by_share)
    events_of = SimulatedEngine.events

    def later(engine: SimulatedEngine) -> list[EngineEvent]:
        return [replace(one, at=one.at + 0.5) if isinstance(one, RunStarted) else one for one in events_of(engine)]

    monkeypatch.setattr(SimulatedEngine, "events", later)
    jobs = [lab.submit(request=request(gpus=1), time_limit_s=600), lab.submit(request=request(gpus=1))]
    lab.ask(lab.submission(BOB, request=request(gpus=1)))
    lab.tick(0.25)
    planned = dict(lab.scheduler.planner().state.runs)
    assert sorted(planned) == jobs
    for _ in range(3):
        lab.tick(1)
        check_planner(lab)
        check_memory(lab)
    planner, state = lab.scheduler.planner().state, lab.scheduler.state
    for job in jobs:
        run = state.open_runs[f"{job}.1"]
        assert run.start_at == run.intent_at + 0.5
        assert planner.runs[job] is planned[job]
        assert planner.runs[job].running.start_at == run.start_at
    assert planner.runs[jobs[0]].running.end_at == state.open_runs[f"{jobs[0]}.1"].start_at + 600
    used = {one.user: one.used.gpus for one in planner.fairshare.used()}
    fresh = Planner.from_snapshot(lab.scheduler.snapshot_with_queue(lab.clock.now()), lab.settings)
    fresh.state.move_to(lab.clock.now())
    assert used == pytest.approx({one.user: one.used.gpus for one in fresh.state.fairshare.used()})


# --- a planner or a memory that was tampered with -------------------------------------------------


def waiting_lab(**parts: Any) -> tuple[Lab, int, int]:
    """One job runs, one waits behind it."""
    lab = Lab(gpus=0, cpus=1, outcome=SimulatedOutcome(runs_s=30), **parts)
    first, second = lab.submit(), lab.submit()
    assert lab.ticker.check_planner() == []
    return lab, first, second


def lose_pending_job(lab: Lab, running: int, pending: int) -> None:
    lab.scheduler.planner().state.apply(events.JobLeft(pending))


def lose_running_job(lab: Lab, running: int, pending: int) -> None:
    lab.scheduler.planner().state.apply(events.RunReleased(running))


def invent_usage(lab: Lab, running: int, pending: int) -> None:
    """Of the calendar and the nodes the planner is told all, each time."""
    lab.scheduler.planner().state._usage["", "eve"] = Usage("", "eve", NOTHING, 0.0)


def lose_row(lab: Lab, running: int, pending: int) -> None:
    lab.scheduler.state.put_job(replace(lab.job(pending), state=JobState.CANCELLED), lab.clock.now())


def lose_hold(lab: Lab, running: int, pending: int) -> None:
    lab.scheduler.state.held.drop(lab.scheduler.state.open_runs[f"{running}.1"])


def hold_up_job(lab: Lab, running: int, pending: int) -> None:
    lab.scheduler.state.eligible.remove(pending)


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (lose_pending_job, "the planner has job 2 pending differently"),
        (lose_running_job, "the planner has job 1 hold something else"),
        (invent_usage, "the planner has other usage of eve"),
        (lose_row, "the memory has another row of jobs: 2"),
        (lose_hold, "the memory has run 1.1 hold something else"),
        (hold_up_job, "by the memory job 2 has to wait, by the table it does not"),
    ],
)
def test_a_difference_is_reported_and_repaired(
    tamper: Callable[[Lab, int, int], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    lab, running, pending = waiting_lab()
    tamper(lab, running, pending)
    (check,) = [one for one in daemon_checks(lab.ticker) if one.check == "planner"]
    assert not check.ok
    assert said in render(check.text)
    assert "report this" in check.hint
    assert said in render(caplog.text)
    check_planner(lab)
    check_memory(lab)
    (check,) = [one for one in daemon_checks(lab.ticker) if one.check == "planner"]
    assert check.ok
    lab.tick(30)
    assert lab.job(running).state is JobState.COMPLETED
    assert lab.job(pending).state is JobState.RUNNING


def test_the_check_runs_every_n_ticks_when_configured() -> None:
    lab, _, pending = waiting_lab()
    scheduler = lab.scheduler
    lab.ticker._check_every = 3
    while (lab.ticker.ticks + 1) % 3:
        lab.tick(1)
    lose_row(lab, 0, pending)
    assert not scheduler.failures.counts["planner"]
    lab.tick(1)
    assert scheduler.failures.counts["planner"] == 1
    assert pending in scheduler.state.jobs
    for _ in range(3):
        lab.tick(1)
    assert scheduler.failures.counts["planner"] == 1
    assert not scheduler.failures.failing


def test_the_check_reports_failing_commits() -> None:
    lab, _, _ = waiting_lab()
    lab.store.is_full = True
    lab.ask(lab.submission())
    (check,) = [one for one in daemon_checks(lab.ticker) if one.check == "planner"]
    assert check.ok
    assert check.level == "warn"
    assert "not compared" in check.text
    lab.store.is_full = False
    lab.submit()
    (check,) = [one for one in daemon_checks(lab.ticker) if one.check == "planner"]
    assert check.text == "its state agrees with the job table"


def test_a_number_of_ticks_is_whole() -> None:
    assert [check_every(None), check_every(""), check_every("20")] == [0, 0, 20]
    with pytest.raises(UsageError, match="not a number of ticks"):
        check_every("often")


# --- what other callers do while a plan is not carried out ------------------------------------------


def test_a_start_that_waits_for_a_reading_books_nothing() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=30))
    scheduler = lab.scheduler
    lab.tick()
    lab.clock.advance(4)
    lab.ticker.submit(lab.submission(request=request(gpus=1)), lambda answer: None)
    lab.ticker.tick()
    assert scheduler.decide_step.awaited == {"n1"}
    assert [start.job_id for start in scheduler.plan.starts] == [1]
    # Who asks for the order of jobs meanwhile finds it pending.
    assert [job.id for job in scheduler.answers.in_queue_order(scheduler.state.jobs.values())] == [1]
    assert not scheduler.planner().state.allocations()
    check_planner(lab)
    lab.strangers[0] = 60_000
    lab.tick()
    assert lab.job(1).state is JobState.PENDING
    assert not scheduler.planner().state.allocations()
    check_planner(lab)
    lab.strangers.clear()
    while lab.job(1).state is JobState.PENDING:
        lab.tick(30)
    check_planner(lab)


def test_a_planner_with_a_start_that_is_not_carried_out_is_not_idle() -> None:
    lab = Lab(gpus=1)
    lab.tick()
    lab.clock.advance(4)
    lab.ticker.submit(lab.submission(request=request(gpus=1)), lambda answer: None)
    lab.ticker.tick()
    planner = lab.scheduler.planner()
    assert [start.job_id for start in planner.plan(lab.clock.now()).starts] == [1]
    assert not planner.state.is_idle


def test_a_dry_run_and_estimates_leave_a_plan_unchanged() -> None:
    lab, _, pending = waiting_lab()
    scheduler = lab.scheduler
    plan, planner = scheduler.plan, scheduler.planner()
    before = planner.state.snapshot(lab.clock.now())
    answer = dry_run(lab.submission().specs[0], ANN, scheduler)()
    assert answer.verdict == "waits"
    assert QueueForecast.of(scheduler).starts([pending])[pending].high_at is None
    assert scheduler.answers.reason_for(lab.job(pending)) is not None
    assert scheduler.plan is plan
    assert scheduler.planner().state.snapshot(lab.clock.now()) == before
    check_planner(lab)


def test_a_planner_that_fails_to_apply_changes_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had changed was forgotten with the error, and the planner went on without it."""
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=500))
    lab.submit(request=request(gpus=1))
    lab.tick(1)
    scheduler, apply = lab.scheduler, PlannerState.apply

    def broken(self: PlannerState, event: events.Event) -> None:
        if isinstance(event, events.JobQueued):
            raise RuntimeError("broken")
        apply(self, event)

    monkeypatch.setattr(scheduler.decide_step, "carry_out", lambda *args, **options: None)
    lab.submit(request=request(gpus=1))
    monkeypatch.setattr(PlannerState, "apply", broken)
    with pytest.raises(RuntimeError):
        scheduler.planner()
    monkeypatch.setattr(PlannerState, "apply", apply)
    assert len(scheduler.planner().state.queue) == 1
