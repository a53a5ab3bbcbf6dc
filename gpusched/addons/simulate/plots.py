"""Plots of schedules: Gantt charts, use of the cluster, distributions of waits and slowdowns.

Drawn with matplotlib, which nothing else needs: the extra `plot`. Needs no display.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from importlib.util import find_spec
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusched.addons.simulate.event_loop import Walk, play
from gpusched.addons.simulate.occupancy import Series
from gpusched.addons.simulate.outcome import Outcome, RunLog, grouping, size_of
from gpusched.errors import UserError
from gpusched.extras import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED = 8
"""Users with a color of their own in Gantt charts, and a line among the shares: the largest consumers."""
_OTHERS = "#b9c1ca"
_MOST_CARD_NAMES = 32
"""Cards that are named one by one; of more only the nodes are."""
_UNITS = (("days", 86400, 2), ("hours", 3600, 2), ("minutes", 60, 2))
"""Units of time, their lengths in seconds, and from how many on they are used."""
_WAITS = ((1, "1 s"), (60, "1 min"), (3600, "1 h"), (86400, "1 day"), (7 * 86400, "1 week"), (30 * 86400, "30 days"))
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


def write(folder: Path, drawn: Sequence[Drawn], subject: str = "") -> list[Path]:
    """Write all plots as PNG: a Gantt chart and shares per policy, the others combined.

    Plots over time have the same axes for each policy. Args: subject: trace and cluster, below each title.
    """
    clock = TimeAxis.of(drawn)
    made = []
    for one in drawn:
        name = file_name(one.policy)
        made.append(_save(folder / f"gantt-{name}.png", partial(_gantt, drawn=one, clock=clock), 6.0, subject))
        made.append(_save(folder / f"shares-{name}.png", partial(_shares, drawn=one, clock=clock), 4.0, subject))
    made.append(_save(folder / "utilisation.png", partial(_utilisation, drawn=drawn, clock=clock), 4.0, subject))
    made.append(_save(folder / "wait-cdf.png", partial(_waits, drawn=drawn), 4.0, subject))
    made.append(_save(folder / "slowdown-cdf.png", partial(_slowdowns, drawn=drawn), 4.0, subject))
    return made


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The axis of time that the plots of all policies share."""

    begin_s: int
    end_s: int
    unit: str
    unit_s: int

    @classmethod
    def of(cls, drawn: Sequence[Drawn]) -> TimeAxis:
        """From the first submission to the end of the longest schedule."""
        begin_s = min(one.series.at_s[0] for one in drawn)
        end_s = max(one.series.at_s[-1] for one in drawn)
        lasts_s = end_s - begin_s
        unit, unit_s = next(
            ((name, one_s) for name, one_s, least in _UNITS if lasts_s >= least * one_s), ("seconds", 1)
        )
        return cls(begin_s, end_s, unit, unit_s)

    def __call__(self, at_s: float) -> float:
        return (at_s - self.begin_s) / self.unit_s

    def label(self, axes: Axes) -> None:
        axes.set_xlabel(f"{self.unit} since the first submission")
        axes.set_xlim(0, max(1, self.end_s - self.begin_s) / self.unit_s)


def file_name(policy: str) -> str:
    """Name of a policy as part of a file name."""
    return "".join(sign if sign.isalnum() or sign in "+_-" else "-" for sign in policy)


