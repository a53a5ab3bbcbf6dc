"""Who may start something in which job, as the daemon decides it, and what clients say when none can be started."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, BOB, ROOT, Lab

from gpusched.cli import visit
from gpusched.engine.attach_protocol import LARGEST, Wanted
from gpusched.errors import Forbidden, NotReady, Refused
from gpusched.model.commands import EnterJob, Resume, Suspend
from gpusched.model.execution import EnterOrder
from gpusched.model.job import Request
from gpusched.model.states import JobState


def started(lab: Lab) -> int:
    job_id = lab.submit(request=Request(cpus=1))
    lab.tick(0.1)
    assert lab.job(job_id).state is JobState.RUNNING
    return job_id


def enter(lab: Lab, job_id: int, caller: Any = ANN) -> Any:
    (answer,) = lab.ask(EnterJob(caller, job_id, "0a"))
    return answer


def test_the_owner_of_a_running_job_may_enter_it() -> None:
    lab = Lab(cpus=1)
    job_id = started(lab)
    assert enter(lab, job_id) == {"run": f"{job_id}.1"}
    assert lab.engine.entered == [(f"{job_id}.1", EnterOrder("0a"))]


@pytest.mark.parametrize("caller", [BOB, ROOT], ids=["another user", "root"])
def test_nobody_else_may(caller: Any) -> None:
    lab = Lab(cpus=1)
    assert isinstance(enter(lab, started(lab), caller), Forbidden)
    assert lab.engine.entered == []


def test_a_job_that_does_not_run_is_not_entered() -> None:
    lab = Lab(cpus=1)
    job_id, waiting = started(lab), lab.submit(request=Request(cpus=1))
    for state in ("pending", "missing", "suspended"):
        if state == "suspended":
            lab.ask(Suspend(ANN, (job_id,)))
        asked = {"pending": waiting, "missing": 999, "suspended": job_id}[state]
        assert enter(lab, asked) == {"run": None}, state
    assert lab.engine.entered == []
    lab.ask(Resume(ANN, (job_id,)))
    lab.tick(0.1)
    assert enter(lab, job_id) == {"run": f"{job_id}.1"}


WANTED = Wanted(["true"], {}, is_terminal=False, umask=0o22, work_dir="")


def test_doors_are_opened_on_the_named_nodes() -> None:
    lab = Lab(cpus=1)
    job_id = started(lab)
    lab.ask(EnterJob(ANN, job_id, "0a", ("n2", "n3")))
    assert lab.engine.entered == [(f"{job_id}.1", EnterOrder("0a", ("n2", "n3")))]


def asked(path: str | None, *states: str) -> visit.Ask:
    """A daemon that answers with this path, and then with these states."""
    left = list(states)

    def ask(method: str, url: str, body: object) -> dict[str, Any]:
        state = left.pop(0) if len(left) > 1 else left[0]
        if method == "POST":
            door = {"job": "42_3", "run": "44.1", "node": "n1", "token": "0a", "path": path}
            return {"enter": {"id": "42_3", "state": state, "path": path, "doors": [] if path is None else [door]}}
        return {"attach": {"state": state}}

    return ask


def test_a_supervisor_that_does_not_know_of_doors_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "DOOR_S", 0.1)
    with pytest.raises(NotReady, match="job 42_3 does not let a command in on n1: it was started by an older gpusched"):
        visit.start_in(asked("/nonexistent/door", "RUNNING"), "42_3", WANTED, "grun")


def test_a_job_that_ends_meanwhile_is_said_to_have_ended() -> None:
    with pytest.raises(visit.NotRunning, match="job 42_3 is COMPLETED; a command can be started only") as caught:
        visit.start_in(asked("/nonexistent/door", "RUNNING", "COMPLETED"), "42_3", WANTED, "grun")
    assert visit.is_over(caught.value.state)


@pytest.mark.parametrize(
    ("state", "hint"),
    [
        ("PENDING", "see what it waits for with: gshow 42_3"),
        ("SUSPENDED", "resume it with: gctl resume 42_3"),
        ("FAILED", "see what became of it with: gshow 42_3"),
        ("COMPLETING", "see what became of it with: gshow 42_3"),
    ],
)
def test_the_state_of_a_job_that_does_not_run_is_named(state: str, hint: str) -> None:
    with pytest.raises(visit.NotRunning) as caught:
        visit.start_in(asked(None, state), "42_3", WANTED, "grun")
    assert caught.value.message.startswith(f"job 42_3 is {state}; ")
    assert caught.value.hint == hint


def test_a_request_that_is_too_large_is_refused_before_anything_is_asked() -> None:
    large = Wanted(["true", "x" * LARGEST], {}, is_terminal=False, umask=0o22, work_dir="")
    with pytest.raises(Refused, match="exceed 1 MiB"):
        visit.start_in(asked(None, "RUNNING"), "42", large, "grun")
