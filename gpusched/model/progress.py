"""Progress of a run: parsing of its reports, and the end extrapolated from its pace. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpusched.model.units import printable
from gpusched.model.value import Value

TEXT_WIDTH = 60
"""Maximum characters of the text beside the number."""
LINE_CHARS = 2000
"""Longer lines are cut to their end, since bars overwrite themselves with carriage returns."""

EARLY_S = 5.0
EARLY_FRACTION = 0.005
"""Below either, no pace is computed: it would be a guess."""
SEEN_S = 15.0
"""From then on, only observed time counts, not the run's total, since the bar may have started late."""
PACE_S = 60.0
PACE_PART = 0.25
"""The pace is taken over the last minute, or the last quarter of the run if that is longer, so that a slow start
counts less and less, and one slow step does not move the end by hours."""
MOST_SAMPLES = 64

_NUMBER = r"\d{1,18}(?:\.\d{0,18})?|\.\d{1,18}"
_SAID = re.compile(rf"\s*({_NUMBER})(?:\s*(%)|\s*/\s*({_NUMBER}))?(?:[\s,;:|](.*))?", re.DOTALL)
_BAR = re.compile(
    rf"(\d{{1,3}})%\|[^|]*\|\s*({_NUMBER})?(\w?)/({_NUMBER})?(\w?)\S*\s*"
    r"\[(?:\d[\d:]*)<(\d[\d:]{0,20}|\?)(?:,\s*([^\],]{1,40}))?"
)


class Progress(Value):
    """Progress as reported by a run."""

    fraction: float
    """From 0 to 1."""
    text: str = ""
    """The rest of the report: `450/1000 5.4it/s`, printable."""
    left_s: float | None = None
    """Remaining time as reported by the run, counted from the report."""


class ToldProgress(Value):
    """Progress as a node reports it."""

    changed_at: float
    """When the run has reported it, by the node's clock."""
    progress: Progress


class Sample(Value):
    """Progress after an elapsed time, suspensions excluded."""

    elapsed_s: float
    fraction: float


def parse_progress(content: str) -> Progress | None:
    """Parse the last line of a progress file: `0.35`, `35%` or `120/1000`, with an optional text after it."""
    line = _last_line(content)
    found = _SAID.fullmatch(line)
    if found is None:
        return None
    number, percent, total, text = found.groups()
    value = float(number)
    if total is not None:
        whole = float(total)
        if whole <= 0:
            return None
        counts = f"{number}/{total}"
        return Progress(_within(value / whole), _shown(f"{counts} {text or ''}"))
    if percent:
        return Progress(_within(value / 100), _shown(text or ""))
    # A bare number is a fraction: 35 may be a percentage or an epoch.
    return Progress(value, _shown(text or "")) if value <= 1 else None


def parse_bar(output: str) -> Progress | None:
    """Parse the tqdm bar at the end of an output: `45%|####5     | 450/1000 [01:23<01:41, 5.4it/s]`."""
    found = _BAR.search(_last_line(output))
    if found is None:
        return None
    percent, done, done_unit, total, total_unit, left, rate = found.groups()
    fraction = _within(float(percent) / 100)
    if done and total and not (done_unit or total_unit) and float(total) > 0:
        # More precise than whole percents.
        fraction = _within(float(done) / float(total))
    counts = f"{done or '?'}{done_unit}/{total or '?'}{total_unit}"
    return Progress(fraction, _shown(f"{counts} {rate or ''}"), _seconds(left))


def _last_line(text: str) -> str:
    return re.split(r"[\r\n]", text[-LINE_CHARS:].rstrip())[-1] if text else ""


def _within(value: float) -> float:
    return min(1.0, max(0.0, value))


def _shown(text: str) -> str:
    return printable(" ".join(text.split()), TEXT_WIDTH)


def _seconds(text: str) -> float | None:
    """Parse `01:41` or `1:02:03`; None for `?`."""
    seconds = 0
    for part in text.split(":"):
        if not part.isdigit():
            return None
        seconds = 60 * seconds + int(part)
    return float(seconds)


def with_sample(samples: Sequence[Sample], sample: Sample) -> tuple[Sample, ...]:
    """Append a sample; drop the earlier ones if progress restarted, as with the next epoch's bar."""
    if samples and sample.fraction < samples[-1].fraction:
        return (sample,)
    if samples and sample.elapsed_s <= samples[-1].elapsed_s:
        return tuple(samples)
    found = (*samples, sample)
    # Every other sample suffices to find one of about the right age.
    return found if len(found) <= MOST_SAMPLES else (*found[:-1:2], sample)


def left_s(samples: Sequence[Sample], began_anew: bool) -> float | None:
    """Time remaining after the last sample, at the recent pace; None when unknown.

    Args: began_anew: the fraction has fallen once, so the run's total time is not a measure of its pace.
    """
    if not samples:
        return None
    last = samples[-1]
    if last.fraction >= 1:
        return 0.0
    window_s = max(PACE_S, PACE_PART * last.elapsed_s)
    old = [one for one in samples if last.elapsed_s - one.elapsed_s >= window_s]
    if old:
        base = old[-1]
    elif began_anew or last.elapsed_s - samples[0].elapsed_s >= SEEN_S:
        base = samples[0]
    else:
        base = Sample(0.0, 0.0)
    passed_s, done = last.elapsed_s - base.elapsed_s, last.fraction - base.fraction
    if passed_s < EARLY_S or done < EARLY_FRACTION:
        return None
    return passed_s * (1 - last.fraction) / done


class ShownProgress(Value):
    """Progress of a run for display."""

    fraction: float
    text: str
    eta_at: float | None
    """Expected completion at the current pace, UTC epoch seconds; None when unknown."""
