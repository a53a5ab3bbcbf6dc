"""Reservations of the calendar: kept free for their members, and closed to everybody else in time."""

from __future__ import annotations

import pytest
from scenario import HOUR, MINUTE, Scenario, running, settings, wants

from gpusched.model.snapshot import Placement
from gpusched.model.value import replace
from gpusched.scheduler.planner import decide
from gpusched.testing import NOW, node, share, window

TWO = [node(gpus=2)]


def course(begins_in, ends_in, cards=(0,), **members):
    members = members or {"users": ["tutor"]}
    place = Placement("n1", tuple(share(card) for card in cards), 4.0, 8192)
    return window("course", place, begins_in=begins_in, ends_in=ends_in, **members)


TUTOR = {"user": "tutor", "uid": 7, "reservation": "course"}

OTHERS = {
    "a job that ends before the window begins uses the card": (wants(1, 2, limit=HOUR), course(HOUR, 2 * HOUR), True),
    "a job that would reach into the window waits": (wants(1, 2, limit=HOUR + 60), course(HOUR, 2 * HOUR), False),
    "a job without a limit keeps off a card with a window to come": (wants(1, 2), course(10 * HOUR, 11 * HOUR), False),
    "a job that does without the card is not concerned": (wants(1, 1), course(HOUR, 2 * HOUR), True),
    "while the window is open the card is nobody else's": (wants(1, 2, limit=MINUTE), course(-HOUR, HOUR), False),
    "other cards stay open": (wants(1, 1), course(-HOUR, HOUR), True),
    "a window that is over keeps nothing": (wants(1, 2), course(-2 * HOUR, 0), True),
}


@pytest.mark.parametrize(("job", "window", "starts"), OTHERS.values(), ids=OTHERS)
def test_other_jobs_respect_the_window(job, window, starts):
    outcome = Scenario(TWO, [job], windows=[window]).outcome()
    assert (1 in outcome.starts) is starts


def test_a_blocked_job_shows_when_the_window_closes():
    outcome = Scenario(TWO, [wants(1, 2, limit=HOUR)], windows=[course(-HOUR, HOUR)]).outcome()
    assert outcome.reserved == {1: ("n1:0,1", HOUR)}
    assert outcome.codes == {1: "ReqNodeNotAvail"}
    assert outcome.text(1) == "needs 2 GPUs; reservation course ends in about 60 min"
    assert outcome.reasons[1].facts == {
        "reservation": "course",
        "begins_at": NOW - HOUR,
        "ends_at": NOW + HOUR,
        "expected_at": NOW + HOUR,
    }


def test_a_job_that_would_start_beside_the_window_waits_for_the_jobs_there():
    busy = [running(5, "n1:1", ends_in=HOUR / 2)]
    waiting = [wants(1, 1, limit=HOUR), wants(2, 1, limit=HOUR, cpus=2)]
    outcome = Scenario(TWO, waiting, busy, windows=[course(-HOUR, HOUR)]).outcome()
    assert outcome.codes == {1: "Resources", 2: "Priority"}
    assert outcome.text(1) == "needs 1 GPU, none of 2 free; expected in about 30 min, when job 5 ends"


def test_a_free_card_of_a_later_window_is_named_to_those_who_wait_for_the_others():
    busy = [running(5, "n1:1", ends_in=HOUR / 2)]
    waiting = [wants(1, 1, limit=3 * HOUR), wants(2, 1, limit=3 * HOUR, cpus=2)]
    outcome = Scenario(TWO, waiting, busy, windows=[course(2 * HOUR, 4 * HOUR)]).outcome()
    assert outcome.codes == {1: "Resources", 2: "Priority"}
    assert outcome.text(1) == "needs 1 GPU; reservation course begins in about 2 h, and the job's time limit is longer"


TOO_SOON = {
    "a limit that is longer": (
        [wants(1, 2, limit=3 * HOUR)],
        "needs 2 GPUs; reservation course begins in about 2 h, and the job's time limit is longer",
    ),
    "no limit": (
        [wants(1, 2)],
        "needs 2 GPUs; reservation course begins in about 2 h, and the job has no time limit",
    ),
    "cores alone": (
        [wants(1, cpus=14)],
        "needs 14 CPUs; reservation course begins in about 2 h, and the job has no time limit",
    ),
    "an earlier job that is planned after it too": (
        [wants(2, 2), wants(1, 2, limit=3 * HOUR)],
        "needs 2 GPUs; reservation course begins in about 2 h, and the job's time limit is longer",
    ),
}


@pytest.mark.parametrize(("waiting", "text"), TOO_SOON.values(), ids=TOO_SOON)
def test_a_job_names_the_reservation_that_begins_too_soon(waiting, text):
    outcome = Scenario(TWO, waiting, windows=[course(2 * HOUR, 4 * HOUR)]).outcome()
    assert outcome.codes[1] == "ReqNodeNotAvail"
    assert outcome.text(1) == text


