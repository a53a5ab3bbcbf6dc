"""What a simulation is asked for: jobs, machines, policies, and by which of the two ways it goes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpusched import paths
from gpusched.errors import UsageError
from gpusched.model.cluster import NodeView
from gpusched.model.value import Value
from gpusched.simulate import daemon_run, planner_run, predicting
from gpusched.simulate.cluster import largest, nodes_of, processors, read_nodes
from gpusched.simulate.daemon_run import Mishaps
from gpusched.simulate.event_loop import Progress
from gpusched.simulate.fitting import leave_out_what_cannot_fit
from gpusched.simulate.metrics import size_of
from gpusched.simulate.outcome import Outcome
from gpusched.simulate.policies import DEFAULT, PRESENT, Policy, policies_of, refuse_fast
from gpusched.simulate.rules import check_exact
from gpusched.simulate.segments import pick, segments_of
from gpusched.simulate.trace import Trace, read_trace, with_estimates


@dataclass(frozen=True, slots=True)
class Asked:
    """The words of the command."""

    trace: str | None = None
    nodes: str | None = None
    cluster: str | None = None
    policies: Sequence[str] = ()
    """By name; none: what fits the rest."""
    is_exact: bool = False
    rules: str | None = None
    """By which every start is determined, `swf` or `gang`; anything that leaves one open is refused."""
    predict: str | None = None
    """How run times are guessed under policies that name no way of their own."""
    from_history: bool = False
    since: str | None = None
    config: str | None = None
    tick: bool = False
    rows: Sequence[str] = ()
    """Parts of the trace, `FIRST:COUNT`; none: all of it."""
    mishaps: Mishaps = field(default_factory=Mishaps)


class Simulation(Value):
    """All that is needed to run it."""

    trace: Trace
    nodes: tuple[NodeView, ...]
    policies: Sequence[Policy]
    is_whole: bool
    """Everything that the daemon does happens, not the policy's decisions alone."""
    mishaps: Mishaps

    @property
    def size(self) -> float:
        """GPUs of the cluster, or its processors where nobody asks for GPUs."""
        return size_of(self.nodes, self.trace.jobs)

    def run(self, policy: Policy, *, keeps_places: bool = False, progress: Progress | None = None) -> Outcome:
        """The schedule under one policy. Raises: UserError."""
        if self.is_whole:
            return daemon_run.run(
                self.trace.jobs,
                self.nodes,
                policy.settings,
                mishaps=self.mishaps,
                knows_run_times=policy.predict is None,
                keeps_places=keeps_places,
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


def prepare(asked: Asked) -> Simulation:
    """What was asked for, read and checked. Raises: UserError."""
    _check_words(asked)
    is_whole = asked.tick or asked.from_history
    names = asked.policies or ((PRESENT, DEFAULT) if asked.config else (PRESENT,) if asked.from_history else _USUAL)
    config = None if asked.config is None else Path(asked.config)
    policies = policies_of(names, config, asked.predict, is_exact=asked.is_exact)
    trace = _history(asked) if asked.from_history else read_trace(Path(asked.trace or ""))
    if asked.rules is not None:
        check_exact(asked.rules, names, trace.jobs)
    if asked.rows:
        pick(trace, segments_of(asked.rows))
    nodes = _machines(asked, trace)
    for policy in policies:
        if is_whole:
            daemon_run.refuse(nodes, policy.settings)
            if policy.orders_by_run_time:
                raise UsageError(
                    f"{policy.name} knows how long each job will run, and the daemon does not",
                    "leave --tick out, or name another policy",
                )
            if policy.predict not in (None, predicting.OWN, predicting.NONE):
                raise UsageError(
                    f"{policy.name} is to predict by {policy.predict}, and with --tick the daemon does so by itself",
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


def _check_words(asked: Asked) -> None:
    if asked.from_history and asked.trace is not None:
        raise UsageError(f"the trace {asked.trace} and --from-history are both jobs to replay", "give one of them")
    if not asked.from_history and asked.trace is None:
        raise UsageError("nothing is named that could be replayed", "give a trace, or --from-history")
    if asked.since is not None and not asked.from_history:
        raise UsageError("--since is of --from-history", "--from-history --since 30d")
    if asked.nodes is not None and asked.cluster is not None:
        raise UsageError("--nodes and --cluster both say what the machines are", "give one of them")
    others = {"--tick": asked.tick, "--from-history": asked.from_history, "--predict": asked.predict}
    given = [name for name, value in others.items() if value]
    if asked.rules is not None and given:
        raise UsageError(f"{given[0]} is not by the rules {asked.rules}", "leave one of them out")
    mishaps = asked.mishaps
    if not 0 <= mishaps.fail_rate < 1:
        raise UsageError(f"--fail-rate {mishaps.fail_rate:g} is no part of all runs", "--fail-rate 0.05")
    if mishaps.retries < 0:
        raise UsageError(f"--retries {mishaps.retries} is less than none", "--retries 2")
    if (mishaps.fail_rate or mishaps.retries) and not (asked.tick or asked.from_history):
        raise UsageError("runs fail and are tried again only with --tick", "add --tick")
    if asked.is_exact and asked.from_history:
        raise UsageError("--exact is of traces: jobs of the history have the time limits that they had", "leave it out")


def _history(asked: Asked) -> Trace:
    from gpusched.instants import parse_since
    from gpusched.simulate.history import read_history

    try:
        since_at = None if asked.since is None else parse_since(asked.since)
    except ValueError as error:
        raise UsageError(str(error), "--since 30d") from None
    return read_history(_table(), since_at)


def _table() -> str:
    """The job table of the daemon that commands talk to."""
    if paths.finds_system():
        return os.path.join(paths.SYSTEM_STATE, os.path.basename(paths.database()))
    return paths.database()


def _machines(asked: Asked, trace: Trace) -> tuple[NodeView, ...]:
    if asked.cluster is not None:
        return read_nodes(Path(asked.cluster))
    if asked.nodes is not None:
        return nodes_of(asked.nodes)
    if asked.from_history:
        from gpusched.simulate.history import read_machine

        (present,) = policies_of([PRESENT])
        return (read_machine(_table(), present.settings),)
    if trace.procs is not None:
        return processors(trace.procs)
    raise UsageError(f"{trace.name} does not say how large its machine is", "--nodes 8x8xA100")
