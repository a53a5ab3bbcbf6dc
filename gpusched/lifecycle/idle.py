"""GPUs of a running job that do nothing: since when, and what is due about it.

Readings are summed up in windows of [idle] window_s. A window in which the busiest card of the run worked less than
[idle] utilisation on average is idle, and `idle_at` is where the first of an unbroken row of idle windows began.
What cannot be read breaks the row: unknown is never idle.

Idle cards alone end nothing. That takes a run that is `quiet` as well: no traffic in the cards' memory, next to no CPU
time, no log or checkpoint that changed. `quiet_at` is since when all of that was known to hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from gpusched.model.job import JobSpec
from gpusched.model.settings import IdleSettings, Settings
from gpusched.model.value import Value, replace

_MISSED = 3
"""Windows without a reading after which nothing is known of the time before."""


class IdleStep(IntEnum):
    """What was done about the idle GPUs of a run; each at most once, in this order."""

    NONE = 0
    TOLD = 1
    LOWERED = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class GpuLoadReading:
    """The cards of a run in one reading, the busiest counting; None when it is not known of one that could be busy."""

    at: float
    utilisation: float | None
    """0 to 1."""
    traffic: float | None
    """Share of time in which the cards' memory was read or written, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What the processes of a run have done beside their GPUs."""

    at: float
    cpu_s: float | None
    """CPU time of all its processes so far; None when unknown."""
    marks: tuple[object, ...] | None
    """Something that changes when its logs grow or its work is saved; None when unknown."""


class IdleStreak(Value):
    """What is remembered of one run between two readings."""

    last: GpuLoadReading
    window_at: float
    busy_s: float = 0.0
    """Utilisation times seconds since `window_at`."""
    idle_at: float | None = None
    quiet_at: float | None = None
    activity: Activity | None = None

    @property
    def mean(self) -> float:
        """Utilisation in the window so far."""
        passed_s = self.last.at - self.window_at
        return self.busy_s / passed_s if passed_s > 0 else self.last.utilisation or 0.0


def add_reading(before: IdleStreak | None, look: GpuLoadReading, settings: IdleSettings) -> IdleStreak:
    """Take in one reading."""
    fresh = IdleStreak(look, look.at)
    if before is None or look.utilisation is None or before.last.utilisation is None:
        return fresh
    passed_s = look.at - before.last.at
    if passed_s < 0 or passed_s > _MISSED * settings.window_s:
        return fresh
    quiet_at = before.quiet_at if _is_still(look, settings) else None
    # The later reading counts for the time since the one before: what has begun to work is busy at once.
    busy_s = before.busy_s + look.utilisation * passed_s
    now = replace(before, last=look, busy_s=busy_s, quiet_at=quiet_at)
    if look.at - before.window_at < settings.window_s:
        return now
    if now.mean > settings.utilisation:
        return replace(fresh, activity=before.activity)
    idle_at = before.window_at if before.idle_at is None else before.idle_at
    return replace(now, window_at=look.at, busy_s=0.0, idle_at=idle_at)


def add_activity(before: IdleStreak, activity: Activity, settings: IdleSettings) -> IdleStreak:
    """Take in what the processes have done since the last time."""
    earlier = before.activity
    after = replace(before, activity=activity)
    if earlier is None or not _is_still(before.last, settings):
        return replace(after, quiet_at=None)
    passed_s = activity.at - earlier.at
    if passed_s <= 0 or earlier.cpu_s is None or activity.cpu_s is None or passed_s > _MISSED * settings.window_s:
        return replace(after, quiet_at=None)
    cores = abs(activity.cpu_s - earlier.cpu_s) / passed_s
    if cores > settings.cpu_cores or activity.marks is None or activity.marks != earlier.marks:
        return replace(after, quiet_at=None)
    return after if before.quiet_at is not None else replace(after, quiet_at=earlier.at)


def _is_still(look: GpuLoadReading, settings: IdleSettings) -> bool:
    return look.traffic is not None and look.traffic <= settings.utilisation


def idle_since(seen: IdleStreak | None, now: float, settings: IdleSettings) -> float | None:
    """Since when the cards do nothing, when that is long enough to be told; None when they work, or unknown."""
    if seen is None or seen.idle_at is None or not settings.after_s or not _is_idle_now(seen, now, settings):
        return None
    return seen.idle_at if now - seen.idle_at >= settings.after_s else None


def _is_idle_now(seen: IdleStreak, now: float, settings: IdleSettings) -> bool:
    utilisation = seen.last.utilisation
    is_recent = now - seen.last.at <= _MISSED * settings.window_s
    return utilisation is not None and max(utilisation, seen.mean) <= settings.utilisation and is_recent


def due(
    seen: IdleStreak | None, done: int, now: float, settings: IdleSettings, *, can_requeue: bool
) -> IdleStep | None:
    """The next step about a run's idle GPUs, of which `done` was the last; None when nothing is due.

    A job that must not be run again is not ended where the settings say `requeue`.
    """
    since = idle_since(seen, now, settings)
    if seen is None or since is None:
        return None
    if done < IdleStep.TOLD:
        return IdleStep.TOLD
    if done < IdleStep.LOWERED and settings.nice and now - since >= settings.lower_after_s:
        return IdleStep.LOWERED
    if done >= IdleStep.ENDED or settings.then == "off" or now - since < settings.then_after_s:
        return None
    if settings.then == "requeue" and not can_requeue:
        return None
    is_recent = seen.activity is not None and now - seen.activity.at <= _MISSED * settings.window_s
    is_quiet = seen.quiet_at is not None and now - seen.quiet_at >= settings.after_s
    return IdleStep.ENDED if is_recent and is_quiet else None


def is_exempt(spec: JobSpec, settings: Settings) -> bool:
    """Whether nobody looks at its GPUs: it said so, or its queue or QOS, or it has a lease that ends it sooner."""
    lease_s = None if spec.interactive is None else spec.interactive.lease_s
    is_leased = lease_s is not None and lease_s <= settings.idle.then_after_s
    if spec.ignore_idle or is_leased or not spec.request.gpus:
        return True
    qos = settings.qos.get(spec.qos)
    if qos is not None and qos.ignore_idle:
        return True
    seen: set[str] = set()
    name: str | None = spec.queue
    while name is not None and name in settings.queue and name not in seen:
        seen.add(name)
        if settings.queue[name].ignore_idle:
            return True
        name = settings.queue[name].parent
    return False
