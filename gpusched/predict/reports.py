"""How far the ends that runs report by their progress were right, by family.

A bar in the output of a run may be that of one epoch of many, which its text does not tell; what tells is when runs
with such bars have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from math import log

TRUSTED_ERROR = 0.25
"""Largest mean of |log(reported / actual)| of a family that is trusted: ends within a quarter of the run time or so."""

_RUNS = 3
"""Newest runs that count, since code changes."""

MOST_FAMILIES = 5000
"""Beyond this, the families least recently active are dropped."""

_SHORTEST_S = 1.0


class ReportTrust:
    """Errors of what the newest runs of each family reported."""

    def __init__(self) -> None:
        self._errors: dict[Hashable, deque[float]] = {}

    def learn(self, kind: Hashable, reported_s: Sequence[float], run_s: float) -> None:
        """A run has completed. Args: reported_s: its length by each of its reports; run_s: its length. Both in s."""
        if not reported_s:
            return
        actual_s = max(_SHORTEST_S, run_s)
        error = sum(abs(log(max(_SHORTEST_S, one) / actual_s)) for one in reported_s) / len(reported_s)
        self._errors[kind] = errors = self._errors.pop(kind, None) or deque(maxlen=_RUNS)
        errors.append(error)
        if len(self._errors) > MOST_FAMILIES:
            del self._errors[next(iter(self._errors))]

    def is_trusted(self, kind: Hashable) -> bool:
        """Whether to plan by what a run of this family reports; so it is until one was wrong."""
        errors = self._errors.get(kind)
        return errors is None or sum(errors) / len(errors) <= TRUSTED_ERROR
