"""Alerts: raised from the changes of a tick, committed with them, and kept until sent.

An alert is a row of the table, written in the same commit as its cause. This module keeps those rows in
memory; `dispatch` hands them to the sender processes.

    carry_out   before a commit: add the alerts that the changes of this tick raise
    committed   after a commit: take in the alerts to send
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from logging import getLogger

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.state import DaemonState
from gpusched.daemon.watches import Stage, Watch, WatchGuard
from gpusched.lifecycle import alerts
from gpusched.lifecycle.alerts import AdminEvent, AlertCause, admin_alert, drain_event, is_over
from gpusched.model.alert_events import ADMIN_EVENTS, ONCE
from gpusched.model.alerts import Alert
from gpusched.model.commands import Caller
from gpusched.model.job import Job, JobEvent, Run, run_id
from gpusched.model.settings import Settings
from gpusched.model.value import replace
from gpusched.ports import Changes, Store
from gpusched.ports.tables import ALERTS, DRAINS
from gpusched.predict.efficiency import EndReport, report_lines

log = getLogger("gpusched.daemon")


_ENDS = ("end", "fail")


def _waste_text(report: EndReport) -> str:
    advice = "; ".join(f"{one.option} {one.why}" for one in report.advice)
    return f"{report.waste}" + (f"; next time: {advice}" if advice else "")


class _Added:
    """What the alerts that a tick has added so far keep from being added."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.by_user: Counter[int] = Counter()
        self.full: set[int] = set()
        """Users with too many."""
        self.armed: set[int] = set()
        """Users with an armed alert."""


