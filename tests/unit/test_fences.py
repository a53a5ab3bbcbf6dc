"""Fences in the daemon: recorded once with the plan, kept over restarts, taken back when a job waits anew."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, ROOT, Lab
from planners import check_planner

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.model.commands import Cancel, Hold, Release, Selection, Update
from gpusched.model.job import ArraySpec, Request
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports.tables import FENCES, KEPT_PLACES

HOUR = 3600.0
AT_ONCE: dict[str, Any] = {"reserve_after_s": 0.0, "reserve_after_runs": 0.0}


def make_lab(**priority: Any) -> Lab:
    """Two GPUs that one job holds for long; what is submitted then waits with room reserved for it at once."""
    lab = Lab(
        gpus=2,
        outcome=SimulatedOutcome(runs_s=100 * HOUR),
        priority=replace(PrioritySettings(), **{**AT_ONCE, "fence_s": HOUR, **priority}),
    )
    lab.submit(request=Request(gpus=2), time_limit_s=2 * 3600)
    return lab


def waiting(lab: Lab, **parts: Any) -> int:
    return lab.submit(**{"request": Request(gpus=2), "time_limit_s": 3600, **parts})


def check(lab: Lab) -> None:
    """The planner, the memory and the table agree on fences."""
    scheduler = lab.scheduler
    assert lab.ticker.check_planner() == []
    assert lab.store.load(FENCES) == scheduler.state.rows[FENCES]
    assert lab.store.load(KEPT_PLACES) == scheduler.state.rows[KEPT_PLACES] == scheduler.planner().state.kept
    check_planner(lab)


def test_the_fence_of_a_reserved_job_is_recorded_with_the_plan() -> None:
    lab = make_lab()
    commits = lab.store.commits
    job_id = waiting(lab)
    # The submission, its plan and the fence are one commit.
    assert lab.store.commits == commits + 1
    # Its first expected start is later than `fence_s` from now.
    assert lab.store.load(FENCES) == {job_id: lab.clock.now() + 2 * HOUR}
    check(lab)


def test_the_fence_lies_after_a_later_reservation() -> None:
    lab = make_lab(fence_s=10 * HOUR)
    job_id = waiting(lab)
    assert lab.store.load(FENCES) == {job_id: lab.clock.now() + 10 * HOUR}


def test_a_fence_is_written_once_and_ticks_leave_the_table_alone() -> None:
    lab = make_lab()
    job_id = waiting(lab)
    fences, commits = lab.store.load(FENCES), lab.store.commits
    for _ in range(5):
        lab.scheduler.look_again()
        lab.tick(60)
    assert lab.store.load(FENCES) == fences == {job_id: fences[job_id]}
    assert lab.store.commits == commits


def test_a_job_that_has_not_waited_long_enough_has_no_fence_yet() -> None:
    lab = make_lab(reserve_after_s=HOUR)
    job_id = waiting(lab)
    assert lab.store.load(FENCES) == {}
    lab.clock.advance(HOUR + 60)
    lab.scheduler.look_again()
    lab.tick()
    assert list(lab.store.load(FENCES)) == [job_id]
    check(lab)


def test_a_restart_keeps_the_fence_and_the_bound() -> None:
    lab = make_lab()
    job_id = waiting(lab)
    fences = lab.store.load(FENCES)
    lab.clock.advance(600)
    lab.restart()
    lab.tick()
    assert lab.store.load(FENCES) == lab.scheduler.planner().state.fences == fences
    (kept,) = lab.scheduler.plan.reservations
    assert (kept.job_id, kept.fence_at) == (job_id, fences[job_id])
    check(lab)


def test_the_fence_is_removed_when_the_job_starts() -> None:
    lab = make_lab()
    job_id = waiting(lab)
    assert lab.store.load(FENCES)
    lab.ask(Cancel(ANN, Selection(ids=(1,))))
    lab.tick(60)
    lab.tick(60)
    assert lab.job(job_id).state is JobState.RUNNING
    assert lab.store.load(FENCES) == lab.scheduler.planner().state.fences == {}
    check(lab)


@pytest.mark.parametrize(
    ("changes", "is_new"),
    [({"gpus": 1}, True), ({"time_limit_s": 7200}, True), ({"name": "other"}, False), ({"nice": 50}, False)],
)
def test_a_job_with_changed_requests_restarts_its_wait(changes: dict[str, Any], is_new: bool) -> None:
    lab = make_lab()
    job_id = waiting(lab)
    before = lab.store.load(FENCES)[job_id]
    lab.clock.advance(1.5 * HOUR)
    lab.ask(Update(ANN, (job_id,), changes))
    assert (lab.store.load(FENCES)[job_id] > before) is is_new
    check(lab)


def test_a_held_job_loses_its_fence_and_gets_a_later_one_once_released() -> None:
    lab = make_lab()
    job_id = waiting(lab)
    before = lab.store.load(FENCES)[job_id]
    lab.ask(Hold(ANN, (job_id,)))
    assert lab.store.load(FENCES) == lab.scheduler.planner().state.fences == {}
    check(lab)
    lab.clock.advance(1.5 * HOUR)
    lab.ask(Release(ANN, (job_id,)))
    assert lab.store.load(FENCES)[job_id] == lab.clock.now() + HOUR > before
    check(lab)


def test_a_job_held_and_released_in_one_tick_restarts_its_wait() -> None:
    lab = make_lab()
    job_id = waiting(lab)
    before = lab.store.load(FENCES)[job_id]
    lab.clock.advance(1.5 * HOUR)
    lab.ask(Hold(ANN, (job_id,)), Release(ANN, (job_id,)))
    assert lab.store.load(FENCES)[job_id] > before
    check(lab)


def test_a_fence_that_failed_to_commit_is_not_kept_in_memory() -> None:
    lab = make_lab(reserve_after_s=HOUR)
    job_id = waiting(lab)
    lab.clock.advance(HOUR + 60)
    lab.store.is_full = True
    lab.scheduler.look_again()
    lab.tick()
    assert lab.scheduler.state.rows[FENCES] == {}
    lab.store.is_full = False
    lab.tick(60)
    assert list(lab.store.load(FENCES)) == [job_id]
    check(lab)


def test_tasks_of_an_array_have_fences_before_they_have_rows() -> None:
    lab = make_lab(backfill_depth=2)
    array_id = waiting(lab, array=ArraySpec("0-5", None, None))
    assert sorted(lab.store.load(FENCES)) == [array_id + 1, array_id + 2]
    check(lab)
    lab.ask(Hold(ANN, (array_id,)))
    assert lab.store.load(FENCES) == {}
    check(lab)


def test_a_place_reserved_past_the_fence_survives_a_restart() -> None:
    lab = Lab(
        gpus=2,
        outcome=SimulatedOutcome(runs_s=100 * HOUR),
        priority=replace(PrioritySettings(), **{**AT_ONCE, "fence_s": 60.0}),
    )
    lab.submit(request=Request(gpus=1), time_limit_s=10 * 3600)
    lab.submit(request=Request(gpus=1), time_limit_s=5 * 3600)
    job_id = waiting(lab, request=Request(gpus=1))
    assert lab.store.load(KEPT_PLACES) == {}, "before its fence room may be reserved elsewhere"
    # Its first expected start is its fence; the run there goes on for longer.
    lab.ask(Update(ROOT, (2,), {"time_limit_s": 20 * 3600}))
    assert lab.scheduler.plan.reservations[0].placement.gpus[0].index == 0
    lab.clock.advance(6 * HOUR)
    lab.scheduler.look_again()
    lab.tick()
    (place,) = lab.store.load(KEPT_PLACES).values()
    assert list(lab.store.load(KEPT_PLACES)) == [job_id]
    # Now the other card would be free first, but room is reserved here.
    lab.ask(Update(ROOT, (2,), {"time_limit_s": 9 * 3600}))
    for _ in range(2):
        assert lab.scheduler.plan.reservations[0].placement == place
        check(lab)
        lab.restart()
        lab.tick(60)
    lab.ask(Hold(ANN, (job_id,)))
    assert lab.store.load(KEPT_PLACES) == {}
    check(lab)
