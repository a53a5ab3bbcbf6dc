"""gpusched simulate: a trace through the policy, and what each schedule is worth."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from gpusched.cli import output
from gpusched.errors import UsageError
from gpusched.model.cluster import NodeView
from gpusched.model.units import format_duration, printable
from gpusched.simulate import metrics, runner
from gpusched.simulate.cluster import largest, nodes_of, processors, read_nodes
from gpusched.simulate.rules import rules_of
from gpusched.simulate.trace import Trace, read_trace, with_estimates

_HEADINGS = ["POLICY", "WAIT", "P95", "COMPLETION", "SLOWDOWN", "MAKESPAN", "UTIL", "FAIRNESS", "STARTS"]


def show(
    path: str, *, nodes: str | None, cluster: str | None, policies: Sequence[str], exact: bool, as_json: bool
) -> None:
    """Print one line for each policy."""
    chosen = [(name, rules_of(name)) for name in policies]
    trace = read_trace(Path(path))
    machines = _machines(trace, nodes, cluster)
    gpus, procs = largest(machines)
    trace.keep_those_that_fit(gpus=gpus, procs=procs)
    jobs = with_estimates(trace.jobs, "exact" if exact else "given")
    rows, lines = [], []
    for name, rules in chosen:
        outcome = runner.run(
            jobs,
            machines,
            rules.settings(),
            orders_by_run_time=rules.orders_by_run_time,
            progress=_progress(name) if sys.stderr.isatty() and not as_json else None,
        )
        made = metrics.worth(outcome, gpus or procs)
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


def _machines(trace: Trace, nodes: str | None, cluster: str | None) -> tuple[NodeView, ...]:
    if nodes is not None and cluster is not None:
        raise UsageError("--nodes and --cluster both say what the machines are", "give one of them")
    if cluster is not None:
        return read_nodes(Path(cluster))
    if nodes is not None:
        return nodes_of(nodes)
    if trace.procs is not None:
        return processors(trace.procs)
    raise UsageError(f"{trace.name} does not say how large its machine is", "--nodes 8x8xA100")


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
