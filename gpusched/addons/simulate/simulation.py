"""gpusched simulate: checks the request, replays the trace under each policy, prints the result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from gpusched import paths
from gpusched.addons.simulate import daemon_run, packing, planner_run, plots, schedules
from gpusched.addons.simulate.cluster import largest, nodes_of, processors, read_nodes
from gpusched.addons.simulate.comparison import Comparison, compare_users
from gpusched.addons.simulate.daemon_run import Mishaps, NeverStarted
from gpusched.addons.simulate.event_loop import Progress
from gpusched.addons.simulate.measures import QueueResult, Schedule, queue_results
from gpusched.addons.simulate.occupancy import Series
from gpusched.addons.simulate.outcome import Outcome, size_of
from gpusched.addons.simulate.policies import (
    DEFAULT,
    PRESENT,
    Policy,
    check_exact,
    leave_out,
    leave_out_what_cannot_fit,
    policies_of,
    refuse_fast,
)
from gpusched.addons.simulate.trace import Trace, parse_rows, read_trace, select_rows, with_estimates
from gpusched.cli import output, tables
from gpusched.cli.tables import Column
from gpusched.errors import UsageError
from gpusched.model.cluster import NodeView
from gpusched.model.settings import Settings
from gpusched.model.units import parse_duration_s, plural
from gpusched.model.value import Value

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    trace: str | None = None
    nodes: str | None = None
    cluster: str | None = None
    policies: Sequence[str] = ()
    """By name; if empty, chosen to suit the other options."""
    is_exact: bool = False
    rules: str | None = None
    """Rules that determine every start, `swf` or `gang`; ambiguous input is refused."""
    predict: str | None = None
    """Method that predicts run times under policies that name none of their own."""
    from_history: bool = False
    since: str | None = None
    config: str | None = None
    tick: bool = False
    rows: Sequence[str] = ()
    """Parts of the trace, `FIRST:COUNT`; if empty, all of it."""
    mishaps: Mishaps = field(default_factory=Mishaps)


class Simulation(Value):
    """A simulation that is ready to run."""

    trace: Trace
    nodes: tuple[NodeView, ...]
    policies: Sequence[Policy]
    is_whole: bool
    """Simulate everything the daemon does, not only the policy's decisions."""
    mishaps: Mishaps

    @property
    def size(self) -> float:
        """GPUs of the cluster, or its processors if no job requests GPUs."""
        return size_of(self.nodes, self.trace.jobs)

    @property
    def subject(self) -> str:
        """Trace and cluster, for titles of plots."""
        kind = "GPU" if any(job.gpus for job in self.trace.jobs) else "processor"
        return f"{Path(self.trace.name).name} on {plural(len(self.nodes), 'node')} with {plural(self.size, kind)}"

    def run(self, policy: Policy, *, keeps_places: bool = False, progress: Progress | None = None) -> Outcome:
        """The schedule under one policy. Raises: UserError, among them NeverStarted."""
        if self.is_whole:
            return daemon_run.run(
                self.trace.jobs,
                self.nodes,
                policy.settings,
                mishaps=self.mishaps,
                knows_run_times=policy.predict is None,
                keeps_places=keeps_places,
                begins_at=self.trace.begins_at,
                progress=progress,
            )
        return planner_run.run(
            self.trace.jobs,
            self.nodes,
            policy.settings,
            orders_by_run_time=policy.orders_by_run_time,
            predict=policy.predict,
            keeps_places=keeps_places,
            progress=progress,
        )

    def run_alike(self, work: Callable[[], _Found]) -> _Found:
        """What `work` finds on jobs that start under every policy; others are left out, counted and named.

        Args: work: runs policies on the trace; done again when jobs have been left out. Raises: UserError.
        """
        while True:
            try:
                return work()
            except NeverStarted as error:
                leave_out(self.trace, error.jobs)


def prepare(asked: SimulationRequest) -> Simulation:
    """Read and check a request. Raises: UserError."""
    _check_words(asked)
    is_whole = asked.tick or asked.from_history
    names = asked.policies or ((PRESENT, DEFAULT) if asked.config else (PRESENT,) if asked.from_history else _USUAL)
    config = None if asked.config is None else Path(asked.config)
    site = policies_of([PRESENT])[0].settings if asked.from_history else None
    policies = policies_of(names, config, asked.predict, is_exact=asked.is_exact, site=site)
    trace = _history(asked) if asked.from_history else read_trace(Path(asked.trace or ""))
    if asked.rules is not None:
        check_exact(asked.rules, names, trace.jobs)
    if asked.rows:
        select_rows(trace, parse_rows(asked.rows))
    nodes = _machines(asked, trace, site)
    for policy in policies:
        if is_whole:
            daemon_run.refuse(nodes, policy.settings)
            if policy.orders_by_run_time:
                raise UsageError(
                    f"{policy.name} knows every run time, which the daemon does not",
                    "leave --tick out, or name another policy",
                )
            if policy.predict not in (None, planner_run.OWN_PREDICTION, planner_run.NO_PREDICTION):
                raise UsageError(
                    f"{policy.name} predicts by {policy.predict}; with --tick the daemon uses its own predictions",
                    "leave that out",
                )
        else:
            refuse_fast(policy)
    trace.jobs = with_estimates(trace.jobs, "exact" if asked.is_exact or asked.rules == "gang" else "given")
    gpus, procs = largest(nodes)
    trace.keep_those_that_fit(gpus=gpus, procs=procs)
    leave_out_what_cannot_fit(trace, nodes, policies, is_admitted=is_whole)
    return Simulation(trace, nodes, policies, is_whole, asked.mishaps)


