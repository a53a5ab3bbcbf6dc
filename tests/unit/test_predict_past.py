"""Guesses of run times by those that were alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.predict.predictor import METHODS, MOST_KEYS, RunTimeGuess, RunTimes, in_steps

MARKS = (("ann", 3600), ("ann",))


def past(*ends):
    known = RunTimes()
    for marks, run_s in ends:
        known.learn(marks, run_s)
    return known


def close_to(length_s):
    return pytest.approx(length_s, rel=0.06)


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_job_runs_to_its_limit_or_has_no_prediction(name):
    assert METHODS[name](RunTimes(), MARKS, 3600) == RunTimeGuess(3600, 3600)
    assert METHODS[name](RunTimes(), MARKS, None) is None


@pytest.mark.parametrize("name", METHODS)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=12), st.integers(1, 5000))
def test_no_prediction_exceeds_the_limit_or_is_below_a_second(name, run_times_s, limit_s):
    guess = METHODS[name](past(*((MARKS, run_s) for run_s in run_times_s)), MARKS, limit_s)
    assert 1 <= guess.plan_s <= limit_s
    assert 1 <= guess.expected_s <= limit_s


def test_the_last_two_runs_under_the_most_specific_known_mark_count():
    known = past((MARKS, 9000), (MARKS, 100), (MARKS, 300), ((("ann", 60), ("ann",)), 5))
    assert METHODS["similar"](known, MARKS, 3600).plan_s == close_to(200)
    assert METHODS["last2"](known, MARKS, 3600).plan_s == close_to((300 + 5) / 2)
    assert METHODS["similar"](known, (("ann", 7), ("ann",)), 3600).plan_s == close_to((300 + 5) / 2)


def test_a_job_that_may_end_at_once_has_an_expected_time_below_its_planned_one():
    known = past(*((MARKS, run_s) for run_s in (10, 3000, 10, 3000)))
    guess = METHODS["mixed"](known, MARKS, 3600)
    assert guess.plan_s == close_to(1505)
    assert guess.expected_s < guess.plan_s / 2


def test_user_wide_history_fades_as_similar_runs_accumulate():
    def expected_s(times):
        known = past(*([((("ann",),), 20_000)] + [(MARKS, 100)] * times))
        return METHODS["mixed"](known, MARKS, 30_000).expected_s

    assert expected_s(0) > expected_s(1) > expected_s(8) > 100


def test_the_least_recent_marks_are_forgotten():
    known = RunTimes()
    for number in range(MOST_KEYS + 1):
        known.learn((number,), 10)
    assert known.known((0,)) == []
    assert known.known((MOST_KEYS,)) == [(10,)]


def test_an_earlier_end_counts_as_older_when_read_later():
    known = past((MARKS, 100))
    known.learn_older(MARKS, [7, 300])
    assert known.known(MARKS[:1]) == [(7, 300, 100)]


@given(st.floats(0, 1e7))
def test_a_step_is_at_most_a_twentieth(length_s):
    # Beside that of the step, the error of a whole number of seconds.
    assert abs(in_steps(length_s, None) - max(1.0, length_s)) <= max(1.0, length_s) / 20 + 0.5
