"""What is said of the future, as JSON. Unknown is null; instants are epoch seconds."""

from __future__ import annotations

from typing import Any

from gpusched.api.render import plain
from gpusched.model.job import Job
from gpusched.model.settings import Settings
from gpusched.model.states import JobState
from gpusched.ports.daemon import Daemon, Forecast
from gpusched.predict.calibrating import Calibration
from gpusched.predict.judging import Measure
from gpusched.scheduler.ahead.estimates import Accuracy, StartRange
from gpusched.scheduler.ahead.whatif import Alternative


def forecast_json(found: Forecast) -> dict[str, Any]:
    """The answer to a dry run."""
    return {**plain(found), "alternatives": [alternative_json(one) for one in found.alternatives]}


def range_json(found: StartRange, calibration: Calibration, now: float) -> dict[str, Any] | None:
    """Both ends of a start, and between which instants four in five start; null when nothing is known."""
    if found.is_unknown:
        return None
    low_at, high_at = likely_range(found, calibration, now)
    return {"low_at": found.low_at, "high_at": found.high_at, "likely_low_at": low_at, "likely_high_at": high_at}


def likely_range(found: StartRange, calibration: Calibration, now: float) -> tuple[float | None, float | None]:
    """Between which instants four in five such jobs start; None twice when too few have started."""
    told_at = found.low_at if found.high_at is None else found.high_at
    likely = calibration.usual if found.high_at is None else calibration.likely
    if likely is None or told_at is None or told_at <= now:
        return None, None
    return likely.range(now, told_at)


def alternative_json(one: Alternative) -> dict[str, Any]:
    """One thing that would help."""
    return {
        "change": plain(one.change),
        "text": one.text,
        "option": one.option,
        "update": one.update,
        "starts": "now" if one.is_now else one.starts_at,
    }


def expected_json(job: Job, daemon: Daemon, *, is_whole: bool) -> dict[str, Any] | None:
    """How long a pending job is expected to run, by what, and how good its user's limits were; null for others.

    Args: is_whole: all may be told of it; else no more than the length.
    """
    if job.state is not JobState.PENDING:
        return None
    limit_s, found = job.spec.time_limit_s, daemon.expectation(job)
    if not is_whole:
        return {"length_s": found.length_s}
    said = prediction_json(daemon.prediction_error(job.user), daemon.scheduler.settings)
    is_stated = limit_s is not None and not job.spec.time_limit_source
    return {**plain(found), "user": job.user, "time_limit_s": limit_s, "is_stated": is_stated, "predictions": said}


def prediction_json(found: Measure, settings: Settings) -> dict[str, Any]:
    """How far off guesses of run times and users' limits have been, and which of them jobs are planned with."""
    return {**plain(found), "is_used": settings.priority.predict and found.is_better}


def accuracy_json(found: Accuracy | None, calibration: Calibration) -> dict[str, Any] | None:
    """How good estimates were, and part of the ranges of four in five that held; null when none can be judged."""
    if found is None:
        return None
    return {**plain(found), "likely_count": calibration.judged, "likely_inside": calibration.share}
