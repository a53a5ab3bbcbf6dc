"""Rows that contradict each other, found while the daemon runs: memory, planner and bookings agree all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lab import Lab
from memory import check_memory

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.checks import daemon_checks
from gpusched.model.job import Job
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.testing import request

DAMAGES: dict[str, tuple[Callable[[Job], Job], JobState]] = {
    "its job has ended": (lambda job: replace(job, state=JobState.COMPLETED, end_at=job.start_at), JobState.COMPLETED),
    "its job waits": (lambda job: replace(job, state=JobState.PENDING, start_at=None), JobState.RUNNING),
    "its job is in another run": (lambda job: replace(job, run=2), JobState.RUNNING),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_an_open_run_that_no_active_job_has_is_booked_until_it_is_stopped(name: str) -> None:
    damage, state = DAMAGES[name]
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=1e6, stop_takes_s=20))
    job_id = lab.submit(request=request(1))
    lab.tick(1)
    lab.store.commit(Changes(jobs={job_id: damage(lab.job(job_id))}))
    lab.ticker.reload()
    other = lab.submit(request=request(1))
    for _ in range(4):
        lab.tick(2)
        assert lab.scheduler.state.strays.keys() == {"1.1"}
        assert {row.check for row in daemon_checks(lab.ticker) if not row.ok} <= {"containers", "slurm commands"}
        assert lab.ticker.check_planner() == []
        assert lab.job(other).state is JobState.PENDING
        check_memory(lab)
    for _ in range(5):
        lab.tick(10)
    assert not lab.scheduler.state.strays
    assert lab.job(job_id).state is state
    (first, *_) = lab.store.runs([job_id])
    assert first.outcome is JobState.CANCELLED
    assert JobState.RUNNING in {lab.job(one).state for one in (job_id, other)}
    check_memory(lab)
