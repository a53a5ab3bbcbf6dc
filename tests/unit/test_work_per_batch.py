"""Runs that end together share one plan, one look at the GPUs and one commit: work is done per batch, not per run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lab import Lab
from loop_bench import loop_bench

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.gpu.history import GpuHistory
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.settings import DaemonSettings
from gpusched.model.states import JobState
from gpusched.scheduler.planner import Planner
from gpusched.testing import request

JOBS = 8


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a plan was made, the GPUs were viewed, and a sample was folded into what is known of its GPU."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, word: str) -> None:
        called = getattr(owner, name)

        def counted(*args: Any, **named: Any) -> Any:
            counts[word] += 1
            return called(*args, **named)

        monkeypatch.setattr(owner, name, counted)

    count(Planner, "plan", "plans")
    count(GpuTracker, "views", "views")
    count(GpuHistory, "fold", "folds")
    return counts


@pytest.mark.parametrize("ended", [1, JOBS])
def test_runs_that_end_together_cost_one_plan_and_one_commit(calls: Counter[str], ended: int) -> None:
    lab = Lab(gpus=0, cpus=JOBS, outcome=SimulatedOutcome(runs_s=1e6))
    lab.outcomes = {f"{number}.1": SimulatedOutcome(runs_s=10) for number in range(1, ended + 1)}
    lab.ask(*[lab.submission() for _ in range(2 * JOBS)])
    lab.tick()
    calls.clear()
    commits = lab.store.commits
    lab.tick(10)
    assert lab.scheduler.meters.events["ended"] == ended
    assert len(lab.scheduler.state.open_runs) == JOBS, "those that waited run"
    assert calls["plans"] == 1
    assert lab.store.commits == commits + 1


def test_a_confirmed_start_costs_no_plan(calls: Counter[str]) -> None:
    lab = Lab(gpus=0)
    lab.submit()
    calls.clear()
    lab.ticker.tick()
    assert lab.scheduler.state.open_runs["1.1"].pid is not None
    assert calls["plans"] == 0


@pytest.mark.parametrize("ended", [1, JOBS])
def test_a_reading_is_applied_once_however_many_runs_ended(calls: Counter[str], ended: int) -> None:
    lab = Lab(gpus=JOBS, outcome=SimulatedOutcome(runs_s=10))
    for _ in range(ended):
        lab.submit(request=request(gpus=1))
    lab.tick(1)
    lab.tick(10)
    assert len(lab.scheduler.state.releasing) == ended
    calls.clear()
    lab.tick(0.1)
    assert not lab.scheduler.state.releasing
    assert calls["folds"] == JOBS, "one for each GPU"
    assert calls["views"] == 1


def test_a_reading_is_requested_before_the_ends_are_planned_and_recorded() -> None:
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=10))
    lab.scheduler.signals.gpus_freed.connect(lambda: lab.steps.append("request"))
    lab.submit(request=request(gpus=1))
    lab.submit(request=request(gpus=1))
    lab.tick(1)
    lab.steps.clear()
    lab.tick(10)
    assert lab.steps[:5] == ["collect", "apply", "request", "decide", "commit"]
    lab.steps.clear()
    lab.tick(0.1)
    assert "request" not in lab.steps, "nothing has ended since"


def on_gpus_and_on_cpus() -> tuple[Lab, int]:
    """A run on a GPU and on all CPUs, and a job that waits for the CPUs alone."""
    lab = Lab(gpus=1, cpus=4, outcome=SimulatedOutcome(runs_s=10))
    lab.scheduler.signals.gpus_freed.connect(lambda: None)
    lab.submit(request=request(gpus=1, cpus=4.0))
    waits = lab.submit(request=request(cpus=4.0))
    return lab, waits


def test_an_end_and_the_reading_that_shows_its_gpu_clean_cost_one_plan(calls: Counter[str]) -> None:
    lab, waits = on_gpus_and_on_cpus()
    lab.clock.advance(10)
    calls.clear()
    lab.ticker.tick()
    assert lab.scheduler.state.releasing
    assert lab.job(1).state is JobState.COMPLETING
    assert calls["plans"] == 0
    due_at = lab.ticker.next_due()
    assert due_at is not None
    lab.tick(0.001)
    assert calls["plans"] == 1
    assert lab.job(waits).state is JobState.RUNNING
    assert (lab.ticker.next_due() or due_at + 1) > due_at, "nothing is due any more"


def test_other_resources_of_an_ended_run_do_not_wait_for_a_slow_reading(calls: Counter[str]) -> None:
    lab, waits = on_gpus_and_on_cpus()
    lab.clock.advance(10)
    lab.ticker.tick()
    due_at = lab.ticker.next_due()
    assert due_at is not None
    lab.clock.advance(due_at - lab.clock.now())
    lab.ticker.tick()
    assert lab.scheduler.state.releasing, "the reading has not come"
    assert lab.job(waits).state is JobState.RUNNING


def test_a_submission_is_planned_at_once_while_a_reading_is_awaited() -> None:
    lab, waits = on_gpus_and_on_cpus()
    lab.clock.advance(10)
    lab.ticker.submit(lab.submission(request=request(cpus=1.0)), lambda answer: None)
    lab.ticker.tick()
    assert lab.scheduler.state.releasing
    assert lab.job(waits).state is JobState.RUNNING


def ended_with_one_waiting() -> tuple[Lab, int, int]:
    """A run that has just ended, as the engine has reported, and a job that waits for its GPU."""
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=10))
    first, second = (lab.submit(request=request(gpus=1)) for _ in range(2))
    lab.clock.advance(10)
    assert lab.ticker.take_news()
    assert lab.ticker.awaits_reading
    assert not lab.ticker.take_news(), "it is reported once"
    return lab, first, second


def test_an_end_whose_gpu_was_read_before_the_tick_costs_one_plan_and_one_commit(calls: Counter[str]) -> None:
    lab, first, second = ended_with_one_waiting()
    lab.load[0] = 0.9
    lab.clock.advance(0.001)
    lab.read()
    assert not lab.ticker.awaits_reading
    commits = lab.store.commits
    calls.clear()
    lab.ticker.tick()
    assert (lab.job(first).state, lab.job(second).state) == (JobState.COMPLETED, JobState.RUNNING)
    assert (calls["plans"], lab.store.commits) == (1, commits + 1)
    assert lab.store.runs([first])[0].mean_utilisation == 0.0, "what was read after the end is not the run's"


def test_a_reading_begun_before_the_end_was_known_proves_nothing() -> None:
    lab, first, second = ended_with_one_waiting()
    lab.read()
    assert lab.ticker.awaits_reading
    lab.ticker.tick()
    assert (lab.job(first).state, lab.job(second).state) == (JobState.COMPLETING, JobState.PENDING)
    lab.tick(0.001)
    assert (lab.job(first).state, lab.job(second).state) == (JobState.COMPLETED, JobState.RUNNING)


def test_a_gpu_that_is_read_before_the_tick_and_not_clean_stays_booked() -> None:
    lab, first, second = ended_with_one_waiting()
    lab.used[0] = 8000
    lab.clock.advance(0.001)
    lab.read()
    assert lab.ticker.awaits_reading
    lab.ticker.tick()
    assert (lab.job(first).state, lab.job(second).state) == (JobState.COMPLETING, JobState.PENDING)
    lab.used[0] = 0
    lab.tick(0.001)
    assert (lab.job(first).state, lab.job(second).state) == (JobState.COMPLETED, JobState.RUNNING)


def test_an_end_that_cannot_be_recorded_keeps_its_gpu_although_that_was_read() -> None:
    lab, first, second = ended_with_one_waiting()
    lab.clock.advance(0.001)
    lab.read()
    lab.store.is_full = True
    lab.ticker.tick()
    assert (lab.job(first).state, lab.job(second).state) == (JobState.RUNNING, JobState.PENDING)
    lab.store.is_full = False
    lab.tick(0.001)
    assert (lab.job(first).state, lab.job(second).state) == (JobState.COMPLETED, JobState.RUNNING)


def two_that_end_in_a_row() -> tuple[Lab, int]:
    """A lab at the end of one run, whose tick takes a second, in which another one ends; and that one's job."""
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=10), daemon=DaemonSettings(poll_s=600, idle_poll_s=600))
    lab.submit(request=request(gpus=1))
    lab.clock.advance(1)
    second = lab.submit(request=request(gpus=1))
    lab.clock.advance(9)
    return lab, second


