"""Questions of docs/contributing.md: without a function that the answer names, a GPU is not found busy."""

from __future__ import annotations

from typing import Any

import pytest
from lab import Lab

from gpusched.engine.simulated import SimulatedOutcome
from gpusched.gpu.history import GpuHistory
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.states import JobState
from gpusched.scheduler import filters
from gpusched.testing import request

BUSY = [(GpuTracker, "observe"), (GpuHistory, "intrusion"), (filters, "reject_card")]


def one_gpu() -> Lab:
    """A daemon whose only card somebody else begins to use after the first reading."""
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=30))
    lab.tick()
    lab.strangers[0] = 60_000
    return lab


def waits(lab: Lab) -> bool:
    job_id = lab.submit(request=request(gpus=1))
    lab.tick()
    return lab.job(job_id).state is JobState.PENDING


def test_a_job_waits_for_a_busy_gpu() -> None:
    assert waits(one_gpu())


@pytest.mark.parametrize(("where", "name"), BUSY, ids=["read", "judged", "kept off"])
def test_a_gpu_is_found_busy_there(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> None:
    lab = one_gpu()
    monkeypatch.setattr(where, name, lambda *args, **named: None)
    assert not waits(lab)
