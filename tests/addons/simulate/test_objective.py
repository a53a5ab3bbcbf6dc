"""Goals in words, and what a schedule is worth by them."""

from __future__ import annotations

import re

import pytest

from gpusched.addons.simulate.outcome import Outcome
from gpusched.addons.simulate.trace import TraceJob
from gpusched.addons.simulate.tuning import Score, Term, objective_of
from gpusched.errors import UsageError


@pytest.mark.parametrize(
    ("text", "target", "limits"),
    [
        ("wait_p95", Term("wait_p95"), ()),
        ("wait_s_p95", Term("wait_p95"), ()),
        (" wait_p95  of small ", Term("wait_p95", "small"), ()),
        (
            "wait_p95 of small, slowdown_mean of wide <= 20",
            Term("wait_p95", "small"),
            (Term("slowdown_mean", "wide", 20.0),),
        ),
        ("wait_most<=2h,completion_mean", Term("completion_mean"), (Term("wait_most", "all", 7200.0),)),
        ("slowdown_p99 of width<=4", Term("slowdown_p99", "width<=4"), ()),
        (
            "slowdown_mean, wait_median of width>=16 <= 30m",
            Term("slowdown_mean"),
            (Term("wait_median", "width>=16", 1800.0),),
        ),
        (
            "wait_mean of user=ann, wait_p99 of queue=theory <= 1h, slowdown_most <= 1.5",
            Term("wait_mean", "user=ann"),
            (Term("wait_p99", "queue=theory", 3600.0), Term("slowdown_most", "all", 1.5)),
        ),
    ],
)
def test_a_goal_is_described_in_words(text, target, limits):
    goal = objective_of(text)
    assert (goal.target, goal.limits) == (target, limits)
    assert objective_of(str(goal)) == goal


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not a term of a goal"),
        ("less wait", "is not a term of a goal"),
        ("wait_p95 < 3", "is not a term of a goal"),
        ("wait_p90", "'wait_p90' is not a measure of a goal: wait_mean, "),
        ("makespan", "'makespan' is not a measure"),
        ("wait_p95 of tiny", "'tiny' is not a group of jobs"),
        ("wait_p95 of width=4", "'width=4' is not a group of jobs"),
        ("wait_p95 of user<=ann", "'user' is not a group of jobs"),
        ("wait_p95 <= 2h", "no measure without a limit"),
        ("wait_p95, slowdown_mean", "2 measures without a limit"),
        ("wait_p95, slowdown_mean <= many", "the limit 'many' of slowdown_mean"),
        ("wait_p95, slowdown_mean <= 0.5", "the limit '0.5' of slowdown_mean"),
        ("wait_p95, slowdown_mean <= nan", "the limit 'nan' of slowdown_mean"),
        ("slowdown_mean, wait_p95 <= soon", "'soon' is not a time"),
    ],
)
def test_an_invalid_goal_is_refused_with_an_example(text, why):
    with pytest.raises(UsageError, match=re.escape(why)) as caught:
        objective_of(text)
    assert caught.value.hint.startswith("--goal '")


JOBS = (
    TraceJob("1", submit_s=0, run_s=100, estimate_s=100, gpus=1, user="ann", queue="a"),
    TraceJob("2", submit_s=0, run_s=50, estimate_s=50, gpus=4, user="eva", queue="a"),
    TraceJob("3", submit_s=10, run_s=10, estimate_s=10, gpus=8, user="eva", queue="b"),
    TraceJob("4", submit_s=10, run_s=10, estimate_s=10, procs=16, user="bob", queue="b"),
)
DONE = Outcome(JOBS, (0, 100, 160, 30), 4)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("wait_mean", (0 + 100 + 150 + 20) / 4),
        ("wait_most", 150),
        ("wait_mean of small", 0),
        ("wait_mean of wide", (150 + 20) / 2),
        ("wait_mean of width<=4", 50),
        ("wait_mean of width>=16", 20),
        ("wait_mean of user=eva", 125),
        ("completion_mean of queue=a", (100 + 150) / 2),
        ("slowdown_most", 16),
        ("slowdown_mean of user=bob", 3),
    ],
)
def test_a_schedule_has_a_value(text, value):
    assert objective_of(text).score(DONE).value == value


def test_limits_take_precedence_over_the_goal():
    goal = objective_of("wait_mean of small, slowdown_most <= 8, wait_most <= 300s")
    score = goal.score(DONE)
    assert (score.limited, score.excess) == ((16, 150), 1.0)
    kept = objective_of("wait_mean, slowdown_most <= 16").score(DONE)
    assert kept.excess == 0
    assert kept.rank < score.rank
    assert kept.value > score.value


def test_equal_violations_are_ordered_by_the_measure():
    more, less = Score(20.0, (900.0,), 0.50004), Score(21.0, (900.0,), 0.5)
    assert more.rank < less.rank
    assert less.rank < Score(20.0, (910.0,), 0.51).rank


def test_an_empty_group_is_named():
    goal = objective_of("wait_mean of small, wait_most of queue=c <= 1h")
    assert goal.missing_in(JOBS) == "queue=c"
    assert objective_of("wait_mean of wide").missing_in(JOBS) is None
