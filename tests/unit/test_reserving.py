"""Making reservations and taking them out, through the scheduler's tick."""

from __future__ import annotations

import os
from typing import Any

import pytest
from lab import ANN, Lab

from gpusched.errors import Forbidden, GpuschedError, NotFound, Refused
from gpusched.model.commands import Caller, Reserve, Unreserve, Update
from gpusched.model.mentions import render
from gpusched.model.queue_settings import AccountSettings
from gpusched.model.snapshot import CalendarEntry, Placement
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports.tables import CALENDAR
from gpusched.scheduler.calendar import ReservationRequest, choose_placement
from gpusched.testing import NOW, allocation, gpu_uuid, gpu_view, node, request, share

OWNER = Caller(os.geteuid(), "owner")
HOUR = 3600
DAY = 24 * HOUR


def wanted(name: str = "course", begins_in: float = HOUR, lasts: int = HOUR, **parts: Any) -> Reserve:
    fields: dict[str, Any] = {"caller": OWNER, "users": ("ann",), **parts}
    if not {"gpus", "cards", "is_node", "cpus"} & parts.keys():
        fields["gpus"] = 1
    return Reserve(name=name, start_at=NOW + begins_in, duration_s=lasts, **fields)


def ask(lab: Lab, command: Reserve | Unreserve) -> Any:
    (answer,) = lab.ask(command)
    if isinstance(answer, GpuschedError):
        raise answer
    return answer


def kept(lab: Lab, name: str = "course") -> tuple[list[int], float, int]:
    """Cards, cores and memory of a recorded reservation."""
    (entry,) = [one for one in lab.store.load(CALENDAR).values() if one.name == name]
    (place,) = entry.held
    return [one.index for one in place.gpus], place.cpus, place.mem_mib


# --- making one ---------------------------------------------------------------------------------


def test_a_reservation_is_recorded_and_survives_a_restart() -> None:
    lab = Lab(gpus=4)
    answer = ask(lab, wanted(gpus=2, every_s=DAY, accounts=("pupils",)))
    (entry,) = lab.store.load(CALENDAR).values()
    assert answer == {"entry": entry, "notes": []}
    assert (entry.start_at, entry.duration_s, entry.every_s) == (NOW + HOUR, HOUR, DAY)
    assert (entry.users, entry.accounts, entry.made_by, entry.made_at) == (("ann",), ("pupils",), "owner", NOW)
    lab.restart()
    assert lab.scheduler.state.rows[CALENDAR] == {"course": entry}
    assert [window.name for window in lab.scheduler.snapshot(NOW).windows][:2] == ["course", "course"]


SIZES = {
    "so many cards, and as much of the rest": ({"gpus": 2}, ([0, 1], 4.0, 32768)),
    "named cards": ({"cards": ("3", "n1:1")}, ([1, 3], 4.0, 32768)),
    "a card by its UUID": ({"cards": ("GPU-2",)}, ([2], 2.0, 16384)),
    "the whole node": ({"is_node": True}, ([0, 1, 2, 3], 8.0, 65536)),
    "cores alone, and as much memory": ({"cpus": 2.0}, ([], 2.0, 16384)),
    "a card, with cores and memory as said": ({"gpus": 1, "cpus": 7.0, "mem_mib": 1024}, ([0], 7.0, 1024)),
    "a card and nothing else": ({"gpus": 1, "cpus": 0.0, "mem_mib": 0}, ([0], 0.0, 0)),
}


@pytest.mark.parametrize(("parts", "expected"), SIZES.values(), ids=SIZES)
def test_resources_are_reserved(parts: dict[str, Any], expected: object) -> None:
    lab = Lab(gpus=4)
    ask(lab, wanted(**parts))
    assert kept(lab) == expected