def _save(path: Path, draw: Callable[[Axes], None], height: float, subject: str) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Figure = Figure(figsize=(10.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    if subject:
        axes.set_title(f"{axes.get_title()}\n{subject}", fontsize="medium")
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


def _gantt(axes: Axes, drawn: Drawn, clock: TimeAxis) -> None:
    from matplotlib.collections import PolyCollection

    outcome, runs = drawn.outcome, drawn.outcome.runs
    assert runs is not None  # as `Drawn` has it
    shapes, jobs = [], []
    for bar in bars(outcome, runs):
        left, right = clock(bar.begin_s), clock(bar.end_s)
        low, high = bar.first, bar.first + bar.count
        shapes.append(((left, low), (left, high), (right, high), (right, low)))
        jobs.append(bar.job)
    what, fills = _fills(axes, drawn, jobs)
    collection = PolyCollection(
        shapes, facecolors=fills, edgecolors="white", linewidths=0.2 if len(shapes) < _MOST_POINTS else 0.0
    )
    collection.set_rasterized(True)
    axes.add_collection(collection)
    axes.set_ylim(size_of(runs.layout.nodes, outcome.jobs), 0)
    axes.set_title(f"{drawn.policy}: who ran where, by {what}")
    clock.label(axes)
    if any(job.gpus for job in outcome.jobs):
        _name_cards(axes, runs)
    else:
        axes.set_ylabel("processor")


def _fills(axes: Axes, drawn: Drawn, jobs: Sequence[int]) -> tuple[str, list[object]]:
    """Colors of bars, explained beside the plot: by group, or by the wait if all jobs are of one group."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Patch

    outcome = drawn.outcome
    what, name_of = grouping(outcome.jobs, drawn.by)
    names = [name_of(job) for job in outcome.jobs]
    used_s = _used_s(outcome, names)
    most = sorted(used_s, key=lambda name: (-used_s[name], name))
    if len(most) > 1:
        colors = colormaps["tab10"]
        known: dict[str, object] = {name: colors(number) for number, name in enumerate(most[:_NAMED])}
        patches = [Patch(color=color, label=name or "-") for name, color in known.items()]  # type: ignore[arg-type]
        if len(most) > _NAMED:
            patches.append(Patch(color=_OTHERS, label=f"{len(most) - _NAMED} others"))
        _beside(axes, handles=patches)
        return what, [known.get(names[job], _OTHERS) for job in jobs]
    shades, waits_s = colormaps["viridis"], [outcome.wait_s[job] for job in jobs]
    longest_s = max(waits_s, default=0) or 1
    unit, unit_s = next(((name, one_s) for name, one_s, least in _UNITS if longest_s >= least * one_s), ("seconds", 1))
    scale = Normalize(0, longest_s / unit_s)
    axes.figure.colorbar(ScalarMappable(scale, shades), ax=axes, label=f"wait in {unit}")
    return "wait", [shades(scale(wait_s / unit_s)) for wait_s in waits_s]


def _used_s(outcome: Outcome, names: Sequence[str]) -> Counter[str]:
    """Card-seconds of each group, or seconds of jobs without cards."""
    runs, found = outcome.runs, Counter[str]()
    assert runs is not None
    for run in range(len(runs)):
        job = runs.job[run]
        found[names[job]] += (runs.end_s[run] - runs.begin_s[run]) * max(1, outcome.jobs[job].gpus or 0)
    return found


def _name_cards(axes: Axes, runs: RunLog) -> None:
    """Names beside the cards, of each one if there are few, and a line below each node."""
    nodes = [node for node in runs.layout.nodes if node.gpus]
    count = sum(len(node.gpus) for node in nodes)
    places, names, first = [], [], 0
    for node in nodes:
        models = ", ".join(dict.fromkeys(gpu.name for gpu in node.gpus))
        if count <= _MOST_CARD_NAMES:
            places += [first + number + 0.5 for number in range(len(node.gpus))]
            names += [f"{node.name}:{gpu.index} {gpu.name}" for gpu in node.gpus]
        else:
            places.append(first + len(node.gpus) / 2)
            names.append(f"{node.name} {len(node.gpus)}x {models}")
        first += len(node.gpus)
        if first < count:
            axes.axhline(first, color="black", linewidth=0.6)
    step = max(1, -(-len(places) // _MOST_CARD_NAMES))
    axes.set_yticks(places[::step], names[::step], fontsize="x-small")


def _beside(axes: Axes, **more: Any) -> None:
    """The legend outside, where it hides no line."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, fontsize="small", **more)


# --- over time --------------------------------------------------------------------------------------


def _utilisation(axes: Axes, drawn: Sequence[Drawn], clock: TimeAxis) -> None:
    for one in drawn:
        at, used = means_over_time(one.series.at_s, one.series.used)
        axes.plot([clock(instant) for instant in at], used, label=one.policy, linewidth=0.9)
    axes.set_ylim(0, 1.02)
    axes.set_title("In use")
    clock.label(axes)
    axes.set_ylabel("part of the cluster")
    _beside(axes)


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


def _shares(axes: Axes, drawn: Drawn, clock: TimeAxis) -> None:
    what, _ = grouping(drawn.outcome.jobs, drawn.by)
    begin_s, end_s = drawn.series.at_s[0], drawn.series.at_s[-1]
    lines = []
    for name, steps in drawn.series.shares.items():
        at_s = [begin_s, *(at for at, _ in steps), end_s]
        values = [0.0, *(share for _, share in steps), steps[-1][1]]
        at, means = means_over_time(at_s, values, _SHARE_POINTS)
        lines.append((-sum(means), name, at, means))
    for _, name, at, means in sorted(lines)[:_NAMED]:
        axes.plot([clock(instant) for instant in at], means, label=name or "-", linewidth=0.9)
    axes.set_ylim(0, 1.02)
    axes.set_title(f"{drawn.policy}: dominant share by {what}")
    clock.label(axes)
    axes.set_ylabel("part of the cluster")
    _beside(axes)


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
    longest_s = max((max(one.outcome.wait_s, default=0) for one in drawn), default=0)
    marks = [(0, "0"), *(mark for mark in _WAITS if mark[0] <= max(1, longest_s))]
    axes.set_xticks([at_s for at_s, _ in marks], [text for _, text in marks])
    axes.set_xticks([], minor=True)
    _distribution(axes, "Waits", "waited at most")


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
    _beside(axes)
