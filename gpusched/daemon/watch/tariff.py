"""Keeps the prices of energy up to date: the settings, and the tariff file; and puts off jobs that wait for low ones.

A file that is wrong or gone leaves the prices that were in force; the log and doctor say so.
"""

from __future__ import annotations

import os
from logging import getLogger
from typing import TYPE_CHECKING

from gpusched.config.tariff import TariffError, read_tariff
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.watches import Watch
from gpusched.model.job import JobEvent
from gpusched.model.settings import Settings
from gpusched.model.tariff import Tariff
from gpusched.model.units import format_duration
from gpusched.scheduler.cheap import postponed

if TYPE_CHECKING:
    from gpusched.daemon.core import Scheduler

log = getLogger("gpusched.daemon")
_LOOK_S = 60.0
_PRICED_AT_ONCE = 500

Stamp = tuple[int, int, int]


class TariffWatch:
    """Reads the tariff when the daemon starts, when the settings change, and when its file does."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._settings = scheduler.settings.energy
        self._stamp: Stamp | None = None
        self._looked_at = float("-inf")
        scheduler.signals.settings_changed.connect(self._adopt)
        self._read()

    def _adopt(self, settings: Settings) -> None:
        if settings.energy != self._settings or self._has_changed():
            self._settings = settings.energy
            self._read()

    def poll(self) -> None:
        """Look once a minute whether the file has changed."""
        now = self._scheduler.now()
        if 0 <= now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        if self._has_changed():
            self._read()

    def _has_changed(self) -> bool:
        return self._settings.tariff is not None and _stamp(self._settings.tariff) != self._stamp

    def _read(self) -> None:
        self._stamp = None if self._settings.tariff is None else _stamp(self._settings.tariff)
        try:
            self._scheduler.use_tariff(read_tariff(self._settings), None)
        except TariffError as error:
            before = self._scheduler.tariff
            rows, end_at = ((), None) if before is None else (before.rows, before.end_at)
            settings = self._settings
            fixed = Tariff(settings.price_per_kwh, settings.g_per_kwh, settings.currency, settings.pue, rows, end_at)
            log.error("%s; the prices in force stay", error.message)
            self._scheduler.use_tariff(fixed, error)


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class CheapStarts(Watch):
    """Puts off jobs that wait for cheap energy when their window has passed or changed; the others keep theirs."""

    name = "cheap energy"

    def __init__(self) -> None:
        self._priced_by: Tariff | None = None
        self._priced_at = float("-inf")

    def carry_out(self, tx: TickTransaction) -> None:
        """Look once a minute, and when the tariff has changed."""
        is_new = tx.tariff is not self._priced_by
        if not is_new and 0 <= tx.now - self._priced_at < _LOOK_S:
            return
        tx.restore_if_dropped(self, "_priced_by", "_priced_at")
        self._priced_by, self._priced_at = tx.tariff, tx.now
        waiting = (job for job in tx.state.jobs.values() if job.spec.start_when is not None)
        due = [job for job in waiting if is_new or job.eligible_at <= tx.now]
        for job in due[:_PRICED_AT_ONCE]:
            after = postponed(job, tx.tariff, tx.now)
            if after is not None:
                text = f"put off by {format_duration(after.eligible_at - tx.now)}, when its energy is best"
                tx.put_job(after, JobEvent(job.id, tx.now, "note", text))
