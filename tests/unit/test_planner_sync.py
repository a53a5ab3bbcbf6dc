"""What the daemon's planner had wrong after an event: found by `test_planner_sync_properties`, one by one."""

from __future__ import annotations

import pytest
from lab import BOB, ROOT, Lab
from planners import check_planner

from gpusched.daemon.yielding import Resume, Suspend
from gpusched.engine.simulated import Outcome
from gpusched.model.settings import PrioritySettings
from gpusched.scheduler.planner import Planner
from gpusched.testing import request


def test_gpus_that_are_not_clean_yet_are_not_charged_to_the_ended_job() -> None:
    """They were, from the end of the run on, until the daemon was started again."""
    by_share = PrioritySettings(order="fairshare", calc_period_s=0.0)
    lab = Lab(gpus=1, outcome=Outcome(runs_s=3), priority=by_share)
    lab.submit(request=request(gpus=1))
    lab.ask(lab.submission(BOB, request=request(gpus=1)))
    lab.submit(request=request(gpus=1))
    lab.used[0] = 9000
    lab.turn(3)
    for _ in range(4):
        lab.turn(3)
    lab.used[0] = 0
    lab.turn(1)
    used = {one.user: one.used.gpus for one in lab.scheduler.planner().fairshare.used()}
    assert used["ann"] < 4
    check_planner(lab)


def test_the_time_in_which_a_job_is_suspended_is_not_charged() -> None:
    by_share = PrioritySettings(order="fairshare", calc_period_s=0.0)
    lab = Lab(gpus=0, cpus=1, outcome=Outcome(runs_s=500), priority=by_share)
    job = lab.submit()
    lab.ask(lab.submission(BOB))
    lab.submit()
    lab.turn(3)
    lab.ask(Suspend(ROOT, (job,)))
    for _ in range(4):
        lab.turn(3)
        check_planner(lab)
    lab.ask(Resume(ROOT, (job,)))
    lab.turn(3)
    check_planner(lab)
    used = {one.user: one.used.cpus for one in lab.scheduler.planner().fairshare.used()}
    fresh = Planner.from_snapshot(lab.scheduler.snapshot(lab.clock.now()), lab.settings)
    fresh.move_to(lab.clock.now())
    assert used == pytest.approx({one.user: one.used.cpus for one in fresh.fairshare.used()})
    assert used["ann"] < 8
