"""Leases: when the runs on a node that does not answer have certainly ended there, so that they may start elsewhere.

A run with a lease ends by itself when its node has had no contact with the daemon for that long (`engine.contact`).
The daemon counts from the last thing it heard of the node, or from its own start, on a clock that cannot be set.
"""

from __future__ import annotations

from logging import getLogger
from typing import TYPE_CHECKING

from gpusched.daemon.nodes import ClusterNodes
from gpusched.daemon.watch.outages import Outages
from gpusched.engine.cluster import ClusterEngine
from gpusched.engine.contact import lost_after_contact_s
from gpusched.model.job import Job, Run
from gpusched.model.mentions import mention_jobs
from gpusched.model.units import format_duration
from gpusched.ports import Engine
from gpusched.ports.tables import DRAINERS

if TYPE_CHECKING:
    from gpusched.daemon.state import DaemonState

log = getLogger("gpusched.daemon")


def lease_of(job: Job, node: str, head: str) -> float | None:
    """The lease of what a job runs on a node, in seconds; None if it waits for the daemon however long that takes."""
    has_none = node == head or job.spec.interactive is not None or job.spec.adopted is not None
    return None if has_none else job.spec.retry.lost_after_s


class Leases:
    """Finds the runs whose leases have ended on nodes that do not answer."""

    def __init__(self, cluster: ClusterNodes, outages: Outages, engine: Engine) -> None:
        self._cluster = cluster
        self._outages = outages
        self._engine = engine if isinstance(engine, ClusterEngine) else None

    def _left_s(self, job: Job, run: Run) -> dict[str, float]:
        """By silent node with a lease: how long until the run has certainly ended there; not positive once it has."""
        found: dict[str, float] = {}
        if self._engine is None:
            return found
        for node in self._outages.of(run):
            lost_after_s = lease_of(job, node, self._cluster.head.name)
            silent_s = self._engine.silent_s(node)
            if lost_after_s is not None and silent_s is not None:
                found[node] = lost_after_contact_s(lost_after_s) - silent_s
        return found

    def decided_at(self, job: Job, run: Run, now: float) -> float | None:
        """When the job may start elsewhere, unless its nodes answer before; None if it waits for them."""
        left_s = self._left_s(job, run)
        # Of a gang, the first node that is given up ends the others.
        return now + max(0.0, min(left_s.values())) if left_s else None

    def give_up(self, state: DaemonState, now: float) -> None:
        """Have the engine give up the runs on nodes that were declared down, and those whose leases have ended on nodes
        that do not answer. Derived from the table, at every tick.
        """
        if self._engine is None:
            return
        self._give_up_leases(state, self._engine, now)
        for node, drainer in state.rows[DRAINERS].items():
            if drainer.down is None:
                continue
            detail = f"{drainer.user} declared node {node} down: {drainer.down}"
            for handle, run in {**state.open_runs, **state.strays}.items():
                if node in run.nodes and run.intent_at <= drainer.at:
                    self._engine.give_up(node, handle, detail, now)

    def _give_up_leases(self, state: DaemonState, engine: ClusterEngine, now: float) -> None:
        """Give up the runs whose leases have ended, and note for each node when others' will."""
        for node in self._cluster:
            node.lease_note = None
        if not self._outages.by_node:
            return
        waiting: dict[str, list[tuple[float, str]]] = {}
        for handle, run in state.open_runs.items():
            job = state.jobs[run.job_id]
            for name, left_s in self._left_s(job, run).items():
                if left_s > 0.0:
                    waiting.setdefault(name, []).append((left_s, job.shown_id))
                    continue
                lost_after_s = format_duration(job.spec.retry.lost_after_s or 0.0)
                detail = f"node {name} was out of reach for longer than its lease of {lost_after_s} and has ended it"
                if engine.give_up(name, handle, detail, now):
                    log.warning("run %s counts as lost: %s", handle, detail)
        for name, jobs in waiting.items():
            known = self._cluster.get(name)
            if known is not None:
                what = mention_jobs([job for _, job in sorted(jobs)])
                known.lease_note = (
                    f"unless it answers, {what} will have ended there by lease, the first in "
                    f"{format_duration(max(1.0, min(left_s for left_s, _ in jobs)))}"
                )
