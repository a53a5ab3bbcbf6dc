"""Idle GPUs of running jobs: since when, and the resulting actions.

Readings are aggregated in windows of [idle] window_s. A window is idle if the mean utilisation of the run's busiest
card was below [idle] utilisation; `idle_at` is the start of the first in an unbroken series of idle windows.
Unreadable values break the series: unknown is never idle.

Idle cards alone never end a run. It must also be `quiet`: no traffic in the cards' memory, next to no CPU time, no
change to logs or checkpoints. `quiet_at` is the time since which all of that has been known to hold. And a run is
requeued only while a job waits for GPUs such as its own: for nobody, its next run would begin on the same ones at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from gpusched.model.job import JobSpec, Request
from gpusched.model.settings import IdleSettings, Settings
from gpusched.model.snapshot import Reason
from gpusched.model.states import ReasonCode
from gpusched.model.units import format_duration
from gpusched.model.value import Value, replace

_MISSED = 3
"""Windows without a reading after which earlier readings no longer count."""


class IdleStep(IntEnum):
    """Steps taken about the idle GPUs of a run; each at most once, in this order."""

    NONE = 0
    TOLD = 1
    LOWERED = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class GpuLoadReading:
    """One reading of a run's cards, taken from the busiest; None if a card that could be busy is unknown."""

    at: float
    utilisation: float | None
    """0 to 1."""
    traffic: float | None
    """Fraction of time with the cards' memory being read or written, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity of a run's processes other than on GPUs."""

    at: float
    cpu_s: float | None
    """Total CPU time of its processes; None when unknown."""
    marks: tuple[object, ...] | None
    """Changes whenever its logs grow or its checkpoints are written; None when unknown."""


class IdleStreak(Value):
    """State of one run between two readings."""

    last: GpuLoadReading
    window_at: float
    busy_s: float = 0.0
    """Utilisation times seconds since `window_at`."""
    idle_at: float | None = None
    quiet_at: float | None = None
    activity: Activity | None = None

    @property
    def mean(self) -> float:
        """Mean utilisation in the window so far."""
        passed_s = self.last.at - self.window_at
        return self.busy_s / passed_s if passed_s > 0 else self.last.utilisation or 0.0


def add_reading(before: IdleStreak | None, look: GpuLoadReading, settings: IdleSettings) -> IdleStreak:
    fresh = IdleStreak(look, look.at)
    if before is None or look.utilisation is None or before.last.utilisation is None:
        return fresh
    passed_s = look.at - before.last.at
    if passed_s < 0 or passed_s > _MISSED * settings.window_s:
        return fresh
    quiet_at = before.quiet_at if _is_still(look, settings) else None
    # The later reading counts for the time since the previous one, so that a card that starts to work is busy at once.
    busy_s = before.busy_s + look.utilisation * passed_s
    now = replace(before, last=look, busy_s=busy_s, quiet_at=quiet_at)
    if look.at - before.window_at < settings.window_s:
        return now
    if now.mean > settings.utilisation:
        return replace(fresh, activity=before.activity)
    idle_at = before.window_at if before.idle_at is None else before.idle_at
    return replace(now, window_at=look.at, busy_s=0.0, idle_at=idle_at)


def add_activity(before: IdleStreak, activity: Activity, settings: IdleSettings) -> IdleStreak:
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
    """Start of the idle time once it is long enough to alert; None while busy or unknown."""
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
    """Next step about a run's idle GPUs after `done`; None when nothing is due.

    A job with --no-requeue is not ended if the settings say `requeue`.
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
    return IdleStep.ENDED if _is_quiet(seen, now, settings) else None


def _is_quiet(seen: IdleStreak, now: float, settings: IdleSettings) -> bool:
    is_recent = seen.activity is not None and now - seen.activity.at <= _MISSED * settings.window_s
    return is_recent and seen.quiet_at is not None and now - seen.quiet_at >= settings.after_s


def outlook(seen: IdleStreak | None, now: float, settings: IdleSettings, *, can_requeue: bool) -> str | None:
    """How long a run's GPUs have been idle and what comes of it, as a sentence; None while they are not."""
    since = idle_since(seen, now, settings)
    if seen is None or since is None:
        return None
    text = f"its GPUs have been idle for {format_duration(now - since)}"
    if settings.then == "off":
        return f"{text}; no action is configured"
    if settings.then == "requeue" and not can_requeue:
        return f"{text}; it cannot be requeued, so it continues"
    what = "requeued once a job waits that could use them" if settings.then == "requeue" else "cancelled"
    left_s = settings.then_after_s - (now - since)
    if left_s > 0:
        return f"{text}; if that lasts for another {format_duration(left_s)}, it will be {what}"
    if not _is_quiet(seen, now, settings):
        return f"{text}; it continues, since nothing shows that its processes are idle too"
    return f"{text}; it will be {what}"


_SHORT_OF_GPUS = (ReasonCode.RESOURCES, ReasonCode.PRIORITY)


def missing_gpus(request: Request, reason: Reason | None) -> int | None:
    """GPUs that a pending job lacks; None if it waits for something else, such as a limit or GPUs that are not there.

    Args: reason: its own by the last plan.
    """
    if not request.gpus or reason is None or reason.code not in _SHORT_OF_GPUS:
        return None
    needed, free = (facts if isinstance(facts := reason.facts.get(name), dict) else {} for name in ("needed", "free"))
    return max(1, int(needed.get("gpus", 1)) - int(free.get("gpus", 0)))


def is_exempt(spec: JobSpec, settings: Settings) -> bool:
    """Whether its GPUs are not monitored: by its own option, its queue or QOS, or since its lease ends it sooner."""
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
