"""A wide job never starves by default, however many small jobs come, also where nobody gives a limit."""

from __future__ import annotations

from math import exp, inf, log
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpusched.addons.simulate.cluster import nodes_of
from gpusched.addons.simulate.event_loop import play
from gpusched.addons.simulate.planner_run import PlannerRun
from gpusched.addons.simulate.policies import Policy, policies_of
from gpusched.addons.simulate.trace import TraceJob
from gpusched.model.value import Value, replace
from gpusched.scheduler.priority import DRAIN_PART
from gpusched.scheduler.reservation import SETTLED_FENCES

HOUR_S, DAY_S = 3600, 86400
LONGEST_RUN_S = 6 * HOUR_S
WIDE_RUN_S = HOUR_S
SUBMITTED_S = DAY_S
"""When the wide job comes, to a cluster that has been full for hours."""

PATIENCE_S = 6 * HOUR_S + 10 * LONGEST_RUN_S
"""It is not expected to run longer than the longest of all."""
DEAR_S = LONGEST_RUN_S / DRAIN_PART
"""So long may the cost of a drain put it off, which leaves all GPUs idle for one run at most."""
PASSED_S = (1 + SETTLED_FENCES) * 2 * DAY_S
"""After the first reservation others may pass it, or open its GPUs again, for so long; what runs by then has to end."""
BOUND_S = max(PATIENCE_S, DEAR_S) + PASSED_S + LONGEST_RUN_S

(DEFAULT,) = policies_of(["default"])


class Stream(Value):
    """Endless small jobs and a wide one."""

    seed: int
    shape: str
    load: float
    """Of the cluster, by small jobs alone."""
    typical_s: float
    """Median run time of a small job."""
    has_limits: bool
    whole_nodes: bool
    """The wide job needs all nodes, or one node and half of the others."""
    is_new_user: bool
    """Whether the wide job is of somebody who has run nothing before."""


def streams(loads: list[float], typical_s: list[float]) -> st.SearchStrategy[Stream]:
    """Any stream of these loads and median run times."""
    return st.builds(
        Stream,
        seed=st.integers(0, 10**6),
        shape=st.sampled_from(["1x2", "1x4", "1x8", "2x4", "3x4", "2x8"]),
        load=st.sampled_from(loads),
        typical_s=st.sampled_from(typical_s),
        has_limits=st.booleans(),
        whole_nodes=st.booleans(),
        is_new_user=st.booleans(),
    )


def jobs_of(stream: Stream) -> list[TraceJob]:
    """The wide job first, then the small ones, until after it should have started."""
    dice, nodes = Random(stream.seed), nodes_of(stream.shape)
    a_node, total = len(nodes[0].gpus), sum(len(node.gpus) for node in nodes)
    gpus = total if stream.whole_nodes else max(a_node, total // 2)
    user = "new" if stream.is_new_user else "user0"
    jobs = [made("wide", SUBMITTED_S, WIDE_RUN_S, gpus, user, stream, dice)]
    at, last = 0.0, SUBMITTED_S + BOUND_S
    while at < last:
        width = dice.choice([1, 1, 1, max(1, a_node // 2)])
        run_s = min(LONGEST_RUN_S, max(30.0, exp(dice.gauss(log(stream.typical_s), 1.0))))
        jobs.append(made(str(len(jobs)), at, run_s, width, f"user{dice.randrange(4)}", stream, dice))
        # The next comes when these GPUs would have done this one, were there as much to do as this load says.
        at += dice.uniform(0, 2) * run_s * width / total / stream.load
    return jobs


def made(name: str, at: float, run_s: float, gpus: int, user: str, stream: Stream, dice: Random) -> TraceJob:
    length_s = max(1, round(run_s))
    limit_s = round(length_s * dice.uniform(1, 5)) if stream.has_limits else length_s
    return TraceJob(name, round(at), length_s, limit_s, gpus=gpus, user=user)


class UntilItStarts:
    """A run that is over when the wide job, its first, has started."""

    def __init__(self, body: PlannerRun) -> None:
        self._body, self._now = body, 0.0
        self.arrive, self.settle = body.arrive, body.settle

    def next_at(self, arrives_at: float) -> float:
        is_over = self._body.starts[0] >= 0 or self._now > SUBMITTED_S + BOUND_S
        return inf if is_over else self._body.next_at(arrives_at)

    def advance(self, now: float) -> None:
        self._now = now
        self._body.advance(now)


def wait_of_the_wide_job(stream: Stream, policy: Policy) -> float:
    """Seconds; infinite when it does not start within the bound."""
    jobs = jobs_of(stream)
    body = PlannerRun(jobs, nodes_of(stream.shape), policy.settings, predict=policy.predict)
    play([job.submit_s for job in jobs], UntilItStarts(body))
    return inf if body.starts[0] < 0 else body.starts[0] - SUBMITTED_S


FULL = Stream(1, "2x4", 1.5, 2400.0, has_limits=False, whole_nodes=True, is_new_user=False)
LATE = Stream(64867, "2x8", 1.5, 7200.0, has_limits=True, whole_nodes=True, is_new_user=False)
"""Its drain is too dear again and again: it starts after 152 hours."""


@given(stream=streams([0.95, 1.1, 1.5], [2400.0, 7200.0]))
@example(stream=FULL)
@example(stream=LATE)
@hypothesis_settings(max_examples=6, deadline=None)
def test_a_wide_job_starts_within_the_bound(stream):
    assert wait_of_the_wide_job(stream, DEFAULT) <= BOUND_S


@pytest.mark.parametrize("has_limits", [True, False], ids=["limits", "no limits"])
@pytest.mark.parametrize("is_new_user", [True, False], ids=["new user", "known user"])
def test_where_no_drain_is_too_dear_it_starts_within_the_fence_of_its_first_reservation(has_limits, is_new_user):
    stream = replace(FULL, has_limits=has_limits, is_new_user=is_new_user)
    assert wait_of_the_wide_job(stream, DEFAULT) <= PATIENCE_S + 2 * DAY_S + LONGEST_RUN_S


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@given(stream=streams([0.95, 1.1, 1.5, 2.5], [600.0, 2400.0, 7200.0]))
@hypothesis_settings(max_examples=300, deadline=None)
def test_a_wide_job_starts_within_the_bound_in_many_streams(stream):
    assert wait_of_the_wide_job(stream, DEFAULT) <= BOUND_S


@pytest.mark.parametrize("has_limits", [True, False], ids=["limits", "no limits"])
def test_without_a_reservation_it_starves(has_limits):
    """So that the tests above are of the reservation, not of a stream that leaves room by chance."""
    (greedy,) = policies_of(["fcfs+greedy"])
    assert wait_of_the_wide_job(replace(FULL, has_limits=has_limits), greedy) == inf
