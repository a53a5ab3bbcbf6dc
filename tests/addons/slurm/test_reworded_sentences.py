"""Slurm's commands choose their sentences and exit codes by codes, never by the daemon's sentences."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched.addons.slurm import sbatch, scontrol, scontrol_update, srun, step_client
from gpusched.addons.slurm.accounting import AccountingRecord, AccountingView
from gpusched.addons.slurm.command import CommandError, parse
from gpusched.addons.slurm.job import SlurmJob
from gpusched.addons.slurm.submission import refused
from gpusched.client import error_from
from gpusched.errors import ABOUT, Forbidden, GpuschedError, NotFound, Refused, UserError

WORDINGS = ("job 42 may not do this", "[job 42 may not do this]", "CPUs accepts no more steps raised is RUNNING")
FIRST, *OTHERS = WORDINGS


class Daemon:
    """A daemon that knows job 42 in one state."""

    def __init__(self, state: str) -> None:
        self.state = state

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        return {"rows": [[self.state]]}


def line_of(state: str) -> scontrol.ControlLine:
    line = scontrol.ControlLine(parse(scontrol.COMMAND, []))
    line._client = Daemon(state)  # type: ignore[assignment]
    return line


def told(error: CommandError, wording: str) -> tuple[str, int]:
    return error.text.replace(wording, "..."), error.code


@pytest.mark.parametrize("about", ["", *ABOUT])
def test_a_refused_submission_is_said_in_slurms_words_whatever_ours_are(about: str) -> None:
    found = {told(refused(sbatch.COMMAND, Refused(text, "", about), {}), text) for text in WORDINGS}
    assert len(found) == 1


@pytest.mark.parametrize("about", ["", *ABOUT])
@pytest.mark.parametrize("kind", [Refused, NotFound])
def test_a_refused_step_likewise(kind: type[UserError], about: str) -> None:
    job = {"id": "42", "nodes": ["n1"]}
    errors = {text: step_client._refused(srun.COMMAND, job, {}, kind(text, "", about)) for text in WORDINGS}
    assert len({told(error, text) for text, error in errors.items()}) == 1


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETED"])
@pytest.mark.parametrize("verb", ["update", "hold", "release", "requeue", "suspend", "resume"])
@pytest.mark.parametrize("kind", [Refused, NotFound, Forbidden])
def test_a_change_that_is_refused_likewise(kind: type[GpuschedError], verb: str, state: str) -> None:
    line = line_of(state)
    found = {scontrol.slurm_error(line, "42", kind(text), verb).replace(text, "...") for text in WORDINGS}
    assert len(found) == 1
    changes = [("TimeLimit", "5")]
    found = {scontrol_update._why_not(line, "42", kind(text), changes).replace(text, "...") for text in WORDINGS}
    assert len(found) == 1


def test_a_priority_is_denied_as_in_slurm_and_why_is_said_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    line = scontrol.ControlLine(parse(scontrol.COMMAND, ["-v"]))
    assert scontrol_update.update(line, ["JobId=42", "Priority=7"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "scontrol: priorities are computed",
        "scontrol: hint: change Nice instead",
        "Access/permission denied for job 42",
    ]


@pytest.mark.parametrize("text", [None, *WORDINGS, "cancelled by bob through MCP"])
def test_who_cancelled_a_job_does_not_depend_on_its_reason(text: str | None) -> None:
    ended = {"state": "CANCELLED", "reason": "CancelledByUser", "start_at": None, "end_at": 9.0, "tasks_left": None}
    row = {**ended, "reason_text": text, "user": "ann", "uid": 1001, "node": None, "cancelled_by": "ann"}
    view = AccountingView(10.0, "lab")
    assert AccountingRecord(view, SlurmJob(row)).shown_state == "CANCELLED by 1001"
    assert AccountingRecord(view, SlurmJob({**row, "cancelled_by": "root"})).shown_state == "CANCELLED by 0"


@pytest.mark.parametrize("about", ABOUT)
def test_what_an_error_is_about_reaches_clients(about: str) -> None:
    found = error_from(Refused("no", "", about).document())
    assert (type(found), found.about) == (Refused, about)
