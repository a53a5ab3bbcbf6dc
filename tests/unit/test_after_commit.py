"""What was committed is carried out, whatever raises behind the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.daemon import reconcile as reconcile_module
from gpusched.daemon import verbs
from gpusched.daemon.failures import STEPS
from gpusched.daemon.reconcile import TICKET_PATIENCE_S, adopt_open_runs, open_run
from gpusched.errors import BrokenInvariant, StoreBroken, StoreFull
from gpusched.lifecycle.transitions import requeue_idle
from gpusched.model.commands import Cancel, Drain, Hold, Reload, Requeue, Resume, Selection, Suspend, Update
from gpusched.model.execution import OpenRun, RunEnded, SignalOrder, StopOrder
from gpusched.model.settings import GpuSettings, IdleSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.ports.tables import DRAINS
from gpusched.testing import launch, request

SLOW = SimulatedOutcome(runs_s=1000, stop_takes_s=5)


def fail(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("a bug")


class Engine:
    """A simulated engine whose calls raise when they are told to: before anything is done, or half-way."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.fails = 0
        """So many more calls of `reconcile` raise."""
        self.poison: str | None = None
        """The run that every call of `reconcile` raises at."""
        self.calls: list[list[str]] = []

    def reconcile(self, runs: Sequence[OpenRun], ended: Iterable[str] = ()) -> None:
        self.calls.append([known.run for known in runs])
        if self.fails:
            self.fails -= 1
            # The first of them is dealt with, the others are not.
            self.engine.reconcile(runs[:1])
            fail()
        for known in runs:
            if known.run == self.poison:
                fail()
            self.engine.reconcile([known])
        self.engine.reconcile((), ended)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def a_lab(**sections: Any) -> Lab:
    sections.setdefault("outcome", SLOW)
    return Lab(**sections)


def with_engine(lab: Lab) -> Engine:
    lab.scheduler.engine = engine = Engine(lab.engine)
    return engine


def alive(lab: Lab) -> set[str]:
    """Runs of which there is a process."""
    return {name for name, run in lab.engine._runs.items() if run.end is None}


def check(lab: Lab) -> None:
    """Memory, table and engine say the same."""
    _, open_runs = lab.store.load_active()
    assert {run.id for run in open_runs} == set(lab.scheduler.state.open_runs) == alive(lab)
    assert not lab.ticker._reconciler.is_behind


# --- every step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_an_exception_at_any_step_keeps_memory_table_and_engine_consistent(step: str) -> None:
    lab = a_lab()
    kept, cancelled, stood = lab.submit(), lab.submit(), lab.submit()
    lab.tick()

    def raising(name: str) -> None:
        if name == step:
            fail()

    lab.ticker._step = raising
    answers: list[Any] = []
    for command in (lab.submission(), Cancel(ANN, Selection(ids=(cancelled,))), Suspend(ANN, (stood,))):
        lab.ticker.submit(command, answers.append)
    is_recorded = STEPS.index(step) > STEPS.index("commit")
    if is_recorded:
        lab.ticker.tick()
        assert answers[0]["ids"] == [4]
        assert not any(isinstance(answer, Exception) for answer in answers)
    else:
        with pytest.raises(RuntimeError):
            lab.ticker.tick()
        assert [type(answer) for answer in answers] == [BrokenInvariant] * 3
    lab.ticker._step = lambda name: None
    lab.tick()
    lab.tick(6)
    check(lab)
    assert lab.job(kept).state is JobState.RUNNING
    assert lab.job(cancelled).state is (JobState.CANCELLED if is_recorded else JobState.RUNNING)
    assert lab.job(stood).state is (JobState.SUSPENDED if is_recorded else JobState.RUNNING)
    assert (lab.engine._runs[f"{stood}.1"].still_since is not None) is is_recorded
    # The submission took the place of the cancelled job.
    assert len(alive(lab)) == 3


