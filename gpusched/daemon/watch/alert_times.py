"""Alerts that time raises: near the time limit, pending too long."""

from __future__ import annotations

from collections.abc import Iterable

from gpusched.daemon.alerts import AlertOutbox
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.indexes import Timers
from gpusched.daemon.reasons import waiting_reason
from gpusched.daemon.state import DaemonState
from gpusched.daemon.watches import Watch
from gpusched.lifecycle import alerts
from gpusched.lifecycle.dependencies import Satisfied
from gpusched.model.job import Job, run_id
from gpusched.model.settings import Settings


class AlertTimes(Watch):
    """The timers of jobs whose owners want alerts."""

    name = "alert times"

    def __init__(self, outbox: AlertOutbox) -> None:
        self._outbox = outbox
        self._timers = Timers()

    def reload(self, state: DaemonState, settings: Settings) -> None:
        self._timers = Timers()
        self.set(state.jobs.values(), state, settings)

    def next_due(self, state: DaemonState, settings: Settings) -> float | None:
        return self._timers.first()

    def set(self, jobs: Iterable[Job], state: DaemonState, settings: Settings) -> None:
        """Set the timers of jobs whose rows have changed. Timers set before expire without effect."""
        for job in jobs:
            if job.spec.alerting is None:
                continue
            at = alerts.pending_alert_at(job, settings.alert.pending_s)
            if at is None:
                at = alerts.limit_alert_at(job, state.open_runs.get(run_id(job.id, job.run)))
            if at is not None:
                self._timers.set(at, job.id)
                self._timers.prune(len(state.jobs), lambda at, job_id: job_id in state.jobs)

    def carry_out(self, tx: TickTransaction) -> None:
        """Raise the alerts of expired timers; reset a timer that expired too early."""
        state = tx.state
        for job_id in sorted(set(self._timers.until(tx.now))):
            job = state.jobs.get(job_id)
            if job is None:
                continue
            run = state.open_runs.get(run_id(job.id, job.run))
            limit_at = alerts.limit_alert_at(job, run)
            pending_at = alerts.pending_alert_at(job, tx.settings.alert.pending_s)
            if limit_at is not None and run is not None and limit_at <= tx.now:
                self._outbox.alert_owner(tx, job, alerts.limit_alert(job, run), run)
            elif pending_at is not None and pending_at <= tx.now:
                self._alert_pending(tx, job)
            else:
                self.set((job,), state, tx.settings)

    def _alert_pending(self, tx: TickTransaction, job: Job) -> None:
        if not isinstance(tx.state.dependency_state(job), Satisfied):
            # Waiting for other jobs is intended; only the wait after that counts.
            self._timers.set(tx.now + tx.settings.alert.pending_s, job.id)
            return
        why = waiting_reason(job, tx.state, tx.plan, tx.now)
        self._outbox.alert_owner(tx, job, alerts.pending_alert(job, tx.now, why.text))
