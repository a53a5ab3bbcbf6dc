"""What a time limit would change, as the daemon tells it: true figures, and nothing where nothing is sent."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.forecast import limit_hint
from gpusched.model.commands import Hold, Update
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import DefaultSettings, SubmitSettings
from gpusched.model.states import JobState
from gpusched.ports.daemon import LimitHint
from gpusched.testing import launch, request

HOUR = 3600
TRAIN = launch("train.sh")
BY_LIMIT = PrioritySettings(order="fifo", backfill_by="limit", predict=True)


def a_lab(known: int = 4, **sections: Any) -> Lab:
    """Two cards, on which `train.sh` has taken an hour; two of three runs of anything else take as long."""
    lab = Lab(**{"gpus": 2, "outcome": SimulatedOutcome(runs_s=HOUR), "priority": BY_LIMIT, **sections})
    lab.scheduler.history.load()
    for _ in range(known):
        lab.submit(launch=TRAIN, request=request(gpus=1))
        lab.tick(HOUR + 1)
        lab.tick(1)
        lab.tick(1)
    assert not lab.scheduler.state.jobs
    return lab


def before_a_wide_job(lab: Lab, **parts: Any) -> int:
    """One card busy for three hours; a job that wants both for an hour; and behind it the one that is returned."""
    lab.outcomes[f"{lab.scheduler.state.next_id}.1"] = SimulatedOutcome(runs_s=3 * HOUR)
    lab.submit(request=request(gpus=1), time_limit_s=3 * HOUR)
    lab.tick(1)
    lab.submit(request=request(gpus=2), time_limit_s=HOUR)
    lab.tick(1)
    return lab.submit(**{"launch": TRAIN, "request": request(gpus=1), **parts})


def hint(lab: Lab, job_id: int) -> LimitHint | None:
    question = limit_hint(lab.job(job_id), lab.scheduler)
    return None if question is None else question()


def started_after_s(lab: Lab, job_id: int) -> float:
    asked_at = lab.clock.now()
    for _ in range(600):
        found = lab.job(job_id)
        if found.start_at is not None:
            return found.start_at - asked_at
        lab.tick(60)
    raise AssertionError(f"job {job_id} did not start in ten hours")


@pytest.mark.parametrize("takes_it", [True, False], ids=["with the limit", "without one"])
def test_both_predicted_starts_come_true(takes_it: bool) -> None:
    lab = a_lab()
    job_id = before_a_wide_job(lab)
    found = hint(lab, job_id)
    assert found is not None
    assert (found.usual, found.limit_s, found.typed, found.time_limit_s) == ("about 60 min", 5400, "1h30m", None)
    now = lab.clock.now()
    assert found.start_at - now < 60
    assert found.start_without_at is not None
    assert found.start_without_at - now == pytest.approx(4 * HOUR, abs=120)
    if takes_it:
        lab.ask(Update(ANN, (job_id,), {"time_limit_s": found.limit_s, "time_limit_source": ""}))
    promised = found.start_at if takes_it else found.start_without_at
    assert started_after_s(lab, job_id) == pytest.approx(promised - now, abs=180)


def test_a_default_in_force_is_named() -> None:
    lab = a_lab(default=DefaultSettings(time_limit_s=24 * HOUR))
    found = hint(lab, before_a_wide_job(lab))
    assert found is not None
    assert (found.limit_s, found.time_limit_s) == (5400, 24 * HOUR)


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        pytest.param({}, {"time_limit_s": 24 * HOUR}, id="a limit was stated"),
        pytest.param({}, {"time_limit_source": "unlimited"}, id="none was asked for"),
        pytest.param({}, {"launch": launch("other.sh")}, id="nothing is known of its run time"),
        pytest.param({}, {"hold": True}, id="it is held"),
        pytest.param({"submit": SubmitSettings(limit_hint=False)}, {}, id="the settings switch it off"),
        pytest.param(
            {"priority": PrioritySettings(order="fifo", backfill=False)}, {}, id="nothing is passed, with or without"
        ),
        pytest.param({"default": DefaultSettings(time_limit_s=HOUR + 60)}, {}, id="the default is shorter"),
        pytest.param(
            {"queue": {"default": QueueSettings("default"), "short": QueueSettings("short", max_time_s=5400)}},
            {"queue": "short"},
            id="its queue allows no more anyway",
        ),
    ],
)
def test_no_hint_is_given_when_a_limit_would_change_nothing(sections: dict[str, Any], parts: dict[str, Any]) -> None:
    lab = a_lab(**sections)
    assert hint(lab, before_a_wide_job(lab, **parts)) is None


def test_no_hint_is_given_for_a_job_that_starts_soon_or_runs() -> None:
    lab = a_lab()
    running = lab.submit(launch=TRAIN, request=request(gpus=1))
    assert hint(lab, running) is None
    lab.tick(1)
    assert lab.job(running).state is JobState.RUNNING
    assert hint(lab, running) is None
    lab.submit(launch=TRAIN, request=request(gpus=1))
    lab.tick(1)
    lab.tick(HOUR - 300)
    assert hint(lab, lab.submit(launch=TRAIN, request=request(gpus=1))) is None


def test_no_hint_is_given_before_the_history_is_read() -> None:
    lab = a_lab()
    job_id = before_a_wide_job(lab)
    lab.restart()
    lab.tick(1)
    assert hint(lab, job_id) is None
    lab.scheduler.history.load()
    lab.tick(1)
    assert hint(lab, job_id) is not None


def test_a_held_job_is_checked_once_released() -> None:
    lab = a_lab()
    job_id = before_a_wide_job(lab)
    assert hint(lab, job_id) is not None
    lab.ask(Hold(ANN, (job_id,)))
    assert hint(lab, job_id) is None
