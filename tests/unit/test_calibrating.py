"""Ranges of starts that hold as often as they say."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.value import replace
from gpusched.predict.calibration import KEPT, LEAST, StartEstimate, WaitRange, calibrate

DICE = st.integers(0, 1 << 32).map(Random)


def some_told(dice, count, wait):
    """Jobs that are told a wait one after the other, and what became of them."""
    made = []
    for number in range(count):
        told_s = dice.choice([100.0, 1000.0, 20_000.0])
        made_at = 1000.0 * number
        made.append(StartEstimate(made_at, made_at + told_s, made_at + told_s * wait(number)))
    return made


@given(DICE)
def test_four_in_five_lie_in_their_range_for_any_waits(dice):
    power = dice.choice([0.3, 1.0, 3.0])
    found = calibrate(some_told(dice, 1500, lambda number: 2 * dice.random() ** power))
    assert found.share == pytest.approx(0.8, abs=0.05)


@given(DICE)
def test_ranges_follow_a_change(dice):
    found = calibrate(some_told(dice, 3000, lambda number: (0.2 if number < 1500 else 3.0) * (0.5 + dice.random())))
    assert found.share == pytest.approx(0.8, abs=0.07)


def test_few_starts_give_no_range():
    made = some_told(Random(1), LEAST - 1, lambda number: 0.5)
    assert calibrate(made).likely is None
    assert calibrate(made).share is None
    assert calibrate([]).likely is None


def test_pending_jobs_do_not_count_yet():
    made = some_told(Random(1), LEAST, lambda number: 0.5)
    waiting = [StartEstimate(one.made_at, one.estimated_at, None) for one in made]
    assert calibrate(waiting).likely is None
    assert calibrate([*made, *waiting]).likely == calibrate(made).likely


def test_usual_starts_are_judged_by_other_usual_starts():
    latest = some_told(Random(1), LEAST, lambda number: 0.5)
    usual = [
        replace(one, start_at=one.made_at + 3 * (one.estimated_at - one.made_at), is_latest=False) for one in latest
    ]
    found = calibrate([*latest, *usual])
    assert found.likely == WaitRange(0.5, 0.5)
    assert found.usual == WaitRange(3.0, 3.0)
    assert calibrate(latest).usual is None


def test_a_range_uses_starts_known_when_it_was_given():
    # All are told at one instant: none of them has anything to go by.
    made = [StartEstimate(0.0, 100.0, 50.0 + number) for number in range(KEPT)]
    found = calibrate(made)
    assert (found.judged, found.likely is not None) == (0, True)


def test_a_range_is_proportional_to_the_given_wait():
    assert WaitRange(0.25, 1.5).range(1000.0, 2000.0) == (1250.0, 2500.0)
    assert WaitRange(0.5, 1.0).range(1000.0, 1000.0) == (1030.0, 1060.0)
