"""What the daemon remembers of the past, and what it says of the future, with a scheduler turned by hand."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from lab import BOB, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.api import service as services
from gpusched.api.service import ApiService
from gpusched.daemon import facade as facades
from gpusched.daemon.facade import OUTLOOK_S, STALE_S, DaemonFacade
from gpusched.daemon.forecast import QueueForecast
from gpusched.daemon.watch import estimates as estimating
from gpusched.daemon.watch import history as history_module
from gpusched.daemon.watch.estimates import KEPT, Estimates, Estimator
from gpusched.daemon.watch.history import MOST_FAMILIES, History
from gpusched.model.commands import Cancel, Selection
from gpusched.model.job import RetryRule
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.snapshot import ClassKey, Estimate
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.ports.tables import ESTIMATES
from gpusched.predict import predictor
from gpusched.predict.family import invocation_of
from gpusched.predict.predictor import LEAST_JUDGED, ExpectedRunTime, RunTimeGuess, in_steps
from gpusched.scheduler.forecast import UNKNOWN, StartRange
from gpusched.scheduler.planner import Planner
from gpusched.testing import NOW, job, launch, request, run

TRAIN = launch("train.sh")


def ended(lab: Lab, times: int, **parts: Any) -> None:
    """So many runs of the family, one after the other, by the lab's outcome."""
    for _ in range(times):
        lab.submit(**{"launch": TRAIN, "request": request(gpus=1), **parts})
        lab.tick(lab.outcome.runs_s + 1)
        lab.tick(1)
        lab.tick(1)
    assert not lab.scheduler.state.jobs


def outlook(lab: Lab) -> QueueForecast:
    return QueueForecast.of(lab.scheduler)


# --- how long jobs ran --------------------------------------------------------------------------------


def test_run_times_are_learned_at_the_end_and_known_after_a_restart() -> None:
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=100))
    lab.scheduler.history.load()
    one = job(1, launch=TRAIN, request=request(gpus=1))
    ended(lab, 2)
    assert lab.scheduler.history.predict(one) is None
    ended(lab, 1)
    for scheduler in (lab.scheduler, lab.restart()):
        scheduler.history.load()
        found = scheduler.history.predict(one)
        assert found is not None
        assert (found.median_s, found.samples) == (100, 3)
    assert lab.scheduler.history.predict(replace(one, user="bob")) is None


def test_predictions_are_used_when_better_than_limits_also_after_a_restart() -> None:
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=100))
    lab.scheduler.history.load()
    one = job(1, launch=TRAIN, request=request(gpus=1), time_limit_s=3600)
    ended(lab, LEAST_JUDGED - 1, time_limit_s=3600)
    assert lab.scheduler.history.guess(one) is None
    ended(lab, 1, time_limit_s=3600)
    for scheduler in (lab.scheduler, lab.restart()):
        scheduler.history.load()
        guess = scheduler.history.guess(one)
        assert guess is not None
        assert guess.plan_s == pytest.approx(100, rel=0.06)
        # Without a limit it is planned with what nine in ten kept to.
        free = scheduler.history.guess(replace(one, spec=replace(one.spec, time_limit_s=None)))
        assert free == RunTimeGuess(in_steps(100, None), in_steps(100, None))
        assert scheduler.history.expectation(one) == ExpectedRunTime(guess.expected_s, "prediction")
        measure = scheduler.history.measure()
        assert (measure.runs, round(measure.limit_factor)) == (LEAST_JUDGED, 36)
        assert measure.guess_factor < 1.3


def test_accurate_limits_are_used() -> None:
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=100))
    lab.scheduler.history.load()
    ended(lab, LEAST_JUDGED, time_limit_s=100)
    one = job(1, launch=TRAIN, request=request(gpus=1), time_limit_s=100)
    assert lab.scheduler.history.expectation(one) == ExpectedRunTime(100, "limit")
    assert lab.scheduler.history.guess(job(1, launch=TRAIN, request=request(gpus=1), time_limit_s=100)) is None