_USUAL = ("fcfs+easy",)


def _check_words(asked: SimulationRequest) -> None:
    if asked.from_history and asked.trace is not None:
        raise UsageError(f"the trace {asked.trace} and --from-history both name jobs to replay", "give one of them")
    if not asked.from_history and asked.trace is None:
        raise UsageError("no jobs to replay", "give a trace, or --from-history")
    if asked.since is not None and not asked.from_history:
        raise UsageError("--since needs --from-history", "--from-history --since 30d")
    if asked.nodes is not None and asked.cluster is not None:
        raise UsageError("--nodes and --cluster both define the cluster", "give one of them")
    others = {"--tick": asked.tick, "--from-history": asked.from_history, "--predict": asked.predict}
    given = [name for name, value in others.items() if value]
    if asked.rules is not None and given:
        raise UsageError(f"{given[0]} cannot be combined with --rules {asked.rules}", "leave one of them out")
    mishaps = asked.mishaps
    if not 0 <= mishaps.fail_rate < 1:
        raise UsageError(f"--fail-rate {mishaps.fail_rate:g} is not a fraction from 0 to below 1", "--fail-rate 0.05")
    if mishaps.retries < 0:
        raise UsageError(f"--retries {mishaps.retries} is negative", "--retries 2")
    if (mishaps.fail_rate or mishaps.retries) and not (asked.tick or asked.from_history):
        raise UsageError("--fail-rate and --retries need --tick", "add --tick")
    if asked.is_exact and asked.from_history:
        raise UsageError("--exact needs a trace: jobs of the history keep their time limits", "leave it out")


def _history(asked: SimulationRequest) -> Trace:
    from gpusched.addons.simulate.history import read_history
    from gpusched.instants import parse_since

    try:
        since_at = None if asked.since is None else parse_since(asked.since)
    except ValueError as error:
        raise UsageError(str(error), "--since 30d") from None
    return read_history(_table(), since_at)


def _table() -> str:
    """Path of the job table of the daemon that commands talk to."""
    if paths.finds_system():
        return os.path.join(paths.SYSTEM_STATE, os.path.basename(paths.database()))
    return paths.database()


def _machines(asked: SimulationRequest, trace: Trace, site: Settings | None) -> tuple[NodeView, ...]:
    if asked.cluster is not None:
        return read_nodes(Path(asked.cluster))
    if asked.nodes is not None:
        return nodes_of(asked.nodes)
    if site is not None:
        from gpusched.addons.simulate.history import read_machine

        return (read_machine(_table(), site),)
    if trace.procs is not None:
        return processors(trace.procs)
    raise UsageError(f"{trace.name} does not state the size of its machine", "--nodes 8x8xA100")


# --- gpusched simulate ------------------------------------------------------------------------------