def test_a_commit_that_raises_after_being_made_is_answered_and_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    commit = lab.store.commit

    def made(changes: Changes) -> None:
        commit(changes)
        fail()

    monkeypatch.setattr(lab.store, "commit", made)
    (answer,) = lab.ask(lab.submission())
    assert answer["ids"] == [1]
    assert alive(lab) == {"1.1"}
    (answer,) = lab.ask(Drain(ROOT, ("0",), "is smoking"))
    assert answer["changed"] == ["GPU-0"]
    assert [failure.step for failure in lab.scheduler.failures.failing] == ["commit"]
    monkeypatch.undo()
    lab.ask(Drain(ROOT, ("0",), None))
    assert lab.scheduler.failures.failing == ()
    check(lab)


def test_a_commit_that_raises_before_being_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    monkeypatch.setattr(lab.store, "commit", fail)
    with pytest.raises(RuntimeError):
        lab.ask(lab.submission(), Drain(ROOT, ("0",), "is smoking"))
    monkeypatch.undo()
    lab.tick()
    assert not lab.scheduler.state.jobs
    assert not lab.scheduler.state.rows[DRAINS]
    check(lab)


# --- replies, listeners, plug-ins ----------------------------------------------------------------------


def test_an_answer_that_raises_delays_no_other_client() -> None:
    lab = a_lab()
    answers: list[Any] = []
    for reply in (fail, answers.append, fail, answers.append):
        lab.ticker.submit(lab.submission(), reply)
    lab.tick()
    assert [answer["ids"] for answer in answers] == [[2], [4]]
    assert alive(lab) == {"1.1", "2.1", "3.1", "4.1"}
    assert lab.scheduler.failures.counts["reply"] == 2


def test_a_listener_that_raises_does_not_affect_the_others() -> None:
    lab = a_lab()
    told: list[list[int]] = []
    for listener in (fail, lambda jobs: told.append(list(jobs)), fail):
        lab.scheduler.signals.jobs_changed.connect(listener)
    lab.scheduler.signals.audited.connect(fail)
    lab.submit()
    assert told == [[1]]
    lab.ask(Hold(ROOT, (1,)))
    assert lab.job(1).hold == "admin"
    lab.tick()
    check(lab)
    assert {failure.step for failure in lab.scheduler.failures.failing} == {"listener fail", "audit"}


class Site:
    """Plug-ins whose guard is broken."""

    names = ("site",)
    job_changed = staticmethod(fail)


def test_exceptions_of_plugins_meters_and_alerts_are_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    lab.scheduler.plugins = Site()  # type: ignore[assignment]
    monkeypatch.setattr(lab.scheduler.meters, "recorded", fail)
    monkeypatch.setattr(lab.scheduler.alerts, "committed", fail)
    lab.submit()
    lab.tick()
    check(lab)
    assert alive(lab) == {"1.1"}
    assert {"plug-ins", "meters", "alerts"} <= set(lab.scheduler.failures.counts)


# --- the engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [1, 2, 3, 7])
def test_an_engine_that_raises_midway_gets_the_rest_with_the_next_tick(fails: int) -> None:
    lab = a_lab()
    cancelled, requeued, stood, limited = (lab.submit() for _ in range(4))
    lab.tick()
    engine = with_engine(lab)
    engine.fails = fails
    answers = lab.ask(
        lab.submission(),
        lab.submission(),
        Cancel(ANN, Selection(ids=(cancelled,))),
        Requeue(ANN, (requeued,)),
        Suspend(ANN, (stood,)),
        Update(ANN, (limited,), {"time_limit_s": 60}),
    )
    assert not any(isinstance(answer, Exception) for answer in answers)
    for _ in range(fails):
        lab.tick()
    runs = lab.engine._runs
    assert {"5.1", "6.1"} <= alive(lab)
    assert (runs["1.1"].stopped_by, runs["2.1"].stopped_by) == ("cancel", "requeue")
    assert runs["3.1"].still_since is not None
    assert runs["4.1"].limit_at == runs["4.1"].start_at + 60
    lab.tick(6)
    lab.tick()
    assert (lab.job(cancelled).state, lab.job(requeued).run) == (JobState.CANCELLED, 2)
    check(lab)
    assert lab.scheduler.failures.failing == ()


def test_a_run_that_fails_in_the_engine_delays_no_other_start() -> None:
    lab = a_lab()
    engine = with_engine(lab)
    engine.poison = "2.1"
    for _ in range(3):
        lab.submit()
    assert alive(lab) == {"1.1", "3.1"}
    assert lab.ticker.has_backlog, "so that the loop tries again"
    lab.tick()
    engine.poison = None
    lab.tick()
    lab.tick()
    check(lab)
    assert [run.number for run in lab.store.runs([2])] == [1]