def test_limits_are_judged_per_user() -> None:
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=100))
    lab.scheduler.history.load()
    ended(lab, LEAST_JUDGED, time_limit_s=3600)
    ended(lab, LEAST_JUDGED, time_limit_s=100, caller=BOB)
    anns = job(1, launch=TRAIN, request=request(gpus=1), time_limit_s=3600)
    for scheduler in (lab.scheduler, lab.restart()):
        scheduler.history.load()
        assert scheduler.history.guess(anns) is not None
        assert scheduler.history.guess(replace(anns, user="bob")) is None
        assert scheduler.history.measure("bob").limit_factor == pytest.approx(1)
        # Everybody's count for a user who has run too little.
        assert scheduler.history.measure("cid") == scheduler.history.measure()


def test_pending_jobs_are_repredicted_when_the_users_limits_are_no_longer_used() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=100), priority=PrioritySettings(predict=True, calc_period_s=60.0))
    lab.scheduler.history.load()
    ended(lab, 1, time_limit_s=3600, launch=launch("other.sh"))
    ended(lab, LEAST_JUDGED - 2, time_limit_s=3600)
    last = lab.submit(launch=TRAIN, request=request(gpus=1), time_limit_s=3600)
    waits = lab.submit(launch=launch("other.sh"), request=request(gpus=1), time_limit_s=3600)
    lab.tick(1)
    assert lab.scheduler.state.jobs[last].state is JobState.RUNNING
    blocker = lab.submit(launch=launch("third.sh"), request=request(gpus=1), nice=-100, caller=ROOT)
    key = lab.scheduler.state.class_of(waits)
    assert key is not None
    assert key.predicted_s is None
    lab.tick(101)
    lab.tick(1)
    lab.tick(1)
    assert lab.scheduler.state.jobs[blocker].state is JobState.RUNNING
    lab.tick(61)
    key = lab.scheduler.state.class_of(waits)
    assert key is not None
    assert key.predicted_s is not None
    assert key.predicted_s < 3600


def cut_short(lab: Lab, times: int, **parts: Any) -> None:
    """So many runs of the family, each ended at its limit of a minute."""
    lab.outcome = SimulatedOutcome(runs_s=7200)
    for _ in range(times):
        lab.submit(**{"launch": TRAIN, "request": request(gpus=1), "time_limit_s": 60, **parts})
        for passes_s in (61, 1, 1):
            lab.tick(passes_s)
    assert not lab.scheduler.state.jobs


def test_timed_out_runs_lengthen_similar_jobs_also_after_a_restart() -> None:
    lab = Lab(gpus=1)
    lab.scheduler.history.load()
    one = job(1, launch=TRAIN, request=request(gpus=1), time_limit_s=60)
    assert lab.scheduler.history.guess(one) is None
    cut_short(lab, 5)
    for scheduler in (lab.scheduler, lab.restart()):
        scheduler.history.load()
        guess = scheduler.history.guess(one)
        # What holds others up is its limit still, which it is ended at; its place is that of 6 minutes.
        assert guess is not None
        assert guess.plan_s == 60
        assert guess.expected_s == pytest.approx(6 * 60, rel=0.06)
        assert scheduler.history.guess(replace(one, user="bob")) is None
        assert scheduler.history.expectation(one) == ExpectedRunTime(guess.expected_s, "overruns", 5)
        # Their limits were exact, as far as others are concerned.
        assert scheduler.history.measure().limit_factor == pytest.approx(1, abs=0.05)


def test_a_job_that_continues_past_its_limit_stated_it_correctly() -> None:
    lab = Lab(gpus=1)
    lab.scheduler.history.load()
    one = job(1, launch=TRAIN, request=request(gpus=1), time_limit_s=60)
    cut_short(lab, 5, retry=RetryRule(retry_on=("timeout",)))
    for scheduler in (lab.scheduler, lab.restart()):
        scheduler.history.load()
        assert scheduler.history.guess(one) is None


