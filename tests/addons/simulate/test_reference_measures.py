"""The measures of the reference schedules are those of an independent simulator."""

from __future__ import annotations

import pytest
from reference_measures import GANG, RIGID

from gpusched.addons.simulate import cluster, measures, planner_run, policies
from gpusched.addons.simulate.outcome import size_of
from gpusched.addons.simulate.trace import read_trace, with_estimates


@pytest.mark.parametrize(("name", "policy"), [(name, policy) for name, rows in GANG.items() for policy in rows])
def test_gangs_match_the_reference(name, policy, trace_file):
    base, _, shape = name.partition("@")
    nodes, jobs = cluster.nodes_of(shape), read_trace(trace_file(f"{base}.csv.gz")).jobs
    made = measures.Schedule(
        "a", planner_run.run(jobs, nodes, policies.rules_of(policy).settings()), size_of(nodes, jobs)
    )
    found = (
        round(made.wait_s.mean, 1),
        round(made.completion_s.mean, 1),
        round(made.slowdown.mean, 3),
        round(made.wide_wait_s or 0.0, 1),
    )
    assert found == GANG[name][policy]


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", RIGID)
def test_rigid_jobs_match_the_reference(policy, trace_file):
    trace = read_trace(trace_file("kth_sp2.swf.gz"))
    text, _, estimate = policy.partition(", est=")
    chosen = policies.rules_of(text)
    jobs = with_estimates(trace.jobs, "exact" if estimate == "run" else "given")
    outcome = planner_run.run(
        jobs, cluster.processors(100), chosen.settings(), orders_by_run_time=chosen.orders_by_run_time
    )
    made = measures.Schedule("a", outcome, 100)
    found = (
        round(made.wait_s.mean, 3),
        round(made.slowdown.mean, 4),
        made.makespan_s,
        round(made.utilisation, 5),
    )
    assert found == RIGID[policy]
