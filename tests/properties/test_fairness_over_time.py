"""Cycle after cycle: the wide job gets its turn, and what passes it never costs it time."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from strategies import held_by

from gpusched import testing
from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.job import Job, Request
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Plan
from gpusched.scheduler.invariants import check_invariants
from gpusched.scheduler.planner import decide
from gpusched.testing import NOW, job, node

FIRST_COME = Settings(priority=PrioritySettings(order="multifactor", weight_short=0.0, weight_whole=0.0))
"""Without these a job that came later goes before the wide one only by passing it."""

WIDE = 1
STEP_S = 60.0
LONGEST_STEPS = 5
"""Every narrow job ends after at most this many steps, whatever its limit."""

MACHINES = {
    "one node": (node("n1", gpus=4, cpus=8),),
    "two nodes": (node("n1", gpus=2, cpus=4), node("n2", gpus=4, cpus=6)),
}
NARROW = [
    Request(gpus=1),
    Request(gpus=2),
    Request(cpus=2),
    Request(gpus=1, vram_mib=9000),
    Request(gpus=1, gpu_fraction=0.5),
]
WIDES = [Request(gpus=4), Request(gpus=4, cpus=6), Request(cpus=6), Request(gpus=3)]


@dataclass
class Machine:
    """Endless narrow arrivals around one wide job; jobs end when chance or their limit says so."""

    nodes: tuple[NodeView, ...]
    chance: Random
    limits: tuple[int | None, ...]
    now: float = NOW
    waiting: list[Job] = field(default_factory=list)
    running: list[Allocation] = field(default_factory=list)
    ends_at: dict[int, float] = field(default_factory=dict)
    next_id: int = WIDE + 1

    def arrive(self, count: int) -> None:
        """Narrow jobs of a few users join the queue."""
        for _ in range(count):
            self.waiting.append(
                job(
                    self.next_id,
                    uid=self.chance.choice([1000, 1001]),
                    request=self.chance.choice(NARROW),
                    time_limit_s=self.chance.choice(self.limits),
                    submit_at=self.now,
                )
            )
            self.next_id += 1

    def cycle(self) -> Plan:
        """Decide and start."""
        snapshot = testing.snapshot(*self.nodes, running=self.running, waiting=self.waiting, now=self.now)
        plan = decide(snapshot, FIRST_COME)
        for held in held_by(plan, self.waiting, self.now):
            self.running.append(held)
            life_s = STEP_S * self.chance.randint(1, LONGEST_STEPS)
            if held.expected_end_at is not None:
                life_s = min(life_s, held.expected_end_at - self.now)
            self.ends_at[held.job_id] = self.now + life_s
        started = {start.job_id for start in plan.starts}
        self.waiting = [one for one in self.waiting if one.id not in started]
        assert check_invariants(testing.snapshot(*self.nodes, running=self.running)) == []
        return plan

    def pass_time(self) -> None:
        """One step on; whatever is due has ended."""
        self.now += STEP_S
        self.running = [held for held in self.running if self.ends_at[held.job_id] > self.now]


def crowded(nodes: tuple[NodeView, ...], wide: Request, seed: int, limits: tuple[int | None, ...]) -> Machine:
    """A machine that narrow jobs filled before the wide one came."""
    machine = Machine(nodes, Random(seed), limits)
    for _ in range(3):
        machine.arrive(6)
        machine.cycle()
        machine.pass_time()
    # Those that came first and still wait go first, as they should; the wide job is next.
    machine.waiting = [*machine.waiting[:2], job(WIDE, request=wide, submit_at=machine.now)]
    return machine


SEEDS = st.integers(0, 10**6)
SOME_LIMITS = (None, None, 60, 180, 600, 3600)
ALL_LIMITED = (60, 180, 600, 3600)


@pytest.mark.parametrize("nodes", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("limits", [(None,), SOME_LIMITS, ALL_LIMITED], ids=["none", "some", "all"])
@given(seed=SEEDS, wide=st.sampled_from(WIDES))
@hypothesis_settings(max_examples=25, deadline=None)
def test_a_wide_job_starts_under_endless_narrow_arrivals(nodes, limits, seed, wide):
    machine = crowded(nodes, wide, seed, limits)
    # Jobs in the way end within LONGEST_STEPS; those that may pass end within as many again, twice over:
    # before the wide job has a start time, and before that start.
    for _ in range(6 * LONGEST_STEPS):
        machine.arrive(4)
        machine.cycle()
        if all(one.id != WIDE for one in machine.waiting):
            return
        machine.pass_time()
    pytest.fail(f"after {6 * LONGEST_STEPS} steps the wide job still waits; running: {machine.running}")


@pytest.mark.parametrize("limits", [SOME_LIMITS, ALL_LIMITED], ids=["some", "all"])
@given(seed=SEEDS, wide=st.sampled_from(WIDES), nodes=st.sampled_from(list(MACHINES.values())))
@hypothesis_settings(max_examples=25, deadline=None)
def test_a_reserved_start_never_moves_later(limits, seed, wide, nodes):
    machine = crowded(nodes, wide, seed, limits)
    promised = float("inf")
    for _ in range(6 * LONGEST_STEPS):
        machine.arrive(4)
        plan = machine.cycle()
        for kept in plan.reservations:
            if kept.job_id == WIDE:
                start_at = float("inf") if kept.start_at is None else kept.start_at
                assert start_at <= promised
                promised = start_at
        if all(one.id != WIDE for one in machine.waiting):
            assert machine.now <= promised
            return
        machine.pass_time()


@given(seed=SEEDS)
@hypothesis_settings(max_examples=20, deadline=None)
def test_no_job_without_a_limit_passes_one_that_needs_all_gpus(seed):
    chance = Random(seed)
    machine = Machine((node("n1", gpus=4, cpus=64),), chance, (None,))
    waited = steps = 0
    # Some seeds ask for all cards late.
    while steps < 40 or not waited:
        steps += 1
        assert steps < 1000
        machine.waiting.append(job(machine.next_id, request=Request(gpus=chance.randint(1, 4)), submit_at=machine.now))
        machine.next_id += 1
        widths = {one.id: one.spec.request.gpus for one in machine.waiting}
        plan = machine.cycle()
        if plan.first_blocked is not None and widths[plan.first_blocked] == 4:
            waited += 1
            assert all(start.job_id < plan.first_blocked for start in plan.starts)
        machine.pass_time()
