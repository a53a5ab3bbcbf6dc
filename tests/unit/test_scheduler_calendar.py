"""The calendar: when windows are, which entries meet, what stands in the way of a new one, whom one admits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.mentions import render
from gpusched.model.settings import Settings
from gpusched.model.snapshot import CalendarEntry, Placement
from gpusched.model.value import replace
from gpusched.scheduler import calendar as calendar
from gpusched.scheduler.calendar import conflicts
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.testing import NOW, allocation, node, request, share, spec

HOUR = 3600
DAY = 24 * HOUR
WEEK = 7 * DAY


def place(*cards: int, where: str = "n1", **parts: Any) -> Placement:
    fields: dict[str, Any] = {"cpus": 1.0, "mem_mib": 1024, **parts}
    return Placement(where, tuple(share(card, where) for card in cards), **fields)


def entry(name: str = "course", begins_in: float = HOUR, lasts: int = HOUR, **parts: Any) -> CalendarEntry:
    fields: dict[str, Any] = {"held": (place(0),), "users": ("tutor",), **parts}
    return CalendarEntry(name, NOW + begins_in, lasts, **fields)


def spans(*entries: CalendarEntry, horizon: float = 2 * DAY, at: float = 0) -> list[tuple[str, float, float]]:
    """Windows as names and instants relative to NOW."""
    found = calendar.windows(entries, NOW + at, horizon)
    return [(window.name, window.start_at - NOW, window.end_at - NOW) for window in found]


# --- windows ------------------------------------------------------------------------------------

WINDOWS = {
    "a single one": (entry(), [(HOUR, 2 * HOUR)]),
    "one that runs now is included": (entry(begins_in=-60), [(-60, HOUR - 60)]),
    "one that ends this instant is over": (entry(begins_in=-HOUR), []),
    "one that begins as the horizon ends is not seen yet": (entry(begins_in=2 * DAY), []),
    "one that begins just before the horizon ends is seen whole": (
        entry(begins_in=2 * DAY - 1),
        [(2 * DAY - 1, 2 * DAY - 1 + HOUR)],
    ),
    "daily": (entry(every_s=DAY), [(HOUR, 2 * HOUR), (DAY + HOUR, DAY + 2 * HOUR)]),
    "daily, begun long ago and running": (
        entry(begins_in=-400 * DAY - 60, every_s=DAY),
        [(day * DAY - 60, day * DAY + HOUR - 60) for day in range(3)],
    ),
    "daily until an instant between two of them": (
        entry(every_s=DAY, until_at=NOW + DAY),
        [(HOUR, 2 * HOUR)],
    ),
    "none begins at the instant of the end": (entry(every_s=DAY, until_at=NOW + DAY + HOUR), [(HOUR, 2 * HOUR)]),
    "one that recurs without a pause": (
        entry(begins_in=0, lasts=DAY, every_s=DAY),
        [(0, DAY), (DAY, 2 * DAY)],
    ),
}


@pytest.mark.parametrize(("given_entry", "expected"), WINDOWS.values(), ids=WINDOWS)
def test_windows_are_listed(given_entry, expected):
    assert [(start, end) for _, start, end in spans(given_entry)] == expected


def test_windows_are_ordered_by_start_and_name_and_say_what_is_reserved_for_whom():
    course = entry("course", begins_in=DAY, accounts=("pupils",))
    demo = entry("demo", every_s=DAY)
    talk = entry("a-talk", begins_in=HOUR)
    assert [name for name, *_ in spans(course, demo, talk)] == ["a-talk", "demo", "course", "demo"]
    (window,) = calendar.windows([course], NOW, 2 * DAY)
    assert (window.held, window.users, window.accounts) == (course.held, ("tutor",), ("pupils",))


def test_the_number_of_windows_of_one_entry_is_bounded():
    assert len(spans(entry(lasts=60, every_s=60), horizon=365 * DAY)) == calendar.MOST_WINDOWS


def test_of_many_entries_the_next_windows_are_listed_first():
    entries = [entry(f"e{number:03}", begins_in=number * HOUR, every_s=DAY) for number in range(150)]
    found = calendar.windows(entries, NOW, 365 * DAY)
    assert len(found) == calendar.MOST_IN_ALL
    assert {window.name for window in found} == {one.name for one in entries}
    second = [window.start_at - NOW for window in found if window.start_at - NOW >= DAY]
    assert sorted(second)[:3] == [DAY, DAY, DAY + HOUR]
    assert found == tuple(sorted(found, key=lambda window: (window.start_at, window.name)))


def test_the_next_window_is_the_current_or_upcoming_one():
    daily = entry(every_s=DAY, until_at=NOW + DAY)
    assert calendar.next_window(daily, NOW).start_at == NOW + HOUR
    assert calendar.next_window(daily, NOW + HOUR + 1).start_at == NOW + HOUR
    assert calendar.next_window(daily, NOW + 2 * HOUR) is None


@pytest.mark.parametrize(
    ("seconds", "runs"), [(HOUR - 1, False), (HOUR, True), (2 * HOUR - 1, True), (2 * HOUR, False), (DAY + HOUR, True)]
)
def test_active_windows_are_found(seconds, runs):
    found = calendar.active(entry(every_s=DAY), NOW + seconds)
    assert (found is not None) is runs


ENTRIES = st.builds(
    lambda begins_in, lasts, pause, until: entry(
        begins_in=begins_in,
        lasts=lasts,
        every_s=None if pause is None else lasts + pause,
        until_at=None if until is None else NOW + until,
    ),
    st.integers(-30 * DAY, 3 * DAY) | st.floats(-1e6, 1e5),
    st.integers(1, DAY),
    st.none() | st.integers(0, 3 * DAY),
    st.none() | st.integers(-DAY, 10 * DAY),
)


@given(ENTRIES, st.integers(0, 5 * DAY), st.integers(1, 20 * DAY))
def test_windows_of_an_entry_are_disjoint_and_overlap_the_query(one, at, horizon):
    now = NOW + at
    found = calendar.windows([one], now, horizon)
    assert all(window.end_at > now and window.start_at < now + horizon for window in found)
    assert all(first.end_at <= second.start_at + 1e-3 for first, second in pairwise(found))
    assert one.until_at is None or all(window.start_at < one.until_at for window in found)


@given(st.integers(-30 * DAY, 0), st.integers(1, DAY), st.integers(0, DAY), st.integers(1, 1000))
def test_windows_are_periodic(begins_in, lasts, pause, times):
    one = entry(begins_in=begins_in, lasts=lasts, every_s=lasts + pause)
    shift = times * (lasts + pause)
    before = [window.start_at + shift for window in calendar.windows([one], NOW, WEEK)]
    assert [window.start_at for window in calendar.windows([one], NOW + shift, WEEK)] == before


@given(ENTRIES, st.integers(0, 20 * DAY))
def test_a_window_is_active_exactly_when_it_is_in_the_list_and_has_begun(one, at):
    now = NOW + at
    found = calendar.windows([one], now, 1)
    begun = [window for window in found if window.start_at <= now]
    assert [calendar.active(one, now)] == (begun or [None])


# --- entries that meet --------------------------------------------------------------------------

EVERY_OTHER_DAY = 2 * DAY
MEETINGS = {
    "single ones of the same hour": (entry(), entry("b", HOUR + 60), HOUR + 60),
    "one begins as the other ends": (entry(), entry("b", 2 * HOUR), None),
    "the same hour, other cards": (entry(), entry("b", held=(place(1),)), None),
    "cards of the same number on two nodes": (entry(), entry("b", held=(place(0, where="n2"),)), None),
    "a whole node and a card of it": (entry(), entry("b", held=(place(3, is_exclusive=True),)), HOUR),
    "a daily one and a single one months later": (
        entry(every_s=DAY),
        entry("b", 90 * DAY + HOUR + 60),
        90 * DAY + HOUR + 60,
    ),
    "a daily one and a single one between two of it": (entry(every_s=DAY), entry("b", 90 * DAY + 5 * HOUR), None),
    "a daily one that ends before": (entry(every_s=DAY, until_at=NOW + 90 * DAY), entry("b", 90 * DAY + HOUR), None),
    "every other day, in turns": (
        entry(every_s=EVERY_OTHER_DAY),
        entry("b", DAY + HOUR, every_s=EVERY_OTHER_DAY),
        None,
    ),
    "daily and weekly at the same hour": (
        entry(every_s=DAY),
        entry("b", 3 * DAY + HOUR, every_s=WEEK),
        3 * DAY + HOUR,
    ),
    "periods that drift into each other": (
        entry("a", 0, every_s=5 * HOUR),
        entry("b", HOUR, every_s=7 * HOUR),
        15 * HOUR,
    ),
    "periods with a common part that keeps them apart": (
        entry("a", 0, every_s=6 * HOUR),
        entry("b", HOUR, every_s=4 * HOUR),
        None,
    ),
    "meeting after more than a year only": (
        entry("a", 0, every_s=DAY, lasts=60),
        entry("b", 43200, every_s=DAY + 60, lasts=30),
        None,
    ),
    "what is over meets nothing": (entry(begins_in=-2 * HOUR), entry("b", -2 * HOUR), None),
}


@pytest.mark.parametrize(("one", "other", "at"), MEETINGS.values(), ids=MEETINGS)
def test_overlaps_are_found(one, other, at):
    expected = None if at is None else NOW + at
    assert calendar.overlaps(one, other, NOW) == expected
    assert calendar.overlaps(other, one, NOW) == expected


def test_resources_reserved_by_both_are_named():
    one, other = entry(held=(place(0, 1),)), entry("b", held=(place(1, 2), place(0, where="n2")))
    assert calendar.shared(one, other) == ("n1:1",)
    assert calendar.shared(one, entry("c", held=(place(is_exclusive=True),))) == ("n1",)


SMALL = st.builds(
    lambda begins_in, lasts, pause, until: entry(
        begins_in=begins_in,
        lasts=lasts,
        every_s=None if pause is None else lasts + pause,
        until_at=None if until is None else NOW + until,
    ),
    st.integers(-40, 40),
    st.integers(1, 12),
    st.none() | st.integers(0, 12),
    st.none() | st.integers(-10, 100),
)


@given(SMALL, SMALL)
def test_overlaps_equal_a_check_of_every_second(one, other):
    first = next(
        (
            NOW + second
            for second in range(2000)
            if calendar.active(one, NOW + second) and calendar.active(other, NOW + second)
        ),
        None,
    )
    assert calendar.overlaps(one, other, NOW) == first


# --- what is in the way ---------------------------------------------------------------------------

MACHINE = [node(gpus=4, cpus=16.0, mem_mib=65536)]
LAYOUT = ClusterLayout(MACHINE, Settings())


def texts(new, others=(), jobs=()):
    return [render(conflict.text) for conflict in conflicts(new, others, jobs, LAYOUT, NOW)]


def busy(job_id, *cards, ends_in=None, **parts):
    return allocation(job_id, "n1", cards, expected_end_at=None if ends_in is None else NOW + ends_in, **parts)


IN_THE_WAY = {
    "nothing": (entry(), [], [], []),
    "another entry on the same card": (
        entry(),
        [entry("b", every_s=DAY)],
        [],
        ["reservation b keeps n1:0 at the same time"],
    ),
    "another entry on the same MIG instance": (
        entry(held=(place(1002),)),
        [entry("b", held=(place(1002),))],
        [],
        ["reservation b keeps n1:0:2 at the same time"],
    ),
    "an entry of the same name is replaced and not in the way": (entry(), [entry()], [], []),
    "a job that ends before it": (entry(), [], [busy(7, 0, ends_in=HOUR)], []),
    "a job that may run into it": (
        entry(),
        [],
        [busy(7, 0, ends_in=2 * HOUR, user="ann")],
        ["job 7 of ann may run until 1:00:00 after the start"],
    ),
    "a job without a time limit": (entry(), [], [busy(7, 0)], ["job 7 has no time limit"]),
    "a job without a time limit on another card": (entry(), [], [busy(7, 1)], []),
    "a job on the node that is kept whole": (
        entry(held=(place(is_exclusive=True),)),
        [],
        [busy(7)],
        ["job 7 has no time limit"],
    ),
    "a job that holds the cores": (
        entry(held=(place(0, cpus=8.0),)),
        [],
        [busy(7, cpus=9.0)],
        ["job 7 has no time limit"],
    ),
    "a job that leaves cores enough": (entry(held=(place(0, cpus=8.0),)), [], [busy(7, cpus=8.0)], []),
    "a job that holds the memory": (
        entry(held=(place(0, mem_mib=60000),)),
        [],
        [busy(7, mem_mib=10000)],
        ["job 7 has no time limit"],
    ),
    "cores that the node does not have": (
        entry(held=(place(0, cpus=17.0),)),
        [],
        [],
        ["node n1 does not have that many CPUs and that much memory"],
    ),
    "cores that another entry keeps": (
        entry(held=(place(0, cpus=10.0),)),
        [entry("b", every_s=DAY, held=(place(1, cpus=7.0),))],
        [],
        ["node n1 does not have that many CPUs and that much memory beside reservation b"],
    ),
    "cores of two entries that never run at the same time": (  # one after the other within this one
        entry(lasts=2 * HOUR, held=(place(0, cpus=8.0),)),
        [entry("b", held=(place(1, cpus=8.0),)), entry("c", 2 * HOUR, held=(place(2, cpus=8.0),))],
        [],
        [],
    ),
    "cores of two entries that run at the same time": (
        entry(lasts=2 * HOUR, held=(place(0, cpus=8.0),)),
        [entry("b", held=(place(1, cpus=4.0),)), entry("c", held=(place(2, cpus=5.0),))],
        [],
        ["node n1 does not have that many CPUs and that much memory beside reservation b and reservation c"],
    ),
}


@pytest.mark.parametrize(("new", "others", "jobs", "expected"), IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_conflicts_are_found(new, others, jobs, expected):
    assert texts(new, others, jobs) == expected


def test_conflicts_name_entries_and_jobs():
    found = conflicts(entry(), [entry("b")], [busy(7, 0)], LAYOUT, NOW)
    assert [(one.name, one.job_id) for one in found] == [("b", None), (None, 7)]


# --- whom it admits -------------------------------------------------------------------------------

TWO_CARDS = entry(lasts=2 * HOUR, held=(place(0, 1, cpus=4.0, mem_mib=8192),), accounts=("pupils",))
ADMITTED = {
    "a job that asks for none": (spec(), "eve", None),
    "a user who is named": (spec(reservation="course", time_limit_s=60), "tutor", None),
    "an account that is named": (spec(reservation="course", time_limit_s=60, account="pupils"), "eve", None),
    "anybody else": (spec(reservation="course", time_limit_s=60), "eve", "access denied to the requested reservation"),
    "one that does not exist": (spec(reservation="cours", time_limit_s=60), "tutor", "'cours' is invalid"),
    "a job without a time limit": (spec(reservation="course"), "tutor", "2:00:00 long and the job has no time limit"),
    "a job that is longer": (spec(reservation="course", time_limit_s=7201), "tutor", "2:00:00 long"),
    "a job that is as long": (spec(reservation="course", time_limit_s=7200), "tutor", None),
    "more cards than are kept": (
        spec(reservation="course", time_limit_s=60, request=request(gpus=3)),
        "tutor",
        "asks for 3 GPUs, but reservation 'course' keeps 2",
    ),
    "more cores than are kept": (
        spec(reservation="course", time_limit_s=60, request=request(cpus=4.5)),
        "tutor",
        "asks for 4.5 CPUs, but reservation 'course' keeps 4",
    ),
    "more nodes than are kept": (
        spec(reservation="course", time_limit_s=60, request=request(nodes=2)),
        "tutor",
        "asks for 2 nodes",
    ),
}


@pytest.mark.parametrize(("wanted", "user", "text"), ADMITTED.values(), ids=ADMITTED)
def test_refused_members_get_a_reason(wanted, user, text):
    found = calendar.why_not_admitted(wanted, user, {"course": TWO_CARDS}, NOW)
    if text is None:
        assert found is None
    else:
        assert text in found.text
        assert found.hint


def test_an_expired_reservation_admits_no_job():
    over = replace(TWO_CARDS, start_at=NOW - 3 * HOUR)
    found = calendar.why_not_admitted(spec(reservation="course", time_limit_s=60), "tutor", {"course": over}, NOW)
    assert found.text == "the requested reservation 'course' is over"