def test_a_pending_job_follows_similar_timed_out_runs() -> None:
    lab = Lab(
        gpus=1, outcome=SimulatedOutcome(runs_s=7200), priority=PrioritySettings(predict=True, calc_period_s=60.0)
    )
    lab.scheduler.history.load()
    ids = [lab.submit(launch=TRAIN, request=request(gpus=1), time_limit_s=60) for _ in range(4)]
    found = []
    while lab.scheduler.state.jobs[ids[-1]].state is not JobState.RUNNING:
        if (key := lab.scheduler.state.class_of(ids[-1])) is not None:
            found.append((key.predicted_s, key.planned_s))
        lab.tick(10)
    assert found[0] == (None, 60)
    assert found[-1][0] == pytest.approx(4 * 60, rel=0.06)
    assert {planned_s for _, planned_s in found} == {60}


def first_waiting_key(lab: Lab) -> ClassKey:
    return lab.scheduler.state.eligible.views()[0].key


def test_predictions_of_pending_jobs_are_updated_when_similar_jobs_end() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=100), priority=PrioritySettings(predict=True, calc_period_s=60.0))
    lab.scheduler.history.load()
    waits = {"launch": TRAIN, "request": request(gpus=1)}
    for _ in range(4):
        lab.submit(**waits)
    lab.submit(**{**waits, "launch": launch("other.sh")})
    assert first_waiting_key(lab).predicted_s is None
    while lab.scheduler.state.jobs[4].state is not JobState.RUNNING:
        lab.tick(10)
        if (key := lab.scheduler.state.class_of(4)) is not None:
            found = key
    # Three that were like the fourth had ended while it waited; the other is expected to run like those.
    assert found.plan_s == in_steps(100, None)
    other = first_waiting_key(lab)
    assert other.predicted_s == other.plan_s == found.predicted_s


def train(epochs: int, **parts: Any) -> dict[str, Any]:
    return {"launch": launch("train.sh", "--epochs", str(epochs)), "request": request(gpus=1), **parts}


@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_same_command_line_is_expected_to_run_as_long_again(is_restarted: bool) -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=10), priority=PrioritySettings(predict=True))
    lab.scheduler.history.load()
    ended(lab, 3, **train(1))
    lab.outcome = SimulatedOutcome(runs_s=300)
    ended(lab, 1, **train(30))
    if is_restarted:
        lab.restart()
        lab.scheduler.history.load()
    history = lab.scheduler.history
    short, long, new = (job(1, **train(epochs)) for epochs in (1, 30, 3))
    assert [history.guess(one) for one in (short, long)] == [
        RunTimeGuess(in_steps(at, None), in_steps(at, None)) for at in (10, 300)
    ]
    # A line that has never completed is expected to run like the others of its script.
    assert history.guess(new) == RunTimeGuess(in_steps(10, None), in_steps((3 * 10 + 300) / 4, None))
    # The printed range needs three runs, here those of the script.
    usual = {one: history.predict(one) for one in (short, long)}
    assert [(found.median_s, found.high_s, found.samples) for found in usual.values() if found] == [
        (10, 10, 3),
        (10, 300, 4),
    ]
    # What a user states is judged by other rules.
    assert history.guess(job(1, **train(30, time_limit_s=3600))) is None


def test_a_command_line_that_was_cut_at_a_limit_tells_no_length() -> None:
    history = History(Lab().store)
    history.load()
    one = job(1, **train(30, time_limit_s=60, time_limit_source="DEFAULT"))
    cut = run(one, start_at=NOW, end_at=NOW + 60, outcome=JobState.TIMEOUT, reason=ReasonCode.TIME_LIMIT)
    history.learn(one, cut)
    assert not history.is_known_invocation(invocation_of(one))
    history.recorded()
    history.learn(one, run(one, start_at=NOW, end_at=NOW + 40, outcome=JobState.COMPLETED))
    assert history.is_known_invocation(invocation_of(one))


def test_a_sweep_of_many_lines_displaces_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "MOST_KEYS", 50)
    history = History(Lab().store)
    history.load()
    rare = job(1, user="bob", launch=launch("rare.sh"))
    history.learn(rare, run(rare, start_at=NOW, end_at=NOW + 70, outcome=JobState.COMPLETED))
    for number in range(100):
        one = job(number, **train(number))
        history.learn(one, run(one, start_at=NOW, end_at=NOW + 7, outcome=JobState.COMPLETED))
        history.recorded()
    assert history.guess(rare) == RunTimeGuess(in_steps(70, None), in_steps(70, None))
    assert not history.is_known_invocation(invocation_of(job(1, **train(0))))


