"""The play of the future: who makes room and comes back, windows, deadlines, use that counts on."""

from __future__ import annotations

from typing import Any

from gpusched.lifecycle.dependencies import Parent, parse_dependency
from gpusched.model.cluster import Allocation, HostSample
from gpusched.model.job import Job
from gpusched.model.planner_settings import CeilingSettings, PreemptSettings, PrioritySettings
from gpusched.model.queue_settings import QosSettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import LimitInForce, PendingJob, Placement, Snapshot, Usage, Window
from gpusched.model.states import JobState
from gpusched.model.table_settings import UserLimit
from gpusched.model.value import replace
from gpusched.scheduler.forecast import UNKNOWN, Arrival, Future, StartForecast, StartRange, by_limit
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.priority import class_key
from gpusched.testing import NOW, allocation, job, node, request, share, snapshot

GRACE = 30.0
URGENT = replace(
    Settings(),
    qos={"low": QosSettings("low"), "high": QosSettings("high", tier=1, preempts=("low",))},
    preempt=PreemptSettings(min_run_s=300.0),
)


def held(job_id: int, *gpus: int, ends_in: float | None = None, **parts: Any) -> Allocation:
    end_at = None if ends_in is None else NOW + ends_in
    return allocation(job_id, "n1", gpus, expected_end_at=end_at, **{"start_at": NOW - 600, "user": "ann", **parts})


def waits(job_id: int, gpus: int = 1, limit_s: int | None = None, **parts: Any) -> Job:
    fields: dict[str, Any] = {"time_limit_s": limit_s, "submit_at": NOW - 1000 + job_id}
    return job(job_id, request=request(gpus=gpus, cpus=parts.pop("cpus", 1.0)), **{**fields, **parts})


def plays(state: Snapshot, wanted: list[int], chosen: Settings, cycles: int = 50) -> dict[int, float]:
    """Seconds from now until each of these starts."""
    found = Future(Planner.from_snapshot(state, chosen), state.now, by_limit).play(wanted, cycles)
    return {job_id: at - NOW for job_id, at in found.items()}


def test_a_victim_has_its_grace_and_restarts_afterwards() -> None:
    running = [held(9, 0, ends_in=7200, qos="low", grace_s=GRACE)]
    state = snapshot(node(gpus=1), running=running, waiting=[waits(1, limit_s=600, qos="high"), waits(2, qos="low")])
    found = plays(state, [1, 9, 2], URGENT)
    # The one that made room goes before others of its kind, and has its whole limit again.
    assert found == {1: GRACE, 9: GRACE + 600, 2: GRACE + 600 + 7800}


def test_a_victim_without_requeue_does_not_restart() -> None:
    running = [held(9, 0, ends_in=7200, qos="low", grace_s=GRACE, can_requeue=False)]
    state = snapshot(node(gpus=1), running=running, waiting=[waits(1, limit_s=600, qos="high"), waits(2, qos="low")])
    assert plays(state, [1, 9, 2], URGENT) == {1: GRACE, 2: GRACE + 600}


def test_a_young_run_is_protected_until_its_minimum_run_time() -> None:
    running = [held(9, 0, ends_in=7200, qos="low", grace_s=GRACE, start_at=NOW - 100)]
    state = snapshot(node(gpus=1), running=running, waiting=[waits(1, limit_s=600, qos="high")])
    assert plays(state, [1], URGENT) == {1: 200 + GRACE}


def test_a_suspended_job_resumes_when_there_is_room_and_ends_later() -> None:
    suspending = replace(URGENT, preempt=PreemptSettings(mode="suspend", min_run_s=300.0))
    running = [held(9, ends_in=1000, qos="low", cpus=16.0, can_suspend=True)]
    urgent = waits(1, 0, limit_s=600, qos="high", cpus=16.0)
    state = snapshot(node(), running=running, waiting=[urgent, waits(2, 0, qos="low", cpus=16.0)])
    # It stood still for the 600 s of the other, with 1000 s left to run.
    assert plays(state, [1, 2], suspending) == {1: 0, 2: 1600}


def test_a_calendar_window_excludes_jobs_until_it_closes() -> None:
    kept = Placement("n1", (share(0),), 0.0, 0)
    window = Window("course", NOW + 600, NOW + 4200, (kept,), users=("teacher",))
    state = replace(snapshot(node(gpus=1), waiting=[waits(1, limit_s=3600)]), windows=(window,))
    assert plays(state, [1], Settings()) == {1: 4200}


