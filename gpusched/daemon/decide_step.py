"""The step `decide` of a tick: which jobs are put off or handed over, and which start, all as recorded intents."""

from __future__ import annotations

from functools import partial

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.failures import StepFailures
from gpusched.daemon.launch.limits import with_limit
from gpusched.daemon.leanings import with_leanings
from gpusched.daemon.nodes import ClusterNode, ClusterNodes
from gpusched.daemon.planner_sync import PlannerSync
from gpusched.daemon.verbs.images import PullWatch
from gpusched.daemon.watch.burst import carry_out as carry_out_bursts
from gpusched.daemon.watch.estimates import Estimates
from gpusched.daemon.watch.history import History
from gpusched.daemon.watch.power_caps import power_cap
from gpusched.daemon.watch.tariff import CheapStarts
from gpusched.daemon.watches import Watches
from gpusched.errors import NotReady
from gpusched.lifecycle import run_transitions
from gpusched.lifecycle.master_ports import choose_port, needs_port, taken_ports
from gpusched.lifecycle.output_paths import output_paths
from gpusched.model.job import Job, JobEvent, Run
from gpusched.model.snapshot import Plan, Start
from gpusched.model.spec import SLURM_ENGINE
from gpusched.scheduler.burst import Burst
from gpusched.scheduler.isolation import describe
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.plugins import Extensions

