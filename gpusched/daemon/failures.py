"""Failures of the daemon's own steps: count and log an exception, and run the other steps.

Tests inject failures: `GPUSCHED_CRASH_AT` names a step of the tick at which the daemon kills itself, as
`kill -9` would. `commit:3` dies before the third `commit`, `commit:3,reconcile` after it, before the next
`reconcile`; `reply:2:raise` raises an exception there instead, as a bug would, and continues. Without the
variable there is no hook.

`GPUSCHED_CHECK_EVERY=1` compares the planner and the memory with the job table after every tick, `20` after
every 20th; differences appear in the log and in `gpusched doctor`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from gpusched.errors import GpuschedError, UsageError

log = getLogger("gpusched.daemon")
STEPS = ("collect", "apply", "decide", "commit", "reply", "reconcile", "signal")
"""Steps of a tick, in order."""
BATCH_STEP = "batch"
"""The step before the next piece of a batch, in ticks that make one."""
LOG_AGAIN_S = 600.0
"""Shortest time between two log entries for the same error of the same step."""
_FORGET_S = 3600.0
_MOST_KNOWN = 500
_LONGEST = 300
Place = tuple[str, str, str, int]
"""Step, exception class, file and line: equal for repeated errors whose texts differ in numbers."""


@dataclass(frozen=True, slots=True)
class StepFailure:
    """A step whose last run failed."""

    step: str
    error: str
    count: int
    """Consecutive failures."""
    since_at: float
    last_at: float


class StepFailures:
    """Runs steps and counts those that raise. `clock` gives UTC epoch seconds."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._failing: dict[str, StepFailure] = {}
        self._logged: dict[Place, float] = {}
        self._announced: set[str] = set()
        """Failing steps that were logged, so that their recovery is logged too."""
        self.counts: Counter[str] = Counter()
        """Failures so far, by step."""

    @property
    def failing(self) -> tuple[StepFailure, ...]:
        """Steps whose last run failed, by name; without those that have not run since for an hour."""
        oldest_at = self._clock() - _FORGET_S
        return tuple(found for _, found in sorted(self._failing.items()) if found.last_at >= oldest_at)

    def run(self, step: str, action: Callable[..., object], *arguments: Any) -> bool:
        """Call `action`; return whether it succeeded. Exceptions are counted and logged, never propagated."""
        try:
            action(*arguments)
        except Exception as error:
            self.note(step, error)
            return False
        if self._failing:
            self.recovered(step)
        return True

    def note(self, step: str, error: BaseException) -> None:
        """Count and log an exception caught elsewhere."""
        now, before = self._clock(), self._failing.get(step)
        text = error.message if isinstance(error, GpuschedError) else f"{type(error).__name__}: {error}"
        count, since_at = (1, now) if before is None else (before.count + 1, before.since_at)
        self._failing[step] = StepFailure(step, text[:_LONGEST], count, since_at, now)
        self.counts[step] += 1
        if not self._is_new(_place(step, error)):
            return
        self._announced.add(step)
        if isinstance(error, GpuschedError):
            log.error("%s: %s", step, text)
        else:
            log.error("%s failed: %s", step, text, exc_info=error)

    def _is_new(self, place: Place) -> bool:
        now = self._monotonic()
        if now - self._logged.get(place, float("-inf")) < LOG_AGAIN_S:
            return False
        if len(self._logged) >= _MOST_KNOWN:
            self._logged.clear()
        self._logged[place] = now
        return True

    def recovered(self, step: str) -> None:
        """Note that a step ran without an error."""
        failure = self._failing.pop(step, None)
        if failure is not None and step in self._announced:
            self._announced.discard(step)
            log.info("%s works again after %d failures", step, failure.count)


def _place(step: str, error: BaseException) -> Place:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    file, line = ("", 0) if at is None else (at.tb_frame.f_code.co_filename, at.tb_lineno)
    return step, type(error).__name__, file, line


VARIABLE = "GPUSCHED_CRASH_AT"
CHECK_VARIABLE = "GPUSCHED_CHECK_EVERY"


@dataclass(slots=True)
class _Moment:
    step: str
    left: int
    raises: bool


def crash_step(text: str | None) -> Callable[[str], None]:
    """Step callback for this setting. Raises: UsageError for an unknown step."""
    if not text:
        return lambda name: None
    moments: list[_Moment] = []
    for part in text.split(","):
        wanted, *how = part.split(":")
        raises = how[-1:] == ["raise"]
        count = ":".join(how[: len(how) - raises]) or "1"
        if wanted not in (*STEPS, BATCH_STEP) or not count.isdigit():
            raise UsageError(f"{VARIABLE}={text!r} is not a step", "steps: " + ", ".join((*STEPS, BATCH_STEP)))
        moments.append(_Moment(wanted, int(count), raises))

    def step(name: str) -> None:
        if not moments or name != moments[0].step:
            return
        moments[0].left -= 1
        if moments[0].left:
            return
        moment = moments.pop(0)
        if moment.raises:
            raise RuntimeError(f"{VARIABLE}: {name}")
        if not moments:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def check_every(text: str | None) -> int:
    """Number of ticks between comparisons of the planner with the table; 0: never. Raises: UsageError."""
    if not text:
        return 0
    if not text.isdigit():
        raise UsageError(f"{CHECK_VARIABLE}={text!r} is not a number of ticks", "give a whole number, 1 for every tick")
    return int(text)