def show_simulation(
    asked: SimulationRequest,
    *,
    wait_bound: str | None = None,
    details: bool = False,
    with_gains: bool = False,
    by: str | None = None,
    plot: str | None = None,
    as_csv: bool = False,
    as_json: bool = False,
) -> None:
    """Print the result of each policy on a trace; see `gpusched simulate --help`."""
    if by not in (None, "user", "queue"):
        raise UsageError(f"--by {by!r} is neither user nor queue", "--by user")
    if as_csv and as_json:
        raise UsageError("--csv and --json cannot be combined", "give one of them")
    wait_bound_s = None if wait_bound is None else _duration_s(wait_bound)
    folder = None if plot is None else plots.folder_of(plot)
    simulation = prepare(asked)
    first = simulation.policies[0].name
    if with_gains and len(simulation.policies) < 2:
        raise UsageError(f"--gains needs two policies, and {first} is one", f"--policy {first},sjf+easy --gains")
    keeps_places = details or by is not None or as_json or as_csv or folder is not None

    def measure() -> tuple[list[Schedule], list[Comparison], list[plots.Drawn], dict[str, list[QueueResult]]]:
        measured: list[Schedule] = []
        compared, drawn = [], []
        by_queue: dict[str, list[QueueResult]] = {}
        reference = None
        for policy in simulation.policies:
            with schedules.progress(policy.name) as progress:
                outcome = simulation.run(policy, keeps_places=keeps_places, progress=progress)
            series = None if folder is None else Series()
            made = Schedule(policy.name, outcome, simulation.size, wait_bound_s, series, by)
            measured.append(made.finish())
            if simulation.is_whole:
                by_queue[policy.name] = queue_results(outcome)
            if reference is None:
                reference = outcome
            else:
                compared.append(compare_users(first, reference, policy.name, outcome, by))
            if series is not None:
                drawn.append(plots.Drawn(policy.name, outcome, series, by))
        return measured, compared, drawn, by_queue

    measured, compared, drawn, by_queue = simulation.run_alike(measure)
    if folder is not None:
        plots.write(folder, drawn, simulation.subject)
    if as_json:
        schedules.print_document(simulation.trace, measured, compared, by_queue)
        return
    if as_csv and with_gains:
        schedules.print_gains_csv(compared)
    elif as_csv:
        schedules.print_csv(measured)
    else:
        (schedules.print_details if details else schedules.print_schedules)(measured)
        if by is not None:
            schedules.print_groups(measured)
        schedules.print_by_queue(by_queue)
        schedules.print_sentences(compared)
        if with_gains:
            schedules.print_gains(compared)
    schedules.print_remarks(simulation.trace)


def _duration_s(text: str) -> int:
    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise UsageError(str(error), "--wait-bound 4h") from None


# --- gpusched pack ----------------------------------------------------------------------------------

_EXAMPLE = "gpusched pack nodes.csv pods.csv --policy first,pack"

_PACKED = (
    Column("STRATEGY", lambda row: row[0]),
    Column("ALLOCATED", lambda row: f"{fmean(run.at_end for run in row[1]):.2%}", right=True),
    Column("LEAST", lambda row: f"{min(run.at_end for run in row[1]):.2%}", right=True),
    Column("MOST", lambda row: f"{max(run.at_end for run in row[1]):.2%}", right=True),
    Column("AT 100 %", lambda row: f"{fmean(run.at_full for run in row[1]):.2%}", right=True),
    Column("FRAGMENTS", lambda row: f"{fmean(run.fragments for run in row[1]):.2%}", right=True),
    Column("DROPPED", lambda row: f"{fmean(run.dropped for run in row[1]):,.0f}", right=True),
    Column("MS/JOB", lambda row: f"{1e3 * sum(one.seconds for one in row[1]) / _tried(row[1]):.2f}", right=True),
)
"""Columns of rows (strategy, one result per order of arrival)."""


def _tried(runs: Sequence[packing.Filled]) -> int:
    return sum(run.placed + run.dropped for run in runs)


def show_packing(nodes_file: str, pods_file: str, policy: str | None, orders: int | None, as_json: bool) -> None:
    """Print a line per strategy. Raises: UsageError, and the errors of reading the two files."""
    rules = packing.RULES if policy is None else tuple(policy.split(","))
    for rule in rules:
        if rule not in packing.RULES:
            raise UsageError(f"{rule!r} is not a known strategy: {', '.join(packing.RULES)}", _EXAMPLE)
    if orders is not None and orders < 1:
        raise UsageError(f"--orders {orders} is less than 1", "--orders 10")
    nodes, jobs = packing.cluster_of(Path(nodes_file)), packing.jobs_of(Path(pods_file))
    capacity = sum(len(node.gpus) for node in nodes)
    if not capacity:
        raise UsageError(f"{nodes_file} lists no GPUs", f"head {nodes_file}")
    if not any(map(packing.gpus_asked, jobs)):
        raise UsageError(f"{pods_file} requests no GPU", f"head {pods_file}")
    typical, wanted = packing.usual(jobs), packing.wanted_of(jobs)
    rows = []
    for rule in rules:
        runs = []
        for seed in range(packing.FIRST_SEED, packing.FIRST_SEED + (orders or 1)):
            coming = packing.arrivals(jobs, packing.DEMAND * capacity, seed)
            with schedules.progress(rule) as progress:
                runs.append(packing.fill(nodes, coming, rule, typical, wanted=wanted, seed=seed, progress=progress))
        rows.append((rule, runs))
    if as_json:
        strategies = [{"strategy": rule, "orders": [asdict(run) for run in runs]} for rule, runs in rows]
        output.print_json({"nodes": len(nodes), "gpus": capacity, "jobs": len(jobs), "strategies": strategies})
    else:
        sys.stdout.write(tables.listing(_PACKED, rows))