def test_pending_jobs_are_told_apart_by_their_lines_once_one_of_each_has_ended() -> None:
    lab = Lab(gpus=2, priority=PrioritySettings(predict=True, calc_period_s=60.0))
    lab.scheduler.history.load()
    for number, (epochs, runs_s) in enumerate([(1, 100), (30, 3000), (1, 9000), (30, 9000), (1, 9000), (30, 9000)], 1):
        lab.outcomes[f"{number}.1"] = SimulatedOutcome(runs_s=runs_s)
        lab.submit(**train(epochs))
    state = lab.scheduler.state
    while state.open_runs.keys() != {"2.1", "3.1"}:
        lab.tick(10)
    lab.tick(70)
    (waiting,) = state.eligible.views()
    assert (waiting.key.plan_s, [one.id for one in waiting.jobs]) == (in_steps(100, None), [4, 5, 6])
    while "2.1" in state.open_runs:
        lab.tick(100)
    lab.tick(70)
    planned = {one.id: view.key.plan_s for view in state.eligible.views() for one in view.jobs}
    # The fifth, which is expected to be short, has passed the fourth.
    assert planned == dict.fromkeys((4, 6), in_steps(3000, None))


def test_jobs_pending_while_the_history_is_read_are_repredicted() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=100), priority=PrioritySettings(predict=True))
    ended(lab, 3)
    for _ in range(2):
        lab.submit(launch=TRAIN, request=request(gpus=1))
    lab.restart()
    lab.tick(1)
    assert first_waiting_key(lab).predicted_s is None
    lab.scheduler.history.load()
    lab.tick(61)
    assert first_waiting_key(lab).predicted_s is not None


def test_failed_runs_are_ignored() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=100, exit_code=1))
    lab.scheduler.history.load()
    ended(lab, 4)
    assert lab.scheduler.history.predict(job(1, launch=TRAIN, request=request(gpus=1))) is None


def test_suspended_time_is_not_run_time() -> None:
    history = History(Lab().store)
    history.load()
    one = job(1, launch=TRAIN)
    for _ in range(3):
        history.learn(one, run(one, start_at=NOW, end_at=NOW + 100, outcome=JobState.COMPLETED, suspended_s=40.0))
        history.recorded()
    found = history.predict(one)
    assert found is not None
    assert found.median_s == 60


def test_the_history_is_read_in_parts_and_the_newest_runs_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "_CHUNK", 3)
    lab = Lab()
    changes = Changes(payloads={"0" * 64: b""})
    jobs = [job(number, launch=TRAIN, state=JobState.COMPLETED, run=1, end_at=NOW) for number in range(1, 102)]
    for one in jobs:
        changes.jobs[one.id] = one
        changes.runs[f"{one.id}.1"] = run(
            one, start_at=NOW, end_at=NOW + one.id, outcome=JobState.COMPLETED, state=RunState.ENDED
        )
    lab.store.commit(changes)
    history = History(lab.store)
    assert not history.load_some()
    # A run that ends now, of a job that is read later, is not taken twice.
    history.learn(jobs[0], changes.runs["1.1"])
    parts = 1
    while not history.load_some():
        parts += 1
    assert parts == 33
    found = history.predict(jobs[0])
    assert found is not None
    assert (found.samples, found.median_s) == (50, 76)
    assert history.load_some()


def test_the_number_of_families_is_bounded() -> None:
    history = History(Lab().store)
    history.load()
    for number in range(MOST_FAMILIES + 5):
        for argument in range(3):
            one = job(1, launch=launch(f"{number}.sh", str(argument)))
            history.learn(one, run(one, start_at=NOW, end_at=NOW + 1, outcome=JobState.COMPLETED))
            history.recorded()
    assert history.predict(job(1, launch=launch("0.sh"))) is None
    assert history.predict(job(1, launch=launch(f"{MOST_FAMILIES}.sh"))) is not None


# --- when jobs start ----------------------------------------------------------------------------------


