"""A sequence with ranges of tasks is the sorted list of the same jobs, whatever comes and goes."""

from __future__ import annotations

import sys
from bisect import bisect_left
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from worlds import NOW

from gpusched.model.settings import Settings
from gpusched.model.snapshot import PendingJob
from gpusched.scheduler.events import TasksQueued
from gpusched.scheduler.job_sequence import JobSequence, minus
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.priority import class_key
from gpusched.scheduler.state import PlannerState
from gpusched.testing import job, node


@given(seed=st.integers(0, 1 << 32))
def test_a_sequence_is_the_sorted_list_of_its_jobs(seed: int) -> None:
    dice, owner = Random(seed), PlannerState((node(),), Settings()).class_of_key(class_key(job(1)))
    found, expected = JobSequence(owner), list[tuple[float, int, object]]()
    for _ in range(30):
        queued_at, first = dice.choice([0.0, 1.0, 2.0]), dice.randrange(40)
        ids = range(first, first + dice.choice([1, 1, 3, 10]))
        there = {one[:2] for one in expected}
        if dice.random() < 0.6:
            for part in minus([ids], [range(one, one + 1) for at, one, _ in expected if at == queued_at]):
                found.add(queued_at, part)
            expected = sorted([*expected, *((queued_at, one, owner) for one in ids if (queued_at, one) not in there)])
        elif expected and dice.random() < 0.5:
            number = dice.randrange(len(expected))
            assert found.pop(number) == expected.pop(number)
        else:
            gone = [one for one in ids if (queued_at, one) in there]
            assert [one for part in found.common(queued_at, [ids]) for one in part] == gone
            assert found.discard(queued_at, ids) == len(gone)
            expected = [one for one in expected if one[:2] not in {(queued_at, one) for one in gone}]
        assert list(found) == expected
        assert len(found) == len(expected)
        assert [found[number] for number in range(len(expected))] == expected
        assert found[:3] == expected[:3]
        assert not expected or found[-1] == expected[-1]
        assert [found.number_of(one) for one in expected] == list(range(len(expected)))
        probe = queued_at, first, owner
        assert (probe in found) == (probe in expected)
        assert bisect_left(found, probe) == bisect_left(expected, probe)
        assert found.first_behind(probe[:2], lambda *job: job) == bisect_left(expected, probe)
        parts = found._parts
        assert all(one[0] < other[0] or one[2] + 1 < other[1] for one, other in pairwise(parts)), parts


@given(ids=st.sets(st.integers(0, 30)), others=st.sets(st.integers(0, 30)))
def test_minus_is_the_difference(ids: set[int], others: set[int]) -> None:
    found = minus(ranges(ids), ranges(others))
    assert [one for part in found for one in part] == sorted(ids - others)


def ranges(ids: set[int]) -> list[range]:
    found: list[range] = []
    for one in sorted(ids):
        first = found.pop().start if found and found[-1].stop == one else one
        found.append(range(first, one + 1))
    return found


def test_an_array_costs_the_planner_the_same_whatever_its_size() -> None:
    key = class_key(job(1))

    def calls(tasks: int) -> int:
        planner = Planner(PlannerState((node(cpus=4),), Settings()))
        planner.state.apply(TasksQueued(1, key, NOW, (range(2, 2 + tasks),)))
        count = 0

        def note(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(note)
        plan = planner.plan(NOW)
        planner.state.apply(TasksQueued(1, key, NOW, (range(2 + tasks // 2, 2 + tasks),)))
        planner.fork().plan(NOW)
        sys.setprofile(None)
        assert [start.job_id for start in plan.starts] == [2, 3, 4, 5]
        assert planner.state.snapshot(NOW, 2).pending[0].jobs == (
            PendingJob(2 + tasks // 2, NOW),
            PendingJob(3 + tasks // 2, NOW),
        )
        return count

    # The first call fills caches.
    calls(10)
    assert calls(1_000_000) < 1.5 * calls(1000)
