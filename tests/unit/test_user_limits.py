"""Limits of single users: who waits for them, what is said, and how they end."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from lab import ANN, BOB, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.errors import Forbidden, NotFound, Refused, UsageError
from gpusched.model.commands import Caller, Reload, SetUserLimit, UndoTableSettings
from gpusched.model.queue_settings import AccountSettings, UserSettings
from gpusched.model.snapshot import LimitInForce, Plan
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.table_settings import UserLimit
from gpusched.model.value import replace
from gpusched.ports.tables import TABLE_SETTINGS
from gpusched.scheduler import events
from gpusched.scheduler.planner import Planner, decide
from gpusched.testing import NOW, job, node, request, snapshot

ADMIN = Caller(os.geteuid(), "admin")
LONG = SimulatedOutcome(runs_s=1e6)
ACCOUNTS = {"vision": AccountSettings("vision"), "nlp": AccountSettings("nlp", parent="vision")}
DAY = 86400.0


def waiting(job_id: int, gpus: int = 1, user: str = "ann", account: str = "vision") -> Any:
    parts = {"request": request(gpus=gpus), "account": account, "user": user, "submit_at": NOW - 100 + job_id}
    return job(job_id, time_limit_s=600, **parts)


def planned(*jobs: Any, limits: tuple[UserLimit, ...]) -> Plan:
    settings = Lab(account=ACCOUNTS).settings
    found = tuple(LimitInForce(one, "30 Nov 18:00" if one.until_at else "") for one in limits)
    view = replace(snapshot(node(gpus=8), waiting=jobs, now=NOW), limits=found)
    plan = decide(view, settings)
    planner = Planner.from_snapshot(replace(view, limits=()), settings)
    planner.state.apply(events.LimitsChanged(found))
    other = planner.plan(NOW)
    assert (other.starts, dict(other.reasons)) == (plan.starts, dict(plan.reasons))
    return plan


RULES: list[tuple[str, list[Any], dict[str, Any], set[int]]] = [
    ("GPUs of all jobs count", [waiting(1, 2), waiting(2, 2), waiting(3, 2)], {"max_gpus": 4}, {1, 2}),
    ("a smaller job passes", [waiting(1, 2), waiting(2, 4), waiting(3, 1)], {"max_gpus": 3}, {1, 3}),
    ("other users are free", [waiting(1), waiting(2, user="bob")], {"max_jobs": 0}, {2}),
    ("running jobs count", [waiting(1), waiting(2), waiting(3)], {"max_jobs": 2}, {1, 2}),
    ("jobs without GPUs hold none", [waiting(1, 0), waiting(2, 1)], {"max_gpus": 0}, {1}),
    ("only in its account", [waiting(1), waiting(2, account="chem")], {"max_jobs": 0, "account": "vision"}, {2}),
    ("and in accounts below it", [waiting(1, account="nlp")], {"max_jobs": 0, "account": "vision"}, set()),
    ("not in accounts above it", [waiting(1)], {"max_jobs": 0, "account": "nlp"}, {1}),
    ("no longer after its end", [waiting(1)], {"max_jobs": 0, "until_at": NOW}, {1}),
    ("still before its end", [waiting(1)], {"max_jobs": 0, "until_at": NOW + 1}, set()),
]


@pytest.mark.parametrize(("jobs", "parts", "wanted"), [one[1:] for one in RULES], ids=[one[0] for one in RULES])
def test_rule(jobs: list[Any], parts: dict[str, Any], wanted: set[int]) -> None:
    plan = planned(*jobs, limits=(UserLimit("ann", **parts),))
    assert {one.job_id for one in plan.starts} == wanted
    assert {reason.code for reason in plan.reasons.values()} <= {ReasonCode.USER_LIMIT}


def test_the_tightest_of_several_holds() -> None:
    limits = (
        UserLimit("ann", max_gpus=4),
        UserLimit("ann", max_gpus=1, account="vision"),
        UserLimit("ann", max_jobs=9),
    )
    assert {one.job_id for one in planned(waiting(1), waiting(2), limits=limits).starts} == {1}


SENTENCES = [
    (
        UserLimit("ann", max_jobs=0, message="disk full", by="root", until_at=NOW + DAY),
        "user ann may have no running jobs: disk full (set by root, until 30 Nov 18:00)",
    ),
    (
        UserLimit("ann", account="vision", max_gpus=1, by="carla"),
        "user ann may have at most 1 GPU in account vision; 0 held, this asks 2 (set by carla)",
    ),
    (UserLimit("ann", max_gpus=1), "user ann may have at most 1 GPU; 0 held, this asks 2 (in the config file)"),
]


@pytest.mark.parametrize(("limit", "text"), SENTENCES)
def test_reason_names_the_limit_who_set_it_why_and_until_when(limit: UserLimit, text: str) -> None:
    (reason,) = planned(waiting(1, 2), limits=(limit,)).reasons.values()
    assert reason.text == text
    assert (reason.facts["user"], reason.facts["set_by"]) == ("ann", limit.by or None)


# --- in the tick --------------------------------------------------------------------------------


def state_of(lab: Lab, job_id: int) -> JobState:
    return lab.job(job_id).state


def test_dated_limit_holds_over_a_restart_and_ends_at_its_time() -> None:
    lab = Lab(gpus=4, outcome=LONG)
    recorded: list[tuple[str, str, dict[str, Any]]] = []

    def record(settings: Any, caller: Caller, what: str, table: Any) -> None:
        recorded.append((caller.user, what, dict(table)))

    lab.scheduler.signals.settings_set.connect(record)
    until_at = lab.clock.now() + DAY
    lab.ask(SetUserLimit(ADMIN, "ann", max_jobs=0, message="disk full", until_at=until_at, what="gctl limit user ann"))
    mine, other = (
        lab.submit(request=request(gpus=1)),
        lab.ask(lab.submission(BOB, request=request(gpus=1)))[0]["ids"][0],
    )
    lab.tick()
    assert [state_of(lab, one) for one in (mine, other)] == [JobState.PENDING, JobState.RUNNING]
    lab.restart()
    lab.scheduler.signals.settings_set.connect(record)
    lab.tick(DAY - 60)
    assert state_of(lab, mine) is JobState.PENDING
    due = lab.ticker.next_due()
    assert due is not None
    assert due <= until_at
    lab.tick(61)
    assert state_of(lab, mine) is JobState.RUNNING
    assert [one[1] for one in recorded] == ["gctl limit user ann", "the limit of user ann ended"]
    assert recorded[-1][2] == {}
    assert not lab.store.load(TABLE_SETTINGS)
    assert lab.ticker.next_due() is None or (lab.ticker.next_due() or 0.0) > until_at


def test_limit_of_the_file_takes_effect_with_a_reload() -> None:
    lab = Lab(gpus=4, outcome=LONG)
    lab.settings = replace(lab.settings, user={"ann": UserSettings("ann", max_gpus=1)})
    lab.ask(Reload(ADMIN))
    first, second = lab.submit(request=request(gpus=1)), lab.submit(request=request(gpus=1))
    lab.tick()
    assert [state_of(lab, one) for one in (first, second)] == [JobState.RUNNING, JobState.PENDING]
    lab.settings = replace(lab.settings, user={})
    lab.ask(Reload(ADMIN))
    lab.tick()
    assert state_of(lab, second) is JobState.RUNNING


def test_limit_is_replaced_removed_and_undone() -> None:
    lab = Lab(gpus=2, account=ACCOUNTS)
    lab.ask(SetUserLimit(ADMIN, "ann", max_gpus=4))
    lab.ask(SetUserLimit(ADMIN, "ann", max_jobs=1), SetUserLimit(ADMIN, "ann", account="vision", max_gpus=1))
    assert {(one.limit.account, one.limit.max_gpus, one.limit.max_jobs) for one in lab.scheduler.user_limits()} == {
        ("", None, 1),
        ("vision", 1, None),
    }
    lab.ask(SetUserLimit(ADMIN, "ann", is_removed=True))
    (left,) = lab.scheduler.user_limits()
    after = {"user": "ann", "account": "vision", "max_gpus": 1, "by": "admin", "at": left.limit.at}
    undo = UndoTableSettings(ADMIN, 3, ((("user_limit", "ann vision"), None, after),))
    assert lab.ask(undo) == [{}]
    assert lab.scheduler.user_limits() == ()
    (again,) = lab.ask(undo)
    assert isinstance(again, Refused)


REFUSALS: list[tuple[Callable[[Lab], SetUserLimit], type[Exception]]] = [
    (lambda lab: SetUserLimit(ANN, "bob", max_gpus=1), Forbidden),
    (lambda lab: SetUserLimit(ADMIN, "bob", account="visoin", max_gpus=1), NotFound),
    (lambda lab: SetUserLimit(ADMIN, "bob"), UsageError),
    (lambda lab: SetUserLimit(ADMIN, "bob", max_gpus=1, until_at=lab.clock.now()), Refused),
    (lambda lab: SetUserLimit(ADMIN, "bob", max_gpus=1, message="x" * 501), Refused),
    (lambda lab: SetUserLimit(ADMIN, "bob", is_removed=True), NotFound),
]


@pytest.mark.parametrize(("make", "error"), REFUSALS)
def test_limit_is_refused(make: Callable[[Lab], SetUserLimit], error: type[Exception]) -> None:
    lab = Lab(account=ACCOUNTS)
    (answer,) = lab.ask(make(lab))
    assert isinstance(answer, error)
    assert not lab.scheduler.state.rows[TABLE_SETTINGS]


def test_limit_that_could_not_be_recorded_is_not_in_force() -> None:
    lab = Lab(gpus=2, outcome=LONG)
    lab.store.is_full = True
    (answer,) = lab.ask(SetUserLimit(ADMIN, "ann", max_jobs=0))
    assert isinstance(answer, Exception)
    lab.store.is_full = False
    mine = lab.submit(request=request(gpus=1))
    lab.tick()
    assert state_of(lab, mine) is JobState.RUNNING
