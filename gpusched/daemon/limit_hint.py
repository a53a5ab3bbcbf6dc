"""What a time limit would change for a job that has none of its own: both futures played, with and without it.

Nothing is said of a job that few are like, that does not wait, or to which a limit would bring less than ten minutes.
"""

from __future__ import annotations

from collections.abc import Callable

from gpusched.daemon.outlook import Outlook
from gpusched.daemon.tick import Scheduler
from gpusched.model.job import DEFAULT, MAXIMUM, Job
from gpusched.model.snapshot import ClassKey
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports.daemon import LimitHint
from gpusched.predict.limits import usual_span
from gpusched.scheduler.ahead.changes import format_limit
from gpusched.scheduler.sharing.admission import longest_time_limit

LEAST_GAIN_S = 600.0
"""A start that comes sooner by less is not worth a line."""

LEAST_PART = 0.1
"""Nor is one that saves less than this part of the wait."""

CYCLES = 20
"""Plans for each of the futures: somebody waits at a prompt."""


def limit_hint(job: Job, scheduler: Scheduler) -> Callable[[], LimitHint | None] | None:
    """A question that another thread may answer; None where there is nothing to ask. Changes nothing."""
    spec, settings, history = job.spec, scheduler.settings, scheduler.history
    is_stated = spec.time_limit_source not in ("", DEFAULT, MAXIMUM) or (
        not spec.time_limit_source and spec.time_limit_s is not None
    )
    if is_stated or not settings.submit.limit_hint or not history.is_loaded:
        return None
    if job.state is not JobState.PENDING or scheduler.world.class_of(job.id) is None:
        return None
    advice, usual = history.limit_advice(job.user, spec), history.predict(job)
    if advice is None or usual is None:
        return None
    most_s = longest_time_limit(spec, settings)
    limit_s = advice.limit_s if most_s is None else min(most_s, advice.limit_s)
    if spec.time_limit_s is not None and limit_s >= spec.time_limit_s:
        return None
    key = scheduler.world.key_of(replace(job, spec=replace(spec, time_limit_s=limit_s, time_limit_source="")))
    outlook = Outlook.of(scheduler)

    def play() -> LimitHint | None:
        found = _starts(outlook, job, key)
        if found is None:
            return None
        words = usual_span(usual)
        return LimitHint(advice.runs, words, limit_s, format_limit(limit_s), *found, spec.time_limit_s)

    return play


def _starts(outlook: Outlook, job: Job, key: ClassKey) -> tuple[float, float | None] | None:
    """When the job starts in this class, and as it is; None where that makes no difference worth a line."""
    now = outlook.snapshot.now
    number = outlook.waiting_ids([job])[job.id]
    without_at = outlook.starts([number], CYCLES)[number].low_at
    if without_at is not None and without_at - now < LEAST_GAIN_S:
        return None
    with_at = outlook.in_class(number, key).starts([number], CYCLES)[number].low_at
    if with_at is None:
        return None
    if without_at is not None and without_at - with_at < max(LEAST_GAIN_S, LEAST_PART * (without_at - now)):
        return None
    return with_at, without_at
