"""The tick, run by hand: its table in memory, simulated engine, a clock that moves when told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.daemon.failures import STEPS
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.errors import BrokenInvariant, Forbidden, NotFound, Refused, StoreFull
from gpusched.model.cluster import DrainEntry
from gpusched.model.commands import Cancel, Drain, Hold, Release, Selection, Submit, Update
from gpusched.model.execution import RunStarted, StopOrder
from gpusched.model.job import ArraySpec, RetryRule
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.ports import JobFilter
from gpusched.ports.tables import DRAINERS, DRAINS
from gpusched.scheduler.invariants import check_invariants
from gpusched.testing import launch, request, spec


def test_steps_run_in_order() -> None:
    lab = Lab()
    lab.steps.clear()
    lab.submit()
    assert tuple(lab.steps) == STEPS


def test_commands_that_arrive_together_share_one_commit_with_the_starts() -> None:
    lab = Lab()
    before = lab.store.commits
    answers = lab.ask(*[lab.submission() for _ in range(5)])
    assert [answer["ids"] for answer in answers] == [[1], [2], [3], [4], [5]]
    assert lab.store.commits == before + 1
    assert all(lab.job(job_id).state is JobState.RUNNING for job_id in range(1, 6))


def test_a_confirmed_start_needs_no_commit_but_is_recorded_by_the_next() -> None:
    lab = Lab()
    job_id = lab.submit()
    before = lab.store.commits
    lab.tick()
    assert lab.store.commits == before
    assert lab.scheduler.state.open_runs["1.1"].pid is not None
    lab.ticker.flush()
    assert lab.store.runs([job_id])[0].pid is not None


def test_a_follower_is_notified_when_the_start_is_confirmed() -> None:
    """That changes no row of the job, and `glogs -f` was told nothing for a minute when no other change came."""
    lab = Lab()
    job_id = lab.submit()
    told: list[list[int]] = []
    lab.scheduler.signals.jobs_changed.connect(lambda jobs: told.append(list(jobs)))
    assert lab.scheduler.state.open_runs["1.1"].start_at is None
    lab.tick()
    assert lab.scheduler.state.open_runs["1.1"].start_at is not None
    assert told == [[job_id]]
    lab.ticker.flush()
    lab.tick()
    assert told == [[job_id]], "nothing has changed since"


def test_a_full_disk_refuses_the_command_and_keeps_the_end_for_later() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10, exit_code=4))
    job_id = lab.submit()
    lab.store.is_full = True
    lab.clock.advance(11)
    (answer,) = lab.ask(lab.submission())
    assert isinstance(answer, StoreFull)
    assert lab.scheduler.trouble == "the disk is full"
    assert lab.job(job_id).state is JobState.RUNNING
    assert sorted(lab.scheduler.state.jobs) == [job_id]
    lab.store.is_full = False
    lab.tick()
    assert (lab.job(job_id).state, lab.job(job_id).exit_code) == (JobState.FAILED, 4)
    assert lab.scheduler.trouble is None
    assert lab.submit() == job_id + 1


def test_a_bug_in_a_tick_is_answered_and_the_next_tick_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    first = lab.submit()
    answers: list[Any] = []
    lab.ticker.submit(lab.submission(), answers.append)
    with monkeypatch.context() as patch:
        patch.setattr(lab.scheduler.decide_step, "carry_out", lambda *args, **options: 1 / 0)
        lab.clock.advance(11)
        with pytest.raises(ZeroDivisionError):
            lab.ticker.tick()
    assert isinstance(answers[0], BrokenInvariant)
    lab.tick()
    assert lab.job(first).state is JobState.COMPLETED


def test_an_impossible_event_is_skipped_and_others_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    first, second = lab.submit(), lab.submit()
    lab.clock.advance(11)
    events = lab.engine.events()
    odd = RunStarted("1.1", 0.0, 1, 1, 1)
    lab.scheduler.state.jobs[first] = replace(lab.scheduler.state.jobs[first], run=9)
    told = [odd, *[event for event in events if event.run == "2.1"]]
    monkeypatch.setattr(SimulatedEngine, "events", lambda engine: told)
    lab.ticker.tick()
    assert lab.job(second).state is JobState.COMPLETED


def test_gpus_stay_booked_until_a_reading_shows_them_clean() -> None:
    lab = Lab(gpus=1)
    first = lab.submit(request=request(gpus=1))
    lab.used[0] = 5000
    lab.tick(11)
    assert lab.job(first).state is JobState.COMPLETING
    second = lab.submit(request=request(gpus=1))
    assert lab.job(second).state is JobState.PENDING
    lab.used.clear()
    lab.tick(1)
    assert lab.job(first).state is JobState.COMPLETED
    assert lab.job(second).state is JobState.RUNNING


def test_a_restart_continues_with_gpus_that_were_not_clean() -> None:
    lab = Lab(gpus=1)
    first = lab.submit(request=request(gpus=1))
    lab.used[0] = 5000
    lab.tick(11)
    lab.restart()
    lab.tick()
    assert lab.job(first).state is JobState.COMPLETING
    lab.used.clear()
    lab.tick(1)
    assert lab.job(first).state is JobState.COMPLETED


def test_a_gpu_that_stays_dirty_is_suspect_and_the_job_ends() -> None:
    lab = Lab(gpus=1)
    first = lab.submit(request=request(gpus=1))
    lab.used[0] = 5000
    lab.tick(11)
    lab.tick(lab.settings.gpu.release_wait_s + 1)
    lab.tick(1)
    assert lab.job(first).state is JobState.COMPLETED
    assert any("was not released after run" in event.text for event in lab.store.events(first))
    assert lab.job(lab.submit(request=request(gpus=1))).state is JobState.PENDING


def test_a_run_on_a_lost_gpu_is_ended_by_hardware_and_requeued_free() -> None:
    lab = Lab(gpus=2, outcome=SimulatedOutcome(runs_s=1000))
    job_id = lab.submit(request=request(gpus=1))
    lab.tick()
    lab.lost.add(0)
    lab.tick(1)
    lab.tick(1)
    lab.tick(1)
    job = lab.job(job_id)
    runs = lab.store.runs([job_id])
    assert (runs[0].outcome, runs[0].reason) == (JobState.NODE_FAIL, ReasonCode.GPU_FAILED)
    assert (job.state, job.run, job.requeues, job.failures) == (JobState.RUNNING, 2, 1, 0)
    assert runs[1].gpus[0].index == 1


def test_a_recorded_cancel_is_sent_again_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=1000))
    job_id = lab.submit()
    lab.tick()
    (answer,) = lab.ask(Cancel(ANN, Selection(ids=(job_id,))))
    assert answer["cancelled"] == [str(job_id)]
    orders: list[Any] = []
    monkeypatch.setattr(SimulatedEngine, "adopt", lambda _, runs: orders.extend(run.pending_order for run in runs))
    adopt_open_runs(lab.scheduler.state, lab.engine)
    assert orders == [StopOrder("cancel")]
    lab.tick()
    assert lab.job(job_id).state is JobState.CANCELLED


def test_a_chain_of_hopeless_jobs_is_cancelled_at_once() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10, exit_code=1))
    first = lab.submit()
    chain = [first]
    for _ in range(4):
        chain.append(lab.submit(dependency=f"afterok:{chain[-1]}"))
    lab.tick(11)
    assert [lab.job(job_id).state for job_id in chain] == [JobState.FAILED] + [JobState.CANCELLED] * 4
    assert lab.job(chain[-1]).reason is ReasonCode.DEPENDENCY_NEVER_SATISFIED


def test_dependants_wait_for_the_retries_of_their_parent() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10, exit_code=1))
    parent = lab.submit(retry=RetryRule(retries=1, backoff_s=5))
    child = lab.submit(dependency=f"afterok:{parent}")
    lab.tick(11)
    assert lab.job(child).state is JobState.PENDING
    lab.outcome = SimulatedOutcome(runs_s=10)
    lab.tick(10)
    lab.tick(11)
    assert (lab.job(parent).state, lab.job(parent).run) == (JobState.COMPLETED, 2)
    assert lab.job(child).state is JobState.RUNNING


def test_a_foreign_job_cannot_be_changed() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=1000))
    job_id = lab.submit()
    commands = [
        Cancel(BOB, Selection(ids=(job_id,))),
        Hold(BOB, (job_id,)),
        Release(BOB, (job_id,)),
        Update(BOB, (job_id,), {"nice": -5}),
    ]
    assert all(isinstance(answer, Forbidden) for answer in lab.ask(*commands))
    (answer,) = lab.ask(Cancel(BOB, Selection(everything=True)))
    assert answer["cancelled"] == []
    assert lab.job(job_id).state is JobState.RUNNING


def test_a_command_on_several_jobs_is_atomic() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=1000))
    mine = lab.submit(hold=True)
    (answer,) = lab.ask(Release(ANN, (mine, 99)))
    assert isinstance(answer, NotFound)
    assert lab.job(mine).hold == "user"
    (answer,) = lab.ask(Update(ANN, (mine,), {"gpus": 99}))
    assert isinstance(answer, Refused)
    assert lab.job(mine).spec.request.gpus == 0


def test_the_number_of_jobs_is_limited() -> None:
    lab = Lab()
    lab.scheduler.settings = replace(lab.settings, limit=replace(lab.settings.limit, jobs=2))
    many = Submit(ANN, [spec(hold=True)] * 3, {})
    assert isinstance(lab.ask(many)[0], Refused)
    assert lab.store.jobs(JobFilter()) == []


def test_devices_accept_every_usual_name() -> None:
    lab = Lab()
    for target, name in (("0", "GPU-0"), ("n1:1", "GPU-1"), ("n1", "n1"), ("GPU-1", "GPU-1")):
        assert lab.ask(Drain(ROOT, (target,), "why"))[0]["changed"] == [name]
        assert lab.store.load(DRAINS) == {name: DrainEntry("why")}
        assert {drained: who.user for drained, who in lab.store.load(DRAINERS).items()} == {name: ROOT.user}
        lab.ask(Drain(ROOT, (target,), None))
    assert lab.store.load(DRAINS) == lab.store.load(DRAINERS) == {}
    for target in ("7", "elsewhere", ""):
        assert isinstance(lab.ask(Drain(ROOT, (target,), "why"))[0], NotFound)


def test_a_missing_payload_fails_the_job_and_not_the_daemon() -> None:
    lab = Lab()
    (answer,) = lab.ask(Submit(ANN, [spec(launch=launch("true", env_sha="nowhere"))], {}))
    lab.tick()
    job = lab.job(answer["ids"][0])
    assert (job.state, job.reason) == (JobState.FAILED, ReasonCode.JOB_LAUNCH_FAILURE)


@settings(max_examples=40)
@given(data=st.data())
def test_any_commands_lose_no_job_and_promise_nothing_twice(data: st.DataObject) -> None:
    lab = Lab(gpus=3, cpus=4)
    submitted: list[int] = []
    for _ in range(data.draw(st.integers(1, 25))):
        lab.outcome = data.draw(
            st.sampled_from(
                [
                    SimulatedOutcome(runs_s=3),
                    SimulatedOutcome(runs_s=7, exit_code=2),
                    SimulatedOutcome(lost=True),
                    SimulatedOutcome(never_starts=True),
                ]
            )
        )
        action = data.draw(st.sampled_from(["submit", "submit", "cancel", "hold", "release", "restart", "wait"]))
        if action == "submit":
            parts = {
                "request": data.draw(
                    st.sampled_from([request(), request(gpus=1), request(gpus=3), request(gpus=1, vram_mib=9000)])
                ),
                "retry": RetryRule(retries=data.draw(st.integers(0, 2)), backoff_s=1),
                "time_limit_s": data.draw(st.sampled_from([None, 5, 60])),
            }
            submitted.append(lab.submit(**parts))
        elif action == "restart":
            lab.ticker.flush()
            lab.restart()
        elif action != "wait" and submitted:
            ids = (data.draw(st.sampled_from(submitted)),)
            lab.ask({"cancel": Cancel(ANN, Selection(ids=ids)), "hold": Hold(ANN, ids)}.get(action, Release(ANN, ids)))
        lab.tick(data.draw(st.integers(0, 4)))
        assert check_invariants(lab.scheduler.snapshot(lab.clock.now())) == []
        known = {job.id: job for job in lab.store.jobs(JobFilter())}
        assert sorted(known) == submitted
        active = {job_id for job_id, job in known.items() if not job.state.is_final}
        assert set(lab.scheduler.state.jobs) == active
    lab.outcome = SimulatedOutcome(runs_s=1)
    for job_id in submitted:
        lab.ask(Release(ANN, (job_id,)))
    for _ in range(400):
        if not lab.scheduler.state.jobs:
            break
        lab.tick(3)
    assert {job.state.is_final for job in lab.store.jobs(JobFilter())} <= {True}


# --- what a submission meets that comes in the very turn in which others end -------------------------------


ARRAY = ArraySpec("0-1")
IN_THE_SAME_TURN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a job": ({}, {"dependency": "afterok:1"}),
    "a job that is named with others": ({}, {"dependency": "afterany:1?afternotok:1"}),
    "one task": ({"array": ARRAY}, {"dependency": "afterok:2"}),
    "an array": ({"array": ARRAY}, {"dependency": "afterok:1"}),
    "an array, task by task": ({"array": ARRAY}, {"dependency": "aftercorr:1", "array": ARRAY}),
}


@pytest.mark.parametrize(("first", "second"), IN_THE_SAME_TURN.values(), ids=IN_THE_SAME_TURN)
def test_a_dependant_of_a_job_that_ends_in_the_same_tick_starts(first: dict[str, Any], second: dict[str, Any]) -> None:
    lab = Lab(cpus=4)
    assert lab.submit(**first) == 1
    lab.clock.advance(11)
    after = lab.submit(**second)
    for _ in range(3):
        lab.tick(11)
    assert lab.job(after).state is JobState.COMPLETED


def test_whole_and_task_by_task_dependencies_are_known_after_a_restart() -> None:
    lab = Lab(cpus=2)
    first = lab.submit(array=ArraySpec("0-3"))
    whole = lab.submit(dependency=f"aftercorr:{first}")
    each = lab.submit(dependency=f"aftercorr:{first}", array=ArraySpec("0-3"), nice=-100, caller=ROOT)
    lab.restart()
    lab.tick(11)
    assert [job.task for job in lab.store.jobs(JobFilter(arrays=frozenset({each})))] == [0, 1]
    for _ in range(6):
        lab.tick(11)
    assert {lab.job(job_id).state for job_id in (first, whole, each)} == {JobState.COMPLETED}
