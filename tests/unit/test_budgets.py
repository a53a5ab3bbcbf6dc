"""GPU-hour budgets: who may start on what is left, in which period, and that no crash changes what was used."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
from lab import ANN, BOB, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.config import SettingsError
from gpusched.config.load import settings_in
from gpusched.daemon import budgets as budgets_module
from gpusched.daemon.failures import STEPS
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.errors import Forbidden, NotFound, Refused
from gpusched.model.commands import Caller, Cancel, GiveCredit, Reload, Requeue, Selection, UndoTableSettings
from gpusched.model.queue_settings import AccountSettings
from gpusched.model.settings import BudgetSettings
from gpusched.model.snapshot import Budget, Plan
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.periods import period_at
from gpusched.ports.tables import ALERTS, TABLE_SETTINGS
from gpusched.scheduler import events
from gpusched.scheduler.budget import spent_of
from gpusched.scheduler.planner import Planner, decide
from gpusched.testing import NOW, job, node, request, snapshot

HOUR = 3600.0
ADMIN = Caller(os.geteuid(), "admin")
LONG = SimulatedOutcome(runs_s=1e6)


def at(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M"))


@pytest.mark.parametrize(
    ("now", "kind", "since", "until", "name", "again"),
    [
        ("2026-11-23 14:00", "month", "2026-11-01 00:00", "2026-12-01 00:00", " of November 2026", "1 Dec"),
        ("2026-12-31 23:59", "month", "2026-12-01 00:00", "2027-01-01 00:00", " of December 2026", "1 Jan"),
        ("2027-01-01 00:00", "month", "2027-01-01 00:00", "2027-02-01 00:00", " of January 2027", "1 Feb"),
        ("2026-11-23 14:00", "quarter", "2026-10-01 00:00", "2027-01-01 00:00", " of quarter 4 of 2026", "1 Jan"),
        ("2026-03-31 23:59", "quarter", "2026-01-01 00:00", "2026-04-01 00:00", " of quarter 1 of 2026", "1 Apr"),
        ("2028-02-29 12:00", "year", "2028-01-01 00:00", "2029-01-01 00:00", " of 2028", "1 Jan"),
    ],
)
def test_periods_are_those_of_the_calendar(now: str, kind: str, since: str, until: str, name: str, again: str) -> None:
    found = period_at(at(now), kind)
    assert (found.since, found.until_at, found.name, found.again) == (at(since), at(until), name, again)


def test_total_has_no_end() -> None:
    found = period_at(NOW, "total")
    assert (found.since, found.until_at, found.name, found.again) == (0.0, None, "", "")


# --- the rules ----------------------------------------------------------------------------------


def budget(**parts: Any) -> Budget:
    """20 GPU-hours of vision and nlp below it, for a month that ends in 100 hours."""
    fields = {
        "accounts": ("nlp", "vision"),
        "gpu_s": 20 * HOUR,
        "until_at": NOW + 100 * HOUR,
        "period": " of November 2026",
        "again": "1 Dec",
        **parts,
    }
    return Budget("vision", **fields)


def waiting(job_id: int, gpus: int = 1, hours: float | None = 1, account: str = "vision", user: str = "ann") -> Any:
    return job(
        job_id,
        request=request(gpus=gpus),
        time_limit_s=None if hours is None else int(hours * HOUR),
        account=account,
        user=user,
        submit_at=NOW - 100 + job_id,
    )


def planned(*jobs: Any, budgets: tuple[Budget, ...], now: float = NOW) -> Plan:
    view = replace(snapshot(node(gpus=8), waiting=jobs, now=now), budgets=budgets)
    plan = decide(view, Lab().settings)
    # The same from a planner that lived before the budgets.
    planner = Planner.from_snapshot(replace(view, budgets=()), Lab().settings)
    planner.state.apply(events.BudgetsChanged(budgets))
    other = planner.plan(now)
    assert (other.starts, dict(other.reasons)) == (plan.starts, dict(plan.reasons))
    return plan


def started(plan: Plan) -> set[int]:
    return {one.job_id for one in plan.starts}


SPENT = (("ann", 10 * HOUR, 2 * HOUR), ("bob", 4 * HOUR, 0.0))  # 4 of 20 are left
RULES = [
    ("job that fits starts", [waiting(1, 4, 1)], {}, {1}),
    ("job that does not fit waits", [waiting(1, 4, 1.5)], {}, set()),
    ("jobs started together do not overspend", [waiting(1, 2, 1), waiting(2, 1, 1), waiting(3, 1, 2)], {}, {1, 2}),
    ("later job that fits passes one that does not", [waiting(1, 8, 1), waiting(2, 1, 4)], {}, {2}),
    ("job of an account below counts", [waiting(1, 1, 5, "nlp")], {}, set()),
    ("job of another account does not", [waiting(1, 8, 50, "chem")], {}, {1}),
    ("job without GPUs does not", [waiting(1, 0, 1000)], {}, {1}),
    ("job without a limit asks a day", [waiting(1, 1, None)], {}, set()),
    ("only the part within the period is asked", [waiting(1, 2, 50)], {"until_at": NOW + 2 * HOUR}, {1}),
    ("period that is over blocks no more", [waiting(1, 8, 50)], {"until_at": NOW}, {1}),
    ("user has room beside others' use", [waiting(1, 1, 6, user="bob")], {"gpu_s": None, "user_gpu_s": 10 * HOUR}, {1}),
    ("user without room waits", [waiting(1, 1, 1)], {"gpu_s": None, "user_gpu_s": 12 * HOUR}, set()),
    ("both must have room", [waiting(1, 1, 5, user="bob")], {"user_gpu_s": 10 * HOUR}, set()),
    ("nothing is left of an overdrawn one", [waiting(1, 1, 0.01)], {"gpu_s": 5 * HOUR}, set()),
]


@pytest.mark.parametrize(("jobs", "parts", "wanted"), [one[1:] for one in RULES], ids=[one[0] for one in RULES])
def test_rule(jobs: list[Any], parts: dict[str, Any], wanted: set[int]) -> None:
    plan = planned(*jobs, budgets=(budget(spent=SPENT, **parts),))
    assert started(plan) == wanted
    if not wanted:
        assert {reason.code for reason in plan.reasons.values()} == {ReasonCode.BUDGET_SPENT}


def test_every_budget_above_must_have_room() -> None:
    above = Budget("science", ("science", "vision"), gpu_s=2 * HOUR)
    assert started(planned(waiting(1, 1, 2), budgets=(above, budget()))) == {1}
    assert started(planned(waiting(1, 1, 3), budgets=(above, budget()))) == set()


SENTENCES = [
    (
        waiting(1, 4, 4),
        {"gpu_s": 2000 * HOUR, "spent": (("ann", 1960 * HOUR, 36 * HOUR),)},
        "vision used 1,960 of 2,000 GPU-hours of November 2026, 36 booked; 4 left, this asks 16; again 1 Dec, or with "
        "-t 1:00:00",
    ),
    (
        waiting(1, 8, 90),
        {"spent": ()},
        "vision used 0 of 20 GPU-hours of November 2026, 0 booked; 20 left, this asks 720; with -t 2:30:00",
    ),
    (
        waiting(1, 1, 3),
        {
            "gpu_s": None,
            "user_gpu_s": 2 * HOUR,
            "until_at": None,
            "period": "",
            "again": "",
            "spent": (("ann", 2.05 * HOUR, 0.0),),
        },
        "user ann of vision used 2.05 of 2 GPU-hours, 0 booked; 0 left, this asks 3",
    ),
    (
        waiting(1, 1, 0.005),
        {"gpu_s": 0.009 * HOUR, "spent": (("ann", 0.005 * HOUR, 0.0),)},
        "vision used 0.005 of 0.009 GPU-hours of November 2026, 0 booked; 0.004 left, this asks 0.005; again 1 Dec",
    ),
    (
        waiting(1, 8, 30),
        {"gpu_s": 250 * HOUR, "spent": (("ann", 10.4 * HOUR, 0.0),)},
        "vision used 10.4 of 250 GPU-hours of November 2026, 0 booked; 239 left, this asks 240; again 1 Dec, or "
        "with -t 1-05:50:00",
    ),
]


@pytest.mark.parametrize(("one", "parts", "text"), SENTENCES)
def test_sentence_says_what_is_left_and_what_would_fit(one: Any, parts: dict[str, Any], text: str) -> None:
    (reason,) = planned(one, budgets=(budget(**parts),)).reasons.values()
    assert reason.text == text


# --- in the tick --------------------------------------------------------------------------------


def lab_with(hours: float | None = 1.0, outcome: SimulatedOutcome | None = None, **parts: Any) -> Lab:
    accounts = {
        "vision": AccountSettings("vision", gpu_hours=hours, **parts),
        "nlp": AccountSettings("nlp", parent="vision"),
    }
    return Lab(gpus=4, account=accounts, **({} if outcome is None else {"outcome": outcome}))


def spent(lab: Lab, user: str | None = None) -> tuple[float, float]:
    """GPU-seconds used and booked."""
    (found,) = lab.scheduler.budgets(lab.clock.now())
    used, booked = spent_of(found, user)
    return round(used, 3), round(booked, 3)


def test_running_job_moves_from_booked_to_used() -> None:
    lab = lab_with(outcome=SimulatedOutcome(runs_s=600))
    lab.submit(request=request(gpus=2), account="nlp", time_limit_s=1200)
    lab.tick()
    assert spent(lab) == (0, 2400)
    lab.tick(500)
    assert spent(lab) == (1000, 1400)
    lab.tick(100)
    assert spent(lab) == spent(lab, "ann") == (1200, 0)


def test_job_waits_until_another_has_left_enough_and_says_why() -> None:
    lab = lab_with(outcome=SimulatedOutcome(runs_s=600))
    first = lab.submit(request=request(gpus=2), account="vision", time_limit_s=1500)
    second = lab.submit(request=request(gpus=1), account="nlp", time_limit_s=1200)
    lab.tick()
    assert [lab.job(one).state for one in (first, second)] == [JobState.RUNNING, JobState.PENDING]
    reason = lab.scheduler.answers.reason_for(lab.job(second))
    assert reason is not None
    assert reason.code is ReasonCode.BUDGET_SPENT
    assert "vision used 0 of 1 GPU-hours" in reason.text
    lab.tick(600)
    lab.tick()
    assert lab.job(second).state is JobState.RUNNING


def test_next_period_begins_at_its_instant() -> None:
    lab = lab_with(hours=0.5)
    edge = period_at(lab.clock.now(), "month").until_at
    assert edge is not None
    lab.clock.advance(edge - 600 - lab.clock.now())
    lab.outcome = SimulatedOutcome(runs_s=1000)
    lab.submit(request=request(gpus=1), account="vision", time_limit_s=1800)
    lab.tick()
    # Of its half hour ten minutes are in this month.
    assert spent(lab) == (0, 600)
    waits = lab.submit(request=request(gpus=3), account="vision", time_limit_s=1800)
    lab.tick()
    assert lab.job(waits).state is JobState.PENDING
    assert lab.ticker.next_due() == edge or (lab.ticker.next_due() or edge) < edge
    lab.tick(600)
    assert spent(lab) == (0, 1200)
    lab.tick(400)
    assert spent(lab) == (400, 0)


def test_raised_budget_starts_what_waited() -> None:
    lab = lab_with(hours=0.1)
    waits = lab.submit(request=request(gpus=1), account="vision", time_limit_s=3600)
    lab.tick()
    assert lab.job(waits).state is JobState.PENDING
    vision = replace(lab.settings.account["vision"], gpu_hours=2.0)
    lab.settings = replace(lab.settings, account={**lab.settings.account, "vision": vision})
    lab.ask(Reload(ADMIN))
    lab.tick()
    assert lab.job(waits).state is JobState.RUNNING


def test_budgets_set_while_jobs_run_count_what_they_used_already() -> None:
    lab = lab_with(hours=None, outcome=SimulatedOutcome(runs_s=100))
    for _ in range(3):
        lab.submit(request=request(gpus=2), account="vision", time_limit_s=200)
    lab.tick(100)
    lab.tick(50)
    assert lab.scheduler.budgets(lab.clock.now()) == ()
    vision = replace(lab.settings.account["vision"], gpu_hours=2.0)
    lab.settings = replace(lab.settings, account={**lab.settings.account, "vision": vision})
    lab.ask(Reload(ADMIN))
    assert spent(lab) == (400, 400)
    lab.tick(50)
    assert spent(lab) == (500, 300)
    lab.tick(50)
    assert spent(lab) == (600, 0)


def test_each_user_has_the_same_budget() -> None:
    lab = lab_with(hours=None, outcome=LONG, gpu_hours_per_user=0.5)
    jobs = [(caller, 1500) for caller in (ANN, ANN, BOB)]
    answers = lab.ask(
        *(lab.submission(caller, request=request(gpus=1), account="vision", time_limit_s=s) for caller, s in jobs)
    )
    lab.tick()
    states = [lab.job(answer["ids"][0]).state for answer in answers]
    assert states == [JobState.RUNNING, JobState.PENDING, JobState.RUNNING]


class Crash(BaseException):
    """The process dies here: nobody catches it."""


@pytest.mark.parametrize("step", STEPS[1:])
def test_crash_before_any_step_neither_loses_nor_doubles_what_was_used(step: str) -> None:
    lab = lab_with()
    lab.submit(request=request(gpus=1), account="vision", time_limit_s=60)
    lab.tick()

    def die(name: str) -> None:
        if name == step:
            raise Crash

    lab.ticker._step = die
    lab.clock.advance(10)
    with pytest.raises(Crash):
        lab.ticker.tick()
    lab.restart()
    adopt_open_runs(lab.scheduler.state, lab.engine)
    lab.tick()
    lab.tick(1)
    assert not lab.scheduler.state.jobs
    assert spent(lab) == (10, 0)


def test_failed_commit_counts_the_run_once() -> None:
    lab = lab_with()
    lab.submit(request=request(gpus=1), account="vision", time_limit_s=60)
    lab.submit(request=request(gpus=1), account="vision", time_limit_s=60)
    lab.store.is_full = True
    lab.tick(10)
    lab.tick()
    lab.store.is_full = False
    for _ in range(4):
        lab.tick(1)
    assert not lab.scheduler.state.jobs
    assert spent(lab) == (20, 0)
    lab.restart()
    assert spent(lab) == (20, 0)


def test_memory_and_table_agree_after_a_day_of_jobs() -> None:
    lab = lab_with(hours=100.0)
    submitted = []
    for number in range(12):
        lab.outcome = SimulatedOutcome(runs_s=10 + 7 * number, exit_code=number % 3)
        submitted.append(lab.submit(request=request(gpus=1 + number % 2), account="vision", time_limit_s=300))
        lab.tick(5)
        if number % 4 == 3:
            lab.ask(Cancel(ANN, Selection(ids=(submitted[-1],))))
        found = spent(lab)
        adopt_open_runs(lab.restart().state, lab.engine)
        # What began is confirmed by the engine.
        lab.tick()
        assert spent(lab) == pytest.approx(found)
    for _ in range(4):
        lab.tick(500)
    assert not lab.scheduler.state.jobs
    runs = lab.store.runs(submitted)
    wanted = sum((run.end_at - run.start_at) * len(run.gpus) for run in runs if run.start_at and run.end_at)
    assert spent(lab)[0] == pytest.approx(wanted, abs=0.01)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("gpu_hours = 9\nbudget_period = 'year'", "per year, but \\[history\\] keep_days is 365"),
        ("gpu_hours_per_user = 9\nbudget_period = 'total'", "for all time, but \\[history\\] keep_days is 365"),
        ("gpu_hours = 1\ngpu_hours_per_user = 2", "gpu_hours_per_user of account vision is 2, but gpu_hours is 1"),
        ("gpu_hours = -1", "it must be a number of at least 0"),
        ("gpu_hours = 1\nbudget_period = 'week'", "it must be one of month, quarter, year, total"),
    ],
)
def test_budget_that_cannot_be_kept_is_refused(lines: str, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        settings_in(f"[account.vision]\n{lines}\n", "config.toml")


@pytest.mark.parametrize("keep_days", [0, 400])
def test_long_period_with_a_long_history_is_kept(keep_days: int) -> None:
    text = f"[account.vision]\ngpu_hours = 9\nbudget_period = 'year'\n[history]\nkeep_days = {keep_days}\n"
    assert settings_in(text, "config.toml").account["vision"].gpu_hours == 9


# --- weights ------------------------------------------------------------------------------------


WEIGHTED = [
    ("of the type that is asked for", "T4", 8, {1}),
    ("of the heaviest type where any will do", None, 1.5, set()),
    ("of the heaviest that the type matches", "A100", 1.5, set()),
    ("and a job that fits by it starts", "A100", 1, {1}),
]


@pytest.mark.parametrize(
    ("gpu_type", "hours", "wanted"), [one[1:] for one in WEIGHTED], ids=[one[0] for one in WEIGHTED]
)
def test_job_books_hours_by_the_weight(gpu_type: str | None, hours: float, wanted: set[int]) -> None:
    one = job(1, request=request(gpus=1, gpu_type=gpu_type), time_limit_s=int(hours * HOUR), account="vision")
    weights = (("nvidiaa100", 4.0), ("nvidiat4", 0.5))
    models = ("NVIDIA A100", "NVIDIA T4")
    machine = node(gpus=tuple(replace(gpu, name=models[i % 2]) for i, gpu in enumerate(node(gpus=4).gpus)))
    view = replace(snapshot(machine, waiting=(one,), now=NOW), budgets=(budget(spent=SPENT, weights=weights),))
    assert started(decide(view, Lab().settings)) == wanted


def test_used_hours_are_weighted_by_the_model_that_was_held() -> None:
    lab = lab_with(hours=10.0, outcome=SimulatedOutcome(runs_s=600))
    lab.settings = replace(lab.settings, budget=BudgetSettings(weights={"a100": 3.0}))
    lab.ask(Reload(ADMIN))
    lab.submit(request=request(gpus=2), account="vision", time_limit_s=1200)
    lab.tick()
    assert spent(lab) == (0, 7200)
    lab.tick(600)
    assert spent(lab) == (3600, 0)
    reading = lab.scheduler.head.reading
    assert reading is not None
    lab.store.save_gpus("lab1", reading)
    lab.restart()
    assert spent(lab) == (3600, 0)


# --- credits ------------------------------------------------------------------------------------


def test_credit_starts_what_waited_ends_with_the_period_and_survives_a_restart() -> None:
    lab = lab_with(hours=0.1, outcome=LONG)
    waits = lab.submit(request=request(gpus=1), account="vision", time_limit_s=3600)
    lab.tick()
    assert lab.job(waits).state is JobState.PENDING
    lab.ask(GiveCredit(ADMIN, "vision", 2.0, "grant"))
    lab.tick()
    assert lab.job(waits).state is JobState.RUNNING
    lab.restart()
    (found,) = lab.scheduler.budgets(lab.clock.now())
    assert (found.gpu_s, found.credit_s) == (pytest.approx(2.1 * HOUR), 2 * HOUR)
    edge = period_at(lab.clock.now(), "month").until_at
    assert edge is not None
    (later,) = lab.scheduler.budgets(edge + 1)
    assert (later.gpu_s, later.credit_s) == (pytest.approx(0.1 * HOUR), 0)


def test_credit_below_zero_takes_away_but_leaves_no_less_than_nothing() -> None:
    lab = lab_with(hours=1.0)
    lab.ask(GiveCredit(ADMIN, "vision", -0.25), GiveCredit(ADMIN, "vision", -7))
    (found,) = lab.scheduler.budgets(lab.clock.now())
    assert found.gpu_s == 0


@pytest.mark.parametrize(
    ("caller", "account", "error"),
    [(ANN, "vision", Forbidden), (ADMIN, "visoin", NotFound), (ADMIN, "nlp", Refused)],
)
def test_credit_is_refused(caller: Caller, account: str, error: type[Exception]) -> None:
    lab = lab_with()
    (answer,) = lab.ask(GiveCredit(caller, account, 1.0))
    assert isinstance(answer, error)
    assert not lab.scheduler.state.rows[TABLE_SETTINGS]


def test_credits_are_recorded_and_undone_by_their_key() -> None:
    lab = lab_with()
    recorded: list[tuple[str, dict[str, Any]]] = []
    lab.scheduler.signals.settings_set.connect(
        lambda settings, caller, what, table: recorded.append((what, dict(table)))
    )
    lab.ask(GiveCredit(ADMIN, "vision", 2.0, "grant", "gctl budget vision credit=2"))
    ((what, table),) = recorded
    assert what == "gctl budget vision credit=2"
    after = table["credit"]["1"]
    assert (after["gpu_hours"], after["by"], after["message"]) == (2.0, "admin", "grant")
    undo = UndoTableSettings(ADMIN, 7, ((("credit", "1"), None, after),), "gctl undo 7")
    (stranger,) = lab.ask(replace_caller(undo, ANN))
    assert isinstance(stranger, Forbidden)
    assert lab.ask(undo) == [{}]
    assert recorded[-1] == ("gctl undo 7", {})
    (again,) = lab.ask(undo)
    assert isinstance(again, Refused)
    # A number is not given twice, so that an old undo finds nothing of a later credit.
    (given,) = lab.ask(GiveCredit(ADMIN, "vision", 1.0))
    assert given["credit"].number == 2


def replace_caller(command: UndoTableSettings, caller: Caller) -> UndoTableSettings:
    return UndoTableSettings(caller, command.number, command.changes, command.what)


# --- alerts -------------------------------------------------------------------------------------


def test_people_are_told_once_at_each_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets_module.pwd, "getpwnam", uid_of)
    lab = lab_with(hours=1.0, outcome=LONG, users={"ann": 1.0, "bob": 1.0, "gone": 1.0})
    lab.submit(request=request(gpus=1), account="vision", time_limit_s=3600)
    told: list[tuple[int, str]] = []

    def look(s: float) -> list[tuple[int, str]]:
        lab.tick(s)
        lab.tick()
        fresh = [
            (one.uid, str(dict(one.facts)["message"]))
            for one in lab.store.load(ALERTS).values()
            if one.event == "budget"
        ]
        fresh = sorted(one for one in fresh if one not in told)
        told.extend(fresh)
        return fresh

    assert look(1800) == []
    first = f"vision used 0.81 of 1 GPU-hours{period_at(lab.clock.now(), 'month').name}, 80 % of it; 0.19 left"
    assert [(uid, text.partition(", again")[0]) for uid, text in look(1100)] == [(1000, first), (1001, first)]
    assert look(120) == []
    lab.restart()
    adopt_open_runs(lab.scheduler.state, lab.engine)
    assert look(120) == []
    assert len(look(300)) == 2
    assert [", 100 % of it; jobs with GPUs wait" in text for _, text in look(300)] == [True, True]
    assert look(600) == []
    # With more to spend, the marks are ahead again.
    lab.ask(GiveCredit(ADMIN, "vision", 9.0))
    assert look(60) == []


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ({"users": {"ann": 1.0, "bob": 1.0}, "coordinators": ("bob",)}, [1001]),
        ({"users": {"*": 1.0}}, [1000]),
        ({"users": {"gone": 1.0}}, []),
    ],
)
def test_coordinators_are_told_else_members_else_users(
    parts: dict[str, Any], wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets_module.pwd, "getpwnam", uid_of)
    lab = lab_with(hours=1.0, outcome=LONG, **{"users": {}, **parts})
    opened = replace(lab.settings.account["vision"], users={**lab.settings.account["vision"].users, "ann": 1.0})
    lab.settings = replace(lab.settings, account={**lab.settings.account, "vision": opened})
    lab.ask(Reload(ADMIN))
    lab.submit(request=request(gpus=1), account="vision", time_limit_s=3600)
    lab.tick()
    lab.settings = replace(lab.settings, account={**lab.settings.account, "vision": replace(opened, **parts)})
    lab.ask(Reload(ADMIN))
    lab.tick(3000)
    lab.tick()
    assert sorted(one.uid for one in lab.store.load(ALERTS).values() if one.event == "budget") == wanted


def test_jobs_on_several_nodes_are_counted_on_all_of_them_by_their_models() -> None:
    accounts = {"vision": AccountSettings("vision", gpu_hours=100.0)}
    lab = Lab(gpus=2, more_nodes=("n2",), models={"n2": "T4"}, account=accounts, outcome=SimulatedOutcome(runs_s=600))
    lab.settings = replace(lab.settings, budget=BudgetSettings(weights={"a100": 2.0, "t4": 0.5}))
    lab.ask(Reload(ADMIN))
    wide = lab.submit(request=request(gpus=2, nodes=2), account="vision", time_limit_s=1200)
    lab.tick()
    (run,) = lab.store.runs([wide])
    assert len(run.nodes) == 2
    # Two A100 and two T4 count five.
    assert spent(lab)[1] == pytest.approx(5 * 1200)
    lab.tick(600)
    lab.tick()
    used, booked = spent(lab)
    assert (used, booked) == (pytest.approx(5 * 600, abs=10), 0)


def uid_of(name: str) -> Any:
    if name == "gone":
        raise KeyError(name)
    return SimpleNamespace(pw_uid={"ann": 1000, "bob": 1001}[name])


# --- fillers ------------------------------------------------------------------------------------


def filler_lab(**parts: Any) -> Lab:
    """An account whose budget of an hour is spent by two hours of a single GPU; four GPUs."""
    return lab_with(hours=1.0, outcome=LONG, when_spent="filler", **parts)


def is_filler(lab: Lab, job_id: int) -> bool:
    return max(lab.store.runs([job_id]), key=lambda run: run.number).is_filler


def test_job_on_a_spent_budget_runs_as_a_filler_and_costs_nothing() -> None:
    lab = filler_lab()
    paid = lab.submit(request=request(gpus=1), account="vision", time_limit_s=3600)
    free = lab.submit(request=request(gpus=2), account="nlp", time_limit_s=7200)
    lab.tick()
    assert [lab.job(one).state for one in (paid, free)] == [JobState.RUNNING] * 2
    assert [is_filler(lab, one) for one in (paid, free)] == [False, True]
    assert spent(lab) == (0, 3600)
    lab.tick(600)
    assert spent(lab) == (600, 3000)
    assert any("as a filler, since the budget of account nlp is spent" in one.text for one in lab.store.events(free))
    adopt_open_runs(lab.restart().state, lab.engine)
    lab.tick()
    assert is_filler(lab, free)
    assert spent(lab) == (600, 3000)
    lab.outcome = SimulatedOutcome(runs_s=10)
    lab.ask(Cancel(ANN, Selection(ids=(free,))))
    lab.tick(100)
    assert spent(lab) == (700, 2900)


def test_filler_makes_room_for_a_job_within_its_budget_and_starts_again() -> None:
    lab = filler_lab()
    free = lab.submit(request=request(gpus=4), account="vision", time_limit_s=7200)
    lab.tick()
    assert is_filler(lab, free)
    lab.outcome = SimulatedOutcome(runs_s=60)
    paid = lab.submit(request=request(gpus=1), account="vision", time_limit_s=1800)
    for _ in range(4):
        lab.tick(1)
    assert lab.job(paid).state is JobState.RUNNING
    assert lab.job(free).state is JobState.PENDING
    lab.outcome = LONG
    reason = lab.scheduler.answers.reason_for(lab.job(free))
    assert reason is not None
    assert reason.code is ReasonCode.BUDGET_SPENT
    assert reason.text.endswith("; runs as a filler once GPUs are idle that no other job needs")
    assert any("it was a filler: the budget of account vision was spent" in one.text for one in lab.store.events(free))
    for _ in range(4):
        lab.tick(60)
    assert lab.job(free).state is JobState.RUNNING
    assert (lab.job(free).run, is_filler(lab, free)) == (2, True)
    assert spent(lab) == (60, 0)


def test_requeued_filler_runs_within_the_budget_once_there_is_credit() -> None:
    lab = filler_lab()
    free = lab.submit(request=request(gpus=1), account="vision", time_limit_s=7200)
    lab.tick()
    lab.ask(GiveCredit(ADMIN, "vision", 2.0, ""))
    lab.tick()
    assert is_filler(lab, free)
    lab.ask(Requeue(ANN, (free,)))
    for _ in range(4):
        lab.tick(1)
    assert lab.job(free).state is JobState.RUNNING
    assert not is_filler(lab, free)


def test_alert_says_that_jobs_run_as_fillers() -> None:
    lab = filler_lab(coordinators=("root",))
    lab.submit(request=request(gpus=1), account="vision", time_limit_s=3600)
    lab.tick()
    lab.tick(3599)
    lab.tick(120)
    told = [dict(one.facts)["message"] for one in lab.store.load(ALERTS).values() if one.event == "budget"]
    assert any(str(text).endswith("; jobs with GPUs run as fillers, again 1 Feb") for text in told), told


def test_fillers_need_preemption() -> None:
    text = '[account.vision]\ngpu_hours = 10\nwhen_spent = "filler"\n[preempt]\nmode = "off"\n'
    with pytest.raises(SettingsError, match='when_spent of account vision is "filler", but'):
        settings_in(text, "config.toml")
    assert settings_in(text.replace("off", "requeue"), "config.toml").account["vision"].when_spent == "filler"