def busy_lab() -> tuple[Lab, int, int]:
    """One card; a job of an hour on it that usually takes 100 s, and one that waits."""
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=100))
    ended(lab, 3)
    lab.outcome = SimulatedOutcome(runs_s=3600)
    running = lab.submit(launch=TRAIN, request=request(gpus=1), time_limit_s=3600)
    waiting = lab.submit(request=request(gpus=1), time_limit_s=600)
    return lab, running, waiting


def test_the_range_goes_from_the_usual_to_the_limit() -> None:
    lab, running, waiting = busy_lab()
    start_at = lab.scheduler.state.jobs[running].start_at
    assert start_at is not None
    assert outlook(lab).starts([waiting]) == {waiting: StartRange(start_at + 100, start_at + 3600)}


def test_a_job_with_a_begin_time_queues_once_it_has_come() -> None:
    lab, _, waiting = busy_lab()
    begin_at = lab.clock.now() + 7200
    later = lab.submit(request=request(gpus=1), begin_at=begin_at)
    held = lab.submit(request=request(gpus=1), begin_at=begin_at, hold=True)
    found = outlook(lab).starts([waiting, later, held])
    assert found[later] == StartRange(begin_at, begin_at)
    assert found[held].is_unknown


def test_a_dependant_starts_after_its_parent() -> None:
    lab, _, waiting = busy_lab()
    after = lab.submit(request=request(gpus=1), dependency=f"afterok:{waiting}")
    never = lab.submit(request=request(gpus=1), dependency=f"afternotok:{waiting}")
    found = outlook(lab).starts([waiting, after, never])
    before = found[waiting]
    assert before.low_at is not None
    assert before.high_at is not None
    assert found[after] == StartRange(before.low_at + 600, before.high_at + 600)
    assert found[never].is_unknown


def test_the_place_counts_jobs_of_all_classes() -> None:
    lab, _, waiting = busy_lab()
    second = lab.submit(request=request(gpus=1), nice=9000)
    lab.clock.advance(1)
    first = lab.submit(caller=ROOT, request=request(gpus=1), nice=-9000)
    assert [outlook(lab).place(job_id) for job_id in (first, waiting, second)] == [(1, 3), (2, 3), (3, 3)]
    assert outlook(lab).first(2) == [first, waiting]


def test_jobs_behind_the_front_of_their_class_are_included() -> None:
    lab, _, _waiting = busy_lab()
    ids = [lab.submit(request=request(gpus=1), time_limit_s=600) for _ in range(200)]
    assert outlook(lab).place(ids[-1]) == (201, 201)


def test_proposals_are_admissible_in_the_queue() -> None:
    queues = {
        "default": QueueSettings("default", max_gpus=1),
        "open": QueueSettings("open"),
        "closed": QueueSettings("closed", users=("bob",)),
    }
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=3600), queue=queues)
    lab.submit(request=request(gpus=1), queue="default")
    waiting = lab.submit(request=request(gpus=1), queue="default")
    found = outlook(lab).alternatives(lab.scheduler.state.jobs[waiting], None)
    assert [one.option for one in found] == ["-q open"]


# --- how good estimates were --------------------------------------------------------------------------


def estimated(lab: Lab) -> None:
    """One look ahead, as the daemon does at a poll."""

    async def look() -> None:
        estimator = Estimator(lab.ticker)
        estimator._ticks = lab.ticker.ticks
        estimator.poll()
        for _ in range(200):
            await asyncio.sleep(0.01)
            if not estimator._look.is_open:
                break

    asyncio.run(look())
    lab.ticker.flush()


def test_an_estimate_is_recorded_once_and_completed_at_the_start() -> None:
    lab, running, waiting = busy_lab()
    start_at = lab.scheduler.state.jobs[running].start_at or 0.0
    made_at = lab.clock.now()
    estimated(lab)
    (first,) = list(lab.store.load(ESTIMATES, 10).values())
    assert first == Estimate(waiting, made_at, start_at + 100, start_at + 3600)
    lab.tick(500)
    estimated(lab)
    assert list(lab.store.load(ESTIMATES, 10).values()) == [first]
    assert lab.scheduler.estimates.accuracy() is None
    lab.tick(3101)
    lab.tick(1)
    lab.tick(1)
    (after,) = list(lab.store.load(ESTIMATES, 10).values())
    assert after.start_at == lab.job(waiting).start_at
    found = lab.scheduler.estimates.accuracy()
    assert found is not None
    assert (found.count, found.inside) == (1, 1.0)
    assert lab.restart().estimates.accuracy() == found


