"""What one could change about a waiting job so that it starts now: every answer is tried by `decide` first.

Only one thing is changed at a time, and nothing is proposed that would not be admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, Snapshot
from gpusched.scheduler.ahead import changes
from gpusched.scheduler.ahead.trial import Change, SensibleLimit, Trial
from gpusched.scheduler.extension import NO_EXTENSIONS, Extensions
from gpusched.scheduler.shortage import about

SOONER_S = 600.0
"""What does not start a job now is proposed only when it gains this much, and half of the wait."""

_CHANGES = (
    changes.limits,
    changes.queues,
    changes.conditions,
    changes.types,
    changes.host,
    changes.slices,
    changes.fewer,
)


@dataclass(frozen=True, slots=True)
class Alternative:
    """One change, tried on the present state of the machines and the queue."""

    change: Mapping[str, object]
    """Fields of the submission and their new values."""
    text: str
    """What it does: "would start now with -t 2h"."""
    option: str
    """As typed for gsub; empty when something has to be left out."""
    update: str
    """As typed for `gctl update ID`; empty when gctl has no word for it."""
    starts_at: float
    """The present, or the promised start."""
    is_now: bool


def alternatives(
    snapshot: Snapshot,
    settings: Settings,
    job_id: int,
    allowed: Callable[[ClassKey], bool] = lambda key: True,
    extensions: Extensions = NO_EXTENSIONS,
    sensible: SensibleLimit | None = None,
) -> tuple[Alternative, ...]:
    """Changes that make a waiting job start now, or clearly sooner, the smallest first.

    `allowed` says whether a job with this key would be admitted, `sensible` which time limits jobs like it keep. Empty
    when the job is not in the snapshot, when it starts anyway, and when nothing that was tried helps.
    """
    trial = Trial.of(snapshot, settings, job_id, allowed, extensions, sensible)
    if trial is None or trial.start_of(trial.key) == snapshot.now:
        return ()
    found = [one for change in _CHANGES for one in change(trial)]
    sooner = _sooner(trial)
    made = [(one.size, _worded(one, snapshot.now, None)) for one in found]
    if not made and sooner is not None:
        one, start_at = sooner
        made = [(one.size, _worded(one, snapshot.now, start_at))]
    return tuple(one for _, one in sorted(made, key=lambda pair: (pair[0], pair[1].text)))


def _worded(one: Change, now: float, start_at: float | None) -> Alternative:
    how = f"without {one.without}" if one.without else f"with {one.option}"
    when = "now" if start_at is None else f"in {about(start_at - now)}"
    at = now if start_at is None else start_at
    remark = f" ({one.remark})" if one.remark else ""
    return Alternative(one.change, f"would start {when} {how}{remark}", one.option, one.update, at, start_at is None)


def _sooner(trial: Trial) -> tuple[Change, float] | None:
    """The change that gains most, when that is clearly worth it."""
    before = trial.known.get(trial.key)
    if before is None or not trial.later:
        return None
    one, start_at = min(trial.later, key=lambda pair: (pair[1], pair[0].size))
    wait_s = before - trial.snapshot.now
    return (one, start_at) if before - start_at >= max(SOONER_S, wait_s / 2) else None
