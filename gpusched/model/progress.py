"""How far a run is: what it says of itself, and when it will be done at that pace. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpusched.model.units import printable
from gpusched.model.value import Value

TEXT_WIDTH = 60
"""Characters kept of what a run says beside the number."""
LINE_CHARS = 2000
"""Of a longer line only the end is looked at: bars are drawn over each other with carriage returns."""

EARLY_S = 5.0
EARLY_FRACTION = 0.005
"""Before either, a pace is anybody's guess."""
SEEN_S = 15.0
"""After so long what was seen counts, not how long the run has lasted: it may have begun in the middle."""
PACE_S = 60.0
PACE_PART = 0.25
"""The pace is that of the last minute, or of the last quarter of the run if that is longer: what was slow at its
beginning counts less and less, and one slow step does not move the end by hours."""
MOST_SAMPLES = 64

_NUMBER = r"\d{1,18}(?:\.\d{0,18})?|\.\d{1,18}"
_SAID = re.compile(rf"\s*({_NUMBER})(?:\s*(%)|\s*/\s*({_NUMBER}))?(?:[\s,;:|](.*))?", re.DOTALL)
_BAR = re.compile(
    rf"(\d{{1,3}})%\|[^|]*\|\s*({_NUMBER})?(\w?)/({_NUMBER})?(\w?)\S*\s*"
    r"\[(?:\d[\d:]*)<(\d[\d:]{0,20}|\?)(?:,\s*([^\],]{1,40}))?"
)


class Progress(Value):
    """What a run says about how far it is."""

    fraction: float
    """From 0 to 1."""
    text: str = ""
    """What it says beside that: `450/1000 5.4it/s`, printable."""
    left_s: float | None = None
    """How long it will take by its own words, from when it said so."""


class Sample(Value):
    """How far a run was after so long; time during which it stood still does not count."""

    elapsed_s: float
    fraction: float


def parse_progress(content: str) -> Progress | None:
    """The last line of a progress file: `0.35`, `35%` or `120/1000`, perhaps with a text after it."""
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
    """The bar that an output ends with, as tqdm draws it: `45%|####5     | 450/1000 [01:23<01:41, 5.4it/s]`."""
    found = _BAR.search(_last_line(output))
    if found is None:
        return None
    percent, done, done_unit, total, total_unit, left, rate = found.groups()
    fraction = _within(float(percent) / 100)
    if done and total and not (done_unit or total_unit) and float(total) > 0:
        # Finer than whole percents.
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
    """`01:41`, `1:02:03`; None for `?`."""
    seconds = 0
    for part in text.split(":"):
        if not part.isdigit():
            return None
        seconds = 60 * seconds + int(part)
    return float(seconds)


def with_sample(samples: Sequence[Sample], sample: Sample) -> tuple[Sample, ...]:
    """The samples of a run and one more; those before it started over, as with the next epoch's bar, are dropped."""
    if samples and sample.fraction < samples[-1].fraction:
        return (sample,)
    if samples and sample.elapsed_s <= samples[-1].elapsed_s:
        return tuple(samples)
    found = (*samples, sample)
    # Every other one is enough to find one of about the right age.
    return found if len(found) <= MOST_SAMPLES else (*found[:-1:2], sample)


def left_s(samples: Sequence[Sample], began_anew: bool) -> float | None:
    """How long it takes from the last sample on, at the recent pace; None when unknown.

    Args: began_anew: the fraction has fallen once, so the whole time of the run says nothing about its pace.
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
    """How far a run is, as people see it."""

    fraction: float
    text: str
    eta_at: float | None
    """When it is done at its pace, UTC epoch seconds; None when unknown."""
