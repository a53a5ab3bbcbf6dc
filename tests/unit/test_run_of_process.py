"""Which run a process belongs to, asked before the run's supervisor has reported its start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gpusched.api.handlers import foreground
from gpusched.errors import NotReady
from gpusched.model.states import RunState

PID, UID = 4711, 1000


def service(*answers: str | None, run_state: RunState = RunState.STARTING, uid: int = UID) -> Any:
    """A service whose engine gives these answers, the last one for good."""
    left = list(answers)
    state = SimpleNamespace(
        open_runs={"7.1": SimpleNamespace(state=run_state, job_id=7)}, jobs={7: SimpleNamespace(uid=uid)}
    )
    return SimpleNamespace(
        scheduler=SimpleNamespace(state=state),
        daemon=SimpleNamespace(run_of_process=lambda pid: left.pop(0) if len(left) > 1 else left[0]),
    )


def asked(service: Any) -> str | None:
    return asyncio.run(foreground.run_of_process(service, PID, UID))


def test_a_known_process_is_answered_at_once() -> None:
    assert asked(service("7.1")) == "7.1"


def test_the_first_process_of_a_run_waits_for_its_supervisor() -> None:
    assert asked(service(None, None, None, "7.1")) == "7.1"


@pytest.mark.parametrize(
    "other", [{"run_state": RunState.RUNNING}, {"uid": UID + 1}], ids=["reported", "of another user"]
)
def test_a_process_outside_of_jobs_does_not_wait_for_other_runs(other: dict[str, Any]) -> None:
    assert asked(service(None, **other)) is None


def test_a_start_that_is_never_reported_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreground, "_START_S", 0.05)
    with pytest.raises(NotReady, match="still being started"):
        asked(service(None))
