"""The measures over time against a plain count, second by second, of any schedules of our own policy."""

from __future__ import annotations

from collections import Counter
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import usable

from gpusched.addons.simulate import cluster, planner_run, policies
from gpusched.addons.simulate.measures import Schedule
from gpusched.addons.simulate.trace import TraceJob


@st.composite
def worlds(draw):
    """A few jobs of whole GPUs, gangs among them, on up to three nodes; how many nodes, and how large."""
    nodes, size = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    numbers = st.tuples(
        st.integers(0, 12), st.integers(1, 9), st.integers(1, nodes * size), st.sampled_from(("ann", "bob", "eve"))
    )
    jobs = [
        TraceJob(str(number), submit_s, run_s, run_s, gpus=gpus, user=user)
        for number, (submit_s, run_s, gpus, user) in enumerate(draw(st.lists(numbers, min_size=1, max_size=9)))
    ]
    return jobs, nodes, size, draw(st.sampled_from(("fcfs", "fcfs+easy", "sjf+greedy/spread", "fcfs+cons/first")))


def held_at(second, outcome, size):
    """GPUs held on each node, and by each user."""
    runs = outcome.runs
    nodes, users = Counter(), Counter()
    for run in range(len(runs)):
        if runs.begin_s[run] <= second < runs.end_s[run]:
            for piece in runs.booking(run).pieces():
                assert {part.card // size for part in piece.parts} == {piece.node}
                nodes[piece.node] += len(piece.parts)
                users[outcome.jobs[runs.job[run]].user] += len(piece.parts)
    return nodes, users


def pieces_of(jobs, size):
    """How often a node is asked for so many GPUs, as parts of all."""
    counts = Counter()
    for job in jobs:
        whole, rest = divmod(job.gpus, size) if job.gpus > size else (0, job.gpus)
        counts[size] += whole
        counts[rest] += 1 if rest else 0
    total = sum(counts.values())
    return {gpus: count / total for gpus, count in counts.items() if count}


@settings(max_examples=50, deadline=None)
@given(worlds())
def test_a_walk_over_moments_equals_counting_seconds(state):
    jobs, count, size, policy = state
    made_settings = policies.rules_of(policy).settings()
    outcome = planner_run.run(jobs, cluster.nodes_of(f"{count}x{size}"), made_settings, keeps_places=True)
    made = Schedule("a", outcome, count * size)
    ends = outcome.end_s
    begin, end = min(job.submit_s for job in jobs), max(ends)
    usual = pieces_of(jobs, size)
    idle_s = stranded_s = fgd_s = all_idle_s = spread_s = 0.0
    used_s, share_s, there_s, present = Counter(), Counter(), Counter(), {}
    for second in range(begin, end):
        nodes, users = held_at(second, outcome, size)
        free = [size - nodes[node] for node in range(count)]
        waiting = {job.gpus for job, at in zip(jobs, outcome.start_s, strict=True) if job.submit_s <= second < at}
        if waiting:
            idle_s += sum(free)
            stranded_s += sum(free) - usable(free, waiting, size)
        all_idle_s += sum(free)
        fgd_s += sum(left * part for left in free for gpus, part in usual.items() if left < gpus)
        parts = [nodes[node] / size for node in range(count)]
        spread_s += sqrt(sum((part - sum(parts) / count) ** 2 for part in parts) / count)
        used_s.update(nodes)
        there = [number for number, job in enumerate(jobs) if job.submit_s <= second < ends[number]]
        present[second] = len(there)
        for user in {jobs[number].user for number in there}:
            there_s[user] += 1
            share_s[user] += users[user] / (count * size)
    assert made.fragmentation == pytest.approx(stranded_s / idle_s if idle_s else 0)
    assert made.fgd_fragmentation == pytest.approx(fgd_s / all_idle_s if all_idle_s else 0, abs=1e-9)
    assert made.node_spread_now == pytest.approx(spread_s / (end - begin), abs=1e-7)
    totals = [used_s[node] / (size * (end - begin)) for node in range(count)]
    mean = sum(totals) / count
    assert made.node_spread == pytest.approx(sqrt(sum((one - mean) ** 2 for one in totals) / count), abs=1e-9)
    if len({job.user for job in jobs}) > 1:
        assert {user: share.mean for user, share in made.dominant_share.items()} == pytest.approx(
            {user: share_s[user] / for_s for user, for_s in there_s.items()}
        )
    rhos = []
    for job, at in zip(jobs, ends, strict=True):
        rivals = sum(present[second] for second in range(job.submit_s, at)) / (at - job.submit_s)
        rhos.append((at - job.submit_s) / (job.run_s * max(1, job.gpus * rivals / (count * size))))
    assert made.finish_time_fairness.mean == pytest.approx(sum(rhos) / len(rhos))
    assert made.finish_time_fairness.most == pytest.approx(max(rhos))
