"""Plans are those of a plain planner that was written from the rules alone: starts, cards and reservations."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_planner import Asked, Held, Node, Place, ReferencePlanner, Rules

from gpusched import testing
from gpusched.model.cluster import Allocation, JobTerms
from gpusched.model.job import Job, Request
from gpusched.model.planner_settings import PlacementSettings, PrioritySettings
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement, Snapshot
from gpusched.scheduler.planner import decide
from gpusched.testing import NOW

ORDERS = {"fcfs": "fifo", "sjf": "sjf"}
DEPTHS = {"easy": 1, "conservative": 1000, "some": 3, "greedy": 0}
USERS = ("ann", "bob")


def some_rules(dice: Random, order: str, depth: int) -> Rules:
    """With maxima of two queues in half of all cases."""
    maxima = {
        name: (dice.choice([3.0, 6.0]), dice.choice([2.0, 4.0, float("inf")]), dice.choice([1.0, 3.0, float("inf")]))
        for name in dice.choice([(), ("default",), ("default", "vision")])
    }
    return Rules(order, depth, dice.random() < 0.85, dice.choice(["first", "pack", "spread"]), maxima)


def settings_of(rules: Rules) -> Settings:
    """The same for `decide`."""

    def or_none(most: float) -> float | None:
        return None if most == float("inf") else most

    return Settings(
        priority=PrioritySettings(
            order=ORDERS[rules.order], backfill_depth=rules.depth, backfill=rules.backfill, max_wait_s=1e9
        ),
        placement=PlacementSettings(rules.strategy),
        queue={
            name: QueueSettings(
                name,
                max_gpus=cards,
                max_gpus_per_user=or_none(of_user),
                max_running_per_user=None if jobs == float("inf") else int(jobs),
            )
            for name, (cards, of_user, jobs) in rules.maxima.items()
        },
    )


def some_job(dice: Random, number: int, now: float, machines: list[Node]) -> Asked:
    """One that fits on some node when nobody else is there."""
    cards, cores = dice.choice(machines)
    return Asked(
        number,
        now,
        dice.randint(0, cards),
        dice.randint(0, cores),
        dice.choice([1.0, 3.0, 7.0, 20.0, 20.0, 60.0, float("inf")]),
        dice.choice(USERS),
        dice.choice(["default", "default", "vision"]),
    )


def snapshot_of(now: float, machines: list[Node], running: list[Held], waiting: list[Asked]) -> Snapshot:
    """The same world for `decide`."""
    nodes = [
        testing.node(f"n{number}", gpus=cards, cpus=float(cores), mem_mib=1)
        for number, (cards, cores) in enumerate(machines)
    ]
    held = [
        Allocation(
            job_id=one.job.id,
            terms=JobTerms(1000, one.job.user, queue=one.job.queue),
            node=f"n{one.place.node}",
            gpus=tuple(testing.share(card, f"n{one.place.node}") for card in sorted(one.place.cards)),
            cpus=float(one.place.cores),
            mem_mib=0,
            start_at=NOW + one.start_s,
            expected_end_at=None if one.end_s == float("inf") else NOW + one.end_s,
        )
        for one in running
    ]
    return testing.snapshot(*nodes, running=held, waiting=map(job_of, waiting), now=NOW + now)


def job_of(one: Asked) -> Job:
    """The same job for `decide`."""
    return testing.job(
        one.id,
        request=Request(gpus=one.cards, cpus=float(one.cores)),
        time_limit_s=None if one.limit_s == float("inf") else int(one.limit_s),
        submit_at=NOW + one.submit_s,
        user=one.user,
        queue=one.queue,
    )


def shown(place: Placement) -> tuple[str, frozenset[int]]:
    """A place of `decide` in the words of both."""
    return place.node, frozenset(card.index for card in place.gpus)


def named(place: Place) -> tuple[str, frozenset[int]]:
    """A place of the reference in the words of both."""
    return f"n{place.node}", place.cards


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("order", ORDERS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=40)
def test_plans_equal_the_reference(order, depth, seed):
    dice = Random(seed)
    rules = some_rules(dice, order, DEPTHS[depth])
    chosen = settings_of(rules)
    machines = [(dice.choice([0, 2, 4, 4]), dice.choice([4, 8])) for _ in range(dice.randint(1, 3))]
    now, last = 0.0, 0
    running: list[Held] = []
    waiting: list[Asked] = []
    for _ in range(dice.randint(1, 10)):
        now += dice.choice([0.0, 1.0, 2.0, 10.0])
        # Some end early, and some a little late.
        running = [one for one in running if one.end_s > now - dice.choice([0.0, 2.0]) and dice.random() > 0.15]
        for _ in range(dice.randint(0, 6)):
            last += 1
            waiting.append(some_job(dice, last, now, machines))
        expected = ReferencePlanner(now, machines, running, waiting, rules)
        plan = decide(snapshot_of(now, machines, running, waiting), chosen)
        assert [(one.job_id, *shown(one.placement)) for one in plan.starts] == [
            (job.id, *named(place)) for job, place in expected.starts
        ]
        assert [(one.job_id, *shown(one.placement), one.start_at) for one in plan.reservations] == [
            (one.job.id, *named(one.place), None if one.start[0] == float("inf") else NOW + one.start[0])
            for one in expected.kept
        ]
        started = {job.id for job, _ in expected.starts}
        waiting = [job for job in waiting if job.id not in started]
        running.extend(Held(job, place, now) for job, place in expected.starts)
