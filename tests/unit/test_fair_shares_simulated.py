"""Three users with shares 1:1:2 who always have jobs waiting: what they get is what they were promised."""

from __future__ import annotations

import pytest
from lab import Lab

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.model.commands import Caller, Submit
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import AccountSettings
from gpusched.model.states import RunState
from gpusched.model.value import replace
from gpusched.ports import JobFilter
from gpusched.testing import launch, request, spec

USERS = {"ann": Caller(1000, "ann"), "bob": Caller(1001, "bob"), "cyd": Caller(1002, "cyd")}
SHARES = {"ann": 1.0, "bob": 1.0, "cyd": 2.0}
JOBS = 240
FAIR = PrioritySettings(
    order="multifactor", weight_age=0.0, weight_nice=0.0, weight_fairshare=100_000.0, half_life_s=200.0
)
BY_RATIO = PrioritySettings(half_life_s=200.0, calc_period_s=1.0)


def run_length_s(run: str) -> float:
    """Between 6 and 14 seconds, as the job's number says, so that GPUs do not come free all at once."""
    return 6.0 + (int(run.partition(".")[0]) * 7919) % 9


def a_lab(priority: PrioritySettings, shares: dict[str, float], gpus: int = 4) -> Lab:
    accounts = {f"of-{user}": AccountSettings(f"of-{user}", shares=share) for user, share in shares.items()}
    lab = Lab(gpus=gpus, cpus=64, priority=priority, account=accounts)
    lab.engine = SimulatedEngine(lab.clock, lambda ticket: SimulatedOutcome(runs_s=run_length_s(ticket.run)))
    lab.restart()
    for user, caller in USERS.items():
        one = spec(request=request(gpus=1, cpus=0.0), account=f"of-{user}", launch=launch("true"))
        lab.ask(Submit(caller, [replace(one, name=f"{user}{number}") for number in range(JOBS)], {"0" * 64: b""}))
    return lab


def gpu_seconds(lab: Lab) -> dict[str, float]:
    users = {job.id: job.user for job in lab.store.jobs(JobFilter())}
    total = dict.fromkeys(USERS, 0.0)
    for run in lab.store.runs(users):
        if run.state is RunState.ENDED and run.start_at is not None and run.end_at is not None:
            total[users[run.job_id]] += (run.end_at - run.start_at) * len(run.gpus)
    return total


def run_until(lab: Lab, ended: int) -> None:
    for _ in range(20 * JOBS):
        if 3 * JOBS - len(lab.scheduler.state.jobs) >= ended:
            return
        lab.tick(1.0)
    raise AssertionError(f"after {20 * JOBS} seconds not {ended} jobs have ended")


def parts_of(seconds: dict[str, float]) -> dict[str, float]:
    return {user: amount / sum(seconds.values()) for user, amount in seconds.items()}


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param(SHARES, id="one to one to two"),
        pytest.param({"ann": 1.0, "bob": 1.0, "cyd": 1.0}, id="all alike", marks=pytest.mark.nightly),
        pytest.param({"ann": 5.0, "bob": 3.0, "cyd": 2.0}, id="five to three to two", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(("priority", "within"), [(FAIR, 0.05), (BY_RATIO, 0.25)], ids=["multifactor", "ratio"])
def test_gpu_time_is_divided_by_the_shares(shares: dict[str, float], priority: PrioritySettings, within: float) -> None:
    """Users who stand alike in the order `response_ratio` may differ by the factor `fairshare_step`."""
    lab = a_lab(priority, shares)
    run_until(lab, 210)
    whole = sum(shares.values())
    assert parts_of(gpu_seconds(lab)) == pytest.approx(
        {user: share / whole for user, share in shares.items()}, rel=within
    )


def test_without_a_weight_it_is_first_come_first_served() -> None:
    """So that the test above is one of fair share, not of the way the jobs were submitted."""
    lab = a_lab(replace(FAIR, weight_fairshare=0.0), SHARES)
    run_until(lab, 210)
    seconds = gpu_seconds(lab)
    assert seconds["ann"] == sum(seconds.values())


def test_an_absent_user_catches_up_only_within_the_half_life() -> None:
    """Nobody is made to wait for ever for what they used long ago."""
    lab = a_lab(FAIR, {"ann": 1.0, "bob": 1.0, "cyd": 1.0})
    run_until(lab, 60)
    before = gpu_seconds(lab)
    lab.clock.advance(20 * FAIR.half_life_s)
    run_until(lab, 270)
    gained = {user: amount - before[user] for user, amount in gpu_seconds(lab).items()}
    assert parts_of(gained) == pytest.approx(dict.fromkeys(USERS, 1 / 3), rel=0.07)


def test_a_restart_midway_forgets_no_usage() -> None:
    lab = a_lab(FAIR, SHARES)
    run_until(lab, 100)
    lab.ticker.flush()
    lab.restart()
    run_until(lab, 210)
    assert parts_of(gpu_seconds(lab)) == pytest.approx({"ann": 0.25, "bob": 0.25, "cyd": 0.5}, rel=0.05)
