"""Plots of schedules: Gantt charts, use of the cluster, distributions of waits and slowdowns.

Drawn with matplotlib, which nothing else needs: the extra `plot`. Needs no display.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from importlib.util import find_spec
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING

from gpusched.addons.simulate.event_loop import Walk, play
from gpusched.addons.simulate.occupancy import Series
from gpusched.addons.simulate.outcome import Outcome, RunLog, grouping, size_of
from gpusched.errors import UserError
from gpusched.extras import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = 20
_NAMED = 8
"""Maximum number of users with their own line among the shares: the largest consumers."""
_SHARE_POINTS = 400
_MOST_POINTS = 4000
"""Maximum points per line, about the width of a plot."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One policy to plot."""

    policy: str
    outcome: Outcome
    series: Series
    by: str | None = None
    """Grouping of colours and shares, `user` or `queue`; None: see `outcome.grouping`."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A job on adjacent cards, or processors, over a period."""

    job: int
    begin_s: int
    end_s: int
    first: int
    count: int


def folder_of(text: str) -> Path:
    """Create the folder for plots if needed, before the simulation.

    Raises: UserError if matplotlib is not installed or the folder cannot be created.
    """
    if find_spec("matplotlib") is None:
        raise UserError("--plot draws with matplotlib, which is not installed", install_command("plot"))
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--plot: {folder} cannot be a folder: {error.strerror}", "--plot pictures") from None
    return folder


def write(folder: Path, drawn: Sequence[Drawn]) -> list[Path]:
    """Write all plots as PNG: a Gantt chart and shares per policy, the others combined."""
    made = []
    for one in drawn:
        name = file_name(one.policy)
        made.append(_save(folder / f"gantt-{name}.png", partial(_gantt, drawn=one), 6.0))
        made.append(_save(folder / f"shares-{name}.png", partial(_shares, drawn=one), 4.0))
    made.append(_save(folder / "utilisation.png", partial(_utilisation, drawn=drawn), 4.0))
    made.append(_save(folder / "wait-cdf.png", partial(_waits, drawn=drawn), 4.0))
    made.append(_save(folder / "slowdown-cdf.png", partial(_slowdowns, drawn=drawn), 4.0))
    return made


def file_name(policy: str) -> str:
    """Name of a policy as part of a file name."""
    return "".join(sign if sign.isalnum() or sign in "+_-" else "-" for sign in policy)


def _save(path: Path, draw: Callable[[Axes], None], height: float) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Figure = Figure(figsize=(10.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot())
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"--plot: {path} cannot be written: {error.strerror}", "--plot pictures") from None
    return path


# --- Gantt charts -----------------------------------------------------------------------------------


def bars(outcome: Outcome, runs: RunLog) -> Iterable[Bar]:
    """Bars of every run on its cards; without cards on processors, which are numbered lowest free first."""
    if any(job.gpus for job in outcome.jobs):
        for run in range(len(runs)):
            cards = sorted(part.card for piece in runs.booking(run).pieces() for part in piece.parts)
            yield from _on(cards, runs, run)
        return
    walk = _ByProcessor(runs)
    play([job.submit_s for job in outcome.jobs], walk)
    yield from walk.bars


class _ByProcessor(Walk):
    """Assigns each run the lowest free processors at its start."""

    def __init__(self, runs: RunLog) -> None:
        super().__init__(runs)
        self.bars: list[Bar] = []
        self._free = list(range(ceil(sum(runs.layout.millicpus) / 1000)))
        self._held: dict[int, list[int]] = {}

    def end(self, run: int) -> None:
        for number in self._held.pop(run):
            heappush(self._free, number)

    def begin(self, run: int) -> None:
        count = ceil(sum(piece.millicpus for piece in self.runs.booking(run).pieces()) / 1000)
        held = self._held[run] = [heappop(self._free) for _ in range(min(count, len(self._free)))]
        self.bars += _on(held, self.runs, run)


def _on(numbers: Sequence[int], runs: RunLog, run: int) -> Iterable[Bar]:
    """One bar for each group of adjacent numbers."""
    first = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield Bar(runs.job[run], runs.begin_s[run], runs.end_s[run], numbers[first], place - first)
            first = place


def _gantt(axes: Axes, drawn: Drawn) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection

    outcome, runs = drawn.outcome, drawn.outcome.runs
    assert runs is not None  # as `Drawn` has it
    what, name_of = grouping(outcome.jobs, drawn.by)
    names = sorted({name_of(job) for job in outcome.jobs})
    colour_of = {name: number % _COLOURS for number, name in enumerate(names)}
    colours = colormaps["tab20"]
    _, unit_s = _unit(drawn.series)
    shapes, fills = [], []
    begin_s = drawn.series.at_s[0]
    for bar in bars(outcome, runs):
        left, right = (bar.begin_s - begin_s) / unit_s, (bar.end_s - begin_s) / unit_s
        low, high = bar.first, bar.first + bar.count
        shapes.append(((left, low), (left, high), (right, high), (right, low)))
        # With a single user, adjacent jobs must still be distinguishable.
        fills.append(colours(colour_of[name_of(outcome.jobs[bar.job])] if len(names) > 1 else bar.job % _COLOURS))
    axes.add_collection(PolyCollection(shapes, facecolors=fills, edgecolors="none", rasterized=True))
    axes.set_ylim(0, size_of(runs.layout.nodes, outcome.jobs))
    _title(axes, f"{drawn.policy}: who ran where, by {what if len(names) > 1 else 'job'}", drawn.series)
    axes.set_ylabel("GPU" if any(job.gpus for job in outcome.jobs) else "processor")


