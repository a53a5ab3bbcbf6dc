"""Sends the alerts in the outbox and records the results. Nothing here blocks.

The rows in state `waiting` define what there is to send: `reconcile` hands all alerts of a user to that
user's courier, which sends those not yet being sent. It may be called at any time and any number of times;
the next call makes up for what an error or a crash left out. Memory holds only the reports that are not yet
in the table, and for how long targets rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import Protocol

from gpusched import entry_points
from gpusched.errors import NotReady
from gpusched.lifecycle.alerts import MOST_IN_QUIET, AdminEvent, admin_alert
from gpusched.model.alerts import FILE, Alert, Report
from gpusched.model.job import JobEvent
from gpusched.model.settings import AlertSettings
from gpusched.ports import Changes, JobFilter
from gpusched.ports.tables import ALERTS

from .core import Scheduler

log = getLogger("gpusched.notify")

_FORGET_S = 3600.0
"""Trouble with a target is over after this time without anything sent to it, beyond the last try of all."""


class AlertCourier(Protocol):
    """Sends one user's alerts, and never waits for a target."""

    @property
    def trouble(self) -> str | None:
        """Why nothing is sent, for the doctor; None when all is well."""

    def submit(self, alerts: Mapping[str, Alert]) -> list[Report]:
        """Take over all of the user's unsent alerts. Returns reports that are known already."""

    def poll(self) -> list[Report]:
        """Reports since the last call."""

    def fileno(self) -> int:
        """Becomes readable when `poll` has something to do; the same for the courier's whole life."""

    def due_s(self) -> float | None:
        """Seconds until something is due without news; None when nothing is."""

    def reconfigure(self, settings: AlertSettings) -> None:
        """Apply changed settings."""

    def close(self) -> None:
        """Release the processes that send; they finish what they have begun."""


class NoCourier:
    """In place of a courier where no add-on sends alerts: they stay in the outbox.

    Its descriptor never becomes readable.
    """

    def __init__(self, uid: int, settings: AlertSettings) -> None:
        self.trouble: str | None = None
        self._fd, self._other = os.pipe2(os.O_CLOEXEC)

    def submit(self, alerts: Mapping[str, Alert]) -> list[Report]:
        missing = entry_points.absent("notify", "sending alerts")
        self.trouble = f"{missing.message}; {missing.hint}" if alerts else None
        return []

    def poll(self) -> list[Report]:
        return []

    def fileno(self) -> int:
        return self._fd

    def due_s(self) -> float | None:
        return None

    def reconfigure(self, settings: AlertSettings) -> None:
        pass

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._other)


@dataclass(frozen=True, slots=True)
class Trouble:
    target: str
    error: str
    at: float
    """Instant of the last failure."""