def test_a_job_names_the_reservation_that_leaves_most_time():
    whole = Placement("n1", tuple(share(card) for card in range(4)), 16.0, 0)
    windows = [course(2 * HOUR, 4 * HOUR, cards=(0, 1)), window("fans", whole, begins_in=5 * HOUR, ends_in=6 * HOUR)]
    outcome = Scenario([node(gpus=4)], [wants(1, 2)], windows=windows).outcome()
    assert (
        outcome.text(1)
        == "needs 2 GPUs; maintenance fans of node n1 begins in about 5 h, and the job has no time limit"
    )


@pytest.mark.parametrize("guess", ["plan_s", "predicted_s"])
def test_a_job_without_a_limit_is_planned_after_a_window_despite_a_short_prediction(guess):
    before = Scenario(TWO, [wants(1, 2)], windows=[course(2 * HOUR, 4 * HOUR)]).snapshot()
    pending = tuple(replace(one, key=replace(one.key, **{guess: 60})) for one in before.pending)
    (kept,) = decide(replace(before, pending=pending), settings()).reservations
    assert kept.start_at == NOW + 4 * HOUR


def test_a_job_blocked_only_by_an_earlier_job_does_not_mention_the_calendar():
    waiting = [wants(1, 2, limit=3 * HOUR), wants(2, 1, limit=5 * HOUR)]
    outcome = Scenario(TWO, waiting, windows=[course(2 * HOUR, 4 * HOUR)]).outcome()
    assert (outcome.codes[2], outcome.text(2)) == ("Priority", "waits behind job 1, which needs 2 GPUs")


def test_a_start_after_a_reservation_is_shown_as_its_end():
    held = [running(9, "n1:0", ends_in=HOUR)]
    outcome = Scenario(TWO, [wants(1, 2, limit=3 * HOUR)], held, windows=[course(2 * HOUR, 4 * HOUR)]).outcome()
    assert outcome.text(1) == ("needs 2 GPUs, 1 of 2 free; expected in about 4 h, when reservation course ends")


def test_only_a_reservation_of_needed_resources_is_named():
    windows = [course(-HOUR, HOUR, cards=(0,)), replace(course(-HOUR, 5 * HOUR, cards=(1,)), name="demo")]
    outcome = Scenario([node(gpus=3)], [wants(1, 2, limit=HOUR)], windows=windows).outcome()
    assert outcome.text(1) == "needs 2 GPUs; reservation course ends in about 60 min"


def test_a_job_is_planned_between_two_windows_when_it_fits_there():
    windows = [course(MINUTE, HOUR), course(3 * HOUR, 4 * HOUR)]
    fits = Scenario(TWO, [wants(1, 2, limit=2 * HOUR)], windows=windows).outcome()
    assert fits.reserved == {1: ("n1:0,1", HOUR)}
    longer = Scenario(TWO, [wants(1, 2, limit=2 * HOUR + 60)], windows=windows).outcome()
    assert longer.reserved == {1: ("n1:0,1", 4 * HOUR)}


MEMBERS = {
    "a member runs on what the window holds": (wants(1, 1, limit=HOUR, **TUTOR), course(-1, HOUR), "n1:0", None),
    "a member of the account too": (
        wants(1, 1, limit=HOUR, user="pupil", account="course", reservation="course"),
        course(-1, HOUR, accounts=["course"]),
        "n1:0",
        None,
    ),
    "a member gets no more than the window holds": (
        wants(1, 2, limit=HOUR, **TUTOR),
        course(-1, HOUR),
        None,
        "waits for others inside reservation course",
    ),
    "nor more cores": (wants(1, 1, cpus=5, limit=HOUR, **TUTOR), course(-1, HOUR), None, "waits for others"),
    "a member waits for the window": (
        wants(1, 1, limit=HOUR, **TUTOR),
        course(2 * HOUR, 3 * HOUR),
        None,
        "reservation course begins in about 2 h",
    ),
    "a member must end with the window": (
        wants(1, 1, limit=2 * HOUR, **TUTOR),
        course(-1, HOUR),
        None,
        "reservation course ends in about 60 min, and the job's time limit is longer",
    ),
    "a member needs a time limit": (
        wants(1, 1, **TUTOR),
        course(-1, HOUR),
        None,
        "and the job has no time limit",
    ),
    "nobody else gets in": (
        wants(1, 1, limit=60, user="eve", reservation="course"),
        course(-1, HOUR),
        None,
        "reservation course is not for eve",
    ),
    "a reservation that is gone is named": (
        wants(1, 1, limit=60, user="tutor", reservation="cours"),
        course(-1, HOUR),
        None,
        "reservation cours does not begin again",
    ),
}


@pytest.mark.parametrize(("job", "window", "place", "text"), MEMBERS.values(), ids=MEMBERS)
def test_members_use_the_window(job, window, place, text):
    outcome = Scenario(TWO, [job], windows=[window]).outcome()
    assert outcome.starts.get(1) == place
    if text is not None:
        assert text in outcome.text(1)
        assert outcome.codes == {1: "Reservation"}