def test_a_later_run_of_the_job_is_ignored() -> None:
    lab = Lab()
    estimates = Estimates(lab.store)
    estimates.add({1: StartRange(NOW, NOW + 5)}, NOW)
    assert estimates.started(1, NOW + 3) == Estimate(1, NOW, NOW, NOW + 5, NOW + 3)
    assert estimates.started(1, NOW + 900) is None
    assert estimates.started(2, NOW) is None


def test_unknown_estimates_are_not_recorded() -> None:
    estimates = Estimates(Lab().store)
    assert estimates.add({1: StartRange(None, None), 2: StartRange(NOW, None)}, NOW).keys() == {2}


def test_the_number_of_estimates_in_memory_is_bounded() -> None:
    estimates = Estimates(Lab().store)
    for number in range(3 * KEPT):
        estimates.add({number: StartRange(NOW, NOW)}, NOW)
    assert len(estimates.known()) == 2 * KEPT
    assert 3 * KEPT - 1 in estimates.known()


def test_a_job_that_started_in_the_meantime_gets_no_estimate() -> None:
    lab, running, _waiting = busy_lab()
    lab.ticker.record_estimates({running: StartRange(NOW, NOW), 999: StartRange(NOW, NOW)}, NOW)
    lab.ticker.flush()
    assert list(lab.store.load(ESTIMATES, 10).values()) == []


def test_the_look_ahead_is_skipped_under_load_and_soon_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    lab, _, _ = busy_lab()
    looks: list[Any] = []
    monkeypatch.setattr(estimating, "_look", lambda *args: looks.append(args) or ({}, NOW, 0.001))

    async def polls() -> None:
        estimator = Estimator(lab.ticker)
        estimator.poll()
        await asyncio.sleep(0.05)
        assert not looks, "the scheduler has turned more than 20 times since the start"
        estimator.poll()
        estimator.poll()
        await asyncio.sleep(0.05)
        assert len(looks) == 1
        estimator.poll()
        await asyncio.sleep(0.05)
        assert len(looks) == 1

    for _ in range(30):
        lab.tick()
    asyncio.run(polls())


def test_a_failed_look_ahead_does_no_harm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    lab, _, _ = busy_lab()

    def broken(*args: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(estimating, "_look", broken)
    estimated(lab)
    assert "look ahead failed" in caplog.text
    assert list(lab.store.load(ESTIMATES, 10).values()) == []


def test_questions_share_the_present_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=3600))
    for _ in range(4):
        lab.submit(request=request(gpus=1), time_limit_s=3600)
    lab.tick(1)
    facade = DaemonFacade(lab.ticker)
    loaded: list[float] = []
    plain = Planner.from_snapshot.__func__  # type: ignore[attr-defined]

    def counted(cls: type[Planner], *args: Any) -> Planner:
        loaded.append(lab.clock.now())
        return plain(cls, *args)  # type: ignore[no-any-return]

    monkeypatch.setattr(Planner, "from_snapshot", classmethod(counted))
    pending = [lab.job(job_id) for job_id in (2, 3, 4)]

    def ask() -> list[Any]:
        return [facade.outlook(job)() for job in pending]

    first = ask()
    assert len(loaded) == 1
    assert [found.place for found in first] == [(1, 3), (2, 3), (3, 3)]
    lab.tick(OUTLOOK_S)
    # The tick has made another plan, of the same state.
    assert ask() == first
    facade.first_starts(10)()
    facade.starts(pending).look()
    assert len(loaded) == 1
    lab.clock.advance(1)
    ask()
    assert len(loaded) == 2
    lab.ask(Cancel(ROOT, Selection(ids=(2,))))
    assert [found.place for found in ask()[1:]] == [(1, 2), (2, 2)]


