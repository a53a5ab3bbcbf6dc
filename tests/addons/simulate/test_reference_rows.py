"""Every row of the reference results: the same start for every job, through the daemon's policy."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from reference import REFERENCE

from gpusched.addons.simulate import cluster, planner_run, policies
from gpusched.addons.simulate.trace import Trace, read_trace, with_estimates

FILES = {"lublin_256": "lublin_256.swf.gz", "kth_sp2": "kth_sp2.swf.gz", "hpc2n": "hpc2n.swf.gz"}
SMALL = {"tiresias_60jobs@4x8", "muri_trace1@8x8", "gavel_msr_6c71a0_seed0@8x8"}


def rows() -> list[object]:
    """Each row with what it takes; those of large traces are run by night."""
    return [
        pytest.param(name, policy, id=f"{name} {policy}", marks=() if name in SMALL else pytest.mark.nightly)
        for name, policies in REFERENCE.items()
        for policy in policies
    ]


@cache
def on_cluster(path: Path, shape: str) -> tuple[Trace, tuple[object, ...]]:
    trace = read_trace(path)
    nodes = cluster.nodes_of(shape) if shape else cluster.processors(trace.procs or 0)
    gpus, procs = cluster.largest(nodes)
    trace.keep_those_that_fit(gpus=gpus, procs=procs)
    return trace, nodes


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "policy"), rows())
def test_the_schedule_matches_the_reference(name, policy, trace_file):
    base, _, shape = name.partition("@")
    trace, nodes = on_cluster(trace_file(FILES.get(base, f"{base}.csv.gz")), shape)
    text, _, estimate = policy.partition(", est=")
    chosen = policies.rules_of(text)
    jobs = with_estimates(trace.jobs, "exact" if estimate == "run" else "given")
    outcome = planner_run.run(jobs, nodes, chosen.settings(), orders_by_run_time=chosen.orders_by_run_time)
    assert outcome.starts_sha == REFERENCE[name][policy]
