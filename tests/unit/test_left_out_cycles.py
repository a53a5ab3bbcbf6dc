"""Where nobody asks for reservations, a cycle that would start nothing is left out, and starts are the same."""

from __future__ import annotations

from math import inf
from random import Random
from unittest.mock import patch

import pytest

from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.settings import Settings
from gpusched.scheduler import planner as planners
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.state import PlannerState
from gpusched.testing import NOW, job, node, request, snapshot


def played(fence_s: float, *, asks_for_reservations: bool, gpus: int, seed: int = 1) -> tuple[list[list[int]], int]:
    """Starts of each cycle while jobs arrive and end at random, and how many cycles walked the queue."""
    priority = PrioritySettings(order="fifo", backfill_depth=1, fence_s=fence_s)
    machine = node(gpus=gpus, cpus=8)
    planner = Planner(PlannerState([machine], Settings(priority=priority)))
    dice, running, found, walks = Random(seed), list[int](), [], 0

    def walk(cycle: planners.Cycle) -> None:
        nonlocal walks
        walks += 1
        whole(cycle)

    whole = planners.walk_queue
    with patch.object(planners, "walk_queue", walk):
        for number in range(1, 150):
            now = NOW + 10.0 * number
            if running and dice.random() < 0.4:
                planner.state.run_ended(running.pop(dice.randrange(len(running))))
            else:
                wanted = request(gpus=dice.choice((1, 2, 4)) if gpus else 0, cpus=float(dice.choice((1, 2, 4, 8))))
                (one,) = snapshot(
                    machine, waiting=[job(number, request=wanted, time_limit_s=dice.choice((60, 600)))]
                ).pending
                planner.state.job_queued(planner.state.class_of_key(one.key), now, number)
            starts = planner.play(now)[0] if asks_for_reservations else planner.schedule(now)
            running += [start.job_id for start in starts]
            found.append([start.job_id for start in starts])
    return found, walks


@pytest.mark.parametrize("gpus", [0, 4])
def test_cycles_that_start_nothing_are_left_out(gpus: int) -> None:
    all_walks = all_cycles = 0
    for seed in range(5):
        whole, cycles = played(inf, asks_for_reservations=True, gpus=gpus, seed=seed)
        starts, walks = played(inf, asks_for_reservations=False, gpus=gpus, seed=seed)
        assert starts == whole
        all_walks, all_cycles = all_walks + walks, all_cycles + cycles
    assert all_walks < all_cycles


def test_none_is_left_out_where_a_fence_follows_from_the_first_reservation() -> None:
    whole, every = played(100.0, asks_for_reservations=True, gpus=0)
    assert played(100.0, asks_for_reservations=False, gpus=0) == (whole, every)
