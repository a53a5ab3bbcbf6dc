"""The monthly statement: what the daemon sums up for whom, and what commands make of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from answering import get
from lab import ANN, BOB, Lab
from shell import compare

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.addons.statement import command as shown
from gpusched.addons.statement.handler import statement
from gpusched.api import visibility
from gpusched.api.handlers.queues import budgets
from gpusched.daemon.facade import DaemonFacade
from gpusched.errors import Refused, UsageError
from gpusched.model.cluster import GpuReading, GpuSample
from gpusched.model.commands import Caller
from gpusched.model.queue_settings import AccountSettings
from gpusched.model.settings import AccessSettings, BudgetSettings, HistorySettings
from gpusched.model.value import replace
from gpusched.periods import month_named, period_at
from gpusched.testing import request

HOUR = 3600.0
BERLIN = "CET-1CEST,M3.5.0,M10.5.0/3"
ACCOUNTS = {
    "science": AccountSettings("science", gpu_hours=100.0, budget_period="year", shares=3),
    "vision": AccountSettings("vision", parent="science", users={"ann": 1.0, "bob": 1.0}, gpu_hours=8.0),
    "chem": AccountSettings("chem", users={"bob": 2.0}, gpu_hours_per_user=5.0),
    "empty": AccountSettings("empty", users={"dan": 1.0}),
}


@pytest.fixture(autouse=True)
def _ann_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "caller_of", lambda request: ANN)


def asked_by(monkeypatch: pytest.MonkeyPatch, caller: Caller) -> None:
    monkeypatch.setattr(visibility, "caller_of", lambda request: caller)


def used_lab(**sections: Any) -> Lab:
    """Jobs of ann and bob; the first one runs over the end of a month."""
    lab = Lab(4, outcome=SimulatedOutcome(runs_s=2 * HOUR), account=ACCOUNTS, **sections)
    edge = period_at(lab.clock.now(), "month").until_at
    assert edge is not None
    lab.clock.advance(edge - HOUR - lab.clock.now())
    lab.submit(request=request(gpus=2, cpus=3.0), account="vision", time_limit_s=7200)
    lab.tick()
    lab.tick(2 * HOUR)
    for account in ("vision", "chem"):
        lab.ask(lab.submission(BOB, request=request(gpus=1), account=account, time_limit_s=7200))
    lab.tick()
    lab.tick(2 * HOUR)
    lab.tick(60)
    return lab


def by_name(answer: dict[str, Any]) -> dict[tuple[str | None, str | None], dict[str, Any]]:
    return {(row["account"], row["user"]): row for row in answer["rows"]}


def test_month_is_summed_by_user_account_and_parent_and_runs_are_split() -> None:
    lab = used_lab()
    this, last = (get(lab, statement, f"month={month}") for month in ("this", "last"))
    assert [(row["account"], row["user"], row["depth"]) for row in this["rows"]] == [
        (None, None, 0),
        ("chem", None, 1),
        ("chem", "bob", 2),
        ("science", None, 1),
        ("vision", None, 2),
        ("vision", "ann", 3),
        ("vision", "bob", 3),
    ]
    now, before = by_name(this), by_name(last)
    hours = {mark: round(row["gpu_hours"], 6) for mark, row in now.items()}
    assert hours[None, None] == 6
    assert (hours["science", None], hours["vision", None], hours["vision", "ann"]) == (4, 4, 2)
    assert round(before[None, None]["gpu_hours"], 6) == 2
    assert ("chem", "bob") not in before
    assert (now[None, None]["jobs"], now["vision", "ann"]["jobs"], before["vision", "ann"]["jobs"]) == (3, 1, 1)
    assert now["vision", "ann"]["cpu_hours"] == pytest.approx(3)
    assert now["science", None]["share_used"] == pytest.approx(4 / 6)
    assert now["vision", "ann"]["fair_share"] == pytest.approx(3 / 5 / 2)
    assert now["vision", None]["budget"]["left_gpu_hours"] == pytest.approx(4)
    assert now["chem", "bob"]["budget"]["used_gpu_hours"] == pytest.approx(2)
    # A year's budget has used what its months have until then.
    same_year = time.localtime(this["since"]).tm_year == time.localtime(last["since"]).tm_year
    assert now["science", None]["budget"]["used_gpu_hours"] == pytest.approx(6 if same_year else 4)
    assert (this["is_final"], last["is_final"], last["is_complete"]) == (False, True, True)


def test_what_is_left_this_month_is_what_budgets_say_at_the_same_instant() -> None:
    lab = used_lab(budget=BudgetSettings(weights={"A100": 1.5}))
    lab.ask(lab.submission(BOB, request=request(gpus=1), account="vision", time_limit_s=3600))
    lab.ask(lab.submission(BOB, request=request(gpus=1), account="chem", time_limit_s=3600))
    lab.tick()
    lab.clock.advance(600)
    rows = by_name(get(lab, statement, "month=this"))
    told = {(row["account"], row["user"]): row for row in get(lab, budgets, "")["budgets"]}
    assert told["vision", None]["booked_gpu_hours"] > 0.8
    for mark, row in told.items():
        if mark in rows:
            assert rows[mark]["budget"] == {key: row[key] for key in (rows[mark]["budget"] or {})}
    assert {("vision", None), ("science", None), ("chem", "bob")} <= told.keys() & rows.keys()
    columns = [column.title for column in shown._columns({"rows": list(rows.values()), "currency": ""})]
    assert columns[-4:] == ["BUDGET", "CHARGED", "BOOKED", "LEFT"]


def test_restricted_people_see_only_their_own_use(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = used_lab(access=AccessSettings(private_data=("usage",)))
    rows = by_name(get(lab, statement, "month=this"))
    assert [mark for mark in rows if mark[1]] == [("vision", "ann")]
    assert rows[None, None]["gpu_hours"] == pytest.approx(2)
    assert rows[None, None]["share_used"] is None
    assert ("chem", None) not in rows
    # What the own account has left is what a waiting job would say.
    assert rows["vision", None]["budget"]["used_gpu_hours"] == pytest.approx(4)
    asked_by(monkeypatch, Caller(0, "root"))
    assert ("chem", "bob") in by_name(get(lab, statement, "month=this"))


def test_month_without_jobs_has_zeros_and_accounts_that_are_gone_stay_in_theirs() -> None:
    lab = used_lab()
    lab.settings = replace(lab.settings, account={"chem": lab.settings.account["chem"]})
    lab.scheduler.settings = lab.settings
    assert ("vision", "ann") in by_name(get(lab, statement, "month=this"))
    lab.clock.advance(40 * 24 * HOUR)
    found = get(lab, statement, "month=this")
    assert [(one["jobs"], one["gpu_hours"], one["energy_kwh"]) for one in found["rows"]][:1] == [(0, 0, None)]


def test_past_months_have_the_budgets_and_weights_that_were_set_then(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = used_lab()
    cards = tuple(GpuSample(f"GPU-{index}", index, "NVIDIA A100", vram_total_mib=40_000) for index in range(4))
    lab.store.save_gpus("n1", GpuReading(lab.clock.now(), "nvml", cards))
    asked: list[float] = []
    then: dict[str, Any] | None = {
        "account": {"vision": {"gpu_hours": 3, "parent": "science"}, "gone": {"gpu_hours_per_user": 2}},
        "budget": {"weights": {"A100": 2}},
    }

    def settings_before(_: DaemonFacade, at: float) -> dict[str, Any] | None:
        asked.append(at)
        return then

    monkeypatch.setattr(DaemonFacade, "settings_before", settings_before)
    last = get(lab, statement, "month=last")
    rows = by_name(last)
    assert asked == [last["until"]]
    assert last["is_as_set_then"]
    assert rows["vision", None]["budget"]["granted_gpu_hours"] == 3
    assert rows["vision", None]["budget"]["used_gpu_hours"] == pytest.approx(4)
    assert rows["vision", "ann"]["gpu_hours_charged"] == pytest.approx(4)
    assert rows["vision", "ann"]["gpu_hours"] == pytest.approx(2)
    assert rows["science", None]["budget"] is None
    then = None
    last = get(lab, statement, "month=last")
    assert not last["is_as_set_then"]
    assert by_name(last)["vision", None]["budget"]["granted_gpu_hours"] == 8
    this = get(lab, statement, "month=this")
    assert this["is_as_set_then"]
    assert len(asked) == 2
    told = "the record of settings begins after this month: budgets and weights are today's"
    assert told in shown.notes(last)
    assert told not in shown.notes(this)


def test_months_that_have_left_the_history_are_said_to_be_incomplete() -> None:
    lab = used_lab(history=HistorySettings(keep_days=0.5))
    assert not get(lab, statement, "month=last")["is_complete"]
    assert get(lab, statement, "month=this")["is_complete"]


@pytest.mark.parametrize("word", ["2026-13", "november", "2026-1", "", "2026-11-01", "0000-01", "9999-01"])
def test_odd_months_are_refused(word: str) -> None:
    with pytest.raises((UsageError, Refused)):
        get(Lab(1), statement, f"month={word}")


def test_month_that_has_not_begun_is_refused() -> None:
    with pytest.raises(Refused, match="has not begun"):
        get(Lab(1), statement, "month=2999-01")


@pytest.mark.parametrize("zone", [BERLIN, "EST5EDT,M3.2.0,M11.1.0", "IST-5:30", "NZST-12NZDT,M9.5.0,M4.1.0/3"])
def test_months_are_those_of_the_time_zone(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        found = month_named("2026-10", 2e9)
        assert time.strftime("%F %T", time.localtime(found.since)) == "2026-10-01 00:00:00"
        assert time.strftime("%F %T", time.localtime(found.until_at)) == "2026-11-01 00:00:00"
        # The clocks change within it.
        days = ((found.until_at or 0) - found.since) / 86400
        assert days == (31 + 1 / 24 if zone == BERLIN else 31)
        assert month_named("last", found.until_at or 0) == found
    finally:
        monkeypatch.undo()
        time.tzset()


# --- what is printed ----------------------------------------------------------------------------

HOSTILE = '<img src=x onerror=alert(1)>"&'


def row(account: str | None, user: str | None, depth: int, hours: float, **parts: Any) -> dict[str, Any]:
    return {
        "account": account,
        "user": user,
        "depth": depth,
        "jobs": 3,
        "runs": 4,
        "open_runs": 0,
        "gpu_hours": hours,
        "gpu_hours_by_type": {"NVIDIA A100": hours, "=HYPERLINK(1)": 0.0},
        "gpu_hours_used": hours / 2,
        "gpu_hours_charged": hours,
        "gpu_hours_filler": hours / 4,
        "cpu_hours": hours * 4,
        "cpu_hours_used": None,
        "energy_kwh": hours * 0.3,
        "grams": hours * 114,
        "cost": hours * 0.084,
        "fair_share": 0.5,
        "share_used": hours / 40,
        "budget": None,
        **parts,
    }


BUDGET = {"period": "November 2026", "granted_gpu_hours": 50, "used_gpu_hours": 30.0, "left_gpu_hours": 20.0}
MONTH: dict[str, Any] = {
    "month": "November 2026",
    "since": 1793487600.0,
    "until": 1796079600.0,
    "now": 1796080000.0,
    "time_zone": "CET",
    "cluster_name": "lab1",
    "is_final": True,
    "is_complete": False,
    "currency": "EUR",
    "rows": [
        row(None, None, 0, 40.0, open_runs=2),
        row("vision", None, 1, 30.0, budget=BUDGET),
        row("vision", "ann", 2, 30.0),
        row("=cmd", None, 1, 10.0, energy_kwh=None, cost=None, grams=None, gpu_hours_used=None),
        row("=cmd", HOSTILE, 2, 10.0, gpu_hours_by_type={"NVIDIA A100": 10.0}),
    ],
}


class _Daemon:
    def __enter__(self) -> _Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, method: str, path: str) -> dict[str, Any]:
        assert (method, path) == ("GET", "/v1/statement?month=2026-11")
        return MONTH


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **values: Any) -> str:
    monkeypatch.setattr(shown, "connect", _Daemon)
    shown.show_statement({"statement": "2026-11", **values})
    return capsys.readouterr().out


@pytest.mark.parametrize(("name", "values"), [("statement.txt", {}), ("statement.csv", {"csv": True})])
def test_output(
    name: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(name, printed(monkeypatch, capsys, **values))


def test_page_loads_nothing_and_escapes_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "november.html"
    path.write_text("an older one")
    assert printed(monkeypatch, capsys, html=str(path)) == ""
    text = path.read_text()
    compare("statement.html", text)
    assert HOSTILE not in text
    assert "&lt;img src=x onerror=alert(1)&gt;&quot;&amp;" in text
    assert not any(part in text for part in ("<script", 'src="', "href=", "url("))
    assert printed(monkeypatch, capsys, html="-") == text
    assert sorted(tmp_path.iterdir()) == [path]


def test_statement_refuses_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "connect", _Daemon)
    for values in ({"users": ["ann"]}, {"csv": True, "html": "-"}, {"limit": 3}, {"ids": ["4"]}):
        with pytest.raises(UsageError):
            shown.show_statement({"statement": "2026-11", **values})
    with pytest.raises(Refused, match="cannot be written"):
        shown.show_statement({"statement": "2026-11", "html": str(tmp_path / "none" / "x.html")})
    (tmp_path / "folder").mkdir()
    with pytest.raises(Refused, match="cannot be written"):
        shown.show_statement({"statement": "2026-11", "html": str(tmp_path / "folder")})
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_json_is_the_daemons_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(monkeypatch, capsys, json=True))["rows"] == MONTH["rows"]
