"""A planner that carries out what it plans, as the simulator does, decides as one made from its snapshot each time."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from bundles import laid_out
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.model.cluster import JobTerms
from gpusched.model.job import Request
from gpusched.model.planner_settings import PlacementSettings, PrioritySettings
from gpusched.model.queue_settings import AccountSettings, QueueSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey
from gpusched.model.value import replace
from gpusched.scheduler.events import RunChanged
from gpusched.scheduler.planner import Planner, decide
from gpusched.scheduler.queue import JobClass
from gpusched.scheduler.state import PlannerState
from gpusched.testing import NOW, gpu_view, node

CLUSTERS = {
    "one node of cores": (node(cpus=8.0),),
    "like nodes of cards": tuple(node(f"n{number}", gpus=4) for number in range(3)),
    "unlike nodes of cards": (node("n1", gpus=4), node("n2", gpus=2, cpus=4.0), node("n3", cpus=6.0)),
    "nodes of cards that some insist on": (
        node("n1", gpus=4),
        node("n2", gpus=4, labels=("big",)),
        node("n3", [gpu_view(0, "n3", name="NVIDIA H100"), gpu_view(1, "n3")]),
    ),
    "GPUs that use the host's memory": (
        node("n1", [gpu_view(0, "n1", has_host_memory=True)], cpus=8.0, mem_mib=48 * 1024),
        node("n2", [gpu_view(index, "n2", has_host_memory=True) for index in range(4)], mem_mib=64 * 1024),
    ),
}


def some_insisting_request(dice: Random) -> Request:
    """Of cards, now and then of some and no others."""
    wish: dict[str, Any] = dice.choice([{}, {}, {"constraint": "big"}, {"nodelist": ("n1",)}])
    if dice.random() < 0.2:
        return Request(cpus=0.0, gpus=1, gpu_type="h100", vram_mib=dice.choice([None, 4096]))
    if dice.random() < 0.2:
        return Request(cpus=0.0, gpus=1, vram_mib=dice.choice([4096, 12288]), **wish)
    return Request(cpus=0.0, gpus=dice.randint(1, 4), **wish)


def some_request(dice: Random) -> Request:
    """Of cores, cards, memory, slices, gangs."""
    kind = dice.randrange(7)
    if kind == 0:
        return Request(cpus=float(dice.randint(1, 8)))
    if kind == 1:
        return Request(cpus=0.0, gpus=dice.randint(1, 4))
    if kind == 2:
        return Request(cpus=1.0, gpus=dice.choice([2, 4]), nodes=2)
    if kind == 3:
        return Request(cpus=0.0, gpus=4, nodes=dice.randint(1, 2), tail_gpus=dice.randint(1, 3))
    if kind == 4:
        return laid_out(dice, 3)
    if kind == 5:
        return Request(cpus=1.0, gpus=1, vram_mib=dice.choice([4096, 12288]))
    return Request(cpus=1.0, mem_mib=dice.choice([1024, 40 * 1024]))


def some_accounts(dice: Random) -> dict[str, AccountSettings]:
    """None, as in most labs, or one above another."""
    if dice.random() < 0.5:
        return {}
    return {"lab": AccountSettings("lab", shares=2.0), "vision": AccountSettings("vision", parent="lab")}


def some_settings(dice: Random) -> Settings:
    """Under which it decides by itself, and now and then a limit of a queue, under which it does not."""
    queues = {"default": QueueSettings("default", max_running_per_user=2)} if dice.random() < 0.1 else {}
    return Settings(
        priority=PrioritySettings(
            order=dice.choice(["fifo", "sjf", "saf", "spf", "fairshare", *["multifactor", "response_ratio"] * 3]),
            reserve_after_s=dice.choice([0.0, 0.0, 3.0, 25.0]),
            reserve_after_runs=dice.choice([0.0, 0.0, 0.001, 0.01]),
            fence_s=dice.choice([0.5, 3.0, 25.0, 1e6]),
            fairshare_step=dice.choice([1.0, 1.01, 1.4, 4.0]),
            weight_age=dice.choice([0.0, 1000.0]),
            weight_fairshare=dice.choice([0.0, 100.0, 10000.0]),
            weight_size=dice.choice([0.0, 100.0]),
            weight_fit=dice.choice([0.0, 30.0]),
            weight_deadline=dice.choice([0.0, 0.0, 100.0]),
            weight_short=dice.choice([0.0, 0.0, 500.0]),
            half_life_s=dice.choice([0.5, 20.0, 1e9]),
            calc_period_s=dice.choice([0.0, 1.0, 7.0, 60.0]),
            backfill=dice.random() < 0.8,
            backfill_depth=dice.choice([0, 1, 1, 3, 50]),
            backfill_elsewhere=dice.random() < 0.5,
            backfill_order=dice.choice(["line", "shortest"]),
            backfill_by=dice.choice(["limit", "prediction"]),
            max_age_s=dice.choice([float("inf"), float("inf"), 3.0, 25.0]),
            max_wait_s=dice.choice([float("inf"), float("inf"), 3.0, 25.0]),
        ),
        account=some_accounts(dice),
        placement=PlacementSettings(strategy=dice.choice(["pack", "spread", "first", "best_fit"])),
        queue=queues,
    )


@pytest.mark.parametrize("cluster", CLUSTERS)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=40)
def test_incremental_decisions_equal_rebuilt_ones(cluster, seed):
    # One number draws the whole story: hundreds of draws of their own would take minutes to be made smaller.
    dice = Random(seed)
    chosen = some_settings(dice)
    is_of_cores = cluster == "one node of cores" and dice.random() < 0.5
    draw = some_insisting_request if "insist" in cluster and dice.random() < 0.8 else some_request
    limits_s = [1, 2, 5, 10, 30] * 3 + ([None] * dice.choice([1, 15]) if dice.random() < 0.3 else [])
    users = dice.choice([1, 2, 4])
    planner = Planner(PlannerState(CLUSTERS[cluster], chosen))
    now, last = NOW, 0
    waiting: set[int] = set()
    running: dict[int, float] = {}
    own: dict[ClassKey, JobClass] = {}
    for _ in range(dice.randint(1, 14)):
        now += dice.choice([0.0, 1.0, 5.0, 20.0])
        for _ in range(dice.randint(0, 3)):
            last += 1
            limit_s = dice.choice(limits_s)
            request = Request(cpus=float(dice.randint(1, 8))) if is_of_cores else draw(dice)
            number = dice.randrange(users)
            key = ClassKey(
                terms=JobTerms(
                    1000 + number,
                    f"u{number}",
                    dice.choice(["", "lab", "vision"]) if chosen.account else "",
                    "default",
                    request=request,
                ),
                nice=dice.choice([0, 0, 1]),
                time_limit_s=limit_s,
                deadline_at=now + 50.0 if dice.random() < 0.03 else None,
                predicted_s=dice.choice([None, 1, 4, 12]),
                plan_s=dice.choice([None, None, 1, 3, 12]),
            )
            job_class = own.get(key) or planner.state.class_of_key(key)
            if dice.random() < 0.2:
                job_class = own[key] = planner.state.queue.own_class(key)
            planner.state.job_queued(job_class, now - dice.choice([0.0, 0.0, 7.0]), last)
            waiting.add(last)
        for job_id in sorted(running):
            if running[job_id] <= now or dice.random() < 0.25:
                planner.state.run_ended(job_id)
                del running[job_id]
        if waiting and dice.random() < 0.16:
            gone = dice.choice(sorted(waiting))
            planner.state.job_left(gone)
            waiting.remove(gone)
        guessed = sorted(job_id for job_id in running if dice.random() < 0.1)
        for job_id in guessed:
            end_at = dice.choice([now + 3.0, None])
            held = planner.state.runs[job_id].allocations
            planner.state.apply(RunChanged(tuple(replace(one, predicted_end_at=end_at) for one in held)))
        for job_class in own.values():
            if dice.random() < 0.2:
                planner.state.predict(job_class, dice.choice([1, 4, 12]), dice.choice([None, 1, 3, 12]))
        expected = decide(planner.state.snapshot(now), chosen)
        starts = planner.schedule(now)
        assert tuple(starts) == expected.starts
        for start in starts:
            waiting.remove(start.job_id)
            running[start.job_id] = now + dice.choice([1.0, 5.0, 40.0])


def test_a_settled_reservation_with_one_possible_place_starts_as_predicted():
    # It waited for the limits of all runs there, without a limit for ever, and let others pass meanwhile.
    test_incremental_decisions_equal_rebuilt_ones.hypothesis.inner_test("one node of cores", 74035)


def test_a_reserved_place_moves_when_others_require_its_gpus():
    nodes = node("n1", gpus=2, labels=("rare",)), node("n2", gpus=2)
    planner = Planner(
        PlannerState(nodes, Settings(priority=PrioritySettings(reserve_after_s=0.0, reserve_after_runs=0.0)))
    )

    def arrives(number, **asked):
        key = ClassKey(JobTerms(1000, "u", "", "default", request=Request(cpus=0.0, gpus=2, **asked)), 0, 100)
        planner.state.job_queued(planner.state.class_of_key(key), NOW + number, number)

    def kept():
        expected = decide(planner.state.snapshot(NOW + 20), planner.state.settings)
        plan = planner.plan(NOW + 20)
        assert plan.starts == expected.starts == ()
        assert plan.reservations == expected.reservations
        return [one.placement.node for one in plan.reservations]

    for number in (1, 2):
        arrives(number)
    assert len(planner.schedule(NOW + 10)) == 2
    arrives(3)
    assert kept() == ["n1"]
    # Six of twelve cards that are asked for are the two that are rare.
    for number in (4, 5, 6):
        arrives(number, constraint="rare")
    assert kept() == ["n2"]
    for number in (4, 5, 6):
        planner.state.job_left(number)
    assert kept() == ["n1"]