# --- over time --------------------------------------------------------------------------------------


def _utilisation(axes: Axes, drawn: Sequence[Drawn]) -> None:
    longest = max((one.series for one in drawn), key=lambda series: series.at_s[-1])
    _, unit_s = _unit(longest)
    begin_s = longest.at_s[0]
    for one in drawn:
        at, used = means_over_time(one.series.at_s, one.series.used)
        axes.plot([(instant - begin_s) / unit_s for instant in at], used, label=one.policy, linewidth=0.9)
    axes.set_ylim(0, 1.02)
    _title(axes, "In use", longest)
    axes.set_ylabel("part of the cluster")
    axes.legend(loc="lower center", ncols=max(1, len(drawn)))


def means_over_time(
    at_s: Sequence[int], values: Sequence[float], most: int = _MOST_POINTS
) -> tuple[list[float], list[float]]:
    """Midpoint and time-weighted mean of up to `most` equal spans; `values` hold from their instant to the next."""
    begin_s, end_s = at_s[0], at_s[-1]
    count = min(most, max(1, end_s - begin_s))
    span_s = max(1.0, (end_s - begin_s) / count)
    sums = [0.0] * count
    number = 0
    for from_s, to_s, value in zip(at_s, at_s[1:], values, strict=False):
        at = float(from_s)
        while at < to_s:
            edge = begin_s + (number + 1) * span_s if number < count - 1 else inf
            until = min(float(to_s), edge)
            sums[number] += value * (until - at)
            at = until
            number += until >= edge
    return [begin_s + (number + 0.5) * span_s for number in range(count)], [total / span_s for total in sums]


def _shares(axes: Axes, drawn: Drawn) -> None:
    what, _ = grouping(drawn.outcome.jobs, drawn.by)
    _, unit_s = _unit(drawn.series)
    begin_s, end_s = drawn.series.at_s[0], drawn.series.at_s[-1]
    lines = []
    for name, steps in drawn.series.shares.items():
        at_s = [begin_s, *(at for at, _ in steps), end_s]
        values = [0.0, *(share for _, share in steps), steps[-1][1]]
        at, means = means_over_time(at_s, values, _SHARE_POINTS)
        lines.append((-sum(means), name, at, means))
    for _, name, at, means in sorted(lines)[:_NAMED]:
        axes.plot([(instant - begin_s) / unit_s for instant in at], means, label=name or "-", linewidth=0.9)
    axes.set_ylim(0, 1.02)
    _title(axes, f"{drawn.policy}: dominant share by {what}", drawn.series)
    axes.set_ylabel("part of the cluster")
    axes.legend(loc="upper left", fontsize="small")


# --- distributions ----------------------------------------------------------------------------------


def cdf(values: Iterable[float]) -> tuple[list[float], list[float]]:
    """Sorted values, with the fraction of all values up to each; many values are thinned out."""
    ordered = sorted(values)
    count = len(ordered)
    step = max(1, count // _MOST_POINTS)
    places = [*range(step - 1, count - 1, step), count - 1]
    return [ordered[place] for place in places], [(place + 1) / count for place in places]


def _waits(axes: Axes, drawn: Sequence[Drawn]) -> None:
    for one in drawn:
        axes.step(*cdf(one.outcome.wait_s), where="post", label=one.policy)
    # Logarithmic from one second on, with zero waits on the left edge.
    axes.set_xscale("symlog", linthresh=1.0)
    _distribution(axes, "Waits", "seconds")


def _slowdowns(axes: Axes, drawn: Sequence[Drawn]) -> None:
    for one in drawn:
        axes.step(*cdf(one.outcome.slowdown), where="post", label=one.policy)
    axes.set_xscale("log")
    _distribution(axes, "Bounded slowdowns", "times the run time")


def _distribution(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(unit)
    axes.set_ylabel("part of the jobs at or below")
    axes.set_ylim(0, 1.02)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right")


def _title(axes: Axes, title: str, series: Series) -> None:
    unit, unit_s = _unit(series)
    axes.set_title(title)
    axes.set_xlabel(f"{unit} since the first submission")
    axes.set_xlim(0, max(1, series.at_s[-1] - series.at_s[0]) / unit_s)


def _unit(series: Series) -> tuple[str, int]:
    """Time unit for a schedule, and its length in seconds."""
    for_s = series.at_s[-1] - series.at_s[0]
    return next((one for one in (("days", 86400), ("hours", 3600)) if for_s > 2 * one[1]), ("seconds", 1))