def test_starts_in_a_long_queue_are_told_as_of_some_seconds_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facades, "LONG_QUEUE", 3)
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=3600))
    for _ in range(5):
        lab.submit(request=request(gpus=1), time_limit_s=3600)
    lab.tick(1)
    facade = DaemonFacade(lab.ticker)
    pending = [lab.job(job_id) for job_id in (2, 3, 4, 5)]
    first = facade.starts(pending)
    told, told_at = first.look(), lab.clock.now()
    assert first.as_of is None
    # It has taken so long that it may be told again for four seconds.
    assert facade._told is not None
    facade._told.spent_s = 0.2

    newcomer = lab.submit(request=request(gpus=1), time_limit_s=60)
    lab.tick(1)
    again = facade.starts(pending)
    assert (again.as_of, again.look()) == (told_at, told)
    outlook = facade.outlook(lab.job(5))()
    assert (outlook.as_of, outlook.start, outlook.place) == (told_at, told[5], (5, 5))
    # A list of the whole queue leaves out what has come since; whoever asks for just that gets an answer of now.
    everybody = [*pending, lab.job(newcomer)]
    listed = facade.starts()
    for one in everybody:
        listed.add([one])
    assert (listed.as_of, listed.look()) == (told_at, {**told, newcomer: UNKNOWN})
    assert listed.new == {newcomer}, "not worked out yet, which is not the same as unknown"
    named = facade.starts(everybody)
    assert (named.as_of, named.new) == (None, set())
    assert named.look()[newcomer] != UNKNOWN

    facade._told.spent_s = 0.2
    lab.ask(Cancel(ROOT, Selection(ids=(2,))))
    lab.tick(1)
    assert facade.starts(pending[1:]).as_of is not None
    assert facade.renewal() is None

    # Then it is told once more while a new one is worked out, which is told from then on.
    lab.tick(4)
    lab.ask(Cancel(ROOT, Selection(ids=(3,))))
    late, now = facade.starts(pending[2:]), lab.clock.now()
    assert late.as_of is not None
    assert late.as_of < now
    renewal = facade.renewal()
    assert renewal is not None
    assert facade.renewal() is None
    while not renewal():
        assert facade.starts(pending[2:]).as_of == late.as_of
    assert facade.starts(pending[2:]).as_of == now
    lab.tick(STALE_S + 1)
    lab.ask(Cancel(ROOT, Selection(ids=(4,))))
    assert facade.starts(pending[3:]).as_of is None


@pytest.mark.parametrize(
    ("last_ago_s", "goes_on", "waits_s"),
    [(60.0, False, 0.0), (0.001, False, services._REST_S), (0.0, True, services._LONGEST_WAIT_S)],
)
def test_a_renewal_lets_requests_go_first_but_not_for_long(
    monkeypatch: pytest.MonkeyPatch, last_ago_s: float, goes_on: bool, waits_s: float
) -> None:
    service, now = ApiService(DaemonFacade(Lab().ticker)), NOW
    service.asked_at = now - last_ago_s

    def sleep(wait_s: float) -> None:
        nonlocal now
        now += wait_s
        if goes_on:
            service.asked_at = now

    monkeypatch.setattr(services, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    service.thinker = SimpleNamespace(submit=lambda step: step())  # type: ignore[assignment]
    began_at: list[float] = []

    def step() -> bool:
        began_at.append(now)
        return True

    service._renew(step)
    assert began_at == [pytest.approx(NOW + waits_s)]


def test_a_question_does_not_wait_for_a_renewal_that_lets_requests_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    service = ApiService(DaemonFacade(Lab().ticker))
    service.asked_at, slept, told = NOW, [], []
    monkeypatch.setattr(services, "time", SimpleNamespace(monotonic=lambda: NOW, sleep=slept.append))
    queue: list[Any] = []
    service.thinker = SimpleNamespace(submit=queue.append)  # type: ignore[assignment]
    service._renew(lambda: bool(told.append("renewed")) or True)
    queue.append(lambda: told.append("answered"))
    for _ in range(2):
        queue.pop(0)()
    assert (told, slept) == (["answered"], [services._REST_S])
    assert len(queue) == 1, "the renewal is behind it"
