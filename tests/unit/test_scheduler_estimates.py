"""When jobs start: scenarios of the range, and how good past ranges were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpusched.addons.simulate.replay import queue_position
from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.job import Job
from gpusched.model.queue_settings import QosSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Estimate, PendingJob, Placement, Prediction, Snapshot, Window
from gpusched.model.value import replace
from gpusched.scheduler.forecast import (
    CLASSES,
    MAX_CYCLES,
    MAX_VISITS,
    SWIFTER,
    UNKNOWN,
    WHOLE_PLAN,
    Accuracy,
    Arrival,
    StartForecast,
    StartRange,
    accuracy,
)
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.priority import class_key
from gpusched.testing import NOW, allocation, job, node, request, snapshot

FAR_OFF = (Window("upgrade", NOW + 1e8, NOW + 1e8 + 60, (Placement("n1", (), 1.0, 0),)),)
"""While the calendar has anything, each plan examines every class."""

HOUR = 3600.0
MINUTE = 60.0


def held(job_id: int, *gpus: int, ends_in: float | None = None, **parts: Any) -> Allocation:
    end_at = None if ends_in is None else NOW + ends_in
    return allocation(job_id, "n1", gpus, expected_end_at=end_at, **{"start_at": NOW - 600, **parts})


def waits(job_id: int, gpus: int = 1, limit_s: int | None = None, **parts: Any) -> Job:
    return job(job_id, request=request(gpus=gpus), time_limit_s=limit_s, submit_at=NOW - 1000 + job_id, **parts)


def usual(**median_s: float) -> dict[int, Prediction]:
    return {int(name[1:]): Prediction(m * 0.5, m, m * 2, 9) for name, m in median_s.items()}


def ranges(
    machine: NodeView,
    running: list[Allocation],
    waiting: list[Job],
    known: Mapping[int, Prediction] | None = None,
    **parts: Any,
) -> dict[int, tuple[float | None, float | None]]:
    """Minutes from now, early and late."""
    known = known or {}
    now = snapshot(machine, running=running, waiting=waiting)
    found = StartForecast(now, Settings(), known.get).ranges([one.id for one in waiting])
    return {
        job_id: tuple(None if at is None else (at - NOW) / MINUTE for at in (one.low_at, one.high_at))  # type: ignore[misc]
        for job_id, one in found.items()
    }


def test_a_job_that_starts_now_starts_now() -> None:
    assert ranges(node(gpus=1), [], [waits(1)]) == {1: (0, 0)}


def test_with_time_limits_alone_both_bounds_are_equal() -> None:
    assert ranges(node(gpus=1), [held(9, 0, ends_in=HOUR)], [waits(1, limit_s=600)]) == {1: (60, 60)}


def test_a_preemption_forbidden_for_now_is_the_latest_start() -> None:
    """What runs has no limit, so that no reservation has a start; its protection ends all the same."""
    rules = replace(
        Settings(),
        qos={"urgent": QosSettings("urgent", tier=1, preempts=("low",)), "low": QosSettings("low")},
        preempt=replace(Settings().preempt, min_run_s=1200.0),
    )
    now = snapshot(node(gpus=1), running=[held(9, 0, qos="low", grace_s=60.0)], waiting=[waits(1, qos="urgent")])
    (found,) = StartForecast(now, rules, {}.get).ranges([1]).values()
    assert found.high_at is not None
    assert 600 <= found.high_at - NOW <= 660


def test_jobs_follow_each_other() -> None:
    found = ranges(node(gpus=1), [held(9, 0, ends_in=HOUR)], [waits(1, limit_s=600), waits(2, limit_s=600), waits(3)])
    assert found == {1: (60, 60), 2: (70, 70), 3: (80, 80)}


def test_earlier_runs_move_the_earliest_start_forward() -> None:
    found = ranges(node(gpus=1), [held(9, 0, ends_in=HOUR)], [waits(1, limit_s=3000), waits(2)], usual(j9=1200, j1=600))
    assert found == {1: (10, 60), 2: (20, 110)}


def test_without_a_limit_there_is_no_latest_start() -> None:
    assert ranges(node(gpus=1), [held(9, 0)], [waits(1)]) == {1: (None, None)}
    assert ranges(node(gpus=1), [held(9, 0)], [waits(1)], usual(j9=1200)) == {1: (10, None)}


def test_a_run_that_outlived_similar_jobs_is_compared_with_its_limit() -> None:
    old = held(9, 0, ends_in=HOUR, start_at=NOW - 5000)
    assert ranges(node(gpus=1), [old], [waits(1)], usual(j9=1200)) == {1: (60, 60)}
    assert ranges(node(gpus=1), [held(9, 0, start_at=NOW - 5000)], [waits(1)], usual(j9=1200)) == {1: (None, None)}


def test_a_prediction_never_exceeds_the_limit() -> None:
    assert ranges(node(gpus=1), [held(9, 0, ends_in=HOUR)], [waits(1)], usual(j9=90_000)) == {1: (60, 60)}


def test_a_job_behind_one_without_a_limit_is_unknown() -> None:
    found = ranges(node(gpus=1), [held(9, 0, ends_in=HOUR)], [waits(1), waits(2)])
    assert found == {1: (60, 60), 2: (None, None)}


def test_the_horizon_is_not_taken_for_a_start() -> None:
    for windows, last in ((FAR_OFF, 4 * SWIFTER // WHOLE_PLAN), ((), 4 * SWIFTER)):
        queue = [waits(number, limit_s=600) for number in range(1, last + 4)]
        now = replace(snapshot(node(gpus=1), waiting=queue), windows=windows)
        found = StartForecast(now, Settings(), lambda job_id: None).ranges([one.id for one in queue], 4)
        assert found[last] == StartRange(NOW + 600 * (last - 1), NOW + 600 * (last - 1))
        assert found[last + 1] == UNKNOWN


def test_a_truncated_class_gives_no_estimate_for_unseen_jobs() -> None:
    queue = [waits(number, limit_s=600) for number in range(1, 6)]
    now = snapshot(node(gpus=1), waiting=queue, front=2)
    found = StartForecast(now, Settings(), lambda job_id: None).ranges([1, 2, 5])
    assert found[1] == StartRange(NOW, NOW)
    assert found[2] == StartRange(NOW + 600, NOW + 600)
    assert found[5] is UNKNOWN


def test_a_job_blocked_by_measured_load_is_unknown() -> None:
    from gpusched.model.cluster import HostSample
    from gpusched.model.planner_settings import CeilingSettings

    load = HostSample(NOW, "n1", 16, 65536, 60000, cpu_fraction=0.99)
    now = snapshot(node(gpus=1, load=load), running=[held(9, ends_in=60)], waiting=[waits(1)])
    settings = Settings(ceiling=CeilingSettings(cpu_fraction=0.5))
    assert StartForecast(now, settings, lambda job_id: None).ranges([1]) == {1: UNKNOWN}


def test_a_drained_node_gives_no_start() -> None:
    assert ranges(node(gpus=1, why_not="drained"), [], [waits(1)]) == {1: (None, None)}


def test_a_job_with_a_begin_time_takes_its_turn() -> None:
    later = waits(2, limit_s=600)
    arrival = Arrival(NOW + 1800, class_key(later), PendingJob(2, NOW + 1800))
    now = snapshot(node(gpus=1), waiting=[waits(1, limit_s=3600)])
    found = StartForecast(now, Settings(), lambda job_id: None, [arrival]).ranges([1, 2])
    assert found == {1: StartRange(NOW, NOW), 2: StartRange(NOW + 3600, NOW + 3600)}


def test_a_run_past_its_limit_is_about_to_end() -> None:
    assert ranges(node(gpus=1), [held(9, 0, ends_in=-5)], [waits(1)]) == {1: (0, 0)}


def test_gaps_are_filled_in_the_future_too() -> None:
    queue = [waits(1, gpus=2, limit_s=3600), waits(2, limit_s=1200)]
    found = ranges(node(gpus=2), [held(8, 0, ends_in=HOUR), held(9, 1, ends_in=1800)], queue)
    assert found == {1: (60, 60), 2: (30, 30)}


def test_classes_are_limited_to_those_before_the_wanted_job() -> None:
    queue = [waits(number, limit_s=600 + number) for number in range(1, 201)]
    now = snapshot(node(gpus=1), waiting=queue)
    assert StartForecast(now, Settings(), lambda job_id: None).ranges([3]) == {
        3: StartRange(NOW + 601 + 602, NOW + 601 + 602)
    }


@pytest.mark.parametrize(("classes", "plans"), [(1, MAX_CYCLES), (60, MAX_CYCLES), (600, MAX_VISITS // 600)])
def test_the_work_is_bounded_for_any_queue(classes: int, plans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(plain: Any) -> Any:
        def plan(*args: Any) -> Any:
            nonlocal made
            made += 1
            return plain(*args)

        return plan

    monkeypatch.setattr(Planner, "play", counted(Planner.play))
    queue = [waits(number, limit_s=6000 * (1 + number % classes)) for number in range(1, 700)]
    now = snapshot(node(gpus=1), running=[held(9999, 0, ends_in=HOUR)], waiting=queue)
    StartForecast(replace(now, windows=FAR_OFF), Settings(), lambda job_id: None).ranges([one.id for one in queue])
    # The more classes, the more each plan costs.
    assert plans <= made <= SWIFTER * plans // (WHOLE_PLAN + min(classes, 60) // (2 * CLASSES))
    made = 0
    StartForecast(now, Settings(), lambda job_id: None).ranges([one.id for one in queue])
    # After the first, one for each start, where that is enough.
    assert made == min(SWIFTER * plans, 1 + len(queue))


def test_the_snapshot_is_not_changed() -> None:
    now = snapshot(node(gpus=1), running=[held(9, 0, ends_in=HOUR)], waiting=[waits(1), waits(2)])
    again = snapshot(node(gpus=1), running=[held(9, 0, ends_in=HOUR)], waiting=[waits(1), waits(2)])
    StartForecast(now, Settings(), lambda job_id: None).ranges([1, 2])
    assert now == again


# --- the place in the queue ---------------------------------------------------------------------------


def queue_of_five() -> Snapshot:
    return snapshot(node(), waiting=[waits(1), waits(2, nice=-500), waits(3), waits(4, gpus=2), waits(5, nice=900)])


@pytest.mark.parametrize(("job_id", "place"), [(2, 1), (1, 2), (3, 3), (4, 4), (5, 5)])
def test_the_place_follows_the_order(job_id: int, place: int) -> None:
    assert queue_position(queue_of_five(), Settings(), job_id) == (place, 5)


def test_an_unknown_job_has_no_place() -> None:
    assert queue_position(queue_of_five(), Settings(), 77) is None


# --- how good estimates were --------------------------------------------------------------------------

WAITING = Estimate(1, NOW, NOW + 100, NOW + 500)


def started(after_s: float, **parts: Any) -> Estimate:
    return replace(WAITING, start_at=NOW + after_s, **parts)


def test_without_estimates_there_is_no_accuracy() -> None:
    assert accuracy([]) is None
    assert accuracy([WAITING, started(5, high_at=None)]) is None


def test_accuracy_is_the_share_inside_and_the_median_error() -> None:
    found = accuracy([started(100), started(300), started(5000), WAITING])
    assert found == Accuracy(3, 2 / 3, 200.0)


@pytest.mark.parametrize(("after_s", "inside"), [(39, 0), (40, 1), (560, 1), (561, 0)])
def test_a_minute_more_or_less_is_inside(after_s: float, inside: int) -> None:
    found = accuracy([started(after_s)])
    assert found is not None
    assert found.inside == inside
