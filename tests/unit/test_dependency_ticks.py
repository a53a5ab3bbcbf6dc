"""Who follows whom through the tick: retries, delays, jobs of one name, and what can never come true."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import ANN, BOB, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.dependencies import Singletons
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.errors import Refused
from gpusched.model.commands import Caller, Cancel, Release, Reload, Selection, Update
from gpusched.model.job import RetryRule
from gpusched.model.mentions import render
from gpusched.model.settings import LifeSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.testing import job

RETRY = RetryRule(retries=1, backoff_s=5.0)
WAIT = LifeSettings(never_satisfied="wait")


def states(lab: Lab, *ids: int) -> list[str]:
    return [lab.job(job_id).state.value for job_id in ids]


@pytest.mark.parametrize("kind", ["afterok", "afterany", "afternotok", "aftercorr"])
def test_a_job_with_retries_left_has_not_ended(kind: str) -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10, exit_code=1))
    first = lab.submit(retry=RETRY)
    second = lab.submit(dependency=f"{kind}:{first}")
    lab.tick(11)
    assert (lab.job(first).failures, states(lab, second)) == (1, ["PENDING"])
    lab.outcome = SimulatedOutcome(runs_s=10, exit_code=0)
    lab.tick(10)
    assert states(lab, first, second) == ["RUNNING", "PENDING"]
    lab.tick(11)
    assert states(lab, first) == ["COMPLETED"]
    assert states(lab, second) == (["CANCELLED"] if kind == "afternotok" else ["RUNNING"])


def test_the_last_failure_decides() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10, exit_code=1))
    first = lab.submit(retry=RETRY)
    good, bad = lab.submit(dependency=f"afterok:{first}"), lab.submit(dependency=f"afternotok:{first}")
    for _ in range(4):
        lab.tick(11)
    assert states(lab, first, good) == ["FAILED", "CANCELLED"]
    assert lab.job(good).reason is ReasonCode.DEPENDENCY_NEVER_SATISFIED
    assert lab.job(bad).run == 1


def test_a_delay_counts_ten_minutes_from_the_start() -> None:
    lab = Lab()
    first = lab.submit(hold=True)
    second, started = lab.submit(dependency=f"after:{first}+10"), lab.submit(dependency=f"after:{first}")
    lab.tick(1000)
    assert states(lab, second) == ["PENDING"]
    lab.ask(Release(ANN, (first,)))
    reason = lab.scheduler.answers.reason_for(lab.job(second))
    assert reason is not None
    assert (reason.code, render(reason.text)) == (
        ReasonCode.DEPENDENCY,
        f"begins in 10:00, 10 min after the start of job {first}",
    )
    assert states(lab, started) == ["RUNNING"]
    assert lab.ticker.next_due() == lab.clock.now() + 600
    lab.tick(599)
    assert states(lab, first, second) == ["COMPLETED", "PENDING"]
    lab.tick(1)
    assert states(lab, second) == ["RUNNING"]


def test_a_delay_is_the_same_after_a_restart() -> None:
    lab = Lab()
    first = lab.submit()
    second = lab.submit(dependency=f"after:{first}+10")
    lab.tick(300)
    lab.restart()
    lab.tick(299)
    assert states(lab, second) == ["PENDING"]
    lab.tick(1)
    assert states(lab, second) == ["RUNNING"]


def test_a_singleton_waits_for_earlier_jobs_of_its_owner_and_name() -> None:
    lab = Lab()
    first = lab.submit(name="nightly")
    other = lab.submit(name="else", dependency="singleton")
    second = lab.submit(name="nightly", dependency="singleton")
    third = lab.submit(name="nightly", dependency="singleton")
    (answer,) = lab.ask(lab.submission(caller=BOB, name="nightly", dependency="singleton"))
    assert states(lab, first, other, second, third) == ["RUNNING", "RUNNING", "PENDING", "PENDING"]
    assert states(lab, answer["ids"][0]) == ["RUNNING"]
    lab.tick(11)
    assert states(lab, second, third) == ["RUNNING", "PENDING"]
    lab.tick(11)
    assert states(lab, second, third) == ["COMPLETED", "RUNNING"]


def test_a_singleton_follows_retries_restarts_and_cancels() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10, exit_code=1))
    first = lab.submit(name="x", retry=replace(RETRY, backoff_s=100.0))
    second = lab.submit(name="x", dependency="singleton")
    lab.tick(11)
    assert states(lab, first, second) == ["PENDING", "PENDING"]
    lab.restart()
    lab.tick()
    assert states(lab, second) == ["PENDING"]
    lab.ask(Cancel(ANN, Selection(ids=(first,))))
    assert states(lab, second) == ["RUNNING"]


def test_a_new_name_applies_at_once() -> None:
    lab = Lab(cpus=1)
    first = lab.submit(name="a")
    second = lab.submit(name="b", hold=True)
    third = lab.submit(name="a", dependency="singleton")
    lab.ask(Update(ANN, (first,), {"name": "c"}), Update(ANN, (second,), {"name": "a"}))
    reason = lab.scheduler.answers.reason_for(lab.job(third))
    assert reason is not None
    assert render(reason.text) == f"waits for job {second}, which has the same name, to end"
    lab.ask(Update(ANN, (second,), {"name": "d"}))
    lab.tick(11)
    assert states(lab, third) == ["RUNNING"]


def test_a_cycle_through_a_name_is_refused() -> None:
    lab = Lab()
    first = lab.submit(name="a", hold=True)
    second = lab.submit(name="b", dependency="singleton")
    third = lab.submit(name="b", dependency="singleton", hold=True)
    (answer,) = lab.ask(Update(ANN, (first,), {"dependency": f"afterok:{third}", "name": "b"}))
    assert isinstance(answer, Refused)
    assert answer.message == f"the jobs would wait for each other: {first} -> {third} -> {first}"
    lab.ask(Update(ANN, (first,), {"dependency": f"afterok:{third}"}))
    (answer,) = lab.ask(Update(ANN, (first,), {"name": "b"}))
    assert isinstance(answer, Refused)
    assert states(lab, second) == ["RUNNING"]


def test_unsatisfiable_jobs_wait_when_configured() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10, exit_code=1), life=WAIT)
    first = lab.submit()
    waits = lab.submit(dependency=f"afterok:{first}")
    ends = lab.submit(dependency=f"afterok:{first}", never_satisfied="cancel")
    behind = lab.submit(dependency=f"afterok:{waits}")
    lab.tick(11)
    assert states(lab, first, waits, ends, behind) == ["FAILED", "PENDING", "CANCELLED", "PENDING"]
    lab.restart()
    lab.tick(1000)
    reason = lab.scheduler.answers.reason_for(lab.job(waits))
    assert reason is not None
    assert reason.code is ReasonCode.DEPENDENCY_NEVER_SATISFIED
    assert render(reason.text) == f"depends on the success of job {first}, which ended as FAILED"
    lab.ask(Update(ANN, (waits,), {"dependency": f"afterany:{first}"}))
    assert states(lab, waits) == ["RUNNING"]


def test_unsatisfiable_jobs_end_when_configured() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10, exit_code=1), life=WAIT)
    first = lab.submit()
    waits = lab.submit(dependency=f"afterok:{first}")
    lab.tick(11)
    lab.ask(Update(ANN, (waits,), {"never_satisfied": "cancel"}))
    assert states(lab, waits) == ["CANCELLED"]


def test_a_single_job_may_wait_where_others_are_cancelled() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10, exit_code=1))
    first = lab.submit()
    waits = lab.submit(dependency=f"afterok:{first}", never_satisfied="wait")
    lab.tick(11)
    assert states(lab, waits) == ["PENDING"]


def test_a_reload_to_cancel_ends_unsatisfiable_jobs() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10, exit_code=1), life=WAIT)
    first = lab.submit()
    waits = lab.submit(dependency=f"afterok:{first}")
    lab.tick(11)
    assert states(lab, waits) == ["PENDING"]
    lab.config = lambda: replace(lab.settings, life=LifeSettings())
    lab.ask(Reload(Caller(0, "root")))
    assert states(lab, waits) == ["CANCELLED"]


def test_a_dependant_of_a_requeued_run_waits_for_the_next_one() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=5, lost=True))
    first = lab.submit()
    second = lab.submit(dependency=f"afterany:{first}")
    lab.outcome = SimulatedOutcome(runs_s=20)
    lab.tick(5)
    assert (lab.job(first).requeues, states(lab, first, second)) == (1, ["RUNNING", "PENDING"])
    scheduler = lab.restart()
    adopt_open_runs(scheduler.state, lab.engine)
    lab.tick(19)
    assert states(lab, first, second) == ["RUNNING", "PENDING"]
    lab.tick(2)
    assert states(lab, first, second) == ["COMPLETED", "RUNNING"]


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from("abx")), max_size=60))
def test_the_first_of_each_name_is_the_smallest_unfinished_id(moves: list[tuple[int, str]]) -> None:
    book = Singletons()
    live: dict[int, str] = {}
    book.begin([])
    for job_id, name in moves:
        ends = name == "x"
        made = job(job_id, name="a" if ends else name, state=JobState.COMPLETED if ends else JobState.PENDING)
        if ends and job_id not in live:
            continue
        book.follow(replace(made, end_at=1.0) if ends else made)
        if ends:
            del live[job_id]
        else:
            live[job_id] = name
        for other, its_name in live.items():
            before = [one for one, named in live.items() if named == its_name and one < other]
            assert book.earlier(other) == min(before, default=None)