def test_members_share_the_window_among_themselves():
    held = [running(9, "n1:0", ends_in=HOUR, reservation="course", user="tutor")]
    jobs = [wants(1, 1, limit=HOUR, **TUTOR), wants(2, limit=HOUR, **TUTOR)]
    outcome = Scenario(TWO, jobs, held, windows=[course(-1, HOUR)]).outcome()
    assert outcome.starts == {2: "n1"}
    assert "waits for others inside" in outcome.text(1)


def test_resources_held_by_members_are_not_counted_twice():
    machine = [node(gpus=2, cpus=8.0)]
    held = [running(9, "n1:0", ends_in=HOUR, reservation="course", user="tutor", cpus=4.0)]
    outcome = Scenario(machine, [wants(1, 1, cpus=4)], held, windows=[course(-1, HOUR)]).outcome()
    assert outcome.starts == {1: "n1:1"}


def test_a_reserved_job_is_not_delayed_by_backfill_between_windows():
    windows = [course(2 * HOUR, 3 * HOUR, cards=(0, 1))]
    held = [running(9, "n1:0", ends_in=HOUR)]
    waiting = [wants(1, 2, limit=HOUR), wants(2, 1, limit=HOUR), wants(3, 1, limit=HOUR + 60)]
    outcome = Scenario(TWO, waiting, held, settings(priority={"backfill_depth": 3}), windows=windows).outcome()
    assert outcome.starts == {2: "n1:1"}
    assert outcome.reserved[1] == ("n1:0,1", HOUR)
    assert outcome.reserved[3] == ("n1:0", 3 * HOUR)
    assert NOW > 0


def test_a_member_waits_for_an_earlier_job_that_still_holds_its_gpu():
    held = [running(9, "n1:0", user="eve", uid=9)]
    outcome = Scenario(TWO, [wants(1, 1, limit=MINUTE, **TUTOR)], held, windows=[course(-HOUR, HOUR)]).outcome()
    assert outcome.starts == {}
    assert "waits for others inside" in outcome.text(1)


MATLAB = (("matlab", 1),)
ONE_LICENSE = settings(license={"matlab": 1})


def test_a_member_waits_for_a_license_used_outside():
    held = [running(9, "n1:1", licenses=MATLAB, user="eve")]
    waiting = [wants(1, 1, limit=MINUTE, licenses=MATLAB, **TUTOR)]
    outcome = Scenario(TWO, waiting, held, ONE_LICENSE, windows=[course(-HOUR, HOUR)]).outcome()
    assert outcome.starts == {}
    assert outcome.codes == {1: "Licenses"}
    assert outcome.text(1) == "needs 1 license matlab, none of 1 free (in use by job 9 of eve)"


def test_a_license_used_by_a_member_is_not_free_outside():
    outside = wants(2, 1, limit=MINUTE, licenses=MATLAB)
    held = [running(9, "n1:0", ends_in=MINUTE, reservation="course", user="tutor", uid=7, licenses=MATLAB)]
    later = Scenario(TWO, [outside], held, ONE_LICENSE, windows=[course(-HOUR, HOUR)]).outcome()
    assert later.reserved == {2: ("n1:1", MINUTE)}
    both = [wants(1, 1, limit=MINUTE, licenses=MATLAB, **TUTOR), outside]
    assert Scenario(TWO, both, (), ONE_LICENSE, windows=[course(-HOUR, HOUR)]).outcome().starts == {1: "n1:0"}


def test_a_member_leaves_a_license_reserved_for_an_earlier_job():
    held = [running(9, "n1:1", ends_in=MINUTE)]
    waiting = [
        wants(1, 1, limit=MINUTE, licenses=MATLAB),
        wants(2, 1, limit=HOUR, licenses=MATLAB, **TUTOR),
        wants(3, 1, limit=MINUTE, licenses=MATLAB, **TUTOR),
    ]
    outcome = Scenario(TWO, waiting, held, ONE_LICENSE, windows=[course(-HOUR, HOUR)]).outcome()
    assert outcome.reserved == {1: ("n1:1", MINUTE)}
    assert outcome.starts == {3: "n1:0"}


def test_a_member_is_not_preempted_for_a_job_that_could_not_use_its_gpu():
    rules = settings(qos={"urgent": {"tier": 1, "preempts": ("low",)}, "low": {}}, preempt={"min_run_s": 0.0})
    held = [
        running(8, "n1:1", qos="urgent", ends_in=HOUR),
        running(9, "n1:0", ends_in=HOUR, reservation="course", user="tutor", uid=7, qos="low"),
    ]
    outcome = Scenario(TWO, [wants(1, 1, qos="urgent")], held, rules, windows=[course(-HOUR, 2 * HOUR)]).outcome()
    assert outcome.preempts == {}
