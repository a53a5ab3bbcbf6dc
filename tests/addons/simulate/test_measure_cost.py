"""What it costs to know where jobs ran and to measure it, beside the simulation itself, and how much memory.

`GPUSCHED_TRACES=... pytest -m nightly -s tests/addons/simulate/test_measure_cost.py` prints figures of large traces.
"""

from __future__ import annotations

import time
import tracemalloc

import pytest

from benchmarks.cases import EXAMPLES
from gpusched.addons.simulate import cluster, measures, planner_run, policies
from gpusched.addons.simulate.outcome import RunLog, size_of
from gpusched.addons.simulate.trace import read_trace

MOST_TIMES = 3.0
"""Measures are a walk over as many events as the simulation had; never more than so many times as dear."""


def costs(trace, machines):
    """Seconds of the processor: simulated, where each ran put down once more, measured; and how many jobs."""
    settings = policies.rules_of("fcfs+easy").settings()
    began = time.process_time()
    outcome = planner_run.run(trace.jobs, machines, settings, keeps_places=True)
    simulated = time.process_time()
    measures.Schedule("fcfs+easy", outcome, size_of(machines, trace.jobs), wait_bound_s=3600).finish()
    measured = time.process_time()
    runs = outcome.runs
    assert runs is not None
    places = [runs.layout.placement(runs.booking(run)) for run in range(len(runs))]
    again = RunLog(machines, settings)
    placing = time.process_time()
    for run, place in enumerate(places):
        again.add(runs.job[run], runs.begin_s[run], runs.end_s[run], place)
    return simulated - began, time.process_time() - placing, measured - simulated, len(trace.jobs)


def test_measuring_costs_no_more_than_simulating():
    simulated, placing, measured, _ = costs(read_trace(EXAMPLES / "muri_trace1.csv.gz"), cluster.nodes_of("8x8"))
    assert placing < MOST_TIMES * simulated
    assert measured < MOST_TIMES * simulated


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "shape"), [("kth_sp2.swf.gz", "100p"), ("hpc2n.swf.gz", "240p"), ("philly_jobs.csv.gz", "64x8")]
)
def test_measuring_a_large_trace_costs_no_more_than_simulating_it(trace_file, name, shape):
    simulated, placing, measured, jobs = costs(read_trace(trace_file(name)), cluster.nodes_of(shape))
    print(
        f"{name}: {jobs / simulated:,.0f} jobs/s; keeping places {placing / simulated:.0%}, "
        f"measuring {measured / simulated:.0%} of the simulation, {jobs / measured:,.0f} jobs/s"
    )
    assert placing < simulated / 2
    assert measured < MOST_TIMES * simulated


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_job_of_a_large_trace_takes_less_than_a_kilobyte(trace_file):
    path = trace_file("philly_jobs.csv.gz")
    machines, settings = cluster.nodes_of("64x8"), policies.rules_of("fcfs+easy").settings()
    tracemalloc.start()
    trace = read_trace(path)
    del trace.jobs[10_000:]
    tracemalloc.reset_peak()
    outcome = planner_run.run(trace.jobs, machines, settings, keeps_places=True)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outcome.runs is not None
    print(f"philly_jobs, 10,000 jobs: {kept / 10_000:,.0f} bytes a job with places, at most {most / 10_000:,.0f}")
    assert kept / 10_000 < 1000
