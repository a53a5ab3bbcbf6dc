"""Output of `gpusched simulate`: tables, CSV, JSON, and progress."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from gpusched.addons.simulate.comparison import Comparison
from gpusched.addons.simulate.event_loop import Progress
from gpusched.addons.simulate.measures import QueueResult, Schedule, detail_lines
from gpusched.addons.simulate.trace import Trace
from gpusched.cli import output, tables
from gpusched.cli.tables import Column
from gpusched.model.units import format_duration, printable

if TYPE_CHECKING:
    from rich.console import Console

ByQueue = Mapping[str, Sequence[QueueResult]]

_SCHEDULE = (
    Column("POLICY", lambda one: printable(one.policy)),
    Column("WAIT", lambda one: format_duration(one.wait_s.mean), right=True),
    Column("P95", lambda one: format_duration(one.wait_s.p95), right=True),
    Column("COMPLETION", lambda one: format_duration(one.completion_s.mean), right=True),
    Column("SLOWDOWN", lambda one: f"{one.slowdown.mean:.2f}", right=True),
    Column("MAKESPAN", lambda one: format_duration(one.makespan_s), right=True),
    Column("UTIL", lambda one: f"{one.utilisation:.1%}", right=True),
    Column("FAIRNESS", lambda one: f"{one.user_fairness:.2f}", right=True),
    Column("STARTS", lambda one: one.starts_sha),
)
_GROUP = (
    Column("JOBS", lambda row: f"{row[1].jobs:,}", right=True),
    Column("WAIT", lambda row: format_duration(row[1].wait_s), right=True),
    Column("SLOWDOWN", lambda row: f"{row[1].slowdown:.2f}", right=True),
    Column("SHARE", lambda row: f"{row[2].mean:.1%}" if row[2] else "-", right=True),
    Column("MOST", lambda row: f"{row[2].most:.1%}" if row[2] else "-", right=True),
)
"""Columns of rows (name, group, dominant share or None)."""
_GAIN = (
    Column("JOBS", lambda one: f"{one.after.jobs:,}", right=True),
    Column("WAIT", lambda one: format_duration(one.after.wait_s), right=True),
    Column("WAS", lambda one: format_duration(one.before.wait_s), right=True),
    Column("SLOWDOWN", lambda one: f"{one.after.slowdown:.2f}", right=True),
    Column("WAS", lambda one: f"{one.before.slowdown:.2f}", right=True),
    Column("TIMES", lambda one: f"{one.times:.2f}", right=True),
)
_BY_QUEUE = (
    Column("QUEUE", lambda row: printable(row[1].queue) or "-"),
    Column("POLICY", lambda row: str(row[0])),
    Column("JOBS", lambda row: f"{row[1].jobs:,}", right=True),
    Column("WAIT", lambda row: format_duration(row[1].wait_s), right=True),
    Column("P95", lambda row: format_duration(row[1].wait_p95_s), right=True),
    Column("COMPLETION", lambda row: format_duration(row[1].completion_s), right=True),
    Column("FAILED", lambda row: f"{row[1].failed:,}", right=True),
    Column("PREEMPTED", lambda row: f"{row[1].preempted:,}", right=True),
    Column("LOST", lambda row: format_duration(row[1].lost_gpu_s), right=True),
)


def print_schedules(schedules: Sequence[Schedule]) -> None:
    """Print a line per policy."""
    sys.stdout.write(tables.listing(_SCHEDULE, schedules))


def print_details(schedules: Sequence[Schedule]) -> None:
    """Print a line per measure, a column per policy."""
    titles = ["MEASURE", *(printable(one.policy) for one in schedules)]
    tables.print_table(titles, detail_lines(schedules), frozenset(range(1, len(titles))))


def print_groups(schedules: Sequence[Schedule]) -> None:
    """Print mean wait, mean slowdown and share of the cluster of each user (or queue) under each policy."""
    for one in schedules:
        name = Column(one.what.upper(), lambda row: printable(row[0]) or "-")
        rows = [(name, group, one.dominant_share.get(name)) for name, group in one.groups.items()]
        sys.stdout.write(f"\n{printable(one.policy)}\n{tables.listing((name, *_GROUP), rows)}")


def print_by_queue(found: ByQueue) -> None:
    """Print each queue under each policy; nothing if only the planner was simulated."""
    if found:
        queues = [one.queue for one in next(iter(found.values()))]
        rows = [
            (name, one) for queue in queues for name, listed in found.items() for one in listed if one.queue == queue
        ]
        sys.stdout.write(f"\n{tables.listing(_BY_QUEUE, rows)}")


def print_sentences(compared: Sequence[Comparison]) -> None:
    """Print a sentence per pair of policies on who gains and who loses; nothing with only one user or queue."""
    told = [f"{printable(str(found))}\n" for found in compared if len(found.listed) > 1]
    if told:
        sys.stdout.write("\n" + "".join(told))


def print_gains(compared: Sequence[Comparison]) -> None:
    """Print each user (or queue) under two policies, the largest gain first."""
    for found in compared:
        name = Column(found.what.upper(), lambda one: printable(one.name) or "-")
        sys.stdout.write(f"\n{printable(f'{found.after} instead of {found.before}')}\n")
        sys.stdout.write(tables.listing((name, *_GAIN), found.listed))


def print_csv(schedules: Sequence[Schedule]) -> None:
    """Print a row per policy; unknown values are empty."""
    rows = [one.row() for one in schedules]
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def print_gains_csv(compared: Sequence[Comparison]) -> None:
    """Print a row per user (or queue) and pair of policies."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    names = ("wait_s_before", "wait_s_after", "slowdown_before", "slowdown_after")
    writer.writerow(("before", "after", "what", "name", "jobs", *names))
    for found in compared:
        for one in found.listed:
            numbers = one.before.wait_s, one.after.wait_s, one.before.slowdown, one.after.slowdown
            writer.writerow((found.before, found.after, found.what, printable(one.name), one.before.jobs, *numbers))


def print_document(
    trace: Trace, schedules: Sequence[Schedule], compared: Sequence[Comparison], by_queue: ByQueue
) -> None:
    """Print one JSON document with all results."""
    document = {
        **trace.document(),
        "policies": [one.document() for one in schedules],
        "gains": [one.document() for one in compared],
    }
    if by_queue:
        document["by_queue"] = {name: [asdict(one) for one in found] for name, found in by_queue.items()}
    output.print_json(document)


def print_remarks(trace: Trace) -> None:
    """Print rows of a trace that were left out or corrected, on stderr."""
    for why, one in trace.dropped.items():
        sys.stderr.write(f"gpusched: {printable(f'left out, {why}: {one}')}\n")
    for note in trace.notes:
        sys.stderr.write(f"gpusched: {printable(note)}\n")


_TOLD_EVERY_S = 0.2


@contextmanager
def progress(name: str, console: Console | None = None) -> Iterator[Progress | None]:
    """A progress bar on stderr: fraction, rate, remaining time; None if stderr is not a terminal."""
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
