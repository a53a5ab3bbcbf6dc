"""What stands between cycles decides as what is built anew for each: after any events, the same plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.model.job import Request
from gpusched.model.settings import PlacementSettings, PrioritySettings, QueueSettings, Settings
from gpusched.model.snapshot import ClassKey, PendingJob
from gpusched.policy.cycle import decide
from gpusched.policy.standing import Standing
from gpusched.testing import NOW, node

CLUSTERS = {
    "one node of cores": (node(cpus=8.0),),
    "like nodes of cards": tuple(node(f"n{number}", gpus=4) for number in range(3)),
    "unlike nodes of cards": (node("n1", gpus=4), node("n2", gpus=2, cpus=4.0), node("n3", cpus=6.0)),
}

REQUESTS = st.one_of(
    st.builds(Request, cpus=st.integers(1, 8).map(float)),
    st.builds(Request, cpus=st.just(0.0), gpus=st.integers(1, 4)),
    st.builds(Request, cpus=st.just(1.0), gpus=st.sampled_from([2, 4]), nodes=st.just(2)),
    st.builds(Request, cpus=st.just(0.0), gpus=st.just(4), nodes=st.integers(1, 2), tail_gpus=st.integers(1, 3)),
    st.builds(Request, cpus=st.just(1.0), gpus=st.just(1), vram_mib=st.sampled_from([4096, 12288])),
    st.builds(Request, cpus=st.just(1.0), mem_mib=st.sampled_from([1024, 40 * 1024])),
)

FLAT = st.builds(Request, cpus=st.integers(1, 8).map(float))


@st.composite
def policies(draw: st.DrawFn) -> Settings:
    """Settings under which it decides by itself, and a queue with a limit now and then, under which it does not."""
    priority = PrioritySettings(
        order=draw(st.sampled_from(["fifo", "sjf", "saf", "spf"])),
        backfill=draw(st.sampled_from([True, True, True, False])),
        backfill_depth=draw(st.sampled_from([0, 1, 1, 3, 50])),
        backfill_elsewhere=draw(st.booleans()),
        max_age_s=float("inf"),
    )
    strategy = draw(st.sampled_from(["pack", "spread", "first", "best_fit"]))
    chosen = Settings(priority=priority, placement=PlacementSettings(strategy=strategy))
    if draw(st.integers(0, 9)) == 0:
        return replace(chosen, queue={"default": QueueSettings("default", max_running_per_user=2)})
    return chosen


@pytest.mark.parametrize("cluster", CLUSTERS)
@given(data=st.data())
@settings(max_examples=120)
def test_it_decides_as_if_everything_were_built_anew(cluster, data):
    nodes, chosen = CLUSTERS[cluster], data.draw(policies())
    requests = FLAT if cluster == "one node of cores" and data.draw(st.booleans()) else REQUESTS
    standing = Standing(nodes, chosen)
    now, last = NOW, 0
    waiting: set[int] = set()
    running: dict[int, float] = {}
    for _ in range(data.draw(st.integers(1, 14))):
        now += data.draw(st.sampled_from([0.0, 1.0, 5.0, 20.0]))
        for _ in range(data.draw(st.integers(0, 3))):
            last += 1
            limit_s = data.draw(st.sampled_from([1, 2, 5, 10, 30] * 3 + [None]))
            key = ClassKey(
                1000 + last % 2,
                "",
                "default",
                0,
                limit_s,
                data.draw(requests),
                user=f"u{last % 2}",
                predicted_s=data.draw(st.sampled_from([None, 1, 4])) if limit_s else None,
            )
            standing.arrived(standing.kind_of(key), PendingJob(last, now - data.draw(st.sampled_from([0.0, 0.0, 7.0]))))
            waiting.add(last)
        for job_id in sorted(running):
            if running[job_id] <= now or data.draw(st.integers(0, 3)) == 0:
                standing.ended(job_id)
                del running[job_id]
        if waiting and data.draw(st.integers(0, 5)) == 0:
            gone = data.draw(st.sampled_from(sorted(waiting)))
            standing.left(gone)
            waiting.remove(gone)
        expected = decide(standing.snapshot(now), chosen)
        plan = standing.decide(now)
        assert plan.starts == expected.starts
        assert not expected.reservations or standing.reservations() == expected.reservations
        for start in plan.starts:
            waiting.remove(start.job_id)
            running[start.job_id] = now + data.draw(st.sampled_from([1.0, 5.0, 40.0]))
