"""The time limit to request: one that 95 % of similar jobs keep.

Runs that were ended at their limit count as longer than all that ended by themselves. Without them each limit would be
derived from the runs that the previous one let through, and limits would shrink.

Fewer than 19 runs have no 95 % quantile (the next of 19 is the longest so far with probability 1/20); the limit is then
1.5 times the longest run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from gpusched.model.snapshot import Prediction
from gpusched.model.units import MAX_SECONDS, format_duration
from gpusched.predict.predictor import EndedRun

LEAST = 3
"""With fewer runs there is no advice."""

SHARE = 0.95

MARGIN = 1.1
"""Runs take a little longer on a busy machine."""

BEYOND = 1.5
"""With few runs, the limit as a multiple of the longest."""

_STEPS_S = ((2 * 3600, 300), (6 * 3600, 600), (12 * 3600, 1800), (86_400, 3600), (MAX_SECONDS, 6 * 3600))
"""(up to, step): limits are rounded up to multiples of the step, as a user would type them."""


@dataclass(frozen=True, slots=True)
class LimitAdvice:
    """A suggested time limit."""

    limit_s: int
    least_s: float
    """What 95 % kept to, as far as is known; a shorter limit makes no sense."""
    runs: int
    """Number of runs it is based on."""
    why: str
    """`95 % of 34 jobs like it took less`."""
    known: str
    """`95 % of 34 jobs like it took at most 1:40:00`."""


def advise(ended: Sequence[EndedRun]) -> LimitAdvice | None:
    """The time limit for one more job like these; None if there are too few."""
    count = len(ended)
    if count < LEAST:
        return None
    whole_s = sorted(one.run_s for one in ended if not one.is_cut)
    rank = ceil(SHARE * (count + 1))
    if rank <= len(whole_s):
        least_s = whole_s[rank - 1]
        share = f"95 % of {count} jobs like it took"
        known = f"{share} at most {_shown(least_s)}"
        return LimitAdvice(rounded_up(least_s * MARGIN), least_s, count, f"{share} less", known)
    longest_s = max(one.run_s for one in ended)
    longest = f"the longest of {count} jobs like it"
    cut = count - len(whole_s)
    why, known = f"half again as long as {longest}", f"{longest} took {_shown(longest_s)}"
    if cut:
        why, known = (f"{text}, {cut} of them ended by a time limit" for text in (why, known))
    # If limits cut more than a few, all we know is that they need longer.
    least_s = longest_s if cut else whole_s[ceil(SHARE * count) - 1]
    return LimitAdvice(rounded_up(longest_s * BEYOND), least_s, count, why, known)


def _shown(length_s: float) -> str:
    return format_duration(ceil(length_s))


def rounded_up(length_s: float) -> int:
    """A length rounded up in steps of 5 minutes up to two hours, then of about 5 %."""
    step_s = next(step_s for up_to_s, step_s in _STEPS_S if length_s <= up_to_s or up_to_s == MAX_SECONDS)
    return min(MAX_SECONDS, max(1, ceil(length_s / step_s)) * step_s)


def usual_span(usual: Prediction) -> str:
    """Run times in words: `1 to 3 h`, `40 min to 2 h`, `about 5 min`."""
    low, high = _said(usual.low_s), _said(usual.high_s)
    if low == high:
        return f"about {low}"
    number, unit = low.split(" ")
    return f"{number if high.endswith(unit) else low} to {high}"


_UNITS = ((90, 1, "s"), (5400, 60, "min"), (48 * 3600, 3600, "h"))
"""(below, seconds per unit, unit)."""


def _said(length_s: float) -> str:
    unit_s, unit = next(((size, word) for most_s, size, word in _UNITS if length_s < most_s), (86_400, "d"))
    number = max(1.0, length_s / unit_s)
    shown = f"{number:.0f}" if number >= 10 or unit in ("s", "min") else f"{number:.1f}".removesuffix(".0")
    return f"{shown} {unit}"
