"""Evidence against GPUs from readings and early failures: kept in memory, acted on in the tick.

A GPU that is held responsible is drained, which records and shows it, and lets `gctl undrain` revert it. The
evidence itself is not recorded: after a restart, it takes new failures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from logging import getLogger

from gpusched.daemon.alerts import AlertOutbox
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.watches import NodeReading, Stage, Watch
from gpusched.gpu.tracker import GpuTracker
from gpusched.lifecycle import transitions
from gpusched.lifecycle.alerts import AdminEvent
from gpusched.lifecycle.failures import (
    Evidence,
    FaultyRun,
    GpuFault,
    Origin,
    add_evidence,
    add_fault,
    attribute_to_foreign_use,
    attribute_to_gpu,
    awaits_faults,
    fault_of,
    fault_runs_text,
    repeated,
    suspicion,
    takes_out,
)
from gpusched.model.cluster import DrainCause, GpuReading, GpuState
from gpusched.model.job import Job, Run
from gpusched.model.settings import FaultSettings
from gpusched.model.states import JobState
from gpusched.model.units import format_duration, gpu_label, plural
from gpusched.model.value import replace
from gpusched.ports.tables import CLEARANCES, DRAINS
from gpusched.predict.family import family

log = getLogger("gpusched.daemon")
_LATE_S = 60.0
_MOST_FAULTY = 1000
_MOST_NAMED = 5


class GpuFaults(Watch):
    """Faults reported by the driver, and runs that failed early, by GPU."""

    name = "GPU faults"
    stage = Stage.BEFORE_COMMANDS

    def __init__(self) -> None:
        self._known: tuple[GpuFault, ...] = ()
        self._parents: dict[str, str] = {}
        """UUID of the GPU that each MIG instance belongs to."""
        self._new: list[GpuFault] = []
        """Faults that no committed tick has acted on."""
        self._logged = 0
        """Number of them that a tick which was not recorded has logged."""
        self._lost: dict[str, dict[str, GpuFault]] = {}
        """Lost GPUs, by node and UUID."""
        self._read_until: dict[str, float | None] = {}
        """By node: faults before this instant are known; None without a source of faults."""
        self._evidence: Evidence = {}
        self._faulty: dict[str, FaultyRun] = {}
        """Runs with a hardware fault, oldest first, by handle."""

    def observe(self, found: NodeReading) -> None:
        node, reading = found.node.name, found.reading
        self._read_until[node] = reading.faults_until
        # Keep the instances of a lost GPU: its runs still refer to them.
        self._parents.update((gpu.uuid, gpu.mig_parent) for gpu in reading.gpus if gpu.mig_parent is not None)
        for gpu in reading.gpus:
            for xid in gpu.xids:
                is_event = xid.sequence is None
                fault = GpuFault(gpu.uuid, gpu.index, xid.number, xid.at, xid.sequence, is_event)
                self._known, is_new = add_fault(self._known, fault)
                if is_new:
                    self._new.append(fault)
        before = self._lost.get(node, {})
        self._lost[node] = now_lost = {
            gpu.uuid: GpuFault(gpu.uuid, gpu.index, None, at) for gpu, at in found.node.tracker.lost()
        }
        losses = [fault for uuid, fault in now_lost.items() if uuid not in before]
        self._known += tuple(losses)
        self._new += losses

    def of(self, uuid: str) -> tuple[GpuFault, ...]:
        """Known numbered faults of a GPU since boot, oldest first."""
        numbered = (fault for fault in self._known if fault.uuid == uuid and fault.xid is not None)
        return tuple(sorted(numbered, key=lambda fault: fault.at))

    def may_be_unread(self, run: Run, tx: TickTransaction) -> bool:
        """Whether the next reading may explain the run's failure; its GPUs are kept until then."""
        wait_s = tx.settings.gpu.release_wait_s
        return any(awaits_faults(run, self._read_until.get(node), tx.now, wait_s) for node in run.nodes)

    def carry_out(self, tx: TickTransaction) -> None:
        """Drain GPUs because of new faults."""
        new, logged = self._new, self._logged
        self._new, self._logged = [], 0
        if new:
            tx.if_dropped(partial(self._take_back, new))
        for number, fault in enumerate(new):
            late_s = tx.now - fault.at
            late = f", found in the kernel's log {format_duration(late_s)} later" if late_s > _LATE_S else ""
            if number >= logged:
                log.error("GPU %d (%s): %s%s", fault.index, fault.uuid, fault.text, late)
            if takes_out(fault, tx.settings.fault, tx.state.rows[CLEARANCES].get(fault.uuid)):
                cause = DrainCause.GPU_LOST if fault.xid is None else DrainCause.GPU_FAULT
                self._drain(fault.uuid, fault.index, fault.text + late, cause, tx)
        # Hold at once, before similar jobs start while these runs are still ending.
        for run in (*tx.state.open_runs.values(), *tx.state.releasing.values()) if new else ():
            job = tx.state.jobs[run.job_id]
            if self._note_faulty(job, run, self._with_instances(run, new), tx.settings.fault):
                self.hold_repeated(job, run, tx)

    def _take_back(self, new: list[GpuFault]) -> None:
        self._new, self._logged = new + self._new, len(new)

    def _with_instances(self, run: Run, faults: Sequence[GpuFault]) -> tuple[GpuFault, ...]:
        """The faults, and those of a divided GPU also for the run's instance: reports do not say which one had it."""
        instances = {self._parents[share.uuid]: share.uuid for share in run.gpus if share.uuid in self._parents}
        return (*faults, *(replace(one, uuid=instances[one.uuid]) for one in faults if one.uuid in instances))

    def _note_faulty(self, job: Job, run: Run, faults: Sequence[GpuFault], settings: FaultSettings) -> bool:
        """Remember a run's hardware fault; return whether there is one."""
        fault = fault_of(run, faults, settings.xid_victim + settings.xid_drain)
        if fault is None:
            return False
        self._faulty.setdefault(run.id, FaultyRun(_origin(job), job.shown_id, run.number, fault))
        while len(self._faulty) > _MOST_FAULTY:
            del self._faulty[next(iter(self._faulty))]
        return True

    def judge(self, job: Job, run: Run, tx: TickTransaction) -> Run:
        """The ended run with the cause of its failure. Its GPU may become suspect."""
        faults, settings = self._with_instances(run, self._known), tx.settings.fault
        after = attribute_to_gpu(run, fault_of(run, faults, settings.xid_victim))
        self._note_faulty(job, run, faults, settings)
        if after is run and run.outcome is JobState.OUT_OF_MEMORY:
            there = set(run.nodes)
            foreign = {gpu.uuid: gpu.foreign_mib for node in tx.nodes if node.name in there for gpu in node.gpus}
            after = attribute_to_foreign_use(run, foreign, tx.settings.fault.early_s, tx.settings.gpu.foreign_mib)
        tx.restore_if_dropped(self, "_evidence")
        self._evidence = add_evidence(self._evidence, job, after, tx.settings.fault)
        for share in after.gpus:
            why = suspicion(self._evidence.get(share.uuid, ()), tx.settings.fault)
            if why is not None:
                self._evidence = {uuid: rows for uuid, rows in self._evidence.items() if uuid != share.uuid}
                self._drain(share.uuid, share.index, why, DrainCause.EARLY_FAILURES, tx)
        return after

    def hold_repeated(self, job: Job, run: Run, tx: TickTransaction) -> None:
        """Hold pending jobs like the run's job, when their runs hit the same fault repeatedly.

        A job submitted since starts once: it may have been fixed.
        """
        last = self._faulty.get(run.id)
        runs = () if last is None else repeated(last, self._faulty.values(), tx.settings.fault.hold_after)
        if last is None or not runs:
            return
        text = fault_runs_text(runs)
        pending = [one for one in tx.state.jobs.values() if one.user == job.user and _may_be_held(one)]
        held = [one for one in pending if last.origin.is_like(_origin(one))]
        for one in held:
            after, event = transitions.hold_for_fault(one, tx.now, text)
            tx.put_job(after, event)
        if held:
            ids = sorted({one.array_id or one.id for one in held})
            some = ", ".join(map(str, ids[:_MOST_NAMED])) + (", ..." if len(ids) > _MOST_NAMED else "")
            news = f"held {plural(len(ids), 'job')} of {job.user} ({some}): {text}"
            log.error("%s", news)
            tx.news.append(AdminEvent("job_held", news, run.node, job.user))

    def _drain(self, uuid: str, index: int, why: str, cause: DrainCause, tx: TickTransaction) -> None:
        if uuid in tx.state.rows[DRAINS]:
            return
        log.error("GPU %s (%s) drained: %s", gpu_label(index), uuid, why)
        tx.drain(uuid, f"{why}; once it works again: gctl undrain {gpu_label(index)}", cause)


