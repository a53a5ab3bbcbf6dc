"""Whatever happens on the way, a job has one fallback when it has failed for good, and else none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from lab import ANN, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.lifecycle.fallback import FAILURES
from gpusched.model.commands import Cancel, Requeue, Selection
from gpusched.model.job import RetryRule
from gpusched.ports import JobFilter
from gpusched.testing import request

OUTCOMES = st.sampled_from(
    [
        SimulatedOutcome(runs_s=2),
        SimulatedOutcome(runs_s=2, exit_code=3),
        SimulatedOutcome(runs_s=2, exit_code=1, gpu_oom=True),
        SimulatedOutcome(runs_s=2, signal=11),
        SimulatedOutcome(runs_s=1e9, stop_takes_s=1),
        SimulatedOutcome(runs_s=2, lost=True),
        SimulatedOutcome(launch_error="no such program"),
        SimulatedOutcome(never_starts=True),
    ]
)
EVENTS = st.lists(
    st.sampled_from(["turn", "turn", "turn", "restart", "full disk", "cancel", "requeue", "fault", "lost"]), max_size=12
)


@given(
    outcomes=st.lists(OUTCOMES, min_size=1, max_size=6),
    events=EVENTS,
    gpus=st.integers(0, 2),
    retries=st.integers(0, 2),
    requeue=st.booleans(),
    limit_s=st.sampled_from([None, 1, 60]),
)
def test_one_fallback_follows_the_last_failure_and_no_other(
    outcomes: list[SimulatedOutcome], events: list[str], gpus: int, retries: int, requeue: bool, limit_s: int | None
) -> None:
    lab = Lab(gpus=2)
    left = list(outcomes)
    lab.engine.outcome = lambda ticket: left.pop(0) if left else SimulatedOutcome(runs_s=1, exit_code=1)
    rule = RetryRule(retries=retries, backoff_s=0, requeue=requeue)
    job_id = lab.submit(fallback="echo", request=request(gpus=gpus), retry=rule, time_limit_s=limit_s)
    for event in [*events, *["turn"] * 60]:
        if event == "restart":
            lab.ticker.flush()
            lab.restart()
            adopt_open_runs(lab.scheduler.state, lab.engine)
        elif event == "full disk":
            lab.store.is_full = True
            lab.tick(1)
            lab.store.is_full = False
        elif event == "cancel":
            lab.ask(Cancel(ANN, Selection(ids=(job_id,))))
        elif event == "requeue":
            lab.ask(Requeue(ANN, (job_id,)))
        elif event == "fault":
            lab.xids[0] = (48,)
        elif event == "lost":
            lab.lost.add(1)
        lab.tick(5)
    job = lab.job(job_id)
    others = [one for one in lab.store.jobs(JobFilter()) if one.id != job_id]
    expected = job.state in FAILURES and job.cancel_at is None
    assert [one.spec.fallback_of for one in others] == [job_id] * expected
    assert job.fallback_id == (others[0].id if expected else None)
    assert all(one.fallback_id is None for one in others)