REFUSED = {
    "a name with blanks": (wanted("my course"), "not a valid name"),
    "a name that is an option": (wanted("-x"), "not a valid name"),
    "nobody": (wanted(users=()), "no one could use"),
    "nothing": (wanted(cpus=None), "the reservation names no resources"),
    "two ways at once": (wanted(gpus=1, cards=("0",)), "given twice"),
    "a whole node with cores": (wanted(is_node=True, cpus=2.0), "includes all of its cores"),
    "a window that is over": (wanted(begins_in=-2 * HOUR), "would begin 2:00:00 ago"),
    "a window that has begun long ago": (wanted(begins_in=-120), "would begin 2:00 ago"),
    "an end without a period": (wanted(until_at=NOW + DAY), "does not recur"),
    "an end before the begin": (wanted(every_s=DAY, until_at=NOW + 60), "end before it begins"),
    "windows that overlap each other": (wanted(lasts=2 * HOUR, every_s=HOUR), "cannot recur every 1:00:00"),
    "windows without number": (wanted(lasts=60, every_s=120), "cannot recur every 2:00"),
    "more cards than there are": (wanted(gpus=3), "asked to reserve 3 GPUs; there are 2"),
    "more cores than there are": (wanted(gpus=1, cpus=9.0), "does not have that many CPUs"),
}


@pytest.mark.parametrize(("command", "text"), REFUSED.values(), ids=REFUSED)
def test_invalid_reservations_are_refused(command: Reserve, text: str) -> None:
    lab = Lab()
    with pytest.raises(Refused) as caught:
        ask(lab, command)
    assert text in caught.value.message
    assert caught.value.hint
    assert lab.store.load(CALENDAR) == {}
    assert lab.scheduler.state.rows[CALENDAR] == {}


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(NotFound, match="'7' is neither a node nor a GPU"):
        ask(Lab(), wanted(cards=("7",)))
    with pytest.raises(NotFound, match="'n1' is not a GPU"):
        ask(Lab(), wanted(cards=("n1",)))


def test_only_the_owner_may_reserve() -> None:
    lab = Lab()
    stranger = Caller(OWNER.uid + 1, "eve")
    with pytest.raises(Forbidden, match="not eve"):
        ask(lab, replace(wanted(), caller=stranger))
    ask(lab, wanted())
    with pytest.raises(Forbidden):
        ask(lab, Unreserve(stranger, ("course",)))
    assert list(lab.scheduler.state.rows[CALENDAR]) == ["course"]


def test_the_name_of_an_expired_reservation_can_be_reused() -> None:
    lab = Lab()
    ask(lab, wanted())
    with pytest.raises(Refused, match="reservation course exists already"):
        ask(lab, wanted(begins_in=DAY))
    ask(lab, wanted("other", begins_in=3 * HOUR))
    lab.tick(2 * HOUR)
    ask(lab, wanted(begins_in=DAY))
    assert [(one.name, one.start_at) for one in lab.store.load(CALENDAR).values()] == [
        ("course", NOW + DAY),
        ("other", NOW + 3 * HOUR),
    ]


def test_expired_reservations_are_removed_with_the_next_one() -> None:
    lab = Lab()
    ask(lab, wanted())
    lab.tick(2 * HOUR)
    ask(lab, wanted("other", begins_in=DAY))
    assert [one.name for one in lab.store.load(CALENDAR).values()] == ["other"]


def test_gpus_of_another_reservation_are_skipped_or_named() -> None:
    lab = Lab(gpus=4)
    ask(lab, wanted(gpus=2, every_s=DAY))
    ask(lab, wanted("demo", begins_in=5 * DAY + HOUR, gpus=2))
    assert kept(lab, "demo")[0] == [2, 3]
    with pytest.raises(Refused, match="leave fewer than 1 of the 4 GPUs"):
        ask(lab, wanted("late", begins_in=5 * DAY + HOUR))
    with pytest.raises(Refused, match="reservation course\x03 keeps n1:1 at the same time"):
        ask(lab, wanted("late", begins_in=7 * DAY + HOUR, cards=("1",)))
    with pytest.raises(Refused, match="reservation course\x03 keeps n1 at the same time"):
        ask(lab, wanted("late", begins_in=7 * DAY + HOUR, is_node=True))
    ask(lab, wanted("late", begins_in=7 * DAY + 2 * HOUR, is_node=True))


