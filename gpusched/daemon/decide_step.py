"""The step `decide` of a tick: which jobs are put off or handed over, and which start, all as recorded intents."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from math import isfinite

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.failures import StepFailures
from gpusched.daemon.launch.limits import with_limit
from gpusched.daemon.leanings import with_leanings
from gpusched.daemon.nodes import ClusterNode, ClusterNodes
from gpusched.daemon.planner_sync import PlannerSync
from gpusched.daemon.watch.estimates import Estimates
from gpusched.daemon.watch.history import History
from gpusched.daemon.watch.power_caps import power_cap
from gpusched.daemon.watches import Stage, Watches
from gpusched.errors import NotReady
from gpusched.lifecycle import run_transitions
from gpusched.lifecycle.master_ports import choose_port, needs_port, taken_ports
from gpusched.lifecycle.output_paths import output_paths
from gpusched.model.job import Job, JobEvent, Run
from gpusched.model.snapshot import ClassKey, Placement, Plan, Reason, Start
from gpusched.model.states import ReasonCode
from gpusched.model.units import format_duration, name_some
from gpusched.model.value import replace
from gpusched.model.variants import with_variant
from gpusched.ports.tables import CALENDAR, DRAINS, ESTIMATES, FENCES, KEPT_PLACES, TABLE_SETTINGS
from gpusched.scheduler.isolation import describe
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.plugins import Extensions

_READ_WITHIN_S = 0.05
"""Longest time that freed CPUs and memory of an ended run wait to be planned together with its GPUs."""
_NO_PLAN = Plan()

_DECIDES = frozenset({DRAINS, CALENDAR, TABLE_SETTINGS})
"""Tables that the plan depends on."""


@dataclass(frozen=True, slots=True)
class StartWait:
    """A start on GPUs that awaits readings which confirm that they are free."""

    nodes: tuple[str, ...]
    """Of all its GPUs."""
    since: float
    missing: tuple[str, ...]
    """Nodes without a new reading since then."""

    def reason(self, cluster: ClusterNodes, now: float) -> Reason:
        """Why the job is still pending."""
        text = f"is about to start: waits for a new reading of the GPUs of {name_some('node', self.missing)}"
        first = cluster.get(self.missing[0])
        if first is not None and len(self.missing) == 1 and isfinite(first.read_at):
            text += f"; the last one is {format_duration(max(0.0, now - first.read_at))} old"
        return Reason(ReasonCode.NONE, text, {"awaits_readings_of": list(self.missing)})


class DecideStep:
    """Plans when something has changed since the last plan, and records what the plan says."""

    def __init__(
        self,
        cluster: ClusterNodes,
        planner: PlannerSync,
        history: History,
        estimates: Estimates,
        failures: StepFailures,
        watches: Watches,
    ) -> None:
        self._cluster = cluster
        self._planner = planner
        self._history = history
        self._estimates = estimates
        self._failures = failures
        self._watches = watches
        self.plan = _NO_PLAN
        """The newest plan."""
        self.must_look = True
        """Set when something other than a job has changed since the last plan: readings, time, the table."""
        self.due_at: float | None = None
        """Latest instant to plan ends of runs that await a reading of clean GPUs."""
        self.waits: dict[int, StartWait] = {}
        """Starts of the newest plan that await readings, by job id."""

    @property
    def awaited(self) -> Set[str]:
        """Nodes whose readings are awaited."""
        return {name for wait in self.waits.values() for name in wait.missing}

    def carry_out(self, tx: TickTransaction, extensions: Extensions, *, reads_gpus: bool = True) -> None:
        """Take the step. Args: reads_gpus: whether a reading of the GPUs follows the end of a run by itself."""
        if not self._must_plan(tx, reads_gpus):
            return
        has_starts = self._carry_out_plans(tx, extensions)
        # A start releases jobs that waited only for it.
        while has_starts and tx.settle_dependencies():
            has_starts = self._carry_out_plans(tx, extensions)
        self.must_look, self.due_at = False, None

    def _must_plan(self, tx: TickTransaction, reads_gpus: bool) -> bool:
        """Whether the input of the last plan has changed; a confirmed start alone does not change it.

        The end of a run on GPUs and the reading that shows them clean, shortly after, share one plan.
        """
        changes = tx.changes
        others = not changes.rows.keys().isdisjoint(_DECIDES)
        has_more = self.must_look or tx.must_plan or others or changes.jobs.keys() - tx.releasing
        is_overdue = self.due_at is not None and tx.now >= self.due_at
        if has_more or is_overdue or (tx.releasing and not reads_gpus):
            return True
        if tx.releasing and self.due_at is None:
            self.due_at = tx.now + _READ_WITHIN_S
        return False

    def _carry_out_plans(self, tx: TickTransaction, extensions: Extensions) -> bool:
        """Plan until nothing more changes; return whether anything is to start."""
        has_starts = self._plan_jobs(tx, extensions)
        tx.must_plan, tx.awaits_readings = False, bool(self.waits)
        self._watches.carry_out(Stage.AFTER_PLAN, tx)
        if tx.must_plan:
            has_starts |= self._plan_jobs(tx, extensions)
        return has_starts

    def _plan_jobs(self, tx: TickTransaction, extensions: Extensions) -> bool:
        has_starts = False
        # Each plan but the last has suspended or resumed a run.
        for _ in range(1 + len(tx.state.open_runs)):
            has_begun, earlier, self.waits = False, self.waits, {}
            self._planner.windows.look(tx.state.rows[CALENDAR], tx.now)
            planner = self._planner.update(tx.state, tx.settings, extensions, tx.nodes, tx.now)
            if planner.state.is_idle:
                self.plan = _NO_PLAN
                break
            self.plan = planner.plan(tx.now)
            for reservation in self.plan.reservations:
                if reservation.fence_at is not None and reservation.job_id not in tx.state.rows[FENCES]:
                    tx.fence(reservation.job_id, reservation.fence_at)
            for job_id, place in planner.state.kept.items():
                if job_id in tx.state.rows[FENCES] and tx.state.rows[KEPT_PLACES].get(job_id) != place:
                    tx.keep_place(job_id, place)
            priorities: dict[tuple[int, float], tuple[ClassKey, float]] = {}
            for start in self.plan.starts:
                wait = self._wait_of(start.placement, earlier.get(start.job_id), tx)
                if wait.missing:
                    # Until the next readings, only this plan keeps its place free.
                    self.waits[start.job_id] = wait
                    continue
                has_begun |= self._start(tx, start, self._cluster[start.placement.node], planner, priorities)
            has_starts |= has_begun
            # Suspensions and resumptions change the resources to plan with.
            if not tx.carry_out(self.plan):
                break
            if self.waits and not has_begun:
                # The next reading triggers another plan for these starts and the rest.
                break
        return has_starts

    def _wait_of(self, placement: Placement, earlier: StartWait | None, tx: TickTransaction) -> StartWait:
        """The readings that a start on these GPUs awaits. Args: earlier: what it has awaited so far.

        A reading from idle time may be old enough for other processes to have started since. One that was begun for
        this start confirms it however long it took; how old a reading may be at all, the tracker decides.
        """
        nodes = tuple([place.node for place in (placement, *placement.others) if place.gpus])
        since = earlier.since if earlier is not None and earlier.nodes == nodes else None
        missing = []
        for name in nodes:
            read_at = self._cluster[name].read_at
            is_new = 0 <= tx.now - read_at <= tx.settings.daemon.poll_s
            if not is_new and (since is None or read_at < since):
                missing.append(name)
        return StartWait(nodes, tx.now if since is None else since, tuple(missing))

    def _start(
        self,
        tx: TickTransaction,
        start: Start,
        node: ClusterNode,
        planner: Planner,
        priorities: dict[tuple[int, float], tuple[ClassKey, float]],
    ) -> bool:
        """Record the intent to start a job; return False if it has to wait for a port.

        Args: priorities: those known in this plan, by the identity of the job's class key and when it was queued.
        """
        state, settings = tx.state, tx.settings
        job = state.find(start.job_id)
        assert job is not None
        job = replace(job, spec=with_variant(job.spec, start.variant))
        port = None
        if needs_port(job, start.placement):
            port = self._master_port(job, node.name, tx)
            if port is None:
                return False
        tx.waited.append((job.spec.queue, tx.now - state.free_at(job)))
        stdout_path, stderr_path = output_paths(job, job.run + 1, node.name, settings.default.output)
        places = (start.placement, *start.placement.others)
        samples = self._cluster.samples_on(place.node for place in places)
        placement = with_limit(job.spec.request, start.placement, samples, settings)
        key = state.class_of(job.id)
        priority = None
        if key is not None:
            known = priorities.get((id(key), job.queued_at))
            if known is None:
                known = key, planner.state.ranking.priority(key, job.queued_at).total
                # With the key, or another could get its identity.
                priorities[id(key), job.queued_at] = known
            priority = known[1]
        boot_ids = {place.node: self._cluster[place.node].boot_id for place in places}
        cap_w = power_cap(job, placement, samples, settings)
        job, run, story = run_transitions.start_run(
            *(job, placement, boot_ids, tx.now, stdout_path, stderr_path),
            priority=priority,
            master_port=port,
            power_cap_w=cap_w,
            is_filler=start.is_filler,
        )
        told = with_leanings(story, job, start.placement, planner.state.layout, self._history)
        tx.put(job, run, (*told, *self._limit(job, run, tx)))
        self._history.began(job)
        if (estimate := self._estimates.started(job.id, tx.now)) is not None:
            tx.changes.rows[ESTIMATES][job.id] = estimate
        return True

    def _master_port(self, job: Job, node: str, tx: TickTransaction) -> int | None:
        """A port for the ranks of the job's next run, which begins on this node; None while all are taken."""
        ports = tx.settings.cluster.ports
        port = choose_port(ports, taken_ports(node, tx.state.open_runs.values()), job)
        if port is None:
            text = f"job {job.shown_id} has to wait: all {len(ports)} ports of [cluster] master_ports are reserved"
            self._failures.note("ports", NotReady(f"{text} on {node}", "widen [cluster] master_ports"))
        else:
            self._failures.recovered("ports")
        return port

    def _limit(self, job: Job, run: Run, tx: TickTransaction) -> tuple[JobEvent, ...]:
        """Set the limits of a run on its nodes; return the event that records them."""
        found = []
        for rank, part in enumerate(run.on_each_node):
            node = self._cluster[part.node]
            here = run.on(rank)
            limits = node.limiter.limits_for(here, tx.settings.isolation, node.samples, tx.state.open_runs)
            if limits is not None:
                where = f"on {part.node}: " if run.parts else ""
                found.append(JobEvent(job.id, tx.now, "note", where + describe(limits), run.number))
        return tuple(found)
