"""Batches: accepted at once, made in pieces between the commands of others; under a key made once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lab import ANN, BOB, Lab
from memory import check_memory

from gpusched.daemon.checks import CHECKS
from gpusched.daemon.meters import SlowTick
from gpusched.daemon.verbs import batch
from gpusched.daemon.verbs.batch import PIECE
from gpusched.errors import BrokenInvariant, GpuschedError, NotReady, Refused
from gpusched.model.commands import ENDED, FAILED, NEVER, Caller, Cancel, Selection, SubmitBatch
from gpusched.model.settings import LimitSettings
from gpusched.model.states import JobState
from gpusched.ports import JobFilter
from gpusched.ports.tables import BATCHES
from gpusched.testing import launch, request, spec

Asked = list[Any]


def command(
    count: int, key: str | None = None, again: str = NEVER, caller: Caller = ANN, first: int = 0, **parts: Any
) -> SubmitBatch:
    lines = [f"echo {number}" for number in range(first, first + count)]
    common = spec(**{"launch": launch("/bin/sh"), "hold": True, "key": key, **parts})
    return SubmitBatch(caller, common, lines, False, json.dumps(lines).encode(), {"0" * 64: b"PATH=/bin"}, again)


def asked(lab: Lab, *commands: Any) -> list[Asked]:
    """Commands for the next tick, and where the answer to each will be."""
    answers: list[Asked] = []
    for one in commands:
        answers.append([])
        lab.ticker.submit(one, answers[-1].append)
    return answers


def made(lab: Lab) -> list[tuple[int, str]]:
    """Id and command of every job in the table."""
    return [(job.id, job.spec.launch.argv[-1]) for job in lab.store.jobs(JobFilter())]


def whole(lab: Lab, answer: Asked) -> None:
    """Turn until the batch is answered."""
    while not answer:
        lab.tick()
        check_memory(lab)


def refusal(answer: Asked) -> GpuschedError:
    (error,) = answer
    assert isinstance(error, GpuschedError), answer
    return error


def test_others_are_served_between_the_pieces() -> None:
    lab = Lab()
    (big,) = asked(lab, command(5 * PIECE))
    lab.tick()
    assert not big
    for pieces in (2, 3, 4):
        ((theirs,),) = [asked(lab, lab.submission(BOB, hold=True))]
        lab.tick()
        assert len(theirs) == 1, "answered with the piece of the same tick"
        assert not big
        assert len([one for one in made(lab) if one[0] <= 5 * PIECE]) == pieces * PIECE
        check_memory(lab)
    lab.tick()
    (answer,) = big
    assert list(answer["ids"]) == list(range(1, 5 * PIECE + 1))
    assert made(lab)[: 5 * PIECE] == [(number + 1, f"echo {number}") for number in range(5 * PIECE)]
    assert lab.store.load(BATCHES) == {}
    assert not lab.ticker.has_batches
    check_memory(lab)


def test_a_small_batch_is_made_at_once_and_leaves_no_row() -> None:
    lab = Lab()
    (small,) = asked(lab, command(PIECE))
    before = lab.store.commits
    lab.tick()
    assert (len(small), len(made(lab)), lab.store.commits) == (1, PIECE, before + 1)
    assert lab.store.load(BATCHES) == {}


def test_jobs_have_the_name_of_their_command_or_the_one_given() -> None:
    lab = Lab()
    lines = ["/usr/bin/python train.py", "  ", "./ x"]
    for is_named in (False, True):
        one = command(1)
        lab.ask(SubmitBatch(ANN, one.spec, lines, is_named, b"", one.payloads))
    assert [job.spec.name for job in lab.store.jobs(JobFilter())] == ["python", "batch", "batch", *["test"] * 3]


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_restart_between_pieces_goes_on(pieces: int) -> None:
    lab = Lab()
    asked(lab, command(3 * PIECE + 7))
    for _ in range(pieces):
        lab.tick()
    assert len(made(lab)) == pieces * PIECE
    lab.restart()
    check_memory(lab)
    assert lab.submit(caller=BOB, hold=True) == 3 * PIECE + 8
    while lab.ticker.has_batches:
        lab.tick()
        check_memory(lab)
    assert made(lab)[:-1] == [(number + 1, f"echo {number}") for number in range(3 * PIECE + 7)]


def test_a_full_disk_between_pieces_loses_nothing() -> None:
    lab = Lab()
    (big,) = asked(lab, command(3 * PIECE))
    lab.tick()
    lab.store.is_full = True
    for _ in range(2):
        lab.tick()
    assert len(made(lab)) == PIECE
    lab.store.is_full = False
    whole(lab, big)
    assert made(lab) == [(number + 1, f"echo {number}") for number in range(3 * PIECE)]


def test_a_full_disk_when_it_is_to_be_accepted_leaves_nothing() -> None:
    lab = Lab()
    lab.store.is_full = True
    (big,) = asked(lab, command(3 * PIECE))
    lab.tick()
    assert isinstance(refusal(big), NotReady)
    lab.store.is_full = False
    lab.tick()
    assert (made(lab), list(lab.store.load(BATCHES).values()), lab.ticker.has_batches) == ([], [], False)
    check_memory(lab)


def test_a_piece_that_raises_stops_nobody_else_and_is_made_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    (big,) = asked(lab, command(3 * PIECE))
    lab.tick()
    with monkeypatch.context() as broken:
        broken.setattr(batch, "_lines", lambda *_: 1 / 0)
        (theirs,) = asked(lab, lab.submission(BOB, hold=True))
        with pytest.raises(ZeroDivisionError):
            lab.ticker.tick()
        lab.tick()
    assert "400 of jobs 1 to 600, a batch that was accepted, could not be made" in refusal(big).message
    assert theirs[0]["ids"] == [3 * PIECE + 1]
    assert [one.step for one in lab.scheduler.failures.failing] == ["batch"]
    check_memory(lab)
    lab.restart()
    while lab.ticker.has_batches:
        lab.tick()
    assert len(made(lab)) == 3 * PIECE + 1


def test_lines_that_are_lost_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    asked(lab, command(3 * PIECE))
    lab.tick()
    lab.store._db.execute("DELETE FROM payloads")
    lab.restart()
    with pytest.raises(BrokenInvariant, match="the lines of jobs 1 to 600, a batch, are not in the job table"):
        lab.ticker.tick()
    lab.tick()


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"request": request(gpus=9)}, "9 GPUs"),
        ({"dependency": "afterok:77"}, "there is no job 77"),
        ({"time_limit_s": 60, "deadline_at": 1.0}, "deadline"),
    ],
)
def test_a_refused_batch_leaves_nothing(parts: dict[str, Any], says: str) -> None:
    lab = Lab()
    (big,) = asked(lab, command(3 * PIECE, **parts))
    lab.tick()
    assert says in refusal(big).message
    assert (made(lab), list(lab.store.load(BATCHES).values()), lab.scheduler.state.next_id) == ([], [], 1)


def test_limits_on_jobs_count_those_that_are_still_to_be_made() -> None:
    lab = Lab(limit=LimitSettings(jobs=4 * PIECE, jobs_per_user=3 * PIECE))
    asked(lab, command(2 * PIECE))
    lab.tick()
    (own, theirs, fits) = asked(
        lab, command(PIECE + 1), command(2 * PIECE + 1, caller=BOB), command(2 * PIECE, caller=BOB)
    )
    lab.tick()
    assert f"would exceed the limit of {3 * PIECE} per user" in refusal(own).message
    assert f"would exceed the limit of {4 * PIECE} pending and running jobs" in refusal(theirs).message
    whole(lab, fits)


@pytest.mark.parametrize(
    ("selection", "is_cut"),
    [
        (Selection(users=frozenset({"ann"})), True),
        (Selection(everything=True), True),
        (Selection(states=frozenset({JobState.PENDING})), True),
        (Selection(states=frozenset({JobState.RUNNING})), False),
        (Selection(queues=frozenset({"other"})), False),
        (Selection(names=frozenset({"echo"})), False),
    ],
)
def test_a_batch_is_cancelled_with_its_jobs_that_are_still_to_be_made(selection: Selection, is_cut: bool) -> None:
    lab = Lab()
    (big,) = asked(lab, command(3 * PIECE))
    lab.tick()
    (cancelled,) = asked(lab, Cancel(ANN, selection))
    lab.tick()
    assert isinstance(cancelled[0], dict)
    check_memory(lab)
    if is_cut:
        assert f"ann cancelled the batch when {2 * PIECE} of its {3 * PIECE} jobs were made" in refusal(big).message
        assert {job.state for job in lab.store.jobs(JobFilter())} == {JobState.CANCELLED}
    else:
        assert not big
    lab.tick()
    assert len(made(lab)) == (2 if is_cut else 3) * PIECE
    assert not lab.ticker.has_batches


def test_nobody_cancels_the_batch_of_another() -> None:
    lab = Lab()
    (big,) = asked(lab, command(3 * PIECE))
    lab.tick()
    lab.ask(Cancel(BOB, Selection(everything=True)), Cancel(BOB, Selection(users=frozenset({"ann"}))))
    whole(lab, big)
    assert len(big[0]["ids"]) == 3 * PIECE


def test_a_learned_time_limit_is_looked_up_for_each_line() -> None:
    lab = Lab()
    (big,) = asked(lab, command(PIECE + 1, time_limit_source="auto"))
    whole(lab, big)
    assert {job.spec.time_limit_source for job in lab.store.jobs(JobFilter())} == {""}
    assert big[0]["limits"] == ["no time limit: fewer than 3 jobs like it have ended"]


# --- keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, PIECE, 2 * PIECE + 1])
def test_the_same_batch_under_a_key_is_made_once(count: int) -> None:
    lab = Lab()
    first, second = asked(lab, command(count, "k"), command(count, "k"))
    whole(lab, first)
    lab.tick()
    later, other_user = asked(lab, command(count, "k"), command(count, "k", caller=BOB))
    lab.tick()
    assert (first[0]["existing"], second[0]["existing"], later[0]["existing"]) == (False, True, True)
    assert first[0]["ids"] == second[0]["ids"] == later[0]["ids"] == range(1, count + 1)
    whole(lab, other_user)
    assert other_user[0]["ids"] == range(count + 1, 2 * count + 1)


def test_a_batch_that_is_being_made_is_awaited_under_its_key_also_after_a_restart() -> None:
    lab = Lab()
    asked(lab, command(3 * PIECE, "k"))
    lab.tick()
    lab.restart()
    (again,) = asked(lab, command(3 * PIECE, "k"))
    lab.tick()
    assert not again
    whole(lab, again)
    assert (again[0]["existing"], len(made(lab))) == (True, 3 * PIECE)


def test_a_key_of_other_work_is_refused() -> None:
    lab = Lab()
    asked(lab, command(2, "k"), lab.submission(hold=True, key="of a job"))
    lab.tick()
    lines, folder, job, of_job = asked(
        lab,
        command(2, "k", first=1),
        command(2, "k", launch=launch("/bin/sh", work_dir="/other")),
        lab.submission(hold=True, key="k"),
        command(2, "of a job"),
    )
    lab.tick()
    assert "belongs to jobs 1 and 2, a batch with a different list of commands" in refusal(lines).message
    assert "belongs to jobs 1 and 2, a batch with a different working directory" in refusal(folder).message
    assert "belongs to jobs 1 and 2, a batch" in refusal(job).message
    assert "belongs to job 3, which is not a batch" in refusal(of_job).message
    assert isinstance(refusal(job), Refused)


def test_other_terms_under_a_key_are_named() -> None:
    lab = Lab()
    asked(lab, command(2, "k"))
    lab.tick()
    same, other = asked(lab, command(2, "k"), command(2, "k", nice=5, request=request(cpus=2)))
    lab.tick()
    assert (same[0]["differs"], other[0]["differs"]) == ([], ["cpus", "nice"])


def test_a_key_makes_another_batch_where_it_says_so() -> None:
    lab = Lab()
    asked(lab, command(2, "k"))
    lab.tick()
    (running,) = asked(lab, command(2, "k", ENDED))
    lab.tick()
    assert running[0]["existing"] is True
    lab.ask(Cancel(ANN, Selection(ids=(1, 2))))
    assert {job.state for job in lab.store.jobs(JobFilter())} == {JobState.CANCELLED}
    never, failed = asked(lab, command(2, "k"), command(2, "k", FAILED))
    lab.tick()
    assert (never[0]["ids"], failed[0]["ids"]) == (range(1, 3), range(3, 5))
    (now,) = asked(lab, command(2, "k"))
    lab.tick()
    assert now[0]["ids"] == range(3, 5)


def test_a_key_is_forgotten_with_the_last_of_its_jobs() -> None:
    lab = Lab()
    asked(lab, command(2, "k"))
    lab.tick()
    lab.ask(Cancel(ANN, Selection(ids=(1, 2))))
    lab.store.prune([1])
    (one_left,) = asked(lab, command(2, "k"))
    lab.tick()
    assert one_left[0]["existing"] is True
    lab.store.prune([2])
    (none_left,) = asked(lab, command(2, "k"))
    lab.tick()
    assert none_left[0]["ids"] == range(3, 5)


# --- the doctor -------------------------------------------------------------------------------------


def test_the_doctor_tells_a_slow_disk_and_forgets_it() -> None:
    lab = Lab()
    now = lab.clock.now()
    lab.scheduler.meters.slow_ticks.append(SlowTick(now, 3.0, 2.5))
    verdict = CHECKS["pace"](lab.scheduler)
    assert "a tick took 3.0 s within the last 5 minutes, 2.5 s of it to write the job table" in str(verdict)
    assert "slow disk" in str(verdict)
    lab.scheduler.meters.slow_ticks.append(SlowTick(now, 4.0, 0.5))
    assert "slow disk" not in str(CHECKS["pace"](lab.scheduler))
    lab.clock.advance(301)
    assert "no tick of the last 5 minutes took 1 s or longer" in str(CHECKS["pace"](lab.scheduler))
