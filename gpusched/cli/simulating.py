"""gpusched simulate: a trace through the policy, and what each schedule is worth."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from gpusched.cli import schedules, tables
from gpusched.cli.simulation import Asked, prepare
from gpusched.errors import UsageError
from gpusched.model.units import format_duration, parse_duration_s, printable
from gpusched.simulate import plots, report
from gpusched.simulate.comparison import compare
from gpusched.simulate.metrics import QueueResult, queue_results
from gpusched.simulate.metrics_over_time import Series
from gpusched.simulate.policies import Policy

_BY_QUEUE = ["QUEUE", "POLICY", "JOBS", "WAIT", "P95", "COMPLETION", "FAILED", "PREEMPTED", "LOST"]


def show(
    asked: Asked,
    *,
    wait_bound: str | None = None,
    details: bool = False,
    with_gains: bool = False,
    by: str | None = None,
    plot: str | None = None,
    as_csv: bool = False,
    as_json: bool = False,
) -> None:
    """Print what each policy makes of a trace; see `gpusched simulate --help`."""
    if by not in (None, "user", "queue"):
        raise UsageError(f"--by {by!r} is neither user nor queue", "--by user")
    if as_csv and as_json:
        raise UsageError("--csv and --json are two forms of the same", "give one of them")
    wait_bound_s = None if wait_bound is None else _duration_s(wait_bound)
    folder = None if plot is None else plots.folder_of(plot)
    simulation = prepare(asked)
    _check_gains(simulation.policies, with_gains)
    trace = simulation.trace
    measured, compared, drawn = [], [], []
    by_queue: list[tuple[str, list[QueueResult]]] = []
    first = None
    keeps_places = details or by is not None or as_json or as_csv or folder is not None
    for policy in simulation.policies:
        with schedules.progress(policy.name) as progress:
            outcome = simulation.run(policy, keeps_places=keeps_places, progress=progress)
        series = None if folder is None else Series()
        measured.append(report.measure(policy.name, outcome, simulation.size, wait_bound_s, series, by))
        if simulation.is_whole:
            by_queue.append((policy.name, queue_results(outcome)))
        if first is None:
            first = outcome
        else:
            compared.append((simulation.policies[0].name, policy.name, compare(first, outcome, by)))
        if series is not None:
            drawn.append(plots.Drawn(policy.name, outcome, series, by))
    if folder is not None:
        plots.write(folder, drawn)
    if as_json:
        told = {name: [asdict(one) for one in found] for name, found in by_queue}
        schedules.print_document(trace, measured, compared, **({"by_queue": told} if told else {}))
        return
    if as_csv:
        if with_gains:
            schedules.print_gains_csv(compared)
        else:
            schedules.print_csv(measured)
    else:
        if details:
            schedules.print_details(measured)
        else:
            schedules.print_schedules(measured)
        if by is not None:
            schedules.print_parties(measured)
        _print_by_queue(by_queue)
        schedules.print_sentences(compared)
        if with_gains:
            schedules.print_gains(compared)
    schedules.print_remarks(trace)


def _duration_s(text: str) -> int:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise UsageError(str(error), "--wait-bound 4h") from None


def _print_by_queue(found: Sequence[tuple[str, Sequence[QueueResult]]]) -> None:
    """Each queue under each policy; nothing where only the policy was asked."""
    if not found:
        return
    queues = [one.queue for one in found[0][1]]
    lines = [
        [
            printable(one.queue) or "-",
            name,
            f"{one.jobs:,}",
            format_duration(one.wait_s),
            format_duration(one.wait_p95_s),
            format_duration(one.completion_s),
            f"{one.failed:,}",
            f"{one.preempted:,}",
            format_duration(one.lost_gpu_s),
        ]
        for queue in queues
        for name, listed in found
        for one in listed
        if one.queue == queue
    ]
    sys.stdout.write("\n")
    tables.print_table(_BY_QUEUE, lines, frozenset(range(2, 9)))


def _check_gains(policies: Sequence[Policy], with_gains: bool) -> None:
    if with_gains and len(policies) < 2:
        text = f"--gains compares two policies, and {policies[0].name} is one"
        raise UsageError(text, f"--policy {policies[0].name},sjf+easy --gains")