def test_a_member_starts_inside_when_the_window_opens() -> None:
    kept = Placement("n1", (share(0),), 4.0, 0)
    window = Window("course", NOW + 600, NOW + 4200, (kept,), users=("ann",))
    state = replace(snapshot(node(gpus=1), waiting=[waits(1, limit_s=3600, reservation="course")]), windows=(window,))
    assert plays(state, [1], Settings()) == {1: 600}


def test_a_member_starts_on_a_node_of_its_reservation_without_maintenance() -> None:
    kept = [Placement(name, (share(0, name),), 4.0, 0) for name in ("n1", "n2")]
    course = Window("course", NOW - 60, NOW + 7200, tuple(kept), users=("ann",))
    whole = [Placement(name, (share(0, name),), 16.0, 0, is_exclusive=True) for name in ("n1", "n2")]
    waiting = [waits(1, limit_s=3600, reservation="course")]
    for closed, starts_s in ((whole[:1], 0), (whole, 1200)):
        upkeep = Window("upgrade", NOW + 600, NOW + 1200, tuple(closed))
        state = replace(snapshot(node("n1", gpus=1), node("n2", gpus=1), waiting=waiting), windows=(course, upkeep))
        assert plays(state, [1], Settings()) == {1: starts_s}


def test_a_job_that_would_miss_its_deadline_never_starts() -> None:
    queue = [waits(1, limit_s=600, deadline_at=NOW + 2000), waits(2, limit_s=600)]
    state = snapshot(node(gpus=1), running=[held(9, 0, ends_in=3600)], waiting=queue)
    found = StartForecast(state, Settings(), lambda job_id: None).ranges([1, 2])
    assert found == {1: UNKNOWN, 2: StartRange(NOW + 3600, NOW + 3600)}


def test_what_was_reserved_is_free_once_its_job_has_missed_its_deadline() -> None:
    running = [held(9, 0, ends_in=600), held(8, 1, ends_in=3600)]
    wide = waits(1, gpus=2, limit_s=600, deadline_at=NOW + 1500)
    state = snapshot(node(gpus=2), running=running, waiting=[wide, waits(2, limit_s=7200)])
    # The last start of the first that meets its deadline is after 900 s.
    assert plays(state, [1, 2], Settings(priority=PrioritySettings(order="fifo"))) == {2: 900}


def test_a_resumed_job_has_the_rest_of_its_time() -> None:
    suspending = replace(URGENT, preempt=PreemptSettings(mode="suspend", min_run_s=300.0))
    running = [held(9, ends_in=1000, qos="low", cpus=16.0, can_suspend=True)]
    urgent = waits(1, 0, limit_s=600, qos="high", cpus=16.0)
    state = snapshot(node(), running=running, waiting=[urgent])
    future = Future(Planner.from_snapshot(state, suspending), NOW, by_limit)
    assert future.play([1], 50) == {1: NOW}
    while (run := future._state.runs[9]).is_suspended:
        future._step()
    assert (run.first.start_at, run.first.expected_end_at) == (NOW - 600 + 600, NOW + 1000 + 600)


def test_a_limit_of_a_user_ends_when_it_was_set_to() -> None:
    limit = LimitInForce(UserLimit("ann", max_gpus=0.0, until_at=NOW + 900))
    state = replace(snapshot(node(gpus=1), waiting=[waits(1, user="ann")]), limits=(limit,))
    assert plays(state, [1], Settings()) == {1: 900}


def test_usage_of_ended_runs_still_counts_for_the_shares() -> None:
    chosen = replace(Settings(), priority=PrioritySettings(order="fairshare", half_life_s=1e9))
    usage = (Usage("a", "ann", Resources(gpus=1.0), NOW), Usage("a", "bob", Resources(gpus=900.0), NOW))
    queue = [
        *(waits(number, limit_s=1000, user="ann", account="a") for number in (1, 3, 5)),
        *(waits(number, limit_s=1000, user="bob", account="a", uid=1001) for number in (2, 4)),
    ]
    state = replace(snapshot(node(gpus=1), waiting=queue), usage=usage)
    order = sorted(plays(state, [1, 2, 3, 4, 5], chosen).items(), key=lambda pair: pair[1])
    assert [job_id for job_id, _ in order] == [1, 2, 3, 4, 5], "they take turns, for each run is counted"


