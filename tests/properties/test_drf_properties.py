"""Dominant Resource Fairness: what serving the smallest dominant share first promises, proved on exact numbers.

Source: Ghodsi et al., Dominant Resource Fairness (NSDI 2011), with demands that may be zero as in Parkes,
Dolev and Shah, Beyond Dominant Resource Fairness (EC 2012). Work is divisible in the first part; in the
second it comes in whole jobs, started by the policy itself, and the promises hold up to one job.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from msgspec.structs import astuple

from gpusched import testing
from gpusched.model.job import Job, Request
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.resources import NOTHING, Resources
from gpusched.model.settings import Settings
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.planner import decide
from gpusched.scheduler.usage import capacity_of, footprint
from gpusched.testing import job, node, request

KINDS = ("gpus", "vram_mib", "cpus", "mem_mib")
NO_FRACTION = Fraction(0)


def amounts(*values: int | Fraction) -> Resources:
    """Exact amounts; Resources only adds, multiplies and divides them."""
    return Resources(*(Fraction(value) for value in values))


EXACT_NOTHING = amounts(0, 0, 0, 0)


def values_of(resources: Resources) -> tuple[Fraction, ...]:
    return tuple(Fraction(value) for value in astuple(resources))


def tasks_in(bundle: Resources, demand: Resources) -> Fraction:
    """How many tasks of this demand a bundle is good for."""
    pairs = zip(values_of(bundle), values_of(demand), strict=True)
    return min(have / need for have, need in pairs if need)


@dataclass(frozen=True)
class Division:
    """Who gets what."""

    capacity: Resources
    demands: tuple[Resources, ...]
    shares: tuple[Fraction, ...]
    """Dominant share of each user."""

    def bundle(self, user: int) -> Resources:
        """What the user holds."""
        return self.demands[user].times(self.tasks(user))

    def tasks(self, user: int) -> Fraction:
        """How much work that is."""
        return self.shares[user] / Fraction(self.demands[user].dominant_share(self.capacity))

    @property
    def held(self) -> tuple[Fraction, ...]:
        """By all users, per kind."""
        total = EXACT_NOTHING
        for user in range(len(self.demands)):
            total += self.bundle(user)
        return values_of(total)


def fill(capacity: Resources, demands: tuple[Resources, ...]) -> Division:
    """Progressive filling: all dominant shares grow at once; who needs what is used up stops."""
    there = values_of(capacity)
    slopes = [values_of(demand.times(1 / Fraction(demand.dominant_share(capacity)))) for demand in demands]
    shares = [NO_FRACTION] * len(demands)
    growing = set(range(len(demands)))
    held = [NO_FRACTION] * len(there)
    while growing:
        pace = [sum((slopes[user][kind] for user in growing), NO_FRACTION) for kind in range(len(there))]
        step = min((there[kind] - held[kind]) / pace[kind] for kind in range(len(there)) if pace[kind])
        for user in growing:
            shares[user] += step
        held = [held[kind] + step * pace[kind] for kind in range(len(there))]
        used_up = {kind for kind in range(len(there)) if pace[kind] and held[kind] == there[kind]}
        growing = {user for user in growing if not any(slopes[user][kind] for kind in used_up)}
    return Division(capacity, demands, tuple(shares))


counts = st.integers(1, 64)
capacities = st.builds(amounts, counts, counts, counts, counts)
needs = st.integers(0, 9)
a_demand = st.builds(amounts, needs, needs, needs, needs).filter(lambda demand: any(values_of(demand)))
users = st.lists(a_demand, min_size=1, max_size=5).map(tuple)
some = st.integers(1, 9)
users_of_everything = st.lists(st.builds(amounts, some, some, some, some), min_size=2, max_size=5).map(tuple)


def test_the_example_of_the_paper_is_reproduced():
    """9 cores and 18 GB; tasks of 1 core and 4 GB, and of 3 cores and 1 GB: 3 and 2 tasks, two thirds each."""
    made = fill(amounts(0, 0, 9, 18), (amounts(0, 0, 1, 4), amounts(0, 0, 3, 1)))
    assert [made.tasks(user) for user in (0, 1)] == [3, 2]
    assert made.shares == (Fraction(2, 3), Fraction(2, 3))


def test_users_without_need_of_an_exhausted_resource_continue():
    made = fill(amounts(4, 0, 8, 0), (amounts(1, 0, 1, 0), amounts(1, 0, 1, 0), amounts(0, 0, 1, 0)))
    assert made.shares == (Fraction(1, 2), Fraction(1, 2), Fraction(1, 2))
    made = fill(amounts(4, 0, 16, 0), (amounts(1, 0, 1, 0), amounts(1, 0, 1, 0), amounts(0, 0, 1, 0)))
    assert made.shares == (Fraction(1, 2), Fraction(1, 2), Fraction(3, 4))


@pytest.mark.parametrize("kind", range(4), ids=KINDS)
def test_a_single_resource_is_divided_equally(kind):
    one = [0, 0, 0, 0]
    one[kind] = 3
    made = fill(amounts(*[12 * (other == kind) for other in range(4)]), (amounts(*one),) * 4)
    assert made.shares == (Fraction(1, 4),) * 4


@given(capacities, users)
def test_allocations_do_not_exceed_capacity(capacity, demands):
    held = fill(capacity, demands).held
    assert all(have <= there for have, there in zip(held, values_of(capacity), strict=True))


@given(capacities, users)
def test_no_user_has_less_than_an_equal_partition(capacity, demands):
    made = fill(capacity, demands)
    own_part = capacity.times(Fraction(1, len(demands)))
    for user, demand in enumerate(demands):
        assert made.tasks(user) >= tasks_in(own_part, demand)


@given(capacities, users)
def test_no_user_envies_another(capacity, demands):
    made = fill(capacity, demands)
    for user, demand in enumerate(demands):
        for other in range(len(demands)):
            assert tasks_in(made.bundle(other), demand) <= made.tasks(user)


@given(capacities, users)
def test_no_usable_resource_is_left(capacity, demands):
    made = fill(capacity, demands)
    left = tuple(there - have for there, have in zip(values_of(capacity), made.held, strict=True))
    for demand in demands:
        assert any(need and not free for need, free in zip(values_of(demand), left, strict=True))


@given(capacities, users, a_demand)
def test_overstating_demand_gains_nothing(capacity, demands, lie):
    honest = fill(capacity, demands)
    lying = fill(capacity, (lie, *demands[1:]))
    assert tasks_in(lying.bundle(0), demands[0]) <= honest.tasks(0)


@given(capacities, users_of_everything)
def test_a_leaving_user_makes_no_other_poorer(capacity, demands):
    """Population monotonicity. It needs users who all need something of everything: who leaves a kind that
    not all need lets others go on there, and take more of the rest with it."""
    before, after = fill(capacity, demands), fill(capacity, demands[:-1])
    for user in range(len(demands) - 1):
        assert after.tasks(user) >= before.tasks(user)


# Whole jobs, as the policy starts them

MACHINE = node(gpus=8, cpus=24.0, mem_mib=64_000)
BY_SHARE = Settings(priority=PrioritySettings(order="drf"))
kinds_of_jobs = st.builds(
    request,
    gpus=st.integers(0, 2),
    cpus=st.sampled_from([0.5, 1.0, 2.0, 5.0]),
    mem_mib=st.sampled_from([0, 500, 9000]),
)
queues_of_users = st.lists(st.tuples(kinds_of_jobs, st.integers(1, 12)), min_size=1, max_size=4)


def waiting_jobs(wanted: list[tuple[Request, int]]) -> list[Job]:
    """So many equal jobs of each user, all of one instant."""
    made = []
    for user, (asked, count) in enumerate(wanted):
        for _ in range(count):
            made.append(job(len(made) + 1, uid=1000 + user, user=f"u{user}", request=asked))
    return made


@given(queues_of_users)
def test_each_start_goes_to_the_active_user_with_the_smallest_share(wanted):
    waiting = waiting_jobs(wanted)
    users = {one.id: one.user for one in waiting}
    plan = decide(testing.snapshot(MACHINE, waiting=waiting), BY_SHARE)
    layout = ClusterLayout([MACHINE], BY_SHARE)
    capacity, held = capacity_of(layout), dict.fromkeys(users.values(), NOTHING)
    order = [users[start.job_id] for start in plan.starts]
    for position, user in enumerate(order):
        for later in order[position + 1 :]:
            assert held[user].dominant_share(capacity) <= held[later].dominant_share(capacity)
        booking = layout.booking(0, plan.starts[position].placement)
        assert booking is not None
        held[user] += footprint(layout, booking)
    if len(wanted) > 1 and len(set(order)) == len(wanted):
        event("every user has started")


@given(st.lists(st.integers(1, 12), min_size=2, max_size=5), kinds_of_jobs)
def test_users_with_equal_demands_hold_the_same_up_to_one_job(counts_of_jobs, asked):
    waiting = waiting_jobs([(asked, count) for count in counts_of_jobs])
    users = {one.id: one.user for one in waiting}
    plan = decide(testing.snapshot(MACHINE, waiting=waiting), BY_SHARE)
    started = Counter(users[start.job_id] for start in plan.starts)
    for user, count in enumerate(counts_of_jobs):
        for other in range(len(counts_of_jobs)):
            is_served = started[f"u{user}"] == count
            assert is_served or started[f"u{other}"] <= started[f"u{user}"] + 1
