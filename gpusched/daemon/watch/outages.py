"""Nodes that do not answer: the fate of the runs on them is unknown, and their owners are alerted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpusched.daemon.alerts import AlertOutbox
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.nodes import ClusterNodes
from gpusched.daemon.watches import Told, Watch
from gpusched.lifecycle.alerts import AdminEvent
from gpusched.model.job import Job, JobEvent, Run
from gpusched.model.snapshot import Reason
from gpusched.model.states import ReasonCode
from gpusched.model.units import format_duration, name_some

if TYPE_CHECKING:
    from gpusched.daemon.leases import Leases


@dataclass(frozen=True, slots=True)
class Outage:
    """Since when a node does not answer, or takes no orders, and why: a sentence that names it."""

    since: float
    why: str


class Outages:
    """Compares the runs with the nodes that answer. Runs stay as they are: they may well be alive."""

    def __init__(self) -> None:
        self.by_node: dict[str, Outage] = {}
        """As seen now."""
        self._members: frozenset[str] | None = None

    def see(self, node: str, why: str | None, now: float, since: float | None = None) -> None:
        """Note whether a node answers. Args: why: None if it does; since: None if that is not known."""
        before = self.by_node.get(node)
        if why is None:
            self.by_node.pop(node, None)
            return
        at = since if since is not None else now if before is None else before.since
        self.by_node[node] = Outage(at if before is None else min(at, before.since), why)

    def be_members(self, nodes: Iterable[str]) -> None:
        """Set the nodes of the cluster: runs on any other cannot be reached at all."""
        self._members = frozenset(nodes)

    def of(self, run: Run) -> Mapping[str, Outage]:
        """The nodes of a run that do not answer; none of a run that another scheduler has taken over."""
        if run.native is not None:
            return {}
        found = {}
        for node in run.nodes:
            if node in self.by_node:
                found[node] = self.by_node[node]
            elif self._members is not None and node not in self._members:
                why = f"node {node} is no longer part of the cluster; name it again in [cluster] nodes"
                found[node] = Outage(run.intent_at, why)
        return found

    def reason(self, run: Run, decided_at: float | None = None) -> Reason | None:
        """Why nothing is known of a run now; None if its nodes answer.

        Args: decided_at: when its lease has certainly ended there; None if it has none.
        """
        found = self.of(run)
        if not found:
            return None
        text = "; ".join(outage.why for outage in found.values())
        what = "its GPUs stay booked" if run.gpus else "its resources stay booked"
        facts = {"unreachable": sorted(found), "unreachable_at": min(outage.since for outage in found.values())}
        if decided_at is not None:
            facts["lost_at"] = decided_at
        return Reason(
            ReasonCode.NODE_UNREACHABLE,
            f"{text}; the job may be running there, so {what}{_until(decided_at)}",
            facts,
        )


class SilentNodes(Watch):
    """Tells owners and administrators of outages that have lasted for [alert] unreachable_s."""

    name = "silent nodes"

    def __init__(self, outages: Outages, leases: Leases, outbox: AlertOutbox) -> None:
        self._outages = outages
        self._leases = leases
        self._outbox = outbox
        self._told: Told[tuple[str, float]] = Told()
        """Runs and outages whose owners were alerted, and nodes whose outage the administrators were."""

    def carry_out(self, tx: TickTransaction) -> None:
        outages = self._outages.by_node
        if not outages:
            self._told.clear()
            return
        late = tx.now - tx.settings.alert.unreachable_s
        lasting = {node: outage for node, outage in outages.items() if outage.since <= late}
        if not lasting:
            return
        hit: dict[str, list[str]] = {node: [] for node in lasting}
        for run in list(tx.state.open_runs.values()):
            for node in lasting.keys() & set(run.nodes):
                job = tx.state.jobs[run.job_id]
                hit[node].append(job.shown_id)
                self._tell(tx, job, run, node, lasting[node])
        for node, outage in lasting.items():
            if self._told.note((node, outage.since), tx):
                runs = f"; running there: {name_some('job', hit[node])}" if hit[node] else ""
                tx.news.append(AdminEvent("node_down", f"{outage.why}{runs}", node))

    def _tell(self, tx: TickTransaction, job: Job, run: Run, node: str, outage: Outage) -> None:
        if self._told.note((run.id, outage.since), tx):
            lasted, decided_at = format_duration(tx.now - outage.since), self._leases.decided_at(job, run, tx.now)
            text = f"{outage.why}, for {lasted}; the job may be running there{_until(decided_at)}"
            tx.put_job(job, JobEvent(job.id, tx.now, "note", text, job.run))
            self._outbox.tell(tx, job, "node_unreachable", text)


class FullNodes(Watch):
    """Tells the administrators of nodes that can start nothing."""

    name = "full nodes"

    def __init__(self, cluster: ClusterNodes, outbox: AlertOutbox) -> None:
        self._cluster = cluster
        self._outbox = outbox
        self._in_trouble: set[str] = set()
        """Nodes that answer but cannot start runs, whose administrators were alerted."""

    def carry_out(self, tx: TickTransaction) -> None:
        troubles = {node.name: node.trouble for node in self._cluster if node.trouble}
        if not (troubles or self._in_trouble):
            return
        self._in_trouble &= troubles.keys()
        for node in sorted(troubles.keys() - self._in_trouble):
            self._in_trouble.add(node)
            # Kept until it is recorded, since the disk that is full may be that of the job table.
            self._outbox.alert_admin(AdminEvent("node_full", troubles[node], node), tx.now, tx.settings)


def _until(decided_at: float | None) -> str:
    """Until when that may be so, for the end of a sentence."""
    if decided_at is None:
        return ""
    at = time.strftime("%H:%M:%S", time.localtime(decided_at))
    return f"; unless the node answers, the job's lease ends it there, and it counts as lost at {at}"
