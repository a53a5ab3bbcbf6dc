"""The outbox is all there is of what is to be told: whatever raises, the next call sends what is still in it."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, BOB, Lab

from gpusched.daemon.dispatch import Dispatcher
from gpusched.daemon.failures import STEPS
from gpusched.model.alerts import Alert
from gpusched.model.job import Alerting
from gpusched.model.settings import AlertSettings
from gpusched.ports import Changes
from gpusched.ports.tables import ALERTS, ChangedRows

END = Alerting(("end",))


def fail(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("a bug")


class Courier:
    """Sends what it is handed and is not sending already, and says so at the next look."""

    trouble = None

    def __init__(self) -> None:
        self.sending: dict[str, Alert] = {}
        self.sent: list[str] = []

    def submit(self, alerts: dict[str, Alert]) -> list[dict[str, Any]]:
        for key, alert in alerts.items():
            if key not in self.sending:
                self.sending[key] = alert
                self.sent.append(key)
        return []

    def poll(self) -> list[dict[str, Any]]:
        sending, self.sending = self.sending, {}
        return [
            report
            for key in sending
            for report in ({"key": key, "target": "a", "outcome": "told", "tries": 1}, {"key": key, "done": True})
        ]

    def due_s(self) -> float | None:
        return None


class Desk:
    """A lab whose alerts are sent."""

    def __init__(self, **sections: Any) -> None:
        self.lab = Lab(**sections)
        self.couriers: dict[int, Courier] = {}
        self.dispatcher = Dispatcher(self.lab.scheduler, self.make)  # type: ignore[arg-type]

    def make(self, uid: int, settings: AlertSettings) -> Courier:
        return self.couriers.setdefault(uid, Courier())

    def end_jobs(self) -> None:
        """One of each user."""
        self.lab.ask(self.lab.submission(ANN, alerting=END), self.lab.submission(BOB, alerting=END))
        self.lab.tick(10)

    @property
    def sent(self) -> list[str]:
        return sorted(key for courier in self.couriers.values() for key in courier.sent)

    def check(self) -> None:
        """Memory and table say the same, and nothing is left to be told."""
        assert {row.key: row for row in self.lab.store.load(ALERTS).values()} == self.lab.scheduler.alerts.rows == {}
        assert self.sent == ["1.1 end", "2.1 end"]
        stories = [event.text for job_id in (1, 2) for event in self.lab.store.events(job_id)]
        assert stories.count("sent end to a") == 2


@pytest.mark.parametrize("step", STEPS)
def test_an_exception_at_any_tick_step_loses_and_doubles_no_alert(step: str) -> None:
    desk = Desk()
    desk.lab.ask(desk.lab.submission(ANN, alerting=END), desk.lab.submission(BOB, alerting=END))
    usual = desk.lab.ticker._step
    desk.lab.ticker._step = lambda name: fail() if name == step else usual(name)
    try:
        desk.lab.tick(10)
    except RuntimeError:
        assert STEPS.index(step) <= STEPS.index("commit")
    desk.dispatcher.reconcile()
    desk.lab.ticker._step = usual
    for _ in range(3):
        desk.lab.tick(1)
        desk.dispatcher.reconcile()
    desk.check()


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_repeated_calls_change_nothing(calls: int) -> None:
    desk = Desk()
    desk.end_jobs()
    for _ in range(2 * calls):
        desk.dispatcher.reconcile()
    desk.check()
    assert not desk.dispatcher.is_behind


def test_a_courier_that_raises_delays_no_other_and_gets_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.end_jobs()
    with monkeypatch.context() as patch:
        patch.setattr(desk.make(ANN.uid, AlertSettings()), "submit", fail)
        desk.dispatcher.reconcile()
        assert desk.sent == ["2.1 end"]
        assert desk.dispatcher.is_behind
    for _ in range(2):
        desk.dispatcher.reconcile()
    desk.check()


def test_an_invalid_report_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.end_jobs()
    alerts = desk.lab.scheduler.alerts
    usual = alerts.settled
    with monkeypatch.context() as patch:
        patch.setattr(
            alerts, "settled", lambda one, *rest, **named: fail() if one.job_id == 1 else usual(one, *rest, **named)
        )
        for _ in range(2):
            desk.dispatcher.reconcile()
        assert list(alerts.rows) == ["1.1 end"]
    # Its courier has forgotten it; with a real one its receipt would stand for it.
    for _ in range(2):
        desk.dispatcher.reconcile()
    assert alerts.rows == {}


def test_endless_targets_claimed_by_a_user_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.model.alerts.MOST_SETTLED", 3)
    desk = Desk()
    desk.end_jobs()
    claimed = [{"key": "1.1 end", "target": f"t{n}", "outcome": "told", "tries": 1} for n in range(5)]
    monkeypatch.setattr(desk.make(ANN.uid, AlertSettings()), "poll", lambda: claimed)
    for _ in range(2):
        desk.dispatcher.reconcile()
    assert desk.lab.scheduler.alerts.rows["1.1 end"].settled == ("t0", "t1", "t2")
    stories = [event.text for event in desk.lab.store.events(1)]
    assert sum(text.startswith("sent end to t") for text in stories) == 3


def test_a_memory_that_cannot_follow_is_reread_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.end_jobs()
    desk.dispatcher.reconcile()
    with monkeypatch.context() as patch:
        patch.setattr(desk.lab.scheduler.alerts, "committed", fail)
        desk.dispatcher.reconcile()
    desk.dispatcher.reconcile()
    desk.check()


def test_a_commit_that_raises_after_being_made_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.end_jobs()
    desk.dispatcher.reconcile()
    commit = desk.lab.store.commit

    def made(changes: Changes) -> None:
        commit(changes)
        fail()

    with monkeypatch.context() as patch:
        patch.setattr(desk.lab.store, "commit", made)
        desk.lab.scheduler.failures.run("alerts", desk.dispatcher.reconcile)
    for _ in range(2):
        desk.dispatcher.reconcile()
    desk.check()


def test_a_courier_is_notified_when_no_rows_are_left() -> None:
    """It would have waited for them, and be called at once again and again when they were due."""
    desk = Desk()
    desk.end_jobs()
    desk.dispatcher.reconcile()
    handed: list[dict[str, Alert]] = []
    courier = desk.couriers[ANN.uid]
    courier.submit = lambda alerts: handed.append(alerts) or []  # type: ignore[assignment,func-returns-value,method-assign]
    courier.poll = list  # type: ignore[method-assign]
    desk.lab.store.commit(Changes(rows=ChangedRows({ALERTS: {"1.1 end": None}})))
    desk.lab.ticker.reload()
    desk.dispatcher.reconcile()
    assert handed == [{}]


def test_a_restart_between_any_two_calls_resends_unrecorded_alerts() -> None:
    desk = Desk()
    desk.end_jobs()
    for _ in range(2):
        desk.lab.restart()
        desk.dispatcher = Dispatcher(desk.lab.scheduler, desk.make)  # type: ignore[arg-type]
        desk.dispatcher.reconcile()
    desk.dispatcher.reconcile()
    desk.check()
