"""First estimates of when jobs start, kept to see how good estimates are.

Only jobs in the first places get one, in quiet moments, and never for more than a small part of the time.
"""

from __future__ import annotations

import asyncio
from time import perf_counter

from gpusched.scheduler.ahead.estimates import StartRange

from .outlook import Outlook
from .tick import Scheduler

FIRST_PLACES = 50
CYCLES = 30
"""Plans that one look ahead may cost; a job that starts later than they reach gets its estimate later."""

_LEAST_GAP_S = 5.0
_REST = 20
"""A look that took a second is followed by so many seconds without one."""

_BUSY_TICKS = 20
"""More ticks than this since the last poll: not a quiet moment."""


class Estimator:
    """Makes estimates at polls, on another thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_looking = False
        self._next_at = 0.0
        self._ticks = 0

    def poll(self) -> None:
        """Look ahead now if it is a quiet moment, something waits, and the last look is long enough ago."""
        loop = asyncio.get_running_loop()
        ticks, self._ticks = self._ticks, self._scheduler.ticks
        is_quiet = self._scheduler.ticks - ticks <= _BUSY_TICKS
        if self._is_looking or not is_quiet or loop.time() < self._next_at or not self._scheduler.plan.reasons:
            return
        if not self._scheduler.history.load_some():
            return
        outlook = Outlook.of(self._scheduler)
        known = frozenset(self._scheduler.estimates.known())
        loop.run_in_executor(None, _look, outlook, known).add_done_callback(self._done)
        # Not before: nothing of the above that raises may keep later polls from looking.
        self._is_looking = True

    def _done(self, looked: asyncio.Future[tuple[dict[int, StartRange], float, float]]) -> None:
        self._is_looking = False
        took_s = _LEAST_GAP_S
        try:
            ranges, made_at, took_s = looked.result()
            self._scheduler.record_estimates(ranges, made_at)
        except asyncio.CancelledError:
            return
        except Exception as error:
            # An estimate is a courtesy: the queue goes on without.
            self._scheduler.failures.note("look ahead", error)
        else:
            self._scheduler.failures.recovered("look ahead")
        self._next_at = asyncio.get_running_loop().time() + max(_LEAST_GAP_S, _REST * took_s)


def _look(outlook: Outlook, known: frozenset[int]) -> tuple[dict[int, StartRange], float, float]:
    """Ranges of the first jobs without an estimate, the instant they are of, and what that took."""
    began = perf_counter()
    wanted = [job_id for job_id in outlook.first(FIRST_PLACES) if job_id not in known]
    ranges = outlook.starts(wanted, CYCLES) if wanted else {}
    return ranges, outlook.snapshot.now, perf_counter() - began