def _origin(job: Job) -> Origin:
    program = job.spec.launch.script_sha or family(job).command
    return Origin(job.user, program, job.id, job.id if job.is_array else job.array_id)


def _may_be_held(job: Job) -> bool:
    return job.state is JobState.PENDING and job.hold is None and job.spec.request.gpus > 0


_EVENTS = {GpuState.LOST: "gpu_lost", GpuState.SUSPECT: "gpu_suspect"}
_UNREADABLE_AFTER = 3
"""Consecutive failed readings before an alert to the administrator: a single one may just be late."""


class GpuAlerts(Watch):
    """Compares the state of each GPU with the last one. Faults at the first look are reported too."""

    name = "alerts of GPUs"

    def __init__(self, outbox: AlertOutbox) -> None:
        self._outbox = outbox
        self._bad: dict[str, str] = {}
        self._unreadable: Counter[str] = Counter()
        """Failed readings since the last good one, by node."""

    def observe(self, found: NodeReading) -> None:
        for news in self.new_faults(found.node.tracker, found.reading, found.node.name):
            self._outbox.alert_admin(news, found.now, found.settings)

    def new_faults(self, tracker: GpuTracker, reading: GpuReading, node: str) -> Iterator[AdminEvent]:
        """Yield GPUs that were lost or became suspect, or one event for a driver that does not respond.

        Omits GPUs that are suspect because of a drain, which is reported when it is recorded.
        """
        error = tracker.unreadable(reading)
        if error is not None:
            self._unreadable[node] += 1
            if self._unreadable[node] == _UNREADABLE_AFTER:
                yield AdminEvent("gpu_lost", f"cannot read the GPUs of {node}: {error}", node)
            return
        self._unreadable.pop(node, None)
        listed = {gpu.uuid for gpu in reading.gpus}
        missing = [gpu for gpu, _ in tracker.lost() if gpu.uuid not in listed]
        for gpu in (*reading.gpus, *missing):
            if gpu.uuid not in self._bad and tracker.is_sound(gpu.uuid):
                # The common case, and a much cheaper check than `status`.
                continue
            status = tracker.status(gpu.uuid)
            event = _EVENTS.get(status.state)
            if gpu.mig_parent is not None and tracker.status(gpu.mig_parent).state in _EVENTS:
                # A fault of the GPU affects all instances: report it once, for the GPU.
                continue
            if event is None:
                # A GPU in an unknown state is not healthy again yet.
                if status.state != GpuState.UNKNOWN:
                    self._bad.pop(gpu.uuid, None)
            elif self._bad.get(gpu.uuid) != event:
                self._bad[gpu.uuid] = event
                if event == "gpu_suspect" and tracker.is_drained(gpu.uuid):
                    continue
                what = "was lost" if event == "gpu_lost" else "is suspect"
                text = f"GPU {gpu_label(gpu.index)} ({gpu.name}, {gpu.uuid}) {what}: {status.detail or 'see ginfo'}"
                yield AdminEvent(event, text, node, gpu.uuid)