def test_runs_that_end_during_a_tick_are_read_while_it_starts_others(calls: Counter[str]) -> None:
    lab, second = two_that_end_in_a_row()
    seen: list[bool] = []

    def look() -> None:
        lab.clock.advance(1)
        seen.append(lab.ticker.take_news())
        lab.clock.advance(0.001)

    lab.ticker.before_starts = look
    lab.ticker.tick()
    assert seen == [True]
    assert lab.ticker.has_news
    assert lab.ticker.awaits_reading
    assert lab.job(second).state is JobState.RUNNING
    lab.ticker.before_starts = None
    lab.read()
    assert not lab.ticker.awaits_reading
    lab.ticker.tick()
    assert lab.job(second).state is JobState.COMPLETED


# aiohttp's, of the gate that is put around the application.
@pytest.mark.filterwarnings("ignore:Changing state of started")
def test_the_loop_goes_on_with_what_it_has_learned_during_a_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpusched.daemon.loop._RETRY_S", 600)
    lab, second = two_that_end_in_a_row()
    with loop_bench(lab, tmp_path) as bench:
        look_ahead = lab.ticker.before_starts
        asked: list[int] = []

        def look() -> None:
            lab.clock.advance(1)
            before = bench.worker.requests
            assert look_ahead is not None
            look_ahead()
            asked.append(bench.worker.requests - before)

        lab.ticker.before_starts = look
        bench.run_until(lambda: lab.job(second).state is not JobState.RUNNING)
    assert asked[0] == 1, "its GPU was to be read"
    assert lab.job(second).state is JobState.COMPLETING


def test_an_end_that_is_reported_after_the_reading_was_asked_for_waits_for_its_own() -> None:
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=10))
    first = lab.submit(request=request(gpus=1))
    lab.clock.advance(1)
    second = lab.submit(request=request(gpus=1))
    lab.clock.advance(9)
    assert lab.ticker.take_news()
    lab.tick(1)
    assert (lab.job(first).state, lab.job(second).state) == (JobState.COMPLETED, JobState.RUNNING)
    assert lab.ticker.take_news()
    lab.tick(0.001)
    assert lab.job(second).state is JobState.COMPLETED