def test_an_unreadable_row_delays_no_other_start(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    usual = reconcile_module.pending_order
    with monkeypatch.context() as patch:
        patch.setattr(
            reconcile_module, "pending_order", lambda job, *rest: fail() if job.id == 1 else usual(job, *rest)
        )
        lab.ask(lab.submission(), lab.submission())
        assert alive(lab) == {"2.1"}
        lab.tick(TICKET_PATIENCE_S + 1)
        assert lab.ticker.has_backlog
        lab.submit()
        assert alive(lab) == {"2.1", "3.1"}
        assert "engine" in {failure.step for failure in lab.scheduler.failures.failing}
    lab.tick()
    lab.tick()
    check(lab)
    assert alive(lab) == {"1.1", "2.1", "3.1"}
    assert lab.scheduler.failures.failing == ()


def test_ends_that_could_not_be_forgotten_are_forgotten_later(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab(outcome=SimulatedOutcome(runs_s=10))
    lab.submit()
    lab.tick()
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedEngine, "_forget", fail)
        lab.tick(10)
    assert lab.job(1).state is JobState.COMPLETED
    assert "1.1" in lab.engine._runs
    lab.tick()
    assert not lab.engine._runs
    check(lab)


def test_the_engine_is_queried_only_about_changed_runs() -> None:
    lab = a_lab(cpus=100)
    for _ in range(20):
        lab.submit()
    lab.tick()
    engine = with_engine(lab)
    lab.tick(1)
    assert engine.calls == []
    lab.ask(Suspend(ANN, (7,)))
    assert engine.calls == [["7.1"]]
    lab.tick(1)
    assert engine.calls == [["7.1"]]


def test_events_the_engine_cannot_deliver_are_delivered_later(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab(outcome=SimulatedOutcome(runs_s=10))
    lab.submit()
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedEngine, "events", fail)
        lab.clock.advance(10)
        (answer,) = lab.ask(lab.submission())
    assert answer["ids"] == [2]
    lab.tick()
    assert lab.job(1).state is JobState.COMPLETED


# --- tickets -------------------------------------------------------------------------------------------


def test_a_ticket_that_fails_at_first_delays_no_other_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = a_lab()
    usual = lab.ticker._reconciler._make_ticket
    monkeypatch.setattr(
        lab.ticker._reconciler, "_make_ticket", lambda job, run: fail() if job.id == 1 else usual(job, run)
    )
    lab.ask(lab.submission(), lab.submission())
    assert alive(lab) == {"2.1"}
    assert [failure.step for failure in lab.scheduler.failures.failing] == ["ticket"]
    monkeypatch.undo()
    lab.tick()
    assert alive(lab) == {"1.1", "2.1"}
    assert lab.scheduler.failures.failing == ()
    lab.tick()
    check(lab)


def test_a_job_whose_ticket_always_fails_does_not_look_started(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    monkeypatch.setattr(lab.ticker._reconciler, "_make_ticket", fail)
    job_id = lab.submit(request=request(gpus=1))
    lab.tick(TICKET_PATIENCE_S + 1)
    lab.tick()
    job = lab.job(job_id)
    assert (job.state, job.reason) == (JobState.FAILED, ReasonCode.JOB_LAUNCH_FAILURE)
    assert job.reason_text == "its start could not be prepared: RuntimeError: a bug"
    check(lab)


def test_a_started_run_is_not_given_up_when_its_ticket_fails_later() -> None:
    """After a commit that failed the table does not know that it runs."""
    lab = a_lab()
    job_id = lab.submit()
    lab.store._db.execute("DELETE FROM payloads")
    lab.ticker.tickets._payloads._kept.clear()
    lab.ticker.reload()
    for _ in range(3):
        lab.tick()
    assert lab.job(job_id).state is JobState.RUNNING
    assert lab.scheduler.state.open_runs["1.1"].pid is not None
    check(lab)


def test_a_cancel_before_the_start_reaches_the_engine_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    with monkeypatch.context() as patch:
        patch.setattr(lab.ticker._reconciler, "_make_ticket", fail)
        job_id = lab.submit()
        lab.ask(Cancel(ANN, Selection(ids=(job_id,))))
    lab.tick()
    assert lab.job(job_id).state is JobState.CANCELLED
    assert not alive(lab)
    assert lab.store.runs([job_id])[0].start_at is None
    check(lab)


# --- what used to live in memory alone --------------------------------------------------------------------


def swallow(lab: Lab, *asked: Any) -> list[Any]:
    """Commit these while nothing reaches the engine, and let a new daemon take over."""
    engine = with_engine(lab)
    engine.reconcile = lambda runs, ended=(): None  # type: ignore[method-assign]
    answers = lab.ask(*asked)
    lab.restart()
    adopt_open_runs(lab.scheduler.state, lab.engine, lab.settings)
    return answers


def test_a_time_limit_lost_in_a_crash_is_set_on_adoption() -> None:
    lab = a_lab()
    lab.submit()
    lab.tick()
    swallow(lab, Update(ANN, (1,), {"time_limit_s": 60}))
    assert lab.engine._runs["1.1"].limit_at == lab.engine._runs["1.1"].start_at + 60


def test_the_grace_of_an_idle_run_survives_a_crash() -> None:
    idle = IdleSettings(after_s=10, then="requeue", notice_s=300)
    lab = a_lab(idle=idle)
    lab.submit(request=request(gpus=1))
    lab.tick()
    job, run = lab.scheduler.state.jobs[1], lab.scheduler.state.open_runs["1.1"]
    after, _ = requeue_idle(job, lab.clock.now(), "its GPUs do nothing")
    assert open_run(after, run, lab.settings).pending_order == StopOrder("preempt", grace_s=300)


def test_the_end_of_a_run_that_lost_its_gpu_is_recorded_and_reordered() -> None:
    lab = a_lab(gpus=2)
    lab.submit(request=request(gpus=1))
    lab.tick()
    engine = with_engine(lab)
    engine.reconcile = lambda runs, ended=(): None  # type: ignore[method-assign]
    lab.lost.add(0)
    lab.tick(1)
    job = lab.job(1)
    assert (job.state, job.reason, job.reason_text) == (JobState.COMPLETING, ReasonCode.GPU_FAILED, "lost GPU 0")
    lab.lost.clear()
    lab.restart()
    adopt_open_runs(lab.scheduler.state, lab.engine, lab.settings)
    assert lab.engine._runs["1.1"].stopped_by == "gpu_lost"
    lab.tick(6)
    lab.tick(1)
    assert lab.store.runs([1])[0].reason_text == "lost GPU 0"
    assert lab.store.runs([1])[0].outcome is JobState.NODE_FAIL


def test_a_signal_is_sent_at_most_once_and_a_failing_one_delays_no_other() -> None:
    lab = a_lab()
    first, second = lab.submit(), lab.submit()
    lab.tick()
    engine = with_engine(lab)
    order = lab.engine.order
    engine.order = lambda run, one: fail() if run == f"{first}.1" else order(run, one)  # type: ignore[attr-defined]
    lab.ask(Cancel(ANN, Selection(ids=(first, second)), signal=10))
    lab.tick()
    assert lab.engine.signals == [(f"{second}.1", SignalOrder(10))]


def test_a_second_cancel_notifies_the_run_once_more() -> None:
    lab = a_lab(outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=float("inf")))
    job_id = lab.submit(launch=launch("true", grace_s=100.0))
    lab.tick()
    for _ in range(2):
        lab.ask(Cancel(ANN, Selection(ids=(job_id,))))
    assert lab.engine._runs["1.1"].kill_at == lab.engine._runs["1.1"].start_at + 100
    assert lab.job(job_id).state is JobState.COMPLETING


# --- turns that break off ------------------------------------------------------------------------------------


def test_a_start_undone_by_a_failed_commit_is_learned_again() -> None:
    lab = a_lab()
    job_id = lab.submit()
    lab.tick()
    assert lab.scheduler.state.open_runs["1.1"].pid is not None
    lab.store.is_full = True
    (answer,) = lab.ask(lab.submission())
    assert isinstance(answer, StoreFull)
    lab.store.is_full = False
    lab.tick()
    lab.tick()
    assert lab.scheduler.state.open_runs["1.1"].pid is not None
    lab.submit()
    lab.ticker.flush()
    assert lab.store.runs([job_id])[0].pid is not None


def test_an_unreadable_table_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is ahead of it: what is in the memory alone must not be built upon."""
    lab = a_lab()
    first = lab.submit()
    with monkeypatch.context() as patch:
        patch.setattr(lab.store, "commit", fail)
        patch.setattr(lab.store, "load_active", fail)
        with pytest.raises(RuntimeError):
            lab.ask(lab.submission())
        answers: list[Any] = []
        lab.ticker.submit(lab.submission(), answers.append)
        with pytest.raises(RuntimeError):
            lab.ticker.tick()
        assert isinstance(answers[0], BrokenInvariant)
        assert lab.ticker.has_backlog
    lab.tick()
    assert sorted(lab.scheduler.state.jobs) == [first]
    assert lab.submit() == first + 1
    lab.tick()
    check(lab)


def test_a_broken_table_is_answered_and_reread_when_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    broken = StoreBroken("the table is corrupt", "restore a backup")

    def refuse(*arguments: Any) -> Any:
        raise broken

    with monkeypatch.context() as patch:
        patch.setattr(lab.store, "commit", refuse)
        patch.setattr(lab.store, "load_active", refuse)
        assert lab.ask(lab.submission()) == [broken]
        assert lab.ask(lab.submission()) == [broken]
    assert lab.submit() == 1
    lab.tick()
    check(lab)


def test_a_failing_command_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab()
    usual = verbs.apply

    def apply(command: Any, tick: Any) -> Any:
        return fail() if command.caller is BOB else usual(command, tick)

    monkeypatch.setattr(verbs, "apply", apply)
    answers: dict[str, Any] = {}

    def note(name: str) -> Callable[[Any], None]:
        return lambda answer: answers.__setitem__(name, answer)

    for name, caller in (("one", ANN), ("bad", BOB), ("two", ANN)):
        lab.ticker.submit(lab.submission(caller), note(name))
    with pytest.raises(RuntimeError):
        lab.ticker.tick()
    assert isinstance(answers.pop("bad"), BrokenInvariant)
    assert answers == {}
    assert lab.ticker.has_backlog
    lab.tick()
    assert {name: answer["ids"] for name, answer in answers.items()} == {"one": [1], "two": [2]}


def test_a_failing_event_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = a_lab(outcome=SimulatedOutcome(runs_s=10))
    lab.submit(), lab.submit()
    lab.tick()
    usual = lab.ticker._run_events.apply

    def apply(tick: Any, event: Any, **how: Any) -> None:
        if isinstance(event, RunEnded) and event.run == "1.1":
            fail()
        usual(tick, event, **how)

    monkeypatch.setattr(lab.ticker._run_events, "apply", apply)
    answers: list[Any] = []
    lab.ticker.submit(lab.submission(), answers.append)
    lab.clock.advance(10)
    with pytest.raises(RuntimeError):
        lab.ticker.tick()
    lab.tick()
    assert lab.job(2).state is JobState.COMPLETED
    assert [answer["ids"] for answer in answers] == [[3]]


def test_a_settings_listener_that_raises_does_not_affect_others() -> None:
    lab = a_lab()
    heard: list[Any] = []
    for listener in (fail, heard.append):
        lab.scheduler.signals.settings_changed.connect(listener)
    before = lab.settings
    lab.config = lambda: replace(before, gpu=GpuSettings(free_polls=1, foreign_mib=777))
    (answer,) = lab.ask(Reload(ROOT))
    assert not isinstance(answer, Exception)
    assert heard == [lab.scheduler.settings]
    assert heard[0].gpu.foreign_mib == 777


def test_settings_that_fail_midway_apply_after_the_next_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = a_lab()
    lab.submit()
    before = lab.settings
    lab.config = lambda: replace(before, gpu=GpuSettings(free_polls=1, foreign_mib=777))
    with monkeypatch.context() as patch:
        patch.setattr(lab.scheduler.state, "reconfigure", fail)
        lab.ask(Reload(ROOT))
    lab.tick()
    check(lab)
    lab.ask(Resume(ANN, (1,)))
    assert lab.scheduler.settings.gpu.foreign_mib == 777
