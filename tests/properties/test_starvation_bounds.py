"""Under endless smaller arrivals every job starts within a bound, whatever the order of the queue."""

from __future__ import annotations

import pytest

from gpusched import testing
from gpusched.api.resources import read_request
from gpusched.model.cluster import Allocation, HostSample, JobTerms
from gpusched.model.job import Job, Request
from gpusched.model.planner_settings import ORDERS, PrioritySettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Usage
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.planner import decide
from gpusched.scheduler.usage import charged, footprint
from gpusched.testing import NOW, job, node

MAX_AGE_S = 3600.0
SHORT_S = 120
WIDE = 1
CARDS = 4
ALL_CARDS = Request(gpus=CARDS)


def plays(
    settings: Settings,
    *,
    has_limits: bool,
    until_s: float,
    cards: tuple[int, ...] = (CARDS,),
    wide: Request = ALL_CARDS,
) -> float | None:
    """When a wide job starts beside a never-ending stream of jobs of one card; None when it does not.

    Args: cards: of each node.
    """
    idle = HostSample(NOW, "n1", 64, 64 * 1024, 64 * 1024, cpu_fraction=0.0)
    machines = [node(f"n{at}", gpus=count, cpus=64.0, load=idle) for at, count in enumerate(cards, 1)]
    layout = ClusterLayout(machines, settings)
    limit_s = SHORT_S if has_limits else None
    waiting: list[Job] = [
        job(WIDE, request=wide, user="ann", uid=hash_of("ann"), account="lab", time_limit_s=limit_s, submit_at=NOW)
    ]
    running: list[tuple[float, Allocation]] = []
    usage: dict[tuple[str, str], Usage] = {}
    now, number = NOW, 100
    while now < NOW + until_s:
        for end_at, held in [one for one in running if one[0] <= now]:
            running.remove((end_at, held))
            booking = layout.booking(held.terms.uid, held)
            assert booking is not None
            mark = (held.terms.account, held.terms.user)
            half_life_s = settings.priority.half_life_s
            rate: Resources = footprint(layout, booking)
            usage[mark] = charged(usage.get(mark), *mark, rate, held.start_at, end_at, now, half_life_s)
        # More arrive than the machine can do, and each is smaller and shorter than the wide one.
        for _ in range(3):
            number += 1
            waiting.append(_job(number, 1, f"u{number % 3}", SHORT_S - 1 if has_limits else None, now))
        snapshot = testing.snapshot(
            *machines, running=[held for _, held in running], waiting=waiting, usage=usage.values(), now=now
        )
        for start in decide(snapshot, settings).starts:
            if start.job_id == WIDE:
                return now - NOW
            one = next(one for one in waiting if one.id == start.job_id)
            waiting.remove(one)
            held = Allocation(
                one.id,
                JobTerms(one.uid, one.user, "lab"),
                start.placement.node,
                start.placement.gpus,
                1.0,
                0,
                now,
                None if one.spec.time_limit_s is None else now + one.spec.time_limit_s,
            )
            # They end at different times, so that four cards are never free at once by chance.
            running.append((now + 61 + one.id % 4 * 17, held))
        now += 20.0
    return None


def _job(number: int, cards: int, user: str, limit_s: int | None, at: float) -> Job:
    request = Request(gpus=cards)
    return job(number, request=request, user=user, uid=hash_of(user), account="lab", time_limit_s=limit_s, submit_at=at)


def hash_of(user: str) -> int:
    """A user id for a name."""
    return sum(map(ord, user))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("has_limits", [True, False], ids=["limits", "no limits"])
def test_a_wide_job_starts_within_a_bound(order, has_limits):
    settings = Settings(
        priority=PrioritySettings(order=order, max_age_s=MAX_AGE_S, max_wait_s=MAX_AGE_S, half_life_s=MAX_AGE_S)
    )
    started = plays(settings, has_limits=has_limits, until_s=2 * MAX_AGE_S)
    assert started is not None
    assert started <= MAX_AGE_S + 4 * SHORT_S


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ((4, 4), {"nodes": 1, "nodes_max": 2, "gpus": 8}),
        ((4, 2), {"nodes": 2, "gpus": 6}),
        ((2, 2, 2), {"nodes": 1, "nodes_max": 3, "ntasks": 5, "gpus_per_task": 1}),
    ],
)
def test_a_job_over_nodes_starts_within_the_same_bound(order, nodes, wanted):
    settings = Settings(
        priority=PrioritySettings(order=order, max_age_s=MAX_AGE_S, max_wait_s=MAX_AGE_S, half_life_s=MAX_AGE_S)
    )
    wide, _ = read_request(wanted, Settings())
    assert wide.bundles is not None
    started = plays(settings, has_limits=True, until_s=2 * MAX_AGE_S, cards=nodes, wide=wide)
    assert started is not None
    assert started <= MAX_AGE_S + 4 * SHORT_S


def test_without_a_reservation_a_wide_job_starves():
    """The stream is strong enough: taken away what keeps room for it, the job does not start."""
    settings = Settings(priority=PrioritySettings(order="sjf", max_wait_s=1e9))
    assert plays(settings, has_limits=True, until_s=2 * MAX_AGE_S) is None