_PLANS_PER_TICK = 64
_HANDED_OVER_PER_TICK = 200
_READ_WITHIN_S = 0.05
"""Longest time that freed CPUs and memory of an ended run wait to be planned together with its GPUs."""
_NO_PLAN = Plan()


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
        self._cheap_starts = CheapStarts()
        self._pulls = PullWatch()
        self.plan = _NO_PLAN
        """The newest plan."""
        self.must_look = True
        """Set when something other than a job has changed since the last plan: readings, time, the table."""
        self.due_at: float | None = None
        """Latest instant to plan ends of runs that await a reading of clean GPUs."""
        self.awaits_reading = False
        """A job will start on GPUs once a new reading confirms that they are free."""
        self.to_burst: tuple[Burst, ...] = ()
        """Jobs that the last look at expected starts found, until the next tick."""

    def carry_out(
        self, tx: TickTransaction, extensions: Extensions, *, is_going_down: bool = False, reads_gpus: bool = True
    ) -> None:
        """Take the step. Args: reads_gpus: whether a reading of the GPUs follows the end of a run by itself."""
        self._watches.run("cheap energy", self._cheap_starts.carry_out, tx)
        if not is_going_down:
            self._watches.run("handover", self._hand_over, tx)
        if not self._must_plan(tx, reads_gpus):
            return
        has_starts = self._carry_out_plans(tx, extensions)
        # A start releases jobs that waited only for it.
        while has_starts and tx.settle_dependencies():
            has_starts = self._carry_out_plans(tx, extensions)
        self.must_look, self.due_at = False, None

    def _hand_over(self, tx: TickTransaction) -> None:
        """Record the intent to hand eligible jobs over to the scheduler that they are for."""
        if tx.handover is None or tx.handover.why_not() is not None:
            return
        bursts, self.to_burst = self.to_burst, ()
        if bursts:
            tx.if_dropped(partial(setattr, self, "to_burst", bursts))
        carry_out_bursts(bursts, tx)
        for job in tx.world.to_hand_over(_HANDED_OVER_PER_TICK):
            paths = output_paths(job, job.run + 1, tx.handover.node, tx.settings.default.output)
            tx.put(*run_transitions.hand_over(job, SLURM_ENGINE, tx.handover.node, tx.now, *paths))

    def _must_plan(self, tx: TickTransaction, reads_gpus: bool) -> bool:
        """Whether the input of the last plan has changed; a confirmed start alone does not change it.

        The end of a run on GPUs and the reading that shows them clean, shortly after, share one plan.
        """
        changes = tx.changes
        others = changes.drains or changes.reservations or changes.table_settings
        has_more = self.must_look or others or changes.jobs.keys() - tx.releasing
        is_overdue = self.due_at is not None and tx.now >= self.due_at
        if has_more or is_overdue or (tx.releasing and not reads_gpus):
            return True
        if tx.releasing and self.due_at is None:
            self.due_at = tx.now + _READ_WITHIN_S
        return False

    def _carry_out_plans(self, tx: TickTransaction, extensions: Extensions) -> bool:
        """Plan until nothing more changes; return whether anything is to start."""
        has_starts = self._plan_jobs(tx, extensions)
        if self._watches.run("image pulls", self._pulls.settle, tx, self.awaits_reading):
            has_starts |= self._plan_jobs(tx, extensions)
        return has_starts

    def _plan_jobs(self, tx: TickTransaction, extensions: Extensions) -> bool:
        has_starts = False
        for _ in range(_PLANS_PER_TICK):
            self._planner.windows.look(tx.world.calendar, tx.now)
            planner = self._planner.update(tx.world, tx.settings, extensions, tx.nodes, tx.now)
            if planner.is_idle:
                self.plan = _NO_PLAN
                break
            self.plan = planner.plan(tx.now)
            for reservation in self.plan.reservations:
                if reservation.fence_at is not None and reservation.job_id not in tx.world.fences:
                    tx.fence(reservation.job_id, reservation.fence_at)
            for job_id, place in planner.kept.items():
                if job_id in tx.world.fences and tx.world.kept.get(job_id) != place:
                    tx.keep_place(job_id, place)
            for start in self.plan.starts:
                node = self._cluster[start.placement.node]
                if start.placement.gpus and _is_reading_old(node, tx):
                    # Until the next reading, only this plan keeps its place free.
                    self.awaits_reading = True
                    continue
                has_starts |= self._start(tx, start, node, planner)
            # Suspensions and resumptions change the resources to plan with.
            if not tx.carry_out(self.plan) and not self.plan.has_more:
                break
            if self.awaits_reading:
                # The next reading triggers another plan for this start and the rest.
                break
        return has_starts

    def _start(self, tx: TickTransaction, start: Start, node: ClusterNode, planner: Planner) -> bool:
        """Record the intent to start a job; return False if it has to wait for a port."""
        world, settings = tx.world, tx.settings
        job = world.find(start.job_id)
        assert job is not None
        port = None
        if needs_port(job, start.placement):
            port = self._master_port(job, node.name, tx)
            if port is None:
                return False
        tx.waited.append((job.spec.queue, tx.now - world.free_at(job)))
        stdout_path, stderr_path = output_paths(job, job.run + 1, node.name, settings.default.output)
        placement = with_limit(job.spec.request, start.placement, node.reading, settings)
        key = world.class_of(job.id)
        priority = None if key is None else planner.ranking.priority(key, job.queued_at).total
        boot_ids = {one.name: one.boot_id for one in self._cluster}
        cap_w = power_cap(job, placement, self._cluster.samples(), settings)
        job, run, story = run_transitions.start_run(
            *(job, placement, boot_ids, tx.now, stdout_path, stderr_path),
            priority=priority,
            master_port=port,
            power_cap_w=cap_w,
            is_filler=start.is_filler,
        )
        told = with_leanings(story, job, start.placement, planner.layout, self._history)
        tx.put(job, run, (*told, *self._limit(job, run, tx)))
        self._history.began(job)
        if (estimate := self._estimates.started(job.id, tx.now)) is not None:
            tx.changes.estimates[job.id] = estimate
        return True

    def _master_port(self, job: Job, node: str, tx: TickTransaction) -> int | None:
        """A port for the ranks of the job's next run, which begins on this node; None while all are taken."""
        ports = tx.settings.cluster.ports
        port = choose_port(ports, taken_ports(node, tx.world.open_runs.values()), job)
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
            limits = node.limiter.limits_for(here, tx.settings.isolation, node.samples, tx.world.open_runs)
            if limits is not None:
                where = f"on {part.node}: " if run.parts else ""
                found.append(JobEvent(job.id, tx.now, "note", where + describe(limits), run.number))
        return tuple(found)


def _is_reading_old(node: ClusterNode, tx: TickTransaction) -> bool:
    """Whether the last GPU reading, from idle time, is old enough for other processes to have started since."""
    return tx.now - node.read_at > tx.settings.daemon.poll_s
