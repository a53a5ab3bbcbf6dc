"""Schedules of gangs of whole GPUs are determined by their rules too: the same as a plain simulator of them gives."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "addons" / "simulate"))

from plain import Gang, gang_schedule

from gpusched.addons.simulate import cluster, planner_run, policies
from gpusched.addons.simulate.trace import TraceJob


@pytest.mark.parametrize("placement", policies.PLACEMENTS)
@pytest.mark.parametrize("backfill", ["none", "greedy", "easy"])
@pytest.mark.parametrize("order", ["fcfs", "sjf"])
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=15)
def test_every_gang_starts_when_the_rules_say(order, backfill, placement, seed):
    dice = Random(seed)
    nodes = dice.randint(2, 5)
    sizes = [1, 1, 2, 3, 4, 4, 5, 8, 4 * nodes]
    jobs = [
        Gang(dice.randint(0, 60), dice.randint(1, 30), min(dice.choice(sizes), 4 * nodes))
        for _ in range(dice.randint(1, 40))
    ]
    jobs.sort(key=lambda one: one.submit)
    trace = [TraceJob(str(number), one.submit, one.run, one.run, gpus=one.gpus) for number, one in enumerate(jobs)]
    chosen = policies.rules_of(f"{order}+{backfill}/{placement}").settings()
    found = planner_run.run(trace, cluster.nodes_of(f"{nodes}x4"), chosen)
    assert list(found.start_s) == gang_schedule(jobs, nodes, 4, order, backfill, placement)
