"""The future played by a planner that goes on is the one played by plans that are made anew."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule_properties import CLUSTERS, some_request, some_settings

from gpusched.model.snapshot import ClassKey
from gpusched.model.value import replace
from gpusched.scheduler import forecast
from gpusched.scheduler.planner import Planner
from gpusched.testing import NOW


@pytest.mark.parametrize("cluster", CLUSTERS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=80)
def test_the_same_jobs_start_at_the_same_instants(cluster, seed):
    dice = Random(seed)
    chosen = some_settings(dice)
    # What has been used, and what is fenced, counts on in the one play, and is as in the present in the other.
    chosen = replace(chosen, queue={}, priority=replace(chosen.priority, weight_fairshare=0.0, fence_s=float("inf")))
    if chosen.priority.order in ("fairshare", "response_ratio"):
        return
    planner = Planner(CLUSTERS[cluster], chosen)
    now, last = NOW, 0
    for _ in range(dice.randint(1, 5)):
        now += dice.choice([0.0, 1.0, 5.0])
        for _ in range(dice.randint(0, 6)):
            last += 1
            number = dice.randrange(3)
            limit_s = dice.choice([2, 5, 10, 30, None])
            key = ClassKey(1000 + number, "", "default", 0, limit_s, some_request(dice), user=f"u{number}")
            planner.job_queued(planner.class_of_key(key), now, last)
        planner.schedule(now)
    snapshot = planner.snapshot(now)
    wanted = [job.id for waiting in snapshot.pending for job in waiting.jobs]
    share = dice.choice([0.3, 1.0])

    def length(job_id, limit_s, so_far_s):
        if limit_s is None:
            return None if job_id % 3 else so_far_s + 7.0
        return max(share * limit_s, so_far_s)

    found = forecast.play_starts_and_ends(snapshot, chosen, length, wanted, 1000)
    assert found is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecast, "TOGETHER", 0.0)
        found = forecast.play_starts_and_ends(snapshot, chosen, length, wanted, 1000)
        assert found == forecast.Future(snapshot, chosen, length).play(wanted, 1000)
