"""Builders for the tests of a job's life: job 7 whose first run lives, ends or is lost."""

from __future__ import annotations

from typing import Any

from gpusched.lifecycle import run_transitions, transitions
from gpusched.model.execution import RunEnded, RunLost, RunStarted
from gpusched.model.job import Job, JobEvent, RetryRule, Run
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement
from gpusched.testing import NOW, job, share

SETTINGS = Settings()
PLACE = Placement("n1", (share(0), share(2)), 4.0, 2048)
LOST = RunLost("7.1", NOW + 60, "its supervisor is gone")


def started(**parts: Any) -> tuple[Job, Run]:
    """A job whose first run lives."""
    one, run, _ = run_transitions.start_run(job(7, **parts), PLACE, {"n1": "boot1"}, NOW, "out", None)
    one, run, _ = run_transitions.run_started(one, run, RunStarted("7.1", NOW + 0.5, 100, 5000, 101))
    return one, run


def end(one: Job, run: Run, *, clean: bool = True, at: float = NOW + 60, **parts: Any) -> transitions.Step:
    """The run ends, by itself with exit code 0 unless said otherwise."""
    fields: dict[str, Any] = {"start_at": NOW + 0.5, "end_at": at, "exit_code": 0}
    event = RunEnded(run.id, **{**fields, **parts})
    return run_transitions.run_ended(one, run, event, SETTINGS, at + 0.1, gpus_clean=clean)


def rule(**parts: Any) -> RetryRule:
    return RetryRule(**{"retries": 2, **parts})


def kinds(events: tuple[JobEvent, ...]) -> list[str]:
    return [event.kind for event in events]


def lose(one: Job, run: Run, *, clean: bool = True, **parts: Any) -> transitions.Step:
    """The machine loses the run."""
    return run_transitions.run_lost(one, run, LOST, SETTINGS, NOW + 61, gpus_clean=clean, **parts)
