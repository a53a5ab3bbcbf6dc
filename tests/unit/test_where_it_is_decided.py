"""Questions of docs/contributing.md: without a function that the answer names, a thing is decided no longer."""

from __future__ import annotations

from typing import Any

import pytest
from lab import Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.gpu.history import GpuHistory
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.settings import LimitSettings, Settings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.scheduler import filters, planner
from gpusched.scheduler.rules import BLOCKED, Cycle
from gpusched.scheduler.timeline import Timeline
from gpusched.testing import NOW, allocation, job, node, request, snapshot

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


# --- backfill ---------------------------------------------------------------------------------------

NO_LIMIT = Settings(priority=PrioritySettings(order="fifo"))
LIMITED = replace(NO_LIMIT, limit=LimitSettings(running_per_user=10))


def started(settings: Settings) -> list[int]:
    """Who starts beside a job that has a core for ten more minutes, behind a job that needs all cores of a node.

    Jobs 3 and 4 fit, and only job 3 ends in time.
    """
    lasting = [
        allocation(8, "n8", expected_end_at=NOW + 600.0),
        allocation(9, "n9", cpus=8.0, expected_end_at=NOW + 9000.0),
    ]
    wide = job(2, submit_at=NOW - 900.0, time_limit_s=600, request=request(cpus=8))
    short = job(3, submit_at=NOW - 800.0, time_limit_s=60, request=request(cpus=1))
    long = job(4, submit_at=NOW - 700.0, time_limit_s=7200, request=request(cpus=1))
    nodes = [node(f"n{number}", gpus=1, cpus=8) for number in (8, 9)]
    view = snapshot(*nodes, running=lasting, waiting=[wide, short, long])
    return [start.job_id for start in planner.decide(view, settings).starts]


@pytest.mark.parametrize("settings", [NO_LIMIT, LIMITED], ids=["no limit", "limited"])
def test_a_job_passes_a_wide_one_only_where_it_does_not_delay_it(settings: Settings) -> None:
    assert started(settings) == [3]


def admit_all(*args: Any) -> bool:
    return True


def block(*args: Any) -> int:
    return BLOCKED


@pytest.mark.parametrize(
    ("where", "name", "instead", "settings", "starts"),
    [
        (planner, "walk_queue", lambda cycle: None, NO_LIMIT, []),
        (planner, "walk_queue", lambda cycle: None, LIMITED, []),
        (Cycle, "schedule_unlimited", block, NO_LIMIT, []),
        (Cycle, "place_now", lambda *args: None, LIMITED, []),
        (Timeline, "admits", admit_all, NO_LIMIT, [3, 4]),
        (Timeline, "admits", admit_all, LIMITED, [3, 4]),
    ],
)
def test_backfill_is_decided_there(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, instead: Any, settings: Settings, starts: list[int]
) -> None:
    monkeypatch.setattr(where, name, instead)
    assert started(settings) == starts
