"""Fillers take nothing from others: with them, jobs within their budget start when they would without them.

Whole GPUs, cores and a limit of a queue on one node, and runs that end before their limits. With a grace of 0 the two
schedules of the jobs within their budget are equal; a filler's grace is all that it may cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.cluster import Allocation
from gpusched.model.job import Job
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import AccountSettings, QueueSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Budget
from gpusched.model.value import replace
from gpusched.scheduler.planner import decide
from gpusched.scheduler.priority import terms_of
from gpusched.testing import NOW, job, node, request, snapshot

GPUS = 4
SPENT = Budget("poor", ("poor",), gpu_s=0.0, when_spent="filler")


def rules(order: str, depth: int, limit: float | None) -> Settings:
    return replace(
        Settings(),
        priority=PrioritySettings(
            order=order, weight_short=0.0, weight_whole=0.0, backfill_by="limit", backfill_depth=depth
        ),
        account={"poor": AccountSettings("poor", gpu_hours=0.0, when_spent="filler"), "rich": AccountSettings("rich")},
        queue={"default": QueueSettings("default"), "narrow": QueueSettings("narrow", max_gpus=limit)},
    )


@dataclass
class Work:
    """A job with the instant of its arrival and the time that it runs."""

    job: Job
    at: float
    runs_s: float


def some_work(dice: Random) -> list[Work]:
    found = []
    for number in range(1, dice.randint(2, 14)):
        at = NOW + dice.choice([0, 0, 5, 20, 60, 61, 200])
        limit_s = dice.choice([10, 30, 60, 100, 400])
        account = dice.choice(["poor", "rich", "rich"])
        made = job(
            number,
            request=request(gpus=dice.randint(1, GPUS), cpus=float(dice.choice([1, 1, 4, 12]))),
            account=account,
            queue=dice.choice(["default", "default", "narrow"]),
            time_limit_s=limit_s,
            uid=1000 if account == "poor" else 1001,
            user="pat" if account == "poor" else "ann",
            submit_at=at,
        )
        found.append(Work(made, at, limit_s * dice.choice([0.5, 1.0, 1.0])))
    return found


def starts_of(work: list[Work], config: Settings) -> tuple[dict[int, float], int, int]:
    """Start of each job within its budget, and how many fillers started and were preempted."""
    by_id = {one.job.id: one for one in work}
    pending = {one.job.id: one.job for one in work}
    running: dict[int, Allocation] = {}
    starts: dict[int, float] = {}
    now, begun, preempted = NOW, 0, 0
    for _ in range(1000):
        while True:
            there = [one for one in pending.values() if by_id[one.id].at <= now]
            view = snapshot(node(gpus=GPUS), running=running.values(), waiting=there, now=now)
            plan = decide(replace(view, budgets=(SPENT,)), config)
            for start in plan.starts:
                one = pending.pop(start.job_id)
                begun += start.is_filler
                assert start.is_filler == (one.spec.account == "poor")
                if not start.is_filler:
                    starts[one.id] = now
                place = start.placement
                running[one.id] = Allocation(
                    *(one.id, terms_of(one), place.node, place.gpus, place.cpus, place.mem_mib, now),
                    expected_end_at=now + (one.spec.time_limit_s or 0),
                    is_filler=start.is_filler,
                    grace_s=0.0,
                )
            for victim in plan.preempts:
                assert running.pop(victim.job_id).is_filler
                pending[victim.job_id] = replace(by_id[victim.job_id].job, is_front=True)
                preempted += 1
            if not plan.starts and not plan.preempts:
                break
        ends = [held.start_at + by_id[held.job_id].runs_s for held in running.values()]
        instants = [at for at in (*ends, *(one.at for one in work)) if at > now]
        if not instants:
            break
        now = min(instants)
        running = {number: held for number, held in running.items() if held.start_at + by_id[number].runs_s > now}
    return starts, begun, preempted


@given(st.integers(0, 1 << 32), st.sampled_from(["multifactor", "fifo", "sjf"]), st.sampled_from([1, 2, 10]))
def test_fillers_delay_no_job_within_its_budget(seed: int, order: str, depth: int) -> None:
    dice = Random(seed)
    config, work = rules(order, depth, dice.choice([None, 2.0, 4.0])), some_work(dice)
    found, _, _ = starts_of(work, config)
    alone, _, _ = starts_of([one for one in work if one.job.spec.account == "rich"], config)
    assert found == alone


def test_the_generated_fillers_start_and_are_preempted() -> None:
    """The property is about something."""
    begun = preempted = 0
    for seed in range(40):
        dice = Random(seed)
        _, more, gone = starts_of(some_work(dice), rules("multifactor", 10, 2.0))
        begun, preempted = begun + more, preempted + gone
    assert begun > 20
    assert preempted > 5