def test_measured_load_applies_to_the_present_only() -> None:
    load = HostSample(NOW, "n1", 16, 65536, 60000, cpu_fraction=0.99)
    busy = snapshot(node(gpus=1, load=load), running=[held(9, 0, ends_in=600)], waiting=[waits(1)])
    for chosen in (
        Settings(ceiling=CeilingSettings(cpu_fraction=0.5)),
        Settings(priority=PrioritySettings(order="utilisation")),
    ):
        assert plays(busy, [1], chosen) == {1: 600}


def test_ends_close_together_cost_one_plan() -> None:
    running = [held(number, number - 1, ends_in=36_000 + number) for number in range(1, 9)]
    state = snapshot(node(gpus=8), running=running, waiting=[waits(10, gpus=8, limit_s=60)])
    assert plays(state, [10], Settings(), cycles=2) == {10: 36_008}


def test_a_run_on_several_nodes_ends_on_all_of_them_at_once() -> None:
    running = [
        allocation(9, "n1", [0], expected_end_at=NOW + 60, start_at=NOW - 60),
        allocation(9, "n2", [0], expected_end_at=NOW + 60, start_at=NOW - 60),
    ]
    state = snapshot(node("n1", gpus=1), node("n2", gpus=1), running=running, waiting=[waits(1, limit_s=5), waits(2)])
    assert plays(state, [1, 2], Settings()) == {1: 60, 2: 60}


# --- jobs that wait for others ------------------------------------------------------------------------


def after(text: str, job_id: int, at: float = NOW, **parents: Any) -> Arrival:
    one = waits(job_id, limit_s=100)
    known = {int(name[1:]): parent for name, parent in parents.items()}
    return Arrival(at, class_key(one), PendingJob(one.id, one.queued_at), parse_dependency(text), known)


def follows(arrivals: list[Arrival], wanted: list[int], gpus: int = 4) -> dict[int, float]:
    """Seconds until each starts, beside job 9 that ends in 600 s and job 1 that starts now for 1000 s."""
    state = snapshot(node(gpus=gpus), running=[held(9, 0, ends_in=600)], waiting=[waits(1, limit_s=1000)])
    found = Future(Planner.from_snapshot(state, Settings()), state.now, by_limit, arrivals).play(wanted, 50)
    return {job_id: at - NOW for job_id, at in found.items()}


RUNS = Parent(JobState.RUNNING, NOW - 600)
WAITS = Parent(JobState.PENDING)


def test_dependants_start_after_their_parents() -> None:
    arrivals = [
        after("afterok:9", 20, j9=RUNS),
        after("afterany:9:1", 21, j9=RUNS, j1=WAITS),
        after("afterok:9?afterok:1", 22, j9=RUNS, j1=WAITS),
        after("after:1", 23, j1=WAITS),
        after("afterok:20", 24, j20=WAITS),
    ]
    assert follows(arrivals, [20, 21, 22, 23, 24]) == {20: 600, 21: 1000, 22: 600, 23: 0, 24: 700}


def test_a_dependency_on_failure_or_an_endless_job_gives_no_start() -> None:
    arrivals = [after("afternotok:9", 20, j9=RUNS), after("afterok:77", 21, j77=WAITS)]
    assert follows(arrivals, [20, 21]) == {}


def test_a_begin_time_applies_beside_the_dependency() -> None:
    arrivals = [after("afterok:9", 20, NOW + 900, j9=RUNS), after("afterok:9", 21, NOW + 300, j9=RUNS)]
    assert follows(arrivals, [20, 21]) == {20: 900, 21: 600}


def test_an_older_released_dependant_delays_a_pending_job() -> None:
    older = after("afterok:9", 0, j9=RUNS)
    state = snapshot(node(gpus=1), running=[held(9, 0, ends_in=600)], waiting=[waits(1, limit_s=1000)])
    found = Future(Planner.from_snapshot(state, Settings()), state.now, by_limit, [older]).play([0, 1], 50)
    assert found == {0: NOW + 600, 1: NOW + 700}
