"""Parts of a trace: each on an empty machine, and what is measured is the mean over all of them."""

from __future__ import annotations

from copy import copy

import pytest

from benchmarks.cases import EXAMPLES
from gpusched.addons.simulate import cluster, measures, planner_run, policies
from gpusched.addons.simulate.trace import parse_rows, read_trace, select_rows

DRAWN = (1981, 2756, 4299, 8850, 3316, 2714, 5228, 7762, 4022, 7085)
"""Where the ten sequences begin in which RLScheduler was compared with others."""

OTHERS = tuple(range(400, 8900, 850))
"""As many that nobody has drawn."""


def mean_slowdown(trace, policy, rows):
    part = copy(trace)
    select_rows(part, rows)
    chosen = policies.rules_of(policy)
    outcome = planner_run.run(part.jobs, cluster.processors(part.procs), chosen.settings())
    return measures.Schedule("a", outcome, part.procs).slowdown.mean


def test_each_part_is_scheduled_independently():
    trace = read_trace(EXAMPLES / "muri_trace1.csv.gz")
    nodes, settings = cluster.nodes_of("2x8"), policies.rules_of("fcfs+easy").settings()
    trace.keep_those_that_fit(gpus=16, procs=0)
    alone = []
    for rows in ((700, 90), (10, 150)):
        part = copy(trace)
        select_rows(part, [rows])
        outcome = planner_run.run(part.jobs, nodes, settings)
        alone += [start - job.submit_s for start, job in zip(outcome.start_s, part.jobs, strict=True)]
    both = copy(trace)
    select_rows(both, parse_rows(["700:90", "10:150"]))
    outcome = planner_run.run(both.jobs, nodes, settings)
    assert [start - job.submit_s for start, job in zip(outcome.start_s, both.jobs, strict=True)] == alone
    assert [job.id for job in both.jobs] == [job.id for job in (*trace.jobs[700:790], *trace.jobs[10:160])]
    assert any(alone)


@pytest.mark.nightly
def test_the_setting_of_rlscheduler_is_reproduced(trace_file):
    trace = read_trace(trace_file("lublin_256.swf.gz"))
    rows = [(first, 1024) for first in DRAWN]
    # What the rules of the literature give there, so that the setting itself is the same.
    assert mean_slowdown(trace, "sjf+easy", rows) == pytest.approx(42.08, abs=0.005)
    assert mean_slowdown(trace, "fcfs+easy", rows) == pytest.approx(271.40, abs=0.005)
    assert mean_slowdown(trace, "saf+easy", rows) < 42


@pytest.mark.nightly
def test_the_better_order_there_is_better_elsewhere(trace_file):
    trace = read_trace(trace_file("lublin_256.swf.gz"))
    rows = [(first, 1024) for first in OTHERS]
    assert mean_slowdown(trace, "saf+easy", rows) < mean_slowdown(trace, "sjf+easy", rows)
