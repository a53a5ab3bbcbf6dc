"""Limits and instants as Slurm's commands read them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.slurm.values import parse_limit_s
from gpusched.instants import parse_instant
from gpusched.model.units import MAX_SECONDS

NOON = time.mktime((2026, 11, 23, 12, 0, 0, 0, 0, -1))
DAY_S = 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300),
        ("0:30", 60),
        ("30:00", 1800),
        ("0:5:0", 300),
        ("1:2:3", 3780),
        ("1-2", 93600),
        ("1-2:3", 93780),
        ("1-02:03:04", 93840),
        ("0-0:10:0", 600),
        ("0", None),
        ("unlimited", None),
        ("INFINITE", None),
        ("-1", None),
        ("99999999999", MAX_SECONDS),
    ],
)
def test_a_limit_is_read_in_whole_minutes(text: str, seconds: int | None) -> None:
    assert parse_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "abc", "4h", "90s", "1:2:3:4", "-", "1-", "-5", "1.5", "1-2-3", "²"])
def test_anything_else_is_no_limit(text: str) -> None:
    with pytest.raises(ValueError):
        parse_limit_s(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("now", "2026-11-23 12:00:00"),
        ("now+1hour", "2026-11-23 13:00:00"),
        ("now+60", "2026-11-23 12:01:00"),
        ("now+2days", "2026-11-25 12:00:00"),
        ("now-7days", "2026-11-16 12:00:00"),
        ("18:00", "2026-11-23 18:00:00"),
        ("06:00", "2026-11-24 06:00:00"),
        ("6pm", "2026-11-23 18:00:00"),
        ("6:30 PM", "2026-11-23 18:30:00"),
        ("12am", "2026-11-24 00:00:00"),
        ("1224", "2026-12-24 00:00:00"),
        ("122427", "2027-12-24 00:00:00"),
        ("12/24", "2026-12-24 00:00:00"),
        ("12.24.26", "2026-12-24 00:00:00"),
        ("12/24/27-18:00:01", "2027-12-24 18:00:01"),
        ("2026-12-24", "2026-12-24 00:00:00"),
        ("2026-12-24T18:00", "2026-12-24 18:00:00"),
        ("2026-12-24T18:00:05", "2026-12-24 18:00:05"),
        ("1970-01-02-00:00:01", "1970-01-02 00:00:01"),
        ("tomorrow", "2026-11-24 00:00:00"),
        ("today", "2026-11-23 00:00:00"),
        ("midnight", "2026-11-24 00:00:00"),
        ("teatime", "2026-11-23 16:00:00"),
    ],
)
def test_an_instant_has_slurms_forms(text: str, shown: str) -> None:
    assert time.strftime("%F %T", time.localtime(parse_instant(text, NOON))) == shown


def test_a_time_of_day_may_be_one_of_the_past() -> None:
    assert parse_instant("06:00", NOON, is_past=True) == NOON - 6 * 3600
    assert parse_instant("13:00", NOON, is_past=True) == NOON - 23 * 3600
    assert parse_instant("noon", NOON, is_past=True) == NOON


def test_a_date_without_a_year_may_be_one_of_the_past() -> None:
    tomorrow = time.strftime("%m%d", time.localtime(NOON + DAY_S))
    last_year = parse_instant(tomorrow, NOON, is_past=True)
    assert NOON - 366 * DAY_S <= last_year < NOON < parse_instant(tomorrow, NOON)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now-7days", NOON - 7 * DAY_S),
        ("today-2days", NOON - 12 * 3600 - 2 * DAY_S),
        ("tomorrow-1day", NOON - 12 * 3600),
        ("uts+1000000000", 1e9),
    ],
)
def test_offsets_lead_into_the_past(text: str, expected: float) -> None:
    assert parse_instant(text, NOON, is_past=True) == expected


def test_the_first_second_of_the_epoch_can_be_written_as_torchx_does() -> None:
    assert parse_instant("1970-01-01-00:00:01", NOON) == parse_instant("1970-01-01T00:00:01", NOON)


@pytest.mark.parametrize(
    "text", ["", "yesteryear", "t", "-", "+", "13pm", "2026-13-01", "25:00", "now+", "now+x", "now+1eon", "1 2"]
)
def test_anything_else_is_no_instant(text: str) -> None:
    with pytest.raises(ValueError):
        parse_instant(text, NOON)


@given(st.text("0123456789:-/.tTnowampm +", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (parse_limit_s, lambda text: parse_instant(text, NOON)):
        try:
            read(text)
        except ValueError:
            continue