class AlertOutbox(Watch):
    """The outbox in memory; as a watch, it looks at what a tick has changed."""

    name = "alerts"
    stage = Stage.BEFORE_COMMIT

    def __init__(
        self, store: Store, guard: WatchGuard, end_report: Callable[[Job, Sequence[Run]], EndReport | None]
    ) -> None:
        """Args: end_report: reports on an ended job, from all its runs."""
        self.rows: dict[str, Alert] = {}
        """Every row of the table, by key."""
        self.dropped = 0
        """Alerts dropped because too many were unsent."""
        self.trouble: Callable[[], str | None] = lambda: None
        """Why alerts cannot be sent, for `gpusched doctor`; set by the dispatcher."""
        self._guard = guard
        self._end_report = end_report
        self._waiting: Counter[int] = Counter()
        """Number of unsent alerts by user."""
        self._view: dict[int, dict[str, Alert]] | None = None
        self._added = _Added(Changes())
        self._armed: dict[int, str] = {}
        self._of_job: dict[int, set[str]] = {}
        self._admin: list[Alert] = []
        """To be added to the next commit, however many ticks are dropped before."""
        self.read_again(store)

    def read_again(self, store: Store) -> None:
        """Take in all rows of the table."""
        self.rows = {}
        self._waiting = Counter()
        self._armed, self._of_job, self._view = {}, {}, None
        for alert in store.load(ALERTS).values():
            self._put(alert.key, alert)

    def waiting(self) -> dict[int, dict[str, Alert]]:
        """Unsent alerts by user and key, oldest first; the same object until something changes."""
        if self._view is None:
            found = self._view = {}
            for alert in sorted(self.rows.values(), key=lambda one: (one.at, one.key)):
                if alert.state == "waiting":
                    found.setdefault(alert.uid, {})[alert.key] = alert
        return self._view

    def mentions(self, job_id: int) -> bool:
        return bool(self._of_job.get(job_id))

    # --- raising ----------------------------------------------------------------------------------

    def tell(self, tx: TickTransaction, job: Job, event: str, message: str) -> None:
        """Alert the owner of an event of the job's run, once per run, if they want to know of it."""
        if event in alerts.wanted_of(job):
            self.alert_owner(tx, job, AlertCause(event, message, job.run))

    def intrusion(self, tx: TickTransaction, job: Job, event: str, about: str, message: str) -> None:
        """Alert the owner of a job to unbooked use or an intruder, once per run and subject.

        Also alerts owners who did not ask for it, by the means that `[foreign]` names.
        """
        what = AlertCause(event, message, job.run, about=about)
        ways = tx.settings.foreign.message
        if "notify" in ways or event in alerts.wanted_of(job):
            self.alert_owner(tx, job, what)
        direct = tuple(f"@{way}" for way in ways if way in ("write", "mail"))
        if direct:
            row = self._made(tx, job, what, self._run_of(tx, job.id, job.run))
            self._add(tx.changes, replace(row, key=f"{row.key} direct", targets=direct), tx)

    def alert_owner(
        self,
        tx: TickTransaction,
        job: Job,
        what: AlertCause,
        run: Run | None = None,
        report: EndReport | None = None,
    ) -> None:
        """Put an alert of a job into the outbox with this tick's commit, unless it was raised before."""
        if run is None and what.run:
            run = self._run_of(tx, job.id, what.run)
        alert = self._made(tx, job, what, run)
        if report is not None:
            alert = replace(alert, facts=(*alert.facts, ("report", "\n".join(report_lines(report)))))
        self._add(tx.changes, alert, tx)

    @staticmethod
    def _made(tx: TickTransaction, job: Job, what: AlertCause, run: Run | None) -> Alert:
        alert, owner = alerts.alert_of(job, what, run, tx.now), Caller(job.uid, job.user)
        told = ((name, tx.text_for(owner, one) if isinstance(one, str) else one) for name, one in alert.facts)
        return replace(alert, facts=tuple(told))

    def _report_of(self, tx: TickTransaction, job: Job) -> EndReport | None:
        runs = {run.number: run for run in tx.store.runs([job.id])}
        runs |= {run.number: run for run in tx.changes.runs.values() if run.job_id == job.id}
        return self._end_report(job, [runs[number] for number in sorted(runs)])

    def carry_out(self, tx: TickTransaction) -> None:
        """Add the alerts that the changes of this tick raise."""
        for job in tx.changes.jobs.values():
            if job.spec.alerting is not None:
                self._guard.run("alerts of a job", self._collect_of, tx, job, part=str(job.id))
        self._collect_others(tx)

    def _collect_others(self, tx: TickTransaction) -> None:
        emptied: dict[int, Job] = {}
        for job in tx.changes.jobs.values():
            if job.state.is_final:
                emptied[job.uid] = job
                for key in self._of_job.get(job.id, ()):
                    if self.rows[key].state == "told":
                        tx.changes.rows[ALERTS][key] = None
        for uid, job in emptied.items():
            self._alert_queue_empty(tx, uid, job)
        changed = tx.changes.rows.get(DRAINS, {})
        told = [drain_event(drained, entry, tx.nodes) for drained, entry in changed.items() if entry is not None]
        for news in (*tx.news, *filter(None, told)):
            alert = self.admin_alert(news, tx.now, tx.settings, tx.changes)
            if alert is not None:
                self._add(tx.changes, alert, tx)
        for alert in tx.messages:
            self._add(tx.changes, alert, tx)
        # Drop alerts of users with too many: retrying would drop and log them again in every tick.
        self._admin = [alert for alert in self._admin if self._add(tx.changes, alert, tx)]
        if self._admin or tx.news or changed:
            tx.changes.rows[ALERTS].update({key: None for key, one in self.rows.items() if is_over(one, tx.now)})

    def _collect_of(self, tx: TickTransaction, job: Job) -> None:
        wanted = alerts.wanted_of(job)
        if not wanted:
            return
        before = tx.before.get(job.id)
        # A tick may close one run of a job and start the next.
        numbers = {job.run, 0 if before is None else before.run} - {0}
        changed = [number for number in numbers if run_id(job.id, number) in tx.changes.runs]
        runs = {number: run for number in numbers if (run := self._run_of(tx, job.id, number)) is not None}
        report = None
        if job.state.is_final and (before is None or not before.state.is_final):
            report = self._report_of(tx, job)
        for what in alerts.alert_causes(before, job, runs, changed):
            self.alert_owner(tx, job, what, runs.get(what.run), report if what.event in _ENDS else None)
        if report is not None and report.waste is not None and alerts.wants_efficiency(job):
            what = AlertCause("efficiency", _waste_text(report), job.run, ("end", "fail"))
            self.alert_owner(tx, job, what, runs.get(job.run), report)
        if job.state.is_final and "queue_empty" in wanted:
            self._arm(tx, job)

    def _arm(self, tx: TickTransaction, job: Job) -> None:
        """Arm a `queue_empty` alert, which may fire long after this job has ended."""
        armed = self._added_to(tx.changes).armed
        # Once per user, even when several jobs end in one tick.
        if job.uid not in self._armed and job.uid not in armed:
            armed.add(job.uid)
            what = AlertCause("queue_empty", f"all jobs of {job.user} have ended")
            self._add(tx.changes, replace(self._made(tx, job, what, None), state="armed"), tx)

    def _alert_queue_empty(self, tx: TickTransaction, uid: int, job: Job) -> None:
        armed = next(
            (one for one in tx.changes.rows[ALERTS].values() if one and one.uid == uid and one.state == "armed"), None
        )
        if armed is None and uid in self._armed:
            armed = self.rows[self._armed[uid]]
        if armed is None or any(user == job.user for _, user in tx.state.active.tally.by_queue_user):
            return
        last = f"{job.shown_id} ({job.spec.name}), {job.state}"
        what = AlertCause("queue_empty", f"all your jobs have ended; the last was {last}")
        facts = alerts.facts_of(job, what, None, tx.now)
        tx.changes.rows[ALERTS][armed.key] = replace(armed, state="waiting", at=tx.now, facts=facts)

    def alert_admin(self, news: AdminEvent, now: float, settings: Settings) -> None:
        """Alert the daemon's own targets with the next commit, if `[alert] admin` names any."""
        alert = self.admin_alert(news, now, settings)
        if alert is not None:
            self._admin.append(alert)

    def alert_users(self, alerts: Iterable[Alert]) -> None:
        """Put alerts about no particular job into the outbox with the next commit."""
        self._admin.extend(alerts)

    def admin_alert(
        self, news: AdminEvent, now: float, settings: Settings, changes: Changes | None = None
    ) -> Alert | None:
        """The alert for the daemon's own targets; None without targets or when enough were sent."""
        changed = {} if changes is None else changes.rows[ALERTS]
        known = {**self.rows, **{one.key: one for one in self._admin}, **changed}
        before = [one for one in known.values() if one is not None]
        alert = admin_alert(news, now, os.geteuid(), settings.alert.admin, before)
        if alert is None and settings.alert.admin:
            log.warning("admin alert suppressed, the same was sent often enough: %s", news.message)
        return alert

    def _add(self, changes: Changes, alert: Alert, tx: TickTransaction) -> bool:
        """Return whether the alert is in the outbox with this commit."""
        if alert.key in self.rows or alert.key in changes.rows[ALERTS]:
            return True
        added = self._added_to(changes)
        waiting = self._waiting[alert.uid] + added.by_user[alert.uid]
        if waiting >= tx.settings.alert.outbox:
            if alert.uid not in added.full:
                # Log once per tick: thousands of a user's jobs may end at once.
                added.full.add(alert.uid)
                log.warning("%s dropped: this user has %d unsent alerts", alert.key, waiting)
            self.dropped += 1
            if alert.job_id is not None:
                text = f"{alert.event} alert dropped: too many unsent alerts"
                tx.add_events(JobEvent(alert.job_id, tx.now, "note", text, alert.run))
            return False
        changes.rows[ALERTS][alert.key] = alert
        added.by_user[alert.uid] += 1
        return True

    def _added_to(self, changes: Changes) -> _Added:
        if self._added.changes is not changes:
            self._added = _Added(changes)
        return self._added

    @staticmethod
    def _run_of(tx: TickTransaction, job_id: int, number: int) -> Run | None:
        handle = run_id(job_id, number)
        for known in (tx.changes.runs, tx.state.open_runs, tx.state.releasing):
            if handle in known:
                return known[handle]
        return next((run for run in tx.store.runs([job_id]) if run.number == number), None)

    # --- after a commit ---------------------------------------------------------------------------

    def committed(self, changes: Changes) -> None:
        for key, alert in changes.rows.get(ALERTS, {}).items():
            self._put(key, alert)
        if self._admin:
            self._admin = [alert for alert in self._admin if alert.key not in changes.rows[ALERTS]]

    def settled(self, alert: Alert, settled: Iterable[str], state: DaemonState, *, is_done: bool) -> Alert | None:
        """The row after delivery to these targets; None when it can be deleted."""
        after = replace(alert, settled=tuple(dict.fromkeys((*alert.settled, *settled))))
        if not is_done:
            return after
        is_kept = alert.event in ADMIN_EVENTS if alert.job_id is None else alert.event in ONCE
        if alert.job_id is not None and alert.job_id not in state.jobs:
            is_kept = False
        return replace(after, state="told") if is_kept else None

    def _put(self, key: str, alert: Alert | None) -> None:
        self._view = None
        before = self.rows.pop(key, None)
        if before is not None:
            if before.state == "waiting":
                self._waiting[before.uid] -= 1
            elif before.state == "armed":
                self._armed.pop(before.uid, None)
            if before.job_id is not None:
                keys = self._of_job[before.job_id]
                keys.discard(key)
                if not keys:
                    del self._of_job[before.job_id]
        if alert is None:
            return
        self.rows[key] = alert
        if alert.state == "waiting":
            self._waiting[alert.uid] += 1
        elif alert.state == "armed":
            self._armed[alert.uid] = key
        if alert.job_id is not None:
            self._of_job.setdefault(alert.job_id, set()).add(key)
