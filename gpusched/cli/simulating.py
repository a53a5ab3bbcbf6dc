"""gpusched simulate: a trace through the policy, and what each schedule is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpusched.cli import schedules
from gpusched.errors import UsageError
from gpusched.model.cluster import NodeView
from gpusched.model.units import parse_duration_s
from gpusched.simulate import plots, predicting, report, runner
from gpusched.simulate.cluster import largest, nodes_of, processors, read_nodes
from gpusched.simulate.gains import gains
from gpusched.simulate.metrics import size_of
from gpusched.simulate.metrics_over_time import Series
from gpusched.simulate.rules import Rules, rules_of
from gpusched.simulate.trace import Trace, read_trace, with_estimates


def show(
    path: str,
    *,
    nodes: str | None,
    cluster: str | None,
    policies: Sequence[str],
    exact: bool,
    predict: str | None = None,
    wait_bound: str | None = None,
    details: bool = False,
    with_gains: bool = False,
    by: str | None = None,
    plot: str | None = None,
    as_csv: bool = False,
    as_json: bool = False,
) -> None:
    """Print what each policy makes of a trace; see `gpusched simulate --help`."""
    _check(policies, with_gains, by, as_csv, as_json)
    wait_bound_s = None if wait_bound is None else parse_duration_s(wait_bound)
    folder = None if plot is None else plots.folder_of(plot)
    chosen = [(name, _rules(name, predict)) for name in policies]
    trace = read_trace(Path(path))
    machines = _machines(trace, nodes, cluster)
    gpus, procs = largest(machines)
    trace.keep_those_that_fit(gpus=gpus, procs=procs)
    jobs = with_estimates(trace.jobs, "exact" if exact else "given")
    size = size_of(machines, jobs)
    measured, compared, drawn = [], [], []
    first = None
    for name, rules in chosen:
        with schedules.progress(name) as progress:
            outcome = runner.run(
                jobs,
                machines,
                rules.settings(),
                orders_by_run_time=rules.orders_by_run_time,
                predict=rules.predict,
                keeps_places=details or by is not None or as_json or as_csv or folder is not None,
                progress=progress,
            )
        series = None if folder is None else Series()
        measured.append(report.measure(name, outcome, size, wait_bound_s, series, by))
        if first is None:
            first = outcome
        else:
            compared.append((chosen[0][0], name, gains(first, outcome, by)))
        if series is not None:
            drawn.append(plots.Drawn(name, outcome, series, by))
    if folder is not None:
        plots.write(folder, drawn)
    if as_json:
        schedules.print_document(trace, measured, compared)
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
        schedules.print_sentences(compared)
        if with_gains:
            schedules.print_gains(compared)
    schedules.print_remarks(trace)


def _rules(name: str, predict: str | None) -> Rules:
    """The rules of a policy; `predict` is for those that name no way to predict of their own."""
    rules = rules_of(name)
    if rules.predict is None and predict is not None:
        rules = replace(rules, predict=predict)
    predicting.check(rules)
    return rules


def _check(policies: Sequence[str], with_gains: bool, by: str | None, as_csv: bool, as_json: bool) -> None:
    if by not in (None, "user", "queue"):
        raise UsageError(f"--by {by!r} is neither user nor queue", "--by user")
    if as_csv and as_json:
        raise UsageError("--csv and --json are two forms of the same", "give one of them")
    if with_gains and len(policies) < 2:
        text = f"--gains compares two policies, and {policies[0]} is one"
        raise UsageError(text, f"--policy {policies[0]},sjf+easy --gains")


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
