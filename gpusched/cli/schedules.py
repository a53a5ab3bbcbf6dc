"""How `gpusched simulate` prints what it measured: tables to read, CSV, JSON, and how far it is."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpusched.cli import output, tables
from gpusched.model.units import format_duration, printable
from gpusched.simulate import report
from gpusched.simulate.comparison import Comparison, sentence
from gpusched.simulate.event_loop import Progress
from gpusched.simulate.report import Schedule
from gpusched.simulate.trace import Trace

if TYPE_CHECKING:
    from rich.console import Console

_HEADINGS = ["POLICY", "WAIT", "P95", "COMPLETION", "SLOWDOWN", "MAKESPAN", "UTIL", "FAIRNESS", "STARTS"]
_PARTIES = ["JOBS", "WAIT", "SLOWDOWN", "SHARE", "MOST"]
_GAINS = ["JOBS", "WAIT", "WAS", "SLOWDOWN", "WAS", "TIMES"]

Compared = tuple[str, str, Comparison]
"""Two policies, the one before first, and who gains and loses."""


def print_schedules(schedules: Sequence[Schedule]) -> None:
    """A line for each policy."""
    lines = [
        [
            printable(one.policy),
            format_duration(one.worth.wait_s.mean),
            format_duration(one.worth.wait_s.p95),
            format_duration(one.worth.completion_s.mean),
            f"{one.worth.slowdown.mean:.2f}",
            format_duration(one.worth.makespan_s),
            f"{one.worth.utilisation:.1%}",
            f"{one.worth.user_fairness:.2f}",
            one.starts_sha,
        ]
        for one in schedules
    ]
    tables.print_table(_HEADINGS, lines, frozenset(range(1, 8)))


def print_details(schedules: Sequence[Schedule]) -> None:
    """A line for each measure, a column for each policy."""
    titles = ["MEASURE", *(printable(one.policy) for one in schedules)]
    tables.print_table(titles, report.lines(schedules), frozenset(range(1, len(titles))))


def print_parties(schedules: Sequence[Schedule]) -> None:
    """Each user (or queue) under each policy: mean wait, mean slowdown, and what it held of the cluster."""
    for one in schedules:
        shares = {} if one.timed is None else one.timed.dominant_share
        lines = [
            [
                printable(name) or "-",
                f"{group.jobs:,}",
                format_duration(group.wait_s),
                f"{group.slowdown:.2f}",
                *((f"{shares[name].mean:.1%}", f"{shares[name].most:.1%}") if name in shares else ("-", "-")),
            ]
            for name, group in report.parties(one).items()
        ]
        sys.stdout.write(f"\n{printable(one.policy)}\n")
        tables.print_table([one.what.upper(), *_PARTIES], lines, frozenset(range(1, 6)))


def print_sentences(compared: Sequence[Compared]) -> None:
    """Who gains and who loses, in a sentence for each two policies; none where there is but one user or queue."""
    told = [sentence(found, before, after) for before, after, found in compared if len(found.listed) > 1]
    if told:
        sys.stdout.write("\n" + "".join(f"{printable(one)}\n" for one in told))


def print_gains(compared: Sequence[Compared]) -> None:
    """Each user (or queue) under both of two policies, who gains most first."""
    for before, after, found in compared:
        sys.stdout.write(f"\n{printable(f'{after} instead of {before}')}\n")
        lines = [
            [
                printable(one.name) or "-",
                f"{one.after.jobs:,}",
                format_duration(one.after.wait_s),
                format_duration(one.before.wait_s),
                f"{one.after.slowdown:.2f}",
                f"{one.before.slowdown:.2f}",
                f"{one.times:.2f}",
            ]
            for one in found.listed
        ]
        tables.print_table([found.what.upper(), *_GAINS], lines, frozenset(range(1, 7)))


def print_csv(schedules: Sequence[Schedule]) -> None:
    """A row for each policy under the names of the measures; what is not known is empty."""
    rows = [report.row(one) for one in schedules]
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def print_gains_csv(compared: Sequence[Compared]) -> None:
    """A row for each user (or queue) and each two policies."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    names = ("wait_s_before", "wait_s_after", "slowdown_before", "slowdown_after")
    writer.writerow(("before", "after", "what", "name", "jobs", *names))
    for before, after, found in compared:
        for one in found.listed:
            numbers = one.before.wait_s, one.after.wait_s, one.before.slowdown, one.after.slowdown
            writer.writerow((before, after, found.what, printable(one.name), one.before.jobs, *numbers))


def print_document(trace: Trace, schedules: Sequence[Schedule], compared: Sequence[Compared], **more: Any) -> None:
    """One JSON document of everything."""
    output.print_json(
        {
            "trace": trace.name,
            "dropped": {why: {"count": one.count, "first": one.named} for why, one in trace.dropped.items()},
            "notes": trace.notes,
            "policies": [report.document(one) for one in schedules],
            "gains": [report.comparison_document(*one) for one in compared],
            **more,
        }
    )


def print_remarks(trace: Trace) -> None:
    """What was left out of a trace and what was put right, on stderr."""
    for why, one in trace.dropped.items():
        sys.stderr.write(f"gpusched: {printable(f'left out, {why}: {one}')}\n")
    for note in trace.notes:
        sys.stderr.write(f"gpusched: {printable(note)}\n")


_TOLD_EVERY_S = 0.2


@contextmanager
def progress(name: str, console: Console | None = None) -> Iterator[Progress | None]:
    """A bar on stderr while a schedule is made: how far, how fast, how long yet; none where stderr is no terminal."""
    if console is None and not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    began = told = time.monotonic()
    with bars.Progress(
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=24),
        bars.TextColumn("{task.completed:,.0f} of {task.total:,.0f} jobs, {task.fields[rate]}", markup=False),
        console=console or Console(stderr=True),
        transient=True,
        auto_refresh=False,
    ) as shown:
        task = shown.add_task(printable(name), total=1, rate="...")

        def tell(done: int, of: int) -> None:
            nonlocal told
            now = time.monotonic()
            if now - told < _TOLD_EVERY_S and done < of:
                return
            told = now
            rate = done / max(1e-9, now - began)
            left = format_duration((of - done) / max(1e-9, rate))
            shown.update(task, completed=done, total=of, rate=f"{rate:,.0f} jobs/s, {left} left", refresh=True)

        yield tell
