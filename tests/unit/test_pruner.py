"""Which jobs the daemon forgets, when, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from lab import ANN, ENV, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.watch.pruning import Pruner
from gpusched.errors import GpuschedError, NotFound, Refused, StoreFull
from gpusched.model.alerts import Alert
from gpusched.model.commands import Cancel, Selection
from gpusched.model.job import ArraySpec, Job
from gpusched.model.pipeline import Pipeline
from gpusched.model.settings import HistorySettings, LifeSettings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports import Changes, JobFilter
from gpusched.ports.tables import ALERTS, PIPELINES, ChangedRows
from gpusched.testing import launch

DAY = 86400.0


def lab(keep_days: float = 10.0, **sections: object) -> Lab:
    return Lab(history=HistorySettings(keep_days), **sections)


def prune(lab: Lab) -> list[Job]:
    """Let the pruner bite until it rests; the jobs whose folder went."""
    folders: list[Job] = []
    pruner = Pruner(lab.ticker, folders.append)
    for _ in range(10_000):
        if not pruner.bite():
            break
    else:
        raise AssertionError("it never rests")
    assert pruner.pruned == len(folders)
    return folders


def left(lab: Lab) -> set[int]:
    return {one.id for one in lab.store.jobs(JobFilter())}


def finish(lab: Lab, turns: int = 4) -> None:
    for _ in range(turns):
        lab.tick(20)


def test_jobs_are_pruned_the_configured_days_after_their_end() -> None:
    a = lab(10)
    first = a.submit()
    finish(a)
    a.tick(5 * DAY)
    second = a.submit()
    waiting = a.submit(hold=True)
    finish(a)
    a.tick(5.5 * DAY)
    assert [one.id for one in prune(a)] == [first]
    assert left(a) == {second, waiting}
    a.tick(100 * DAY)
    prune(a)
    assert left(a) == {waiting}
    assert a.submit() == waiting + 1


def test_zero_keeps_jobs_for_ever_and_checkpoints_are_waited_for() -> None:
    for history, life in (
        (HistorySettings(0), LifeSettings()),
        (HistorySettings(1), LifeSettings(checkpoint_keep_s=1e9)),
    ):
        a = Lab(history=history, life=life)
        job_id = a.submit()
        finish(a)
        a.tick(1000 * DAY)
        assert prune(a) == []
        assert left(a) == {job_id}


def test_jobs_named_by_pending_ones_are_kept() -> None:
    a = lab()
    parent, other, array = a.submit(), a.submit(), a.submit(array=ArraySpec("0-2"))
    child = a.submit(dependency=f"afterok:{parent},afterok:{array}_1={array + 2}", hold=True)
    finish(a)
    a.tick(100 * DAY)
    prune(a)
    assert left(a) == {parent, array, array + 1, array + 2, array + 3, child}
    assert other not in left(a)
    a.restart()
    a.ask(Cancel(ANN, Selection(ids=(child,))))
    prune(a)
    assert left(a) == {child}


def test_an_array_followed_task_by_task_is_kept() -> None:
    a = lab()
    array = a.submit(array=ArraySpec("0-2"))
    child = a.submit(array=ArraySpec("0-2"), dependency=f"aftercorr:{array}", hold=True)
    finish(a)
    a.tick(100 * DAY)
    prune(a)
    assert left(a) == {array, array + 1, array + 2, array + 3, child}


def test_a_job_with_a_pending_fallback_is_kept() -> None:
    a = lab()
    a.outcome = SimulatedOutcome(runs_s=10, exit_code=1)
    failed = a.submit(fallback="echo sorry", launch=launch("false"))
    a.tick()
    a.tick(20)
    a.tick(1)
    (fallback,) = [one for one in a.store.jobs(JobFilter()) if one.spec.fallback_of == failed]
    a.scheduler.state.put_job(replace(a.scheduler.state.jobs[fallback.id], hold="user"), a.clock.now())
    assert not a.scheduler.state.jobs[fallback.id].state.is_final
    a.clock.advance(100 * DAY)
    prune(a)
    assert left(a) == {failed, fallback.id}


def test_an_array_is_pruned_whole_and_not_while_a_task_is_pending() -> None:
    a = lab()
    a.outcomes = {}
    array = a.submit(array=ArraySpec("0-3", throttle=1))
    a.tick()
    a.tick(20)
    a.clock.advance(100 * DAY)
    assert prune(a) == []
    assert array + 1 in left(a)
    for _ in range(6):
        a.tick(20)
    a.clock.advance(100 * DAY)
    prune(a)
    assert left(a) == set()
    assert a.submit() == array + 5


def test_a_pipeline_is_pruned_whole() -> None:
    a = lab()
    a.store.commit(Changes(rows=ChangedRows({PIPELINES: {1: Pipeline(1, 1000, "ann", "night", a.clock.now(), "")}})))
    early = a.submit(pipeline="p1", step="a")
    finish(a)
    a.tick(50 * DAY)
    late = a.submit(pipeline="p1", step="b")
    finish(a)
    a.tick(5 * DAY)
    prune(a)
    assert left(a) == {early, late}
    a.tick(50 * DAY)
    prune(a)
    assert (left(a), a.store.find(PIPELINES, [1])) == (set(), {})


def test_a_job_with_a_pending_alert_is_kept() -> None:
    a = lab()
    job_id = a.submit()
    finish(a)
    a.store.commit(
        Changes(rows=ChangedRows({ALERTS: {"x": Alert("x", "end", ("end",), 1000, a.clock.now(), job_id=job_id)}}))
    )
    a.ticker.reload()
    a.clock.advance(100 * DAY)
    assert prune(a) == []
    a.store.commit(Changes(rows=ChangedRows({ALERTS: {"x": None}})))
    a.ticker.reload()
    assert [one.id for one in prune(a)] == [job_id]


def test_scripts_are_pruned_with_their_last_job() -> None:
    a = lab()
    ids = [a.submit(launch=launch("true", script_sha=sha)) for sha in ("1" * 64, "2" * 64, "1" * 64)]
    a.store.commit(Changes(payloads={"1" * 64: b"one", "2" * 64: b"two"}))
    finish(a)
    a.tick(100 * DAY)
    again = a.submit(launch=launch("true", script_sha="1" * 64), hold=True)
    prune(a)
    assert left(a) == {again}
    assert a.store.payload_shas("", 9) == ["0" * 64, "1" * 64]
    assert a.store.payload("0" * 64) == ENV
    assert len(ids) == 3


def test_pruning_pauses_while_a_client_waits() -> None:
    a = lab()
    a.submit()
    finish(a)
    a.tick(100 * DAY)
    answers: list[object] = []
    a.ticker.submit(a.submission(), answers.append)
    assert not a.ticker.is_quiet
    assert prune(a) == []
    a.tick()
    assert len(prune(a)) == 1


def test_a_full_disk_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    a = lab()
    a.submit()
    finish(a)
    a.tick(100 * DAY)

    def full(jobs: Iterable[int], pipelines: Iterable[int] = ()) -> None:
        raise StoreFull("the disk is full", "free some")

    with monkeypatch.context() as patch:
        patch.setattr(a.store, "prune", full)
        pruner = Pruner(a.ticker, lambda job: None)
        assert pruner.bite() is False
        assert pruner.bite() is False, "it rests"
    assert len(prune(a)) == 1


def test_naming_a_pruned_job_says_so() -> None:
    a = lab()
    job_id = a.submit()
    finish(a)
    a.tick(100 * DAY)
    prune(a)
    (gone,) = a.ask(Cancel(ANN, Selection(ids=(job_id,))))
    (never,) = a.ask(Cancel(ANN, Selection(ids=(99,))))
    assert isinstance(gone, NotFound)
    assert isinstance(never, GpuschedError)
    assert f"no job {job_id} any more" in gone.message
    assert "any more" not in never.message
    with pytest.raises(Refused, match="any more to depend on"):
        a.submit(dependency=f"afterok:{job_id}")


def test_the_walk_terminates_with_jobs_that_must_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    a = lab()
    parents = [a.submit() for _ in range(40)]
    a.submit(dependency=",".join(f"afterok:{one}" for one in parents), hold=True)
    finish(a, 60)
    assert {one.state for one in a.store.jobs(JobFilter(ids=frozenset(parents)))} == {JobState.COMPLETED}
    a.tick(100 * DAY)
    assert prune(a) == []
