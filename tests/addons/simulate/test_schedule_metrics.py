"""What a schedule is worth, on cases that can be worked out by hand and on those of the reference."""

from __future__ import annotations

import pytest

from benchmarks.cases import EXAMPLES
from gpusched.addons.simulate import cluster, measures, planner_run, policies
from gpusched.addons.simulate.comparison import compare_users
from gpusched.addons.simulate.outcome import Outcome, jain
from gpusched.addons.simulate.trace import TraceJob, read_trace


def job(submit_s, run_s, *, gpus=1, user="ann", queue="q"):
    return TraceJob("j", submit_s, run_s, run_s, gpus=gpus, user=user, queue=queue)


def test_two_jobs_match_hand_computation():
    jobs = [job(0, 100), job(50, 5, gpus=8, user="bob")]
    made = measures.Schedule("a", Outcome(jobs, [0, 100], 2), 8)
    assert (made.wait_s.mean, made.wait_s.median, made.wait_s.p95, made.wait_s.most) == (25, 0, 50, 50)
    assert (made.completion_s.mean, made.completion_s.p99) == (77.5, 100)
    assert (made.slowdown.mean, made.slowdown.most) == ((1 + 5.5) / 2, 5.5)
    assert (made.makespan_s, made.wide_wait_s) == (105, 50)
    assert made.utilisation == pytest.approx(140 / (8 * 105))
    assert made.jobs_per_hour == pytest.approx(2 * 3600 / 105)
    assert made.user_fairness == pytest.approx((1 + 5.5) ** 2 / (2 * (1 + 5.5**2)))
    assert made.queue_fairness == 1


def test_mean_wait_and_slowdown_match_the_reference():
    trace = read_trace(EXAMPLES / "muri_trace1.csv.gz")
    outcome = planner_run.run(trace.jobs, cluster.nodes_of("8x8"), policies.rules_of("sjf+easy/best").settings())
    made = measures.Schedule("a", outcome, 64)
    assert round(made.wait_s.mean, 1) == 998555.2
    assert round(made.completion_s.mean, 1) == 1249006.9
    assert round(made.slowdown.mean, 3) == 73.179
    assert made.wide_wait_s is not None
    assert round(made.wide_wait_s, 1) == 2244036.2


def test_winners_and_losers_are_named():
    jobs = [job(0, 10, user="ann"), job(0, 10, user="bob")]
    before, after = Outcome(jobs, [0, 10], 2), Outcome(jobs, [10, 0], 2)
    assert [
        (one.name, one.before.slowdown, one.after.slowdown) for one in compare_users("a", before, "b", after).listed
    ] == [
        ("bob", 2, 1),
        ("ann", 1, 2),
    ]


@pytest.mark.parametrize(("values", "index"), [([1, 1, 1], 1), ([1, 0, 0, 0], 0.25), ([], 1), ([0, 0], 1)])
def test_jains_index_is_computed(values, index):
    assert jain(values) == pytest.approx(index)
