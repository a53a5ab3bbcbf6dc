"""GPUs of runs: those of ended runs stay booked until they are proven clean, and lost ones end the runs on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from logging import getLogger

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.failures import StepFailures
from gpusched.daemon.nodes import ClusterNodes
from gpusched.daemon.run_events import grow
from gpusched.daemon.watch.gpus import GpuFaults
from gpusched.daemon.watches import Stage, Watch, WatchGuard
from gpusched.gpu.tracker import DIRTY, WAITING
from gpusched.lifecycle import run_transitions, transitions
from gpusched.model.cluster import GpuState
from gpusched.model.job import Job, JobEvent, Run
from gpusched.model.units import gpu_label

log = getLogger("gpusched.daemon")
Judge = Callable[[Job, Run, TickTransaction], Run]
"""Finds the cause of a run's end: returns the run with another outcome, or the same run."""
_VERDICT = "verdict"


class Releases(Watch):
    """Ends the jobs whose GPUs have become clean or are given up on."""

    name = "GPUs of ended runs"
    stage = Stage.BEFORE_COMMANDS

    def __init__(
        self,
        cluster: ClusterNodes,
        gpu_faults: GpuFaults,
        judges: Sequence[Judge],
        failures: StepFailures,
        guard: WatchGuard,
    ) -> None:
        self._cluster = cluster
        self._gpu_faults = gpu_faults
        self._judges = judges
        self._failures = failures
        self._guard = guard

    def carry_out(self, tx: TickTransaction) -> None:
        releases = [(run, self._release_states(run, tx.now)) for run in tx.state.releasing.values()]
        if any(DIRTY in states.values() for _, states in releases):
            tx.view_again()
        for run, states in releases:
            if not self._is_watched(run) or WAITING in states.values():
                continue
            if not self._gpu_faults.may_be_unread(run, tx):
                self._guard.run("GPUs of an ended run", self._finish_release, tx, run, states, part=run.id)

    def _is_watched(self, run: Run) -> bool:
        """Whether readings show what the run has left. Of one without GPUs, nothing has to be proven."""
        cluster = self._cluster
        is_proven = not run.gpus or cluster.head.tracker.is_proven(run)
        return is_proven or (cluster.has_all_of(run) and cluster.is_released(run))

    def _finish_release(self, tx: TickTransaction, run: Run, states: Mapping[str, str]) -> None:
        job = tx.state.jobs[run.job_id]
        tx.state.end_release(run)
        tx.releasing.discard(run.job_id)
        run = self._judged(job, run, tx)
        if job.is_handed_over:
            job = transitions.completing(job)
        job, story = run_transitions.finish(job, run, tx.settings, tx.now, partial(grow, tx=tx))
        tx.put_job(job, *story)
        self._gpu_faults.hold_repeated(job, run, tx)
        for uuid, state in states.items():
            if state == DIRTY:
                status = self._cluster.status(uuid, now=tx.now)
                why = status.detail if status.state == GpuState.SUSPECT else status.why
                text = f"GPU {uuid} was not given back: {why or 'see ginfo'}"
                tx.add_events(JobEvent(job.id, tx.now, "note", text, run.number))

    def _release_states(self, run: Run, now: float) -> dict[str, str]:
        """Release state of each GPU of an ended run, by UUID. A GPU that is given up on becomes suspect."""
        return {share.uuid: self._cluster.release_state(share.uuid, now, run.id) for share in run.gpus}

    def _judged(self, job: Job, run: Run, tx: TickTransaction) -> Run:
        """The ended run with the cause of its failure. A judge that raises is ignored."""
        for judge in self._judges:
            try:
                after = judge(job, run, tx)
            except Exception as error:
                self._failures.note(_VERDICT, error)
                continue
            self._failures.recovered(_VERDICT)
            if after is not run:
                run = tx.changes.runs[run.id] = after
                tx.add_events(JobEvent(job.id, tx.now, "note", f"{run.outcome}: {run.reason_text}", run.number))
        return run


class LostGpus(Watch):
    """Stops the runs on GPUs that the driver has lost."""

    name = "lost GPUs"
    stage = Stage.BEFORE_COMMANDS

    def __init__(self, cluster: ClusterNodes) -> None:
        self._cluster = cluster

    def carry_out(self, tx: TickTransaction) -> None:
        if not self._cluster.has_losses:
            return
        lost = {gpu.uuid for gpu, _ in self._cluster.lost()}
        for run in list(tx.state.open_runs.values()):
            shares = [share for share in run.gpus if share.uuid in lost or self._cluster.is_gone(share.uuid)]
            if not shares:
                continue
            what = "GPU " + ", ".join(gpu_label(share.index) for share in shares)
            after, story = transitions.lose_gpu(tx.state.jobs[run.job_id], tx.now, what)
            if story:
                log.error("ending run %s: it lost %s", run.id, what)
                tx.put_job(after, *story)
