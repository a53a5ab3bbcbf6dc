"""gpusched simulate: a trace through the policy, and what each schedule is worth."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from gpusched.cli import output
from gpusched.cli.simulation import Asked, prepare
from gpusched.model.units import format_duration, printable
from gpusched.simulate import metrics

_HEADINGS = ["POLICY", "WAIT", "P95", "COMPLETION", "SLOWDOWN", "MAKESPAN", "UTIL", "FAIRNESS", "STARTS"]


def show(asked: Asked, *, as_json: bool) -> None:
    """Print one line for each policy."""
    simulation = prepare(asked)
    trace = simulation.trace
    rows, lines = [], []
    for choice in simulation.choices:
        name = choice.name
        is_watched = sys.stderr.isatty() and not as_json
        outcome = simulation.run(choice, progress=_progress(name) if is_watched else None)
        made = metrics.worth(outcome, simulation.size)
        rows.append({"policy": name, **asdict(made), "starts_sha": outcome.starts_sha})
        lines.append(
            [
                name,
                format_duration(made.wait_s.mean),
                format_duration(made.wait_s.p95),
                format_duration(made.completion_s.mean),
                f"{made.slowdown.mean:.2f}",
                format_duration(made.makespan_s),
                f"{made.utilisation:.1%}",
                f"{made.user_fairness:.2f}",
                outcome.starts_sha,
            ]
        )
    dropped = {why: {"count": one.count, "first": one.named} for why, one in trace.dropped.items()}
    if as_json:
        output.print_json({"trace": trace.name, "dropped": dropped, "notes": trace.notes, "policies": rows})
        return
    output.print_table(_HEADINGS, lines, frozenset(range(1, 8)))
    for why, one in trace.dropped.items():
        sys.stderr.write(f"gpusched: {printable(f'left out, {why}: {one}')}\n")
    for note in trace.notes:
        sys.stderr.write(f"gpusched: {printable(note)}\n")


def _progress(name: str) -> Callable[[int, int], None]:
    """A line that is written over: how far, how fast, how long yet."""
    began = time.monotonic()

    def tell(done: int, of: int) -> None:
        rate = done / max(1e-9, time.monotonic() - began)
        left = format_duration((of - done) / max(1e-9, rate))
        end = "\r" if done < of else "\033[K\r"
        sys.stderr.write(f"\033[K{name}: {done:,} of {of:,} jobs, {rate:,.0f} jobs/s, {left} left{end}")
        sys.stderr.flush()

    return tell
