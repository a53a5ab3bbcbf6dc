"""Schedules are determined by their rules: the same start for every job as a plain simulator of those rules gives.

Rigid jobs on identical processors, an order, and a rule of backfilling, as in the literature on SWF traces. The plain
simulator below knows nothing of cards, classes or profiles; it is written from the rules alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched import testing
from gpusched.model.cluster import Allocation, JobTerms
from gpusched.model.job import Request
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.settings import Settings
from gpusched.scheduler.planner import decide
from gpusched.testing import NOW, job, node


@dataclass(frozen=True)
class Rigid:
    """One job of a trace, in whole seconds and processors."""

    submit: int
    procs: int
    run: int
    est: int


@st.composite
def traces(draw: st.DrawFn) -> tuple[int, list[Rigid]]:
    """A machine and some jobs for it, by submission."""
    procs = draw(st.integers(1, 8))
    jobs = []
    for _ in range(draw(st.integers(1, 14))):
        run = draw(st.integers(1, 30))
        jobs.append(
            Rigid(
                draw(st.integers(0, 40)), draw(st.integers(1, procs)), run, run + draw(st.sampled_from([0, 0, 3, 20]))
            )
        )
    return procs, sorted(jobs, key=lambda one: one.submit)


ORDERS = {
    "fcfs": ("fifo", lambda index, one: (one.submit, index)),
    "sjf": ("sjf", lambda index, one: (one.est, one.submit, index)),
}
RULES = {"none": (False, 1), "easy": (True, 1), "cons": (True, 10_000)}


def by_the_rules(procs: int, jobs: list[Rigid], order: str, rule: str) -> list[int]:
    """Start of each job: at every instant completions, then arrivals, then one pass."""
    rank = ORDERS[order][1]
    starts: dict[int, int] = {}
    instants = sorted({one.submit for one in jobs})
    while instants:
        now = instants.pop(0)
        running = {index: at for index, at in starts.items() if at + jobs[index].run > now}
        free = procs - sum(jobs[index].procs for index in running)
        queue = [index for index, one in enumerate(jobs) if one.submit <= now and index not in starts]
        queue.sort(key=lambda index: rank(index, jobs[index]))
        ends = [(at + jobs[index].est, jobs[index].procs) for index, at in running.items()]
        for index in _chosen(procs, jobs, queue, ends, free, now, rule):
            starts[index] = now
            instants = sorted({*instants, now + jobs[index].run})
    return [starts[index] for index in range(len(jobs))]


def _chosen(procs, jobs, queue, ends, free, now, rule) -> list[int]:
    if rule == "cons":
        return _planned(procs, jobs, queue, ends, now)
    chosen = []
    rest = list(queue)
    while rest and jobs[rest[0]].procs <= free:
        index = rest.pop(0)
        free -= jobs[index].procs
        ends.append((now + jobs[index].est, jobs[index].procs))
        chosen.append(index)
    if rule == "none" or not rest:
        return chosen
    head = jobs[rest[0]]
    shadow = next(at for at, _ in sorted(ends) if free + sum(p for end, p in ends if end <= at) >= head.procs)
    extra = free + sum(p for end, p in ends if end <= shadow) - head.procs
    for index in rest[1:]:
        one = jobs[index]
        if one.procs <= free and (now + one.est <= shadow or one.procs <= extra):
            if now + one.est > shadow:
                extra -= one.procs
            free -= one.procs
            chosen.append(index)
    return chosen


def _planned(procs, jobs, queue, ends, now) -> list[int]:
    """Conservative by planning anew: each at the earliest instant at which it fits for its whole estimate."""
    plan = [(now, end, p) for end, p in ends]
    chosen = []
    for index in queue:
        one = jobs[index]
        for at in sorted({now, *(end for _, end, _ in plan)}):
            marks = [at, *(begin for begin, _, _ in plan if at < begin < at + one.est)]
            if all(sum(p for begin, end, p in plan if begin <= mark < end) + one.procs <= procs for mark in marks):
                plan.append((at, at + one.est, one.procs))
                if at == now:
                    chosen.append(index)
                break
    return chosen


def by_the_policy(procs: int, jobs: list[Rigid], order: str, rule: str) -> list[int]:
    """The same, but every pass is one `decide`."""
    backfill, depth = RULES[rule]
    chosen = Settings(
        priority=PrioritySettings(order=ORDERS[order][0], backfill=backfill, backfill_depth=depth, max_wait_s=1e9)
    )
    machine = node(cpus=float(procs), mem_mib=1)
    starts: dict[int, int] = {}
    instants = sorted({one.submit for one in jobs})
    while instants:
        now = instants.pop(0)
        running = [
            Allocation(
                index + 1, JobTerms(1), "n1", (), float(jobs[index].procs), 0, NOW + at, NOW + at + jobs[index].est
            )
            for index, at in starts.items()
            if at + jobs[index].run > now
        ]
        waiting = [
            job(
                index + 1,
                request=Request(cpus=float(one.procs)),
                time_limit_s=one.est,
                submit_at=NOW + one.submit,
            )
            for index, one in enumerate(jobs)
            if one.submit <= now and index not in starts
        ]
        snapshot = testing.snapshot(machine, running=running, waiting=waiting, now=NOW + now)
        for start in decide(snapshot, chosen).starts:
            starts[start.job_id - 1] = now
            instants = sorted({*instants, now + jobs[start.job_id - 1].run})
    return [starts[index] for index in range(len(jobs))]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("order", ORDERS)
@given(case=traces())
@settings(max_examples=25)
def test_every_job_starts_when_the_rules_say(order, rule, case):
    procs, jobs = case
    assert by_the_policy(procs, jobs, order, rule) == by_the_rules(procs, jobs, order, rule)
