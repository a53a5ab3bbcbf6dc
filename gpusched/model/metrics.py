"""Metrics pages for Prometheus: families, samples, and the two text formats.

OpenMetrics 1.0 is Prometheus's choice over HTTP. The older text format, version 0.0.4, is the only one that
node_exporter's textfile collector reads: it lacks `info` and `# UNIT`, and names a counter by its sample.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, isnan

from gpusched.errors import BrokenInvariant

OPENMETRICS = "openmetrics"
PROMETHEUS = "prometheus"
FORMATS = (PROMETHEUS, OPENMETRICS)

CONTENT_TYPES = {
    PROMETHEUS: "text/plain; version=0.0.4; charset=utf-8",
    OPENMETRICS: "application/openmetrics-text; version=1.0.0; charset=utf-8",
}


def label(text: str) -> str:
    """Make a text usable as a label: escape undecodable bytes."""
    return text.encode("utf-8", "backslashreplace").decode()


class Histogram:
    """Cumulative histogram: counts of observations up to each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Record one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self._counts)

    def cumulated(self) -> Iterator[tuple[float, int]]:
        """Each bound, ending with infinity, with the number of observations up to it."""
        return zip((*self._bounds, inf), accumulate(self._counts), strict=True)


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric family: name, meaning and label names."""

    name: str
    """Without `_total` or `_info`; with its unit, if any."""
    kind: str
    """`gauge`, `counter`, `histogram` or `info`."""
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""

    @property
    def sample(self) -> str:
        """Name for queries of a counter or an info; for a histogram, the name without the suffixes of its parts."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


class Page:
    """Metrics of one instant. Families may be added in any order, each label set once."""

    def __init__(self) -> None:
        self._rows: dict[MetricFamily, dict[tuple[str, ...], float | Histogram]] = {}

    def put(self, family: MetricFamily, value: float | Histogram | None, *labels: str) -> None:
        """Add the value of one series; None means unknown and omits it. Raises: BrokenInvariant."""
        if value is None:
            return
        marks = tuple(map(label, labels))
        rows = self._rows.setdefault(family, {})
        # Readers reject a page with any error as a whole.
        if (
            len(marks) != len(family.labels)
            or marks in rows
            or isinstance(value, Histogram) != (family.kind == "histogram")
        ):
            raise BrokenInvariant(f"{family.name}{list(marks)} is not a series, or it already exists")
        rows[marks] = value

    def text(self, form: str) -> str:
        """Render the page in one of FORMATS."""
        is_open = form == OPENMETRICS
        lines: list[str] = []
        for family, rows in self._rows.items():
            lines += _head(family, is_open)
            for marks, value in rows.items():
                lines += _samples(family, list(zip(family.labels, marks, strict=True)), value)
        if is_open:
            lines.append("# EOF")
        return "\n".join(lines) + "\n"


def _head(family: MetricFamily, is_open: bool) -> Iterable[str]:
    name = family.name if is_open else family.sample
    kind = family.kind if is_open or family.kind != "info" else "gauge"
    yield f"# HELP {name} {_escape(family.help, quotes=is_open)}"
    yield f"# TYPE {name} {kind}"
    if is_open and family.unit:
        yield f"# UNIT {name} {family.unit}"


def _samples(family: MetricFamily, labels: Sequence[tuple[str, str]], value: float | Histogram) -> Iterable[str]:
    if not isinstance(value, Histogram):
        yield f"{family.sample}{_braces(labels)} {_number(value)}"
        return
    for bound, count in value.cumulated():
        yield f"{family.name}_bucket{_braces([*labels, ('le', _bound(bound))])} {count}"
    yield f"{family.name}_count{_braces(labels)} {value.count}"
    yield f"{family.name}_sum{_braces(labels)} {_number(value.sum)}"


def _braces(labels: Sequence[tuple[str, str]]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(text)}"' for name, text in labels) + "}"


def _escape(text: str, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _bound(bound: float) -> str:
    return "+Inf" if bound == inf else repr(float(bound))


def _number(value: float) -> str:
    if isnan(value):
        return "NaN"
    if abs(value) == inf:
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
