"""Maintenance windows: nothing runs into them, and who waits for that is told."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, Lab

from gpusched.api.notices import notices
from gpusched.errors import Refused
from gpusched.model.commands import Caller, Cancel, Drain, Reserve, Selection
from gpusched.model.states import JobState, ReasonCode
from gpusched.ports.tables import CALENDAR
from gpusched.testing import request

ROOT = Caller(0, "root")
HOUR = 3600.0


def maintain(lab: Lab, in_s: float = HOUR, duration_s: int = 7200, **parts: Any) -> Any:
    start_at = lab.clock.now() + in_s
    parts = {"is_maintenance": True, "message": "new driver", **parts}
    (answer,) = lab.ask(Reserve(ROOT, "upgrade", start_at, duration_s, **parts))
    return answer


def why(lab: Lab, job_id: int) -> str:
    reason = lab.scheduler.answers.reason_for(lab.job(job_id))
    assert reason is not None
    assert reason.code is ReasonCode.REQ_NODE_NOT_AVAIL
    return reason.text


def test_no_job_runs_into_maintenance_and_each_says_why() -> None:
    lab = Lab()
    entry = maintain(lab)["entry"]
    assert (entry.is_maintenance, entry.held[0].is_exclusive, len(entry.held[0].gpus)) == (True, True, 2)
    short = lab.submit(time_limit_s=600, request=request(gpus=1))
    long = lab.submit(time_limit_s=7200, request=request(gpus=1))
    endless = lab.submit(request=request(cpus=1))
    lab.tick()
    assert lab.job(short).state is JobState.RUNNING
    text = why(lab, long)
    assert "maintenance upgrade of node n1 begins in" in text
    assert "time limit is longer (new driver)" in text
    assert "the job has no time limit (new driver)" in why(lab, endless)
    lab.tick(HOUR)
    assert "maintenance upgrade of node n1 ends in" in why(lab, long)
    tiny = lab.submit(time_limit_s=1, request=request(cpus=1))
    assert "ends in" in why(lab, tiny)
    lab.tick(7200)
    lab.tick(1)
    assert {lab.job(one).state for one in (long, endless)} == {JobState.RUNNING}


def test_maintenance_survives_a_restart_with_its_message() -> None:
    lab = Lab()
    maintain(lab)
    lab.restart()
    (entry,) = lab.scheduler.state.rows[CALENDAR].values()
    assert (entry.is_maintenance, entry.message) == (True, "new driver")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"users": ("ann",)}, "no jobs run in a maintenance window"),
        ({"accounts": ("lab",)}, "no jobs run in a maintenance window"),
        ({"gpus": 1}, "covers the whole node"),
        ({"cards": ("0",)}, "covers the whole node"),
        ({"cpus": 2.0}, "covers the whole node"),
        ({"message": "x" * 2001}, "longer than"),
    ],
)
def test_invalid_maintenance_is_refused(parts: dict[str, Any], message: str) -> None:
    found = maintain(Lab(), **parts)
    assert isinstance(found, Refused)
    assert message in found.message
    assert found.hint


def test_jobs_cannot_request_maintenance() -> None:
    lab = Lab()
    maintain(lab)
    with pytest.raises(Refused, match="maintenance, when no job runs"):
        lab.submit(time_limit_s=60, reservation="upgrade")


def test_a_job_that_overlaps_maintenance_is_named() -> None:
    lab = Lab()
    lab.submit(request=request(gpus=1))
    lab.tick()
    found = maintain(lab)
    assert isinstance(found, Refused)
    assert "no time limit" in found.message
    assert "--ignore-jobs" in found.hint
    assert "not affected" in maintain(lab, ignore_jobs=True)["notes"][0]


def test_all_users_see_drains_and_upcoming_maintenance() -> None:
    lab = Lab()
    assert notices(lab.scheduler) == []
    maintain(lab, in_s=8 * 86400)
    assert notices(lab.scheduler) == []
    lab.tick(86400 + HOUR)
    lab.ask(Drain(Caller(0, "root"), ("0",), "fan is broken"))
    drain, coming = notices(lab.scheduler)
    assert (drain["kind"], drain["what"], drain["message"]) == ("drain", "GPU 0", "fan is broken")
    assert (coming["kind"], coming["name"], coming["what"]) == ("maintenance", "upgrade", "node n1")
    assert coming["end_at"] - coming["start_at"] == 7200
    lab.tick(9 * 86400)
    assert [one["kind"] for one in notices(lab.scheduler)] == ["drain"]
    assert ANN.uid


def test_maintenance_and_reservations_overlap_and_nothing_runs_meanwhile() -> None:
    lab = Lab()
    begins_at = lab.clock.now() + 60
    (made,) = lab.ask(Reserve(ROOT, "course", begins_at, 6 * 3600, gpus=1, users=("ann",)))
    assert made["notes"] == []
    answer = maintain(lab)
    assert not isinstance(answer, Refused), answer
    assert answer["notes"] == ["reservation course overlaps; nothing runs in it during maintenance upgrade"]
    lab.tick(60)
    short = lab.submit(time_limit_s=600, request=request(gpus=1), reservation="course")
    long = lab.submit(time_limit_s=7200, request=request(gpus=1), reservation="course")
    outside = lab.submit(time_limit_s=7200, request=request(gpus=1))
    lab.tick()
    assert lab.job(short).state is JobState.RUNNING
    reason = lab.scheduler.answers.reason_for(lab.job(long))
    assert reason is not None
    assert "maintenance upgrade begins in" in reason.text
    lab.ask(Cancel(ANN, Selection(ids=(short,))))
    lab.tick(HOUR)
    reason = lab.scheduler.answers.reason_for(lab.job(long))
    assert reason is not None
    assert "maintenance upgrade ends in" in reason.text
    assert lab.job(outside).state is JobState.PENDING
    lab.tick(7200)
    lab.tick(1)
    assert {lab.job(one).state for one in (long, outside)} == {JobState.RUNNING}


def test_a_reservation_can_be_made_beside_maintenance_on_other_gpus() -> None:
    lab = Lab()
    maintain(lab)
    at = lab.clock.now() + HOUR
    for name in ("first", "second"):
        (made,) = lab.ask(Reserve(ROOT, name, at, 3600, gpus=1, users=("ann",)))
        assert [note.partition(";")[0] for note in made["notes"]] == [f"reservation {name} overlaps"]
    (refused,) = lab.ask(Reserve(ROOT, "third", at, 3600, gpus=1, users=("ann",)))
    assert isinstance(refused, Refused), "two reservations never share a card"
    (other,) = lab.ask(Reserve(ROOT, "again", at, 3600, is_maintenance=True))
    assert "maintenance upgrade overlaps" in " ".join(other["notes"])
