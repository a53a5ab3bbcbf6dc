"""Usage of ended runs: what is charged, to whom, and that no crash loses it or charges it twice."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, BOB, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.allocations import usage_with_run
from gpusched.daemon.failures import STEPS
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.model.commands import Cancel, Selection
from gpusched.model.job import Job, Run
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import AccountSettings, QosSettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Usage
from gpusched.model.states import JobState, RunState
from gpusched.ports.tables import USAGE
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.testing import NOW, job, node, request, share
from gpusched.testing import run as a_run

CARD_MIB = 24 * 1024
SLOW = PrioritySettings(half_life_s=1e12)
"""Nothing fades within a test, so that the sums are whole numbers."""


def ended(of: Job, **parts: Any) -> Run:
    fields = {
        "state": RunState.ENDED,
        "outcome": JobState.COMPLETED,
        "start_at": NOW - 100.0,
        "end_at": NOW,
        "number": 1,
        **parts,
    }
    return a_run(of, **fields)


def charged_for(
    settings: Settings | None = None, *, job_parts: dict[str, Any] | None = None, **run_parts: Any
) -> Usage | None:
    settings = settings or Settings(priority=SLOW)
    made = job(1, run=1, account="lab", **(job_parts or {}))
    layout = ClusterLayout((node("n1", gpus=4),), settings)
    return usage_with_run({}, made, ended(made, **run_parts), layout, settings, NOW)


def close(usage: Usage | None, gpus: float, vram_mib: float, cpus: float, mem_mib: float) -> None:
    assert usage is not None
    assert (usage.account, usage.user, usage.at) == ("lab", "ann", NOW)
    used = usage.used
    assert (used.gpus, used.vram_mib, used.cpus, used.mem_mib) == pytest.approx((gpus, vram_mib, cpus, mem_mib))


def test_a_run_is_charged_for_its_whole_booking_while_it_ran() -> None:
    usage = charged_for(gpus=(share(0), share(1)), cpus=3, mem_mib=10)
    close(usage, 200, 200 * CARD_MIB, 300, 1000)


def test_a_slice_is_charged_as_its_part_of_the_gpu() -> None:
    close(charged_for(gpus=(share(0, vram_mib=6 * 1024),), cpus=0, mem_mib=0), 25, 600 * 1024, 0, 0)


def test_suspended_time_is_not_charged() -> None:
    close(charged_for(cpus=2, mem_mib=0, suspended_s=60.0), 0, 0, 80, 0)
    # Also when it was ended while it stood still.
    still = charged_for(job_parts={"suspended_at": NOW - 60}, cpus=2, mem_mib=0, suspended_s=60.0)
    close(still, 0, 0, 80, 0)


@pytest.mark.parametrize(
    ("factor", "cpus"), [(2.0, 400.0), (0.5, 100.0), (0.0, None)], ids=["counts double", "counts half", "is free"]
)
def test_the_usage_factor_of_the_qos_applies(factor: float, cpus: float | None) -> None:
    settings = Settings(priority=SLOW, qos={"x": QosSettings("x", usage_factor=factor)})
    usage = charged_for(settings, job_parts={"qos": "x"}, cpus=2, mem_mib=0)
    if cpus is None:
        assert usage is None
    else:
        close(usage, 0, 0, cpus, 0)


def test_a_run_that_never_began_is_not_charged() -> None:
    assert charged_for(start_at=None) is None


def test_older_usage_decays_before_the_new_is_added() -> None:
    settings = Settings(priority=PrioritySettings(half_life_s=100.0))
    before = Usage("lab", "ann", Resources(cpus=80.0), NOW - 200)
    made = job(1, run=1, account="lab")
    layout = ClusterLayout((node("n1"),), settings)
    run = ended(made, start_at=NOW - 1e-6, cpus=1, mem_mib=0)
    usage = usage_with_run({("lab", "ann"): before}, made, run, layout, settings, NOW)
    assert usage is not None
    assert usage.used.cpus == pytest.approx(20.0, abs=1e-5)


# --- in the tick --------------------------------------------------------------------------------


def gpu_seconds(lab: Lab) -> dict[tuple[str, str], float]:
    """As recorded, and as the memory knows it: they must never differ after a tick."""
    stored = {(usage.account, usage.user): usage.used.gpus for usage in lab.store.load(USAGE).values()}
    known = {mark: usage.used.gpus for mark, usage in lab.scheduler.state.rows[USAGE].items()}
    assert stored == known
    return {mark: round(amount, 3) for mark, amount in stored.items()}


def test_each_run_is_charged_to_its_account_and_user() -> None:
    accounts = {name: AccountSettings(name) for name in "ab"}
    lab = Lab(gpus=4, priority=SLOW, account=accounts)
    one = request(gpus=1)
    lab.ask(
        lab.submission(ANN, request=one, account="a"),
        lab.submission(ANN, request=one, account="b"),
        lab.submission(BOB, request=request(gpus=2), account="b"),
    )
    lab.tick(10)
    assert gpu_seconds(lab) == {("a", "ann"): 10, ("b", "ann"): 10, ("b", "bob"): 20}
    assert {(usage.account, usage.user) for usage in lab.scheduler.snapshot(lab.clock.now()).usage} == {
        ("a", "ann"),
        ("b", "ann"),
        ("b", "bob"),
    }


def test_every_run_of_a_job_is_charged_including_failed_ones() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=10, exit_code=3), priority=SLOW)
    lab.submit(request=request(gpus=1), retry={"retries": 1, "backoff_s": 1})
    lab.tick(10)
    lab.tick(5)
    lab.tick(10)
    lab.tick(1)
    assert not lab.scheduler.state.jobs
    assert gpu_seconds(lab) == {("ann", "ann"): 20}


def test_a_cancelled_run_is_charged_until_its_end() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=1000), priority=SLOW)
    job_id = lab.submit(request=request(gpus=1))
    lab.tick(4)
    lab.ask(Cancel(ANN, Selection(ids=(job_id,))))
    lab.tick()
    assert gpu_seconds(lab) == {("ann", "ann"): 4}


def test_a_gpu_that_is_slow_to_clean_is_not_charged() -> None:
    lab = Lab(gpus=1, priority=SLOW)
    job_id = lab.submit(request=request(gpus=1))
    lab.used[0] = 5000
    lab.tick(10)
    assert lab.job(job_id).state is JobState.COMPLETING
    assert gpu_seconds(lab) == {("ann", "ann"): 10}
    lab.restart()
    lab.tick(7)
    lab.used.clear()
    lab.tick(1)
    assert lab.job(job_id).state is JobState.COMPLETED
    assert gpu_seconds(lab) == {("ann", "ann"): 10}


def test_a_failed_commit_charges_nothing_and_the_next_one_charges_once() -> None:
    lab = Lab(gpus=1, priority=SLOW)
    lab.submit(request=request(gpus=1))
    lab.store.is_full = True
    lab.tick(10)
    lab.tick()
    assert gpu_seconds(lab) == {}
    lab.store.is_full = False
    lab.tick()
    assert gpu_seconds(lab) == {("ann", "ann"): 10}


class Crash(BaseException):
    """The process dies here: nobody catches it."""


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_crash_before_any_step_neither_loses_nor_doubles_the_charge(step: str) -> None:
    lab = Lab(gpus=1, priority=SLOW)
    lab.submit(request=request(gpus=1))
    lab.tick()

    def die(name: str) -> None:
        if name == step:
            raise Crash

    lab.ticker._step = die
    lab.clock.advance(10)
    with pytest.raises(Crash):
        lab.ticker.tick()
    lab.restart()
    adopt_open_runs(lab.scheduler.state, lab.engine)
    lab.tick()
    lab.tick(1)
    assert not lab.scheduler.state.jobs
    assert gpu_seconds(lab) == {("ann", "ann"): 10}


def test_a_job_of_a_free_qos_leaves_no_usage() -> None:
    lab = Lab(gpus=1, priority=SLOW, qos={"free": QosSettings("free", usage_factor=0.0)})
    lab.submit(request=request(gpus=1), qos="free")
    lab.tick(10)
    assert gpu_seconds(lab) == {}
