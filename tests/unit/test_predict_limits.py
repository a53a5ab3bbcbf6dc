"""How good the time limits of each user have been, and what runs that were ended at theirs say of jobs like them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.predict import predictor
from gpusched.predict.predictor import (
    JUDGED_RUNS,
    JUDGED_RUNS_OF_USER,
    LEAST_JUDGED,
    MOST_USERS,
    EndedRun,
    JudgedRun,
    Overruns,
    PredictionJudge,
    RunTimeGuess,
    at_least,
)

GOOD_GUESS, GOOD_LIMIT = JudgedRun(100, 1000, 100), JudgedRun(1000, 100, 100)
TRAIN, MINUTE = ("ann", "train.py", 1), 60


def close_to(length_s):
    return pytest.approx(length_s, rel=0.06)


# --- guesses and limits --------------------------------------------------------------------------


def test_predictions_win_only_once_they_were_better():
    judge = PredictionJudge()
    assert not judge.is_better("ann")
    judge.add("ann", *[JudgedRun(200, 1000, 100)] * (LEAST_JUDGED - 1))
    assert not judge.is_better("ann")
    assert judge.add("ann", JudgedRun(200, 1000, 100)), "something else is gone by from now on"
    found = judge.measure("ann")
    assert found.is_better
    assert found.is_own
    assert (found.guess_factor, found.limit_factor) == (pytest.approx(2), pytest.approx(10))
    judge.add("ann", *[JudgedRun(10_000, 100, 100)] * JUDGED_RUNS)
    assert not judge.is_better("ann")
    assert judge.measure("ann").runs == JUDGED_RUNS_OF_USER
    assert judge.measure().runs == JUDGED_RUNS


def test_each_user_is_judged_by_their_own_runs():
    judge = PredictionJudge()
    judge.add("ann", *[GOOD_GUESS] * JUDGED_RUNS)
    judge.add("bob", *[GOOD_LIMIT] * LEAST_JUDGED)
    assert judge.is_better("ann")
    assert not judge.is_better("bob")
    assert judge.measure().is_better


def test_a_user_with_few_runs_is_judged_like_all_users():
    judge = PredictionJudge()
    judge.add("ann", *[GOOD_GUESS] * JUDGED_RUNS)
    judge.add("bob", *[GOOD_LIMIT] * (LEAST_JUDGED - 1))
    assert judge.is_better("bob")
    assert judge.measure("bob") == judge.measure() == judge.measure("who has run nothing")
    assert judge.add("bob", GOOD_LIMIT)
    assert not judge.is_better("bob")


def test_runs_read_from_the_history_do_not_displace_recent_ones():
    judge = PredictionJudge()
    judge.add("ann", *[JudgedRun(100, 100, 100)] * JUDGED_RUNS)
    judge.add_older([("ann", JudgedRun(1, 100, 100))] * 10)
    assert judge.measure().guess_factor == judge.measure("ann").guess_factor == 1


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(1, 9)), max_size=60), st.integers(0, 60)
)
def test_the_order_of_reading_the_history_does_not_matter(runs, cut):
    ended = [(user, JudgedRun(guess_s, limit_s, 5)) for user, guess_s, limit_s in runs]
    at_once, in_parts = PredictionJudge(), PredictionJudge()
    for user, one in ended:
        at_once.add(user, one)
    for user, one in ended[cut:]:
        in_parts.add(user, one)
    in_parts.add_older(ended[:cut])
    for user in (*"abc", None):
        assert at_once.measure(user) == in_parts.measure(user)


def test_the_least_recent_users_are_forgotten():
    judge = PredictionJudge()
    judge.add("ann", *[GOOD_LIMIT] * LEAST_JUDGED)
    for number in range(MOST_USERS):
        judge.add(f"user{number}", GOOD_GUESS)
    assert not judge.measure("ann").is_own
    assert len(judge._users) == MOST_USERS
    judge.add_older([("ann", GOOD_GUESS)])
    assert len(judge._users) == MOST_USERS


def test_one_more_run_costs_the_judge_its_own_errors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = PredictionJudge()
    judge.add("ann", *(JudgedRun(100.0, 3600.0, 50.0 + run) for run in range(JUDGED_RUNS)))
    asked: list[float] = []

    def log(value: float) -> float:
        asked.append(value)
        return 0.0

    monkeypatch.setattr(predictor, "log", log)
    judge.add("ann", JudgedRun(100.0, 3600.0, 50.0))
    assert len(asked) == 2
    assert judge.measure().runs == JUDGED_RUNS


# --- limits that were too short ------------------------------------------------------------------


def cut_at(limit_s):
    return EndedRun(limit_s, limit_s, is_cut=True)


def ran(run_s, limit_s=None):
    return EndedRun(run_s, limit_s, is_cut=False)


def known(*ends, kind=TRAIN, user="ann"):
    found = Overruns()
    for one in ends:
        found.learn(kind, user, one)
    return found


def test_runs_that_end_by_themselves_do_not_discredit_a_limit():
    assert Overruns().least_s(TRAIN, "ann", 600) is None
    assert known(*[ran(500, 600)] * 20).least_s(TRAIN, "ann", 600) is None
    assert known(*[ran(9000)] * 20).least_s(TRAIN, "ann", 600) is None


@pytest.mark.parametrize("times", [1, 2, 11])
def test_a_repeated_false_limit_predicts_the_overrun_time(times):
    found = known(*[cut_at(10 * MINUTE)] * times)
    assert found.least_s(TRAIN, "ann", 10 * MINUTE) == close_to((1 + times) * 10 * MINUTE)
    assert found.count(TRAIN, "ann", 10 * MINUTE) == times


def test_a_completed_run_reveals_the_true_run_time():
    found = known(*[cut_at(600)] * 11, ran(7200))
    assert found.least_s(TRAIN, "ann", 600) == close_to(11 * 600 + 7200)
    found.learn(TRAIN, "ann", ran(7200))
    assert found.least_s(TRAIN, "ann", 600) == close_to((11 * 600 + 2 * 7200) / 2)
    for _ in range(predictor.RUNS_KEPT):
        found.learn(TRAIN, "ann", ran(300, 600))
    assert found.least_s(TRAIN, "ann", 600) is None


def test_one_run_among_many_that_reached_its_limit_changes_little():
    found = known(*[ran(600, 3600)] * 19, cut_at(3600))
    assert found.least_s(TRAIN, "ann", 3600) == close_to((19 * 600 + 3600) / 19)


def test_a_doubled_limit_is_trusted():
    found = known(*[cut_at(600)] * 30)
    assert found.least_s(TRAIN, "ann", 1199) is not None
    assert found.least_s(TRAIN, "ann", 1200) is None


def test_a_new_name_for_the_same_script_changes_nothing():
    found = Overruns()
    for number in range(5):
        found.learn(("ann", f"{number}.py", 1), "ann", cut_at(600))
    assert found.least_s(("ann", "6.py", 1), "ann", 600) == close_to(6 * 600)
    assert found.least_s(("bob", "6.py", 1), "bob", 600) is None
    for _ in range(5):
        found.learn(("ann", "other.py", 1), "ann", ran(300, 600))
    assert found.least_s(("ann", "6.py", 1), "ann", 600) is None, "most of the limits stated were right"


def test_other_commands_are_unaffected_once_they_have_a_run():
    found = known(*[cut_at(600)] * 30)
    found.learn(("ann", "eval.py", 1), "ann", ran(300, 600))
    assert found.least_s(("ann", "eval.py", 1), "ann", 600) is None


def test_the_least_recent_families_are_forgotten(monkeypatch):
    monkeypatch.setattr(predictor, "MOST_FAMILIES", 3)
    found = Overruns()
    for number in range(5):
        found.learn(number, f"u{number}", cut_at(60))
    assert [found.least_s(number, f"u{number}", 60) for number in range(5)][:2] == [None, None]
    assert found.least_s(4, "u4", 60) == close_to(120)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 900), st.booleans()), max_size=70), st.integers(0, 70))
def test_the_order_in_which_overruns_are_read_makes_no_difference(runs, cut):
    ended = [(kind, "ann", EndedRun(run_s, 900, is_cut)) for kind, run_s, is_cut in runs]
    at_once, in_parts = Overruns(), Overruns()
    for one in ended:
        at_once.learn(*one)
    for one in ended[cut:]:
        in_parts.learn(*one)
    in_parts.learn_older(ended[:cut])
    for kind in "abc":
        assert at_once.least_s(kind, "ann", 600) == in_parts.least_s(kind, "ann", 600)


def test_overruns_move_expected_and_not_planned_times():
    assert at_least(None, 600, None) is None
    assert at_least(None, 600, 500) is None
    assert at_least(None, 600, 3600) == RunTimeGuess(600, 3600)
    assert at_least(RunTimeGuess(90, 40), 600, 3600) == RunTimeGuess(90, 3600)
    assert at_least(RunTimeGuess(90, 4000), 600, 3600) == RunTimeGuess(90, 4000)