def test_running_jobs_that_may_overlap_are_named() -> None:
    lab = Lab()
    short = lab.submit(request=request(gpus=1), time_limit_s=HOUR // 2)
    endless = lab.submit(request=request(gpus=1))
    assert {lab.job(short).state, lab.job(endless).state} == {JobState.RUNNING}
    ask(lab, wanted("one"))
    (card,) = kept(lab, "one")[0]
    assert all(
        one.index == card for held in lab.scheduler.state.holds.values() for one in held.gpus if held.job_id == short
    )
    with pytest.raises(Refused, match=f"job {endless} of ann\x03 has no time limit") as caught:
        ask(lab, wanted("two", gpus=1))
    assert "--ignore-jobs" in (caught.value.hint or "")
    answer = ask(lab, wanted("two", gpus=1, ignore_jobs=True))
    assert list(map(render, answer["notes"])) == [f"job {endless} of ann has no time limit, and is not affected"]


def test_an_unconfigured_account_is_only_a_warning() -> None:
    lab = Lab(account={"vision": AccountSettings("vision")})
    answer = ask(lab, wanted(accounts=("vision", "visoin")))
    assert answer["notes"] == ["account visoin does not exist yet"]


# --- using one, and taking it out ---------------------------------------------------------------


def test_a_member_runs_inside_while_others_wait() -> None:
    lab = Lab(gpus=1)
    ask(lab, wanted(begins_in=10, lasts=600))
    other = lab.submit(request=request(gpus=1), time_limit_s=60)
    assert lab.job(other).state is JobState.PENDING
    member = lab.submit(request=request(gpus=1), time_limit_s=60, reservation="course")
    assert lab.job(member).state is JobState.PENDING
    lab.tick(10)
    lab.tick(1)
    assert lab.job(member).state is JobState.RUNNING
    assert lab.job(other).state is JobState.PENDING


def test_a_job_of_a_non_member_is_refused() -> None:
    lab = Lab()
    ask(lab, wanted(users=("bob",)))
    with pytest.raises(Refused, match="access denied to the requested reservation 'course': it is not for ann"):
        lab.submit(time_limit_s=60, reservation="course")


CHANGES = {
    "into one that is not there": ({"reservation": "cours"}, "'cours' is invalid"),
    "into one of others": ({"reservation": "theirs"}, "it is not for ann"),
    "into one of its own": ({"reservation": "other"}, None),
    "out of it": ({"reservation": None}, None),
    "to a time limit that is too long": ({"time_limit_s": HOUR + 1}, "1:00:00 long"),
    "to a time limit that is too long, outside": ({"time_limit_s": HOUR + 1, "reservation": None}, None),
    "to more cards than are kept": ({"gpus": 2}, "keeps 1"),
    "to another name": ({"name": "x"}, None),
}


@pytest.mark.parametrize(("changes", "text"), CHANGES.values(), ids=CHANGES)
def test_a_job_inside_can_be_changed(changes: dict[str, Any], text: str | None) -> None:
    lab = Lab(gpus=3)
    for name, user in (("course", "ann"), ("other", "ann"), ("theirs", "bob")):
        ask(lab, wanted(name, users=(user,)))
    job_id = lab.submit(request=request(gpus=1), time_limit_s=60, reservation="course")
    (answer,) = lab.ask(Update(ANN, (job_id,), changes))
    if text is None:
        assert answer == {"changed": [str(job_id)]}
    else:
        assert text in answer.message


def test_a_job_of_a_removed_reservation_can_still_be_changed() -> None:
    lab = Lab()
    ask(lab, wanted())
    job_id = lab.submit(time_limit_s=60, reservation="course")
    ask(lab, Unreserve(OWNER, ("course",)))
    reason = lab.scheduler.answers.reason_for(lab.job(job_id))
    assert reason is not None
    assert reason.text.endswith("; run the job outside with: gctl update JOB reservation=")
    assert lab.ask(Update(ANN, (job_id,), {"time_limit_s": 120})) == [{"changed": [str(job_id)]}]
    lab.ask(Update(ANN, (job_id,), {"reservation": None}))
    assert lab.job(job_id).state is JobState.RUNNING


def test_removal_frees_the_gpus_and_names_waiting_jobs() -> None:
    lab = Lab(gpus=1)
    ask(lab, wanted())
    member = lab.submit(time_limit_s=60, reservation="course")
    other = lab.submit(request=request(gpus=1))
    assert lab.job(other).state is JobState.PENDING
    assert ask(lab, Unreserve(OWNER, ("course",))) == {"changed": ["course"], "waiting": [member]}
    assert lab.store.load(CALENDAR) == {}
    assert lab.job(other).state is JobState.RUNNING


def test_removal_is_atomic() -> None:
    lab = Lab()
    ask(lab, wanted())
    with pytest.raises(NotFound, match="there is no reservation 'nope'"):
        ask(lab, Unreserve(OWNER, ("course", "nope")))
    assert list(lab.scheduler.state.rows[CALENDAR]) == ["course"]


def test_a_full_disk_leaves_the_calendar_unchanged() -> None:
    lab = Lab()
    ask(lab, wanted())
    lab.store.is_full = True
    with pytest.raises(GpuschedError, match="the disk is full"):
        ask(lab, Unreserve(OWNER, ("course",)))
    assert list(lab.scheduler.state.rows[CALENDAR]) == ["course"]


# --- which cards ----------------------------------------------------------------------------------


def linked(*groups: int | None) -> tuple[Any, ...]:
    return tuple(gpu_view(index, link_group=group) for index, group in enumerate(groups))


def busy(job_id: int, *cards: int, ends_in: float | None = None) -> Any:
    return allocation(job_id, "n1", cards, expected_end_at=None if ends_in is None else NOW + ends_in)


CHOICES = {
    "the lowest": (linked(None, None, None), 2, [], [0, 1]),
    "those without a job": (linked(None, None, None), 2, [busy(7, 0)], [1, 2]),
    "a job that is over by then does not count": (linked(None, None), 1, [busy(7, 0, ends_in=HOUR)], [0]),
    "linked ones": (linked(None, 0, None, 0), 2, [], [1, 3]),
    "linked ones of the smaller group": (linked(0, 0, 0, 0, 1, 1), 2, [], [4, 5]),
    "linked ones with fewer jobs": (linked(0, 0, 1, 1), 2, [busy(7, 0)], [2, 3]),
    "unlinked ones rather than a job": (linked(0, 0, None), 2, [busy(7, 0)], [1, 2]),
    "one card needs no link": (linked(None, 0, 0), 1, [], [0]),
    "well ones": ((gpu_view(0, why_not="drained"), gpu_view(1)), 1, [], [1]),
    "a drained one when there is no other": ((gpu_view(0, why_not="drained"),), 1, [], [0]),
    "never a lost one": ((gpu_view(0, is_present=False),), 1, [], None),
}


@pytest.mark.parametrize(("cards", "count", "jobs", "expected"), CHOICES.values(), ids=CHOICES)
def test_gpus_are_chosen(cards: tuple[Any, ...], count: int, jobs: list[Any], expected: list[int] | None) -> None:
    entry = CalendarEntry("course", NOW + HOUR, HOUR, ())
    place = choose_placement(ReservationRequest(gpus=count), entry, [node(gpus=cards)], [], jobs, NOW)
    assert (None if place is None else [one.index for one in place.gpus]) == expected


def test_the_node_with_fewer_jobs_is_chosen() -> None:
    entry = CalendarEntry("course", NOW + HOUR, HOUR, (), users=("ann",))
    machines = [node("n1", gpus=2), node("n2", gpus=2)]
    place = choose_placement(ReservationRequest(gpus=1), entry, machines, [], [busy(7, 0)], NOW)
    assert place is not None
    assert place.node == "n2"
    whole = CalendarEntry("all", NOW, DAY, (Placement("n1", (), 16.0, 0, is_exclusive=True),), users=("ann",))
    place = choose_placement(
        ReservationRequest(gpus=2), entry, machines, [whole], [allocation(8, "n2", [share(0, "n2")])], NOW
    )
    assert place is not None
    assert [one.uuid for one in place.gpus] == [gpu_uuid("n2", 0), gpu_uuid("n2", 1)]
