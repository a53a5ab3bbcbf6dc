"""Why something is drained is a code: what a drained or suspect GPU is, and who is told, depends on no message."""

from __future__ import annotations

import pytest
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.api.notices import notices
from gpusched.model.cluster import DrainCause, DrainEntry, GpuState
from gpusched.model.commands import Drain
from gpusched.model.mentions import render
from gpusched.model.settings import AlertSettings, PrologSettings
from gpusched.model.value import replace
from gpusched.ports.tables import ALERTS, DRAINS
from gpusched.testing import request

LOOKS_SUSPECT = ("suspect: was lost", "suspect: XID 79", "lost: it fell off", "declared down: fan")
"""What an administrator may type, and the daemon has written itself."""


def lab_with_alerts() -> Lab:
    lab = Lab(gpus=2, alert=AlertSettings(admin=("ops",)))
    lab.tick(1)
    return lab


def alerts(lab: Lab) -> list[tuple[str, str]]:
    told = lab.store.load(ALERTS).values()
    return [(one.event, str(dict(one.facts)["message"]).partition(") ")[2]) for one in told]


def causes(lab: Lab) -> dict[str, DrainCause]:
    return {name: entry.cause for name, entry in lab.store.load(DRAINS).items()}


@pytest.mark.parametrize("message", LOOKS_SUSPECT)
def test_a_message_of_an_administrator_is_only_a_message(message: str) -> None:
    lab = lab_with_alerts()
    lab.ask(Drain(ROOT, ("0",), message))
    assert causes(lab) == {"GPU-0": DrainCause.ADMIN}
    status = lab.scheduler.head.tracker.status("GPU-0", now=lab.clock.now())
    assert (status.state, status.why, status.drain) == (GpuState.DRAINED, message, DrainCause.ADMIN)
    view = lab.scheduler.nodes(lab.clock.now())[0].gpus[0]
    assert (view.why_not, view.is_suspect) == (f"drained: {message}", False)
    assert alerts(lab) == [("gpu_drained", f"was drained: {message}")]
    (told,) = notices(lab.scheduler)
    assert (told["message"], told["cause"]) == (message, DrainCause.ADMIN)


@pytest.mark.parametrize("message", ["[was lost]", "no word of it"])
def test_a_suspect_gpu_is_one_whatever_its_message_says(message: str) -> None:
    lab = lab_with_alerts()
    lab.xids[0] = (48,)
    lab.tick(1)
    (found,) = lab.store.load(DRAINS).values()
    assert found.cause is DrainCause.GPU_FAULT
    lab.scheduler.state.rows[DRAINS]["GPU-0"] = reworded = replace(found, message=message)
    lab.scheduler.cluster.set_drains({"GPU-0": reworded})
    status = lab.scheduler.head.tracker.status("GPU-0", now=lab.clock.now())
    assert (status.state, status.why, status.drain) == (GpuState.SUSPECT, message, DrainCause.GPU_FAULT)
    view = lab.scheduler.head.tracker.views(lab.clock.now())[0]
    assert (view.why_not, view.is_suspect) == (f"suspect: {message}", True)
    assert notices(lab.scheduler)[0]["message"] == f"suspect: {message}"
    assert [event for event, _ in alerts(lab)] == ["gpu_suspect"]


def test_undraining_a_gpu_that_measures_itself_suspect_changes_it() -> None:
    lab = lab_with_alerts()
    assert lab.ask(Drain(ROOT, ("0",), None))[0]["changed"] == []
    lab.submit(request=request(gpus=1))
    lab.tick(1)
    lab.used[0] = 9000
    for _ in range(8):
        lab.tick(10)
    assert lab.scheduler.nodes(lab.clock.now())[0].gpus[0].is_suspect
    assert lab.ask(Drain(ROOT, ("0",), None))[0]["changed"] == ["GPU-0"]
    assert not lab.store.load(DRAINS)


def test_users_whose_runs_fail_early_are_another_cause_than_a_fault() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=2, exit_code=1))
    for caller in (ANN, BOB):
        lab.ask(lab.submission(caller, request=request(gpus=1)))
        lab.tick(3)
        lab.tick(1)
    assert causes(lab) == {"GPU-0": DrainCause.EARLY_FAILURES}


def test_a_program_of_the_site_that_fails_is_a_cause() -> None:
    lab = Lab(prolog=PrologSettings(path="/etc/gpusched/prolog"))
    lab.outcome = SimulatedOutcome(prolog_fault="the prolog ended with exit code 1")
    lab.submit(request=request(gpus=1))
    lab.tick(1)
    lab.tick(1)
    assert causes(lab) == {"n1": DrainCause.SITE_PROGRAM}
    assert render(lab.store.load(DRAINS)["n1"].text).startswith("the prolog ended with exit code 1 (job 1); once")


@pytest.mark.parametrize("cause", DrainCause)
def test_only_a_suspicion_is_shown_as_one(cause: DrainCause) -> None:
    is_suspect = cause in (DrainCause.GPU_FAULT, DrainCause.GPU_LOST, DrainCause.EARLY_FAILURES)
    assert cause.is_suspicion is is_suspect
    assert DrainEntry("fan", cause).text == ("suspect: fan" if is_suspect else "fan")
