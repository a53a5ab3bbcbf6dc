"""The factors of the weighted priority, each in [0, 1], 1 being the most urgent.

Source: Slurm's multifactor priority plugin for age, fair share, size, partition, QOS and nice; the fit
factor is the resource-aware term of dominant-resource schedulers.
"""

from __future__ import annotations

from math import inf, log2

from gpusched.model.job import NICE_MAX, NICE_MIN, Request
from gpusched.model.resources import Resources


def clamped(value: float) -> float:
    """The value, or the nearer end of [0, 1]."""
    return min(1.0, max(0.0, value))


def age_factor(waited_s: float, max_age_s: float) -> float:
    """Time waited over the longest that counts; a clock that was set back counts as no wait."""
    if max_age_s <= 0:
        return 0.0
    return clamped(waited_s / max_age_s)


def nice_factor(nice: int) -> float:
    """1 for the most urgent nice value, 0 for the least."""
    return clamped((NICE_MAX - nice) / (NICE_MAX - NICE_MIN))


def size_factor(request: Request, wanted: Resources, capacity: Resources, *, favor_small: bool) -> float:
    """The part of the cluster's GPUs that the job asks for, or of its cores when it asks for none."""
    have, want = (capacity.gpus, wanted.gpus) if request.gpus else (capacity.cpus, wanted.cpus)
    size = clamped(want / have) if have > 0 else 0.0
    return 1.0 - size if favor_small else size


_LONG_S = 30 * 86400.0
"""A run of a month or more is no longer short in any way."""


def short_factor(length_s: float) -> float:
    """1 for a job that is over at once, 0 for a month or more, and for an unknown (infinite) length.

    Each doubling takes away as much: run times differ by powers of ten, and so do the errors of what is known of them.
    """
    return clamped(1.0 - log2(1.0 + max(0.0, length_s)) / log2(1.0 + _LONG_S))


def whole_factor(request: Request, largest_node: int) -> float:
    """The part of the largest node's cards that it needs free at once; 0 without GPUs, 1 for whole nodes.

    For so many cards others must end before one of them begins anew, so that small jobs that pass cost most.
    """
    return clamped(request.gpus / largest_node) if largest_node and not request.shares_cards else 0.0


def fit_factor(wanted: Resources, capacity: Resources) -> float:
    """1 less the dominant share of the cluster that the job asks for."""
    return 1.0 - clamped(wanted.dominant_share(capacity))


def deadline_factor(deadline_at: float | None, time_limit_s: int | None, now: float, horizon_s: float) -> float:
    """0 without a deadline or far from it, 1 at the last start that meets it, rising evenly over `horizon_s`."""
    if deadline_at is None or horizon_s <= 0:
        return 0.0
    slack_s = deadline_at - (time_limit_s or 0) - now
    return clamped(1.0 - slack_s / horizon_s) if slack_s < inf else 0.0
