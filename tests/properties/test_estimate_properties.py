"""What must hold of every range of starts, whatever the machines and the queue."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st
from strategies import settings, snapshots

from gpusched import testing
from gpusched.model.job import Job, Request
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Prediction, Snapshot
from gpusched.model.value import replace
from gpusched.scheduler.forecast import StartForecast
from gpusched.scheduler.planner import decide
from gpusched.scheduler.whatif import alternatives
from gpusched.testing import NOW, job

predictions = st.dictionaries(
    st.integers(1, 120), st.floats(0, 5000).map(lambda m: Prediction(m / 2, m, m * 2, 5)), max_size=30
)


def with_one_more(snapshot: Snapshot, newcomer: Job) -> Snapshot:
    (waiting,) = testing.pending([newcomer])
    classes = {one.key: one for one in snapshot.pending}
    before = classes.get(waiting.key)
    if before is not None:
        waiting = PendingClass(before.key, (*before.jobs, *waiting.jobs), before.total + 1)
    classes[waiting.key] = waiting
    ordered = sorted(classes.values(), key=lambda one: (one.jobs[0].queued_at, one.jobs[0].id))
    return replace(snapshot, pending=tuple(ordered))


@given(snapshots(), settings(), predictions)
def test_the_earliest_start_is_not_after_the_latest_nor_before_now(
    case: tuple[Snapshot, list[Job]], chosen: Settings, known: dict[int, Prediction]
) -> None:
    snapshot, waiting = case
    found = StartForecast(snapshot, chosen, known.get).ranges([one.id for one in waiting])
    assert set(found) == {one.id for one in waiting}
    for one in found.values():
        assert one.low_at is None or one.low_at >= snapshot.now
        if one.high_at is not None:
            assert one.low_at is not None
            assert one.low_at <= one.high_at


@given(snapshots(), settings(), predictions)
def test_a_planned_start_is_estimated_as_now(
    case: tuple[Snapshot, list[Job]], chosen: Settings, known: dict[int, Prediction]
) -> None:
    snapshot, waiting = case
    found = StartForecast(snapshot, chosen, known.get).ranges([one.id for one in waiting])
    for start in decide(snapshot, chosen).starts:
        assert (found[start.job_id].low_at, found[start.job_id].high_at) == (snapshot.now, snapshot.now)


@given(snapshots(), settings(), st.sampled_from([None, 60, 3600]), st.integers(0, 2))
def test_a_later_lower_job_does_not_move_the_first_pending_start(
    case: tuple[Snapshot, list[Job]], chosen: Settings, limit_s: int | None, gpus: int
) -> None:
    snapshot, _ = case
    chosen = replace(chosen, priority=replace(chosen.priority, backfill_depth=1))
    first = decide(snapshot, chosen).first_blocked
    if first is None:
        return
    newcomer = job(900, uid=1002, request=Request(gpus=gpus), time_limit_s=limit_s, nice=9000, submit_at=NOW)
    before = StartForecast(snapshot, chosen, lambda job_id: None).ranges([first])
    after = StartForecast(with_one_more(snapshot, newcomer), chosen, lambda job_id: None).ranges([first])
    assert after[first].high_at == before[first].high_at


@given(snapshots())
def test_equal_questions_get_equal_answers(case: tuple[Snapshot, list[Job]]) -> None:
    snapshot, waiting = case
    usual = Settings(priority=PrioritySettings())
    ids = [one.id for one in waiting]
    once, again = (StartForecast(snapshot, usual, lambda job_id: None).ranges(ids) for _ in range(2))
    assert once == again


@given(snapshots(), settings())
def test_advice_holds_for_every_blocked_job(case: tuple[Snapshot, list[Job]], chosen: Settings) -> None:
    snapshot, _ = case
    started = {start.job_id for start in decide(snapshot, chosen).starts}
    for waiting in snapshot.pending:
        for one in waiting.jobs[:1]:
            found = alternatives(snapshot, chosen, one.id)
            assert not (found and one.id in started)
            for advice in found:
                if advice.is_now:
                    assert one.id in starts_of(changed(snapshot, waiting.key, one, advice.change), chosen)
                else:
                    assert advice.starts_at > snapshot.now


def starts_of(snapshot: Snapshot, chosen: Settings) -> set[int]:
    return {start.job_id for start in decide(snapshot, chosen).starts}


def changed(snapshot: Snapshot, key: ClassKey, job: PendingJob, change: Mapping[str, object]) -> Snapshot:
    """The snapshot with this job asking for something else, made without the code under test."""
    left = []
    for waiting in snapshot.pending:
        jobs = tuple(other for other in waiting.jobs if other.id != job.id)
        if jobs:
            left.append(PendingClass(waiting.key, jobs, waiting.total - (len(waiting.jobs) - len(jobs))))
    own = {name: value for name, value in change.items() if name == "time_limit_s"}
    request = replace(key.terms.request, **{name: value for name, value in change.items() if name not in own})
    other = replace(key.with_terms(request=request), **own)
    same = [waiting for waiting in left if waiting.key == other]
    jobs = tuple(sorted([job, *(same[0].jobs if same else ())], key=lambda one: (one.queued_at, one.id)))
    left = [waiting for waiting in left if waiting.key != other]
    left.append(PendingClass(other, jobs, 1 + (same[0].total if same else 0)))
    return replace(snapshot, pending=tuple(sorted(left, key=lambda one: (one.jobs[0].queued_at, one.jobs[0].id))))
