"""Drawings as plain shapes, which templates write as SVG. Pure: data in, coordinates out.

Lengths are attributes of SVG, since the content security policy forbids styles in elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

WIDTH, HEIGHT = 640, 120
"""Of a plot, in its own units."""
LANE, GAP = 22, 6
"""Height of a lane of the timeline and the space below it."""
MOST_SHAPES = 2000
MOST_LANES = 200
_STEPS_S = (60, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 2 * 86400, 7 * 86400, 30 * 86400)
_TICKS = 6


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on the axis of time."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """One curve over time, with what it reached and its limit."""

    title: str
    lines: tuple[str, ...]
    """Points of polylines; one ends where nothing is known."""
    dots: tuple[tuple[str, str], ...]
    """Places of values without neighbors, of which no line can be drawn."""
    step_s: float
    """Each value is the mean of this time."""
    top: str
    """Value at the upper edge, with its unit."""
    last: str
    limit_y: float | None
    ticks: tuple[Tick, ...]
    peak: str


def plot(
    title: str, values: Sequence[float | None], start_at: float, step_s: float, *, unit: str, limit: float | None = None
) -> Plot | None:
    """A curve in WIDTH x HEIGHT; None if nothing is known. Args: limit: booking or cap, drawn as a line."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    top = _round_up(max(*known, limit or 0.0, 0.0) or 1.0)
    across = WIDTH / max(1, len(values) - 1)
    lines, dots, piece = [], [], []
    for number, value in enumerate([*values, None]):
        if value is not None:
            piece.append(f"{number * across:.1f},{HEIGHT - HEIGHT * min(value, top) / top:.1f}")
        elif piece:
            if len(piece) > 1:
                lines.append(" ".join(piece))
            else:
                x, _, y = piece[0].partition(",")
                dots.append((x, y))
            piece = []
    last = next((value for value in reversed(values) if value is not None), None)
    return Plot(
        title,
        tuple(lines),
        tuple(dots),
        step_s,
        f"{top:g} {unit}",
        "n/a" if last is None else f"{_short(last)} {unit}",
        None if limit is None else round(HEIGHT - HEIGHT * limit / top, 1),
        ticks(start_at, start_at + step_s * len(values), WIDTH),
        f"{_short(max(known))} {unit}",
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if value <= step * power * (1 + 1e-9))


def ticks(start_at: float, end_at: float, width: float) -> tuple[Tick, ...]:
    """Marks at full minutes, hours or days of local time."""
    span = max(1.0, end_at - start_at)
    step = next((step for step in _STEPS_S if span / step <= _TICKS), 90 * 86400)
    midnight = datetime.fromtimestamp(start_at).replace(hour=0, minute=0, second=0, microsecond=0)  # noqa: DTZ006
    at = midnight.timestamp()
    at += math.ceil((start_at - at) / step) * step
    found: list[Tick] = []
    while at <= end_at and len(found) <= 2 * _TICKS:
        moment = datetime.fromtimestamp(at)  # noqa: DTZ006
        text = f"{moment:%H:%M}" if step < 86400 and (moment.hour or moment.minute) else f"{moment:%a} {moment.day}"
        found.append(Tick(round((at - start_at) / span * width, 1), text))
        at += step
        if step >= 86400:
            # Days with a clock change are shorter or longer.
            near = datetime.fromtimestamp(at) + timedelta(hours=12)  # noqa: DTZ006
            at = near.replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
    return tuple(found)


def anchor(tick: Tick, width: float) -> str:
    """Where the text of a mark begins, so that the edge does not cut it: an SVG `text-anchor`."""
    return "start" if tick.x < 30 else "end" if tick.x > width - 30 else "middle"


# --- timeline -------------------------------------------------------------------------------------

PAST, NOW, ENDS, OPEN, PLAN, WHISKER = "past", "now", "ends", "open", "plan", "whisker"
BOOKED, OTHERS, FOREIGN = "booked", "others", "foreign"
"""Kinds of shapes: a run that ended, a running one, until its limit, on and on without one, expected from, at the
latest, reserved, what is hidden from the viewer, and use without a job."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One rectangle; a whisker is as thin as a line."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    label: str
    """Written on it, as far as there is room."""
    title: str
    job: str | None


@dataclass(frozen=True, slots=True)
class Lane:
    """A card or a pending job."""

    label: str
    y: float
    link: str


@dataclass(slots=True)
class GanttChart:
    """The Gantt chart."""

    start_at: float
    end_at: float
    now: float
    width: float = 1000.0
    lanes: list[Lane] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    left_out: int = 0
    """Shapes beyond the maximum."""

    @property
    def height(self) -> float:
        return len(self.lanes) * (LANE + GAP)

    @property
    def now_x(self) -> float:
        return self.x(self.now)

    @property
    def ticks(self) -> tuple[Tick, ...]:
        return ticks(self.start_at, self.end_at, self.width)

    def x(self, at: float) -> float:
        """Place of an instant, within the picture."""
        part = (at - self.start_at) / (self.end_at - self.start_at)
        return round(min(1.0, max(0.0, part)) * self.width, 1)

    def lane(self, label: str, link: str) -> float:
        """Add a lane; returns its place."""
        y = self.height
        self.lanes.append(Lane(label, y, link))
        return y

    def add(
        self,
        kind: str,
        y: float,
        start_at: float,
        end_at: float,
        label: str = "",
        title: str = "",
        job: str | None = None,
    ) -> None:
        """Add a shape to the lane at `y`, unless it is outside the picture."""
        if end_at < self.start_at or start_at > self.end_at:
            return
        if len(self.shapes) >= MOST_SHAPES:
            self.left_out += 1
            return
        x, thin = self.x(start_at), kind in (WHISKER, ENDS)
        # A short run is a tick.
        width = max(2.0, round(self.x(end_at) - x, 1))
        top, height = (y + LANE / 2 - 2, 4.0) if thin else (y, float(LANE))
        room = int(width / 7)
        self.shapes.append(Shape(kind, x, top, width, height, label[:room] if room > 2 else "", title, job))


def bar(fraction: float | None, width: float = 100.0) -> float | None:
    """Length of a bar; None if nothing is known."""
    return None if fraction is None else round(min(1.0, max(0.0, fraction)) * width, 1)