class Dispatcher:
    """One courier for each user with unsent alerts.

    Args: make: creates couriers, for tests.
    """

    def __init__(self, scheduler: Scheduler, make: Callable[[int, AlertSettings], AlertCourier] | None = None) -> None:
        self._scheduler = scheduler
        self._make = make or entry_points.find("alert.courier") or NoCourier
        self._couriers: dict[int, AlertCourier] = {}
        self._reports: list[Report] = []
        """Reports not recorded yet."""
        self._fleeting: dict[str, Alert] = {}
        """Alerts about an unwritable table, which therefore cannot be recorded."""
        self.troubles: dict[tuple[int, str], Trouble] = {}
        """By user and target, until it is reached again."""
        self._database: str | None = None
        self._of_database: tuple[Alert, ...] = ()
        self._seen: dict[int, dict[str, Alert]] | None = None
        """The outbox as last handed over."""
        self.watch: Callable[[AlertCourier], None] | None = None
        """Called with a new courier, so that the loop watches its descriptor."""
        self.listeners: list[Callable[[Report, Alert], None]] = []
        """Called with each received report and its alert."""
        scheduler.signals.settings_changed.connect(self._reconfigure)
        scheduler.alerts.trouble = self.trouble

    @property
    def is_behind(self) -> bool:
        """Whether the outbox has changed since it was handed over; cheap enough for every tick."""
        return self._scheduler.alerts.waiting() is not self._seen

    def due_s(self) -> float | None:
        """Seconds until something is due without news; None when nothing is."""
        found = [courier.due_s() for courier in self._couriers.values()]
        return min((due_s for due_s in found if due_s is not None), default=None)

    def reconcile(self) -> None:
        """Record the reports of senders and send unsent alerts."""
        for courier in self._couriers.values():
            self._scheduler.failures.run("courier", self._collect, courier)
        self._watch_database()
        self._record()
        self._hand_over()
        if self._reports:
            # Record the receipts of an earlier daemon before sending anything.
            self._record()
            self._hand_over()

    def _hand_over(self) -> None:
        """Submit all unsent alerts, except those with an unrecorded report."""
        waiting = self._seen = self._scheduler.alerts.waiting()
        if self._fleeting:
            own = os.geteuid()
            waiting = {**waiting, own: {**waiting.get(own, {}), **self._fleeting}}
        unrecorded = {report["key"] for report in self._reports}
        # Include couriers with nothing left to send: they must not wait for deleted alerts.
        for uid in {**waiting, **self._couriers}:
            unsent = {key: one for key, one in waiting.get(uid, {}).items() if key not in unrecorded}
            if not self._scheduler.failures.run("courier", self._hand, uid, unsent):
                # Hand over again after the next tick, even without new alerts.
                self._seen = None

    def _collect(self, courier: AlertCourier) -> None:
        self._receive(courier.poll())

    def _receive(self, reports: list[Report]) -> None:
        """Pass on the reports of a sender, and keep them until they are recorded."""
        for report in reports:
            alert = self._fleeting.get(report["key"])
            if alert is not None and report.get("done"):
                del self._fleeting[report["key"]]
            elif alert is None:
                alert = self._scheduler.alerts.rows.get(report["key"])
                self._reports.append(report)
            if alert is not None:
                self._note(report, alert)
                for listener in self.listeners:
                    self._scheduler.failures.run("alert listener", listener, report, alert)

    def _hand(self, uid: int, alerts: dict[str, Alert]) -> None:
        courier = self._couriers.get(uid)
        if courier is None:
            courier = self._couriers[uid] = self._make(uid, self._scheduler.settings.alert)
            if self.watch is not None:
                self.watch(courier)
        self._receive(courier.submit(alerts))

    def trouble(self) -> str | None:
        """What is wrong with alerts now, as a sentence; None when all is well."""
        # Forget old troubles: removing a target from the file is not reported here.
        oldest = self._scheduler.now() - self._scheduler.settings.alert.give_up_s - _FORGET_S
        self.troubles = {mark: one for mark, one in self.troubles.items() if one.at >= oldest}
        parts = [f"{one.target or 'no target'}: {one.error}" for one in self.troubles.values()]
        parts += [courier.trouble for courier in self._couriers.values() if courier.trouble]
        if self._scheduler.alerts.dropped:
            parts.append(f"{self._scheduler.alerts.dropped} alerts were dropped: too many were unsent")
        return "; ".join(parts) or None

    def close(self) -> None:
        """Record all known reports and release the senders."""
        for courier in self._couriers.values():
            self._scheduler.failures.run("courier", self._collect, courier)
        self._record()
        for courier in self._couriers.values():
            courier.close()
        self._couriers = {}

    def _reconfigure(self, settings: object) -> None:
        for courier in self._couriers.values():
            courier.reconfigure(self._scheduler.settings.alert)

    def _watch_database(self) -> None:
        """Alert at once about trouble with the table, since the table cannot record it."""
        before, self._database = self._database, self._scheduler.trouble
        if self._database is None or before is not None:
            return
        scheduler = self._scheduler
        news = AdminEvent("database", self._database, scheduler.head.name)
        alert = admin_alert(news, scheduler.now(), os.geteuid(), scheduler.settings.alert.admin, self._of_database)
        if alert is not None:
            self._fleeting[alert.key] = alert
            self._of_database = (*self._of_database, alert)[-MOST_IN_QUIET:]

    # --- recording --------------------------------------------------------------------------------

    def _record(self) -> None:
        """Write deliveries and failures into the outbox and the jobs' stories, in one commit."""
        if not self._reports:
            return
        scheduler = self._scheduler
        changes = Changes()
        current = dict(scheduler.alerts.rows)
        for report in self._reports:
            # One bad report must not keep the others from the table forever.
            scheduler.failures.run("alert report", self._apply, report, current, changes)
        known = {event.job_id for event in changes.events}
        if known:
            there = {job.id for job in scheduler.store.jobs(JobFilter(ids=frozenset(known)))}
            changes.events = [event for event in changes.events if event.job_id in there]
        try:
            if changes:
                with scheduler.meters.commit():
                    scheduler.store.commit(changes)
        except Exception as error:
            scheduler.failures.note("alert receipts", error)
            if not isinstance(error, NotReady):
                # The commit may have succeeded: reload, so that the retry omits what the table already has.
                scheduler.alerts.read_again(scheduler.store)
            return
        scheduler.failures.recovered("alert receipts")
        self._reports = []
        scheduler.take_in_alerts(changes)

    def _apply(self, report: Report, current: dict[str, Alert], changes: Changes) -> None:
        """Add the effects of a report to the changes; nothing if the table has them already."""
        key = report["key"]
        alert = current.get(key)
        is_done = bool(report.get("done"))
        if alert is None or not (is_done or alert.may_settle(report.get("target", ""))):
            return
        settled = [report["target"]] if report.get("outcome") in ("told", "gave_up") else []
        if is_done or settled:
            after = self._scheduler.alerts.settled(alert, settled, self._scheduler.state, is_done=is_done)
            changes.rows[ALERTS][key] = after
            if after is not None:
                current[key] = after
        text = _story(report, alert)
        if text is not None and alert.job_id is not None:
            changes.events.append(JobEvent(alert.job_id, self._scheduler.now(), "note", text, alert.run))

    def _note(self, report: Report, alert: Alert) -> None:
        """Log a report, and keep its error for `gpusched doctor`."""
        outcome = report.get("outcome")
        if outcome is None:
            return
        mark = (alert.uid, report["target"])
        if outcome == "told":
            if self.troubles.pop(mark, None) is not None:
                log.info("target %s is reached again", report["target"])
            self.troubles.pop((alert.uid, FILE), None)
            return
        self.troubles[mark] = Trouble(report["target"], report["error"], self._scheduler.now())
        again = f"next attempt in {report['next_s']:.0f} s" if outcome == "failed" else "given up"
        log.warning(
            "could not send %s to %s: %s; %s", alert.key, report["target"] or "any target", report["error"], again
        )


def _story(report: Report, alert: Alert) -> str | None:
    """The line of a report in the job's story; None when it says nothing new."""
    outcome, tries = report.get("outcome"), report.get("tries", 0)
    target = report.get("target") or "any target"
    if outcome == "told":
        return f"sent {alert.event} to {target}" + (f", at attempt {tries}" if tries > 1 else "")
    if outcome == "gave_up":
        after = f" after {tries} attempts" if tries > 1 else ""
        return f"could not send {alert.event} to {target}{after}: {report['error']}"
    if outcome == "failed" and tries == 1:
        return f"could not send {alert.event} to {target} yet: {report['error']}; will retry"
    return None
