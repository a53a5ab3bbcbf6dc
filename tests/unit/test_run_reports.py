"""Ends that runs report by their progress: whom the planner believes, how far, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from math import inf

import pytest

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.facade import DaemonFacade
from gpusched.daemon.forecast import QueueForecast
from gpusched.daemon.watch.run_reports import LEAST_S, RunReports
from gpusched.model.commands import Cancel, Selection
from gpusched.model.job import Job
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.progress import ShownProgress
from gpusched.predict.reports import MOST_FAMILIES, ReportTrust
from gpusched.scheduler.timeline import foreseen_end
from gpusched.testing import launch, request
from tests.lab import ANN, Lab

HOUR = 3600.0


@pytest.mark.parametrize(
    ("predicted", "reported", "limit", "now", "expected"),
    [
        pytest.param(100, None, inf, 10, 100, id="no report"),
        pytest.param(100, 50, inf, 10, 50, id="sooner than predicted"),
        pytest.param(None, 50, inf, 10, 50, id="nothing else is known"),
        pytest.param(None, 50, 200, 10, 50, id="sooner than the limit"),
        pytest.param(None, 300, 200, 10, 200, id="later than the limit"),
        pytest.param(100, 150, inf, 10, 150, id="later than predicted"),
        pytest.param(100, 9000, inf, 10, 225, id="put off by one step of growth at most"),
        pytest.param(100, 300, inf, 80, 300, id="and by another once the prediction is outlived"),
        pytest.param(100, 50, inf, 50, 100, id="a report that has passed"),
        pytest.param(100, 50, inf, 75, 225, id="which leaves what was predicted"),
        pytest.param(None, 50, inf, 60, inf, id="or nothing"),
        pytest.param(100, 150, 120, 10, 120, id="predicted, reported and limited"),
        pytest.param(100, 110, 120, 105, 110, id="reported between the prediction and the limit"),
    ],
)
def test_a_report_counts_until_it_has_passed_and_puts_an_end_off_by_one_step(predicted, reported, limit, now, expected):
    assert foreseen_end(0.0, predicted, limit, now, reported) == expected


@pytest.mark.parametrize(
    ("runs", "trusted"),
    [
        pytest.param([], True, id="no history"),
        pytest.param([([90, 110, 100], 100)], True, id="right"),
        pytest.param([([10, 20, 30, 40, 50], 50)], False, id="a bar of each epoch"),
        pytest.param([([10], 100), ([100], 100), ([100], 100)], False, id="wrong once in three runs"),
        pytest.param([([10], 100), *[([100], 100)] * 3], True, id="wrong four runs ago"),
        pytest.param([([], 100)], True, id="a run without reports"),
        pytest.param([([0.0], 0.0)], True, id="no time at all"),
    ],
)
def test_a_family_is_trusted_until_its_newest_runs_were_wrong(runs, trusted):
    trust = ReportTrust()
    for reported_s, run_s in runs:
        trust.learn("mine", reported_s, run_s)
    assert trust.is_trusted("mine") is trusted
    assert trust.is_trusted("another")


def test_families_that_are_least_recently_active_are_forgotten():
    trust = ReportTrust()
    for number in range(MOST_FAMILIES + 1):
        trust.learn(number, [10.0], 100.0)
    assert trust.is_trusted(0)
    assert not trust.is_trusted(1)


class Reports:
    """A reader of progress that is told what runs report."""

    def __init__(self) -> None:
        self.shown: dict[str, ShownProgress] = {}

    async def refresh(self, jobs: Iterable[Job], runs: object) -> None:
        pass

    def of(self, handle: str) -> ShownProgress | None:
        return self.shown.get(handle)


class ReportingLab:
    """A lab with one GPU whose runs last two hours, and what reads their reports."""

    def __init__(self, **sections: object) -> None:
        self.lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=2 * HOUR), **sections)
        self.reader = Reports()
        self.reports = RunReports(self.lab.scheduler, self.reader)

    def start(self, **parts: object) -> int:
        parts = {"launch": launch("train.py"), **parts}
        job_id = self.lab.submit(request=request(gpus=1), **parts)
        self.lab.tick()
        return job_id

    def report(self, job_id: int, left_s: float) -> None:
        """The only run of a job reports to end in so many seconds."""
        at = self.lab.clock.now() + left_s
        self.reader.shown = {f"{job_id}.1": ShownProgress(0.5, "", at)}
        self.look()

    def look(self) -> None:
        self.reports.take_in(self.reports._telling())
        self.lab.tick()

    def planned_in(self, waiting: int) -> float | None:
        """In how many seconds the planner expects a pending job to start."""
        lab = self.lab
        found = {one.job_id: one.start_at for one in lab.scheduler.decide_step.plan.reservations}
        at = found.get(waiting)
        return None if at is None else at - lab.clock.now()


def reporting(**sections: object) -> tuple[ReportingLab, int, int]:
    """A lab in which the first of two jobs has run for ten minutes."""
    made = ReportingLab(priority=PrioritySettings(reserve_after_s=0.0, reserve_after_runs=0.0, **sections))
    first = made.start()
    made.lab.tick(600)
    return made, first, made.start()


def test_a_waiting_job_is_planned_to_when_the_running_one_says_it_ends():
    made, first, second = reporting()
    made.report(first, 1200)
    assert made.planned_in(second) == pytest.approx(1200)
    assert made.lab.scheduler.state.holds[f"{first}.1"].reported_end_at == made.lab.clock.now() + 1200


def test_the_estimate_for_a_waiting_job_is_that_end_too():
    made, first, second = reporting()
    made.report(first, 1200)
    found = QueueForecast.of(made.lab.scheduler).starts([second])[second]
    assert found.low_at == pytest.approx(made.lab.clock.now() + 1200)
    assert found.high_at is None


def test_small_moves_of_an_end_are_not_planned_anew():
    made, first, _ = reporting()
    made.report(first, 1200)
    before = made.lab.scheduler.state.holds
    held = before[f"{first}.1"]
    made.report(first, 1210)
    assert made.lab.scheduler.state.holds[f"{first}.1"] is held
    made.report(first, 2400)
    assert made.lab.scheduler.state.holds[f"{first}.1"].reported_end_at == made.lab.clock.now() + 2400


def test_runs_that_have_just_begun_are_not_asked():
    made = ReportingLab()
    first = made.start()
    assert made.reports._telling() == []
    made.lab.tick(LEAST_S)
    assert [job.id for job in made.reports._telling()] == [first]


def test_without_predictions_nobody_is_asked_and_nothing_is_kept():
    made, first, _ = reporting(predict=False)
    made.report(first, 1200)
    assert made.lab.scheduler.state.reported_ends == {}


def test_a_family_that_was_wrong_is_not_believed_again():
    made, first, second = reporting()
    facade = DaemonFacade(made.lab.ticker, progress=made.reader, reports=made.reports)
    made.report(first, 120)
    assert made.planned_in(second) == pytest.approx(120)
    made.lab.tick(2 * HOUR)
    made.lab.tick(600)
    assert made.lab.scheduler.state.jobs[second].run == 1
    third = made.start()
    made.lab.tick(LEAST_S)
    made.report(second, 1200)
    assert made.planned_in(third) != pytest.approx(1200)
    shown = facade.progress_of(made.lab.scheduler.state.jobs[second])
    assert (shown.fraction, shown.eta_at) == (0.5, None), "the end that is shown is the one that is planned"


def test_a_run_that_is_always_about_to_end_is_not_believed_for_long():
    made, first, second = reporting()
    believed = []
    for _ in range(20):
        made.report(first, 120)
        believed.append(made.lab.scheduler.state.holds[f"{first}.1"].reported_end_at is not None)
        made.lab.tick(60)
    assert believed[:3] == [True] * 3
    assert not any(believed[10:])
    assert made.planned_in(second) is None


def test_what_a_stopped_run_has_reported_does_not_count():
    made, first, _ = reporting()
    made.report(first, 1200)
    made.lab.ask(Cancel(ANN, Selection(ids=(first,))))
    held = made.lab.scheduler.state.holds.get(f"{first}.1")
    assert held is None or held.reported_end_at is None


def test_a_reloaded_memory_is_told_again():
    made, first, second = reporting()
    made.report(first, 1200)
    made.lab.ticker.reload()
    assert made.lab.scheduler.state.reported_ends == {}
    made.look()
    assert made.planned_in(second) == pytest.approx(1200)


def test_runs_are_asked_between_ticks_from_time_to_time(monkeypatch):
    made, first, second = reporting()
    made.reader.shown = {f"{first}.1": ShownProgress(0.5, "", made.lab.clock.now() + 1200)}
    asked = []

    async def refresh(jobs, runs):
        asked.append([job.id for job in jobs])

    monkeypatch.setattr(made.reader, "refresh", refresh)

    async def poll_twice():
        for _ in range(2):
            made.reports.poll()
            await asyncio.sleep(0)

    asyncio.run(poll_twice())
    made.lab.tick()
    assert asked == [[first]]
    assert made.planned_in(second) == pytest.approx(1200)


def test_a_reader_that_raises_is_counted_and_asked_again(monkeypatch):
    made, _, _ = reporting()

    async def refresh(jobs, runs):
        raise OSError("the file server is gone")

    monkeypatch.setattr(made.reader, "refresh", refresh)

    async def poll():
        made.reports.poll()
        await asyncio.sleep(0)

    asyncio.run(poll())
    assert "progress of runs" in made.lab.scheduler.failures.counts
