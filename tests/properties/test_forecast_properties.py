"""The future played by a planner that goes on is the one played by plans that are made anew."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule_properties import CLUSTERS, some_request, some_settings

from gpusched.lifecycle.dependencies import Parent, parse_dependency
from gpusched.model.cluster import JobTerms
from gpusched.model.snapshot import ClassKey, PendingJob, Prediction
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.scheduler import forecast
from gpusched.scheduler.forecast import Arrival, Future, IncrementalFuture, StartForecast, is_incremental
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.state import PlannerState
from gpusched.testing import NOW


def drawn(cluster, dice):
    """A planner under random settings, the last instant that it planned, and run lengths."""
    chosen = some_settings(dice)
    # What has been used, and what is fenced, counts on in the one play, and is as in the present in the other.
    chosen = replace(chosen, queue={}, priority=replace(chosen.priority, weight_fairshare=0.0, fence_s=float("inf")))
    if chosen.priority.order in ("fairshare", "response_ratio"):
        chosen = replace(chosen, priority=replace(chosen.priority, order="fifo"))
    planner = Planner(PlannerState(CLUSTERS[cluster], chosen))
    now, last = NOW, 0
    for _ in range(dice.randint(1, 5)):
        now += dice.choice([0.0, 1.0, 5.0])
        for _ in range(dice.randint(0, 6)):
            last += 1
            number = dice.randrange(3)
            limit_s = dice.choice([2, 5, 10, 30, None])
            key = ClassKey(JobTerms(1000 + number, f"u{number}", "", "default", request=some_request(dice)), 0, limit_s)
            planner.state.job_queued(planner.state.class_of_key(key), now, last)
        planner.schedule(now)
    share = dice.choice([0.3, 1.0])

    def length(job_id, limit_s, so_far_s):
        if limit_s is None:
            return None if job_id % 3 else so_far_s + 7.0
        return max(share * limit_s, so_far_s)

    return planner, chosen, now, length


def some_arrivals(dice, snapshot):
    """Jobs that become eligible by time, and jobs that follow pending ones or each other."""
    waiting = [job.id for one in snapshot.pending for job in one.jobs]
    arrivals, last = [], max(waiting, default=0) + 1000
    for _ in range(dice.randint(0, 4)):
        last += 1
        key = ClassKey(JobTerms(1000, "u0", "", "default", request=some_request(dice)), 0, dice.choice([2, 10, None]))
        at = snapshot.now + dice.choice([0.0, 3.0, 20.0])
        parents = [*waiting, *(one.job.id for one in arrivals)]
        if parents and dice.random() < 0.5:
            kind = dice.choice(["afterok", "after", "afterany", "after+1"])
            parent = dice.choice(parents)
            text = f"after:{parent}+1" if kind == "after+1" else f"{kind}:{parent}"
            known = {parent: Parent(JobState.PENDING)}
            arrivals.append(Arrival(at, key, PendingJob(last, at), parse_dependency(text), known))
        else:
            arrivals.append(Arrival(at, key, PendingJob(last, at)))
    return arrivals


@pytest.mark.parametrize("cluster", CLUSTERS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=80)
def test_the_same_jobs_start_at_the_same_instants(cluster, seed):
    dice = Random(seed)
    planner, chosen, now, length = drawn(cluster, dice)
    # With some jobs of a class hidden, both end where what is visible ends.
    snapshot = planner.state.snapshot(now, dice.choice([None, 2]))
    arrivals = some_arrivals(dice, snapshot)
    wanted = [job.id for waiting in snapshot.pending for job in waiting.jobs] + [one.job.id for one in arrivals]
    loaded = Planner.from_snapshot(snapshot, chosen)
    assert is_incremental(loaded, arrivals)
    with pytest.MonkeyPatch.context() as patch:
        # Ends that are merged are merged at other instants in the two.
        patch.setattr(forecast, "TOGETHER", 0.0)
        found = IncrementalFuture(loaded, now, length, arrivals).play(wanted, 1000)
        assert found == Future(snapshot, chosen, length, arrivals).play(wanted, 1000)


@pytest.mark.parametrize("cluster", CLUSTERS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=40)
def test_a_shared_forecast_answers_as_a_new_one(cluster, seed):
    dice = Random(seed)
    planner, chosen, now, _ = drawn(cluster, dice)
    snapshot = planner.state.snapshot(now, dice.choice([None, 2]))
    arrivals = some_arrivals(dice, snapshot)
    wanted = [job.id for waiting in snapshot.pending for job in waiting.jobs] + [one.job.id for one in arrivals]
    known = {job_id: Prediction(1.0, 2.0, 5.0, 9) for job_id in wanted if dice.random() < 0.3}
    loaded = Planner.from_snapshot(snapshot, chosen)
    shared = StartForecast(snapshot, chosen, known.get, arrivals, planner=loaded)
    dice.shuffle(wanted)
    for job_id in wanted:
        fresh = StartForecast(snapshot, chosen, known.get, arrivals).ranges([job_id])
        assert shared.ranges([job_id]) == fresh
    # The planner that all of them share is left as it was.
    assert loaded.snapshot(now) == Planner.from_snapshot(snapshot, chosen).snapshot(now)
