"""Applies run events to the lifecycle; GPUs stay booked until they are proven clean."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from logging import getLogger
from math import inf

from gpusched.daemon.allocations import usage_with_run
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.nodes import ClusterNodes
from gpusched.daemon.state import DaemonState
from gpusched.daemon.verbs.admission import check_admitted
from gpusched.daemon.verbs.images import end_pull
from gpusched.daemon.verbs.step import close_steps
from gpusched.daemon.watch.history import History
from gpusched.errors import Refused
from gpusched.lifecycle import run_transitions
from gpusched.lifecycle.retry import LargerRequest, NothingLarger, larger_request
from gpusched.model.cluster import DrainCause
from gpusched.model.execution import (
    EngineEvent,
    NativeRunStarted,
    RunAccepted,
    RunEnd,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunResumed,
    RunStarted,
    RunStopping,
    RunSuspended,
)
from gpusched.model.hostlist import fold
from gpusched.model.job import Job, JobEvent, Request, Run, split_run_id
from gpusched.model.mentions import mention_job
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import replace
from gpusched.model.variants import with_requests
from gpusched.ports.tables import DRAINERS, DRAINS, USAGE
from gpusched.scheduler.infeasible import refusal

log = getLogger("gpusched.daemon")


class RunEvents:
    """Applies the events of runs, tick by tick."""

    def __init__(self, cluster: ClusterNodes, history: History) -> None:
        self._cluster = cluster
        self._history = history

    def apply(self, tx: TickTransaction, event: EngineEvent, *, is_over: bool = False) -> None:
        """Record one event. If the table already has the run's end, only let the engine forget it.

        Args: is_over: the run's end follows among the events of this tick.
        """
        run = tx.state.open_runs.get(event.run)
        if run is None:
            if isinstance(event, RunEnd):
                # The end was recorded before a crash between commit and forget.
                tx.forgettable.append(event.run)
                if (stray := tx.state.strays.get(event.run)) is not None:
                    tx.put_run(_ended_stray(stray, event))
                self._tell_of_survivor(tx, event)
            return
        job = tx.state.jobs[run.job_id]
        event = _at_possible_instants(event, job, run, tx.now)
        if isinstance(event, RunStarted):
            if run.start_at is None:
                _tell_of_checkpoints(job, run, tx)
            _, run, story = run_transitions.run_started(job, run, event)
            if is_over:
                # What it holds is released again before anything reads it.
                tx.state.open_runs[run.id] = tx.changes.runs[run.id] = run
                tx.add_events(*story)
            else:
                tx.put(job, run, story)
        elif isinstance(event, RunAccepted):
            tx.put(*run_transitions.run_accepted(job, run, event))
        elif isinstance(event, NativeRunStarted):
            tx.put(*run_transitions.native_run_started(job, run, event))
        elif isinstance(event, RunStopping):
            tx.state.steps.closed.add(run.id)
            tx.put(*run_transitions.run_stopping(job, run, event))
        elif isinstance(event, RunSuspended):
            tx.put(*run_transitions.run_suspended(job, run, event))
        elif isinstance(event, RunResumed):
            tx.put(*run_transitions.run_resumed(job, run, event))
        elif isinstance(event, RunEnded):
            run = self._with_meter(run)
            tx.state.held.learn_epilogs(job, event.end_at, tx.state.rules)
            _drain_for_fault(run, event, tx)
            if event.prolog_fault is not None and event.start_at is None:
                unstarted = RunNeverStarted(event.run, event.end_at, event.prolog_fault)
                step = run_transitions.run_never_started(job, run, unstarted, tx.settings, tx.now)
                self._close_run(tx, *step, clean=True)
                return
            # A run that never started has left nothing on its GPUs.
            clean = not run.gpus or event.start_at is None
            more = partial(grow, tx=tx)
            job, run, story = run_transitions.run_ended(
                job, run, event, tx.settings, tx.now, gpus_clean=clean, grow=more
            )
            if job.spec.is_pull:
                job = end_pull(job, run, event.detail, tx)
            self._close_run(tx, job, run, story, clean=clean)
        elif isinstance(event, RunLost):
            run = self._with_meter(run)
            # A reboot has cleaned the GPUs.
            node = self._cluster.get(run.node)
            # A node that has not reported yet has not been restarted, for all that is known.
            boot_id = run.boot_id if node is None else node.boot_id
            drainers = tx.state.rows[DRAINERS]
            if event.is_given_up or any(
                drainer.down is not None for name in run.nodes if (drainer := drainers.get(name)) is not None
            ):
                boot_id = ""
            # Of a gang, the other nodes are up, and their GPUs have to be watched.
            clean = not run.gpus or (run.boot_id != boot_id and not run.parts)
            if run.native is not None:
                # Its own scheduler says so, of nodes that are not ours.
                boot_id = "lost"
            if run.boot_id == boot_id:
                _drain_for_missing_epilog(run, tx)
            job = _leave_out(job, event, tx)
            step = run_transitions.run_lost(job, run, event, tx.settings, tx.now, boot_id=boot_id, gpus_clean=clean)
            self._close_run(tx, *step, clean=clean)
        else:
            job = _leave_out(job, event, tx)
            step = run_transitions.run_never_started(job, run, event, tx.settings, tx.now)
            self._close_run(tx, *step, clean=True)

    def node_shut_down(self, event: EngineEvent, state: DaemonState) -> str | None:
        """The node on which a run of its present boot was stopped because the machine is shutting down."""
        why = getattr(event, "why", None) or getattr(event, "stopped_by", None)
        run = state.open_runs.get(event.run)
        if why != "shutdown" or run is None:
            return None
        # Of a gang, only the end says where it was.
        where = getattr(event, "failed_on", "") or (run.node if len(run.nodes) == 1 else "")
        part = next((part for part in run.on_each_node if part.node == where), None)
        node = None if part is None else self._cluster.get(where)
        return where if part is not None and node is not None and node.boot_id == part.boot_id else None

    def _tell_of_survivor(self, tx: TickTransaction, event: EngineEvent) -> None:
        """Say so when a run that was declared lost turns out to have lived on."""
        if not isinstance(event, RunEnded) or event.start_at is None:
            return
        job_id, number = split_run_id(event.run)
        run = next((run for run in tx.store.runs([job_id]) if run.number == number), None)
        if run is None or run.reason is not ReasonCode.NODE_DOWN or run.end_at is None or event.end_at <= run.end_at:
            return
        text = f"run {number}, taken for lost, had lived on; it was ended when its node could be reached again"
        log.warning("job %d: %s", job_id, text)
        tx.add_events(JobEvent(job_id, tx.now, "note", text, number))

    def _close_run(self, tx: TickTransaction, job: Job, run: Run, story: Iterable[JobEvent], *, clean: bool) -> None:
        """Record the end of a run; if its GPUs are clean, it holds nothing any more."""
        if run.native is None:
            tx.charge(usage_with_run(tx.state.rows[USAGE], job, run, tx.layout(run.nodes), tx.settings, tx.now))
            tx.state.note_ended(job, run)
        tx.add_events(*story)
        self._history.learn(job, run)
        # First, or its job's new row would have the run, which has ended, booked anew.
        tx.state.close_run(run)
        tx.put_job(job)
        tx.changes.runs[run.id] = run
        close_steps(run, tx)
        if clean:
            tx.state.put_run(run)
        else:
            tx.begin_release(run)
        tx.forgettable.append(run.id)

    def _with_meter(self, run: Run) -> Run:
        # Read without removing: the event is repeated if this tick cannot be recorded.
        meter = self._cluster.meter(run)
        if meter is None:
            return run
        return replace(
            run,
            peak_vram_mib=meter.peak_vram_mib,
            mean_utilisation=meter.mean_utilisation,
            energy_j=meter.energy_j,
            measured=meter.measured,
        )


_MOST_SKEW_S = 5.0


def _at_possible_instants(event: EngineEvent, job: Job, run: Run, now: float) -> EngineEvent:
    """The event, not later than now and not earlier than the run was decided on or began.

    Those who report it read the time of day, which may have jumped just then: an hour would be charged as a day, and a
    backoff would end tomorrow.
    """
    began_at = run.intent_at if run.start_at is None else run.start_at
    if run.native is not None or job.spec.adopted is not None:
        # These ran before they were known here.
        began_at = -inf

    def is_possible(at: float) -> bool:
        return began_at - _MOST_SKEW_S <= at <= now + _MOST_SKEW_S

    if not isinstance(event, RunEnded):
        return event if is_possible(event.at) else replace(event, at=min(max(event.at, began_at), now))
    if event.start_at is not None and not is_possible(event.start_at):
        # What it was taken for as it began stays.
        start_at = min(max(event.start_at, began_at), now) if run.start_at is None else run.start_at
        event = replace(event, start_at=start_at)
    # The end is told of as it happens, unless this daemon was away.
    return event if is_possible(event.end_at) else replace(event, end_at=now)


def _leave_out(job: Job, event: RunLost | RunNeverStarted, tx: TickTransaction) -> Job:
    """Keep a job from a node that takes no runs of its user, lest it be tried there for ever."""
    node, request = event.refused_on, job.spec.request
    if not node or node in request.exclude:
        return job
    text = f"node {node} is left out from now on: {event.detail}"
    hint = f"once that is mended: gctl update {job.shown_id} exclude={','.join(request.exclude)}"
    tx.add_events(JobEvent(job.id, tx.now, "note", f"{text}; {hint}", job.run))
    return replace(job, spec=with_requests(job.spec, lambda one: replace(one, exclude=(*one.exclude, node))))


def _drain_for_fault(run: Run, event: RunEnded, tx: TickTransaction) -> None:
    """Take a node on which a program of the site failed out of use, until an administrator has looked at it."""
    why = event.prolog_fault or event.epilog_fault
    if why is not None:
        _drain(event.fault_on or run.node, why, run, tx)


def _drain_for_missing_epilog(run: Run, tx: TickTransaction) -> None:
    """The same for a run whose supervisor was killed: the site's epilog was not executed for it."""
    if tx.settings.epilog.path is not None and run.native is None:
        why = f"the epilog {tx.settings.epilog.path} was not executed: the supervisor of the run was killed"
        _drain(run.node, why, run, tx)


def _drain(node: str, why: str, run: Run, tx: TickTransaction) -> None:
    if node in tx.state.rows[DRAINS]:
        return
    log.error("node %s drained: %s (run %s)", node, why, run.id)
    message = f"{why} ({mention_job(str(run.job_id))}); once it is fixed: gctl undrain {node}"
    tx.drain(node, message, DrainCause.SITE_PROGRAM)


def _tell_of_checkpoints(job: Job, run: Run, tx: TickTransaction) -> None:
    """Report that a job continues on another node, whose folder has none of its checkpoints."""
    if run.number == 1 or tx.settings.life.checkpoint_dir is not None:
        return
    before = [one for one in tx.store.runs([job.id]) if one.number < run.number and one.start_at is not None]
    if not before or set(before[-1].nodes) >= set(run.nodes):
        return
    text = (
        f"run {before[-1].number} was on {fold(before[-1].nodes)}, and its checkpoint folder is there; "
        "[life] checkpoint_dir names a shared one"
    )
    tx.add_events(JobEvent(job.id, tx.now, "note", text, run.number))


def grow(job: Job, run: Run, tx: TickTransaction) -> LargerRequest | NothingLarger | None:
    """What the job's next run requests; None for the same."""
    spec = job.spec

    def is_admitted(request: Request) -> bool:
        if refusal(request, tx.nodes, tx.settings) is not None:
            return False
        with tx.state.active.with_more(spec, job.user, -1):
            try:
                check_admitted(replace(spec, request=request), job.user, tx)
            except Refused:
                return False
        return True

    return larger_request(spec.request, run, tx.nodes, tx.settings, is_admitted)


def _ended_stray(run: Run, event: RunEnd) -> Run:
    """The row of a run that was open although no active job had it."""
    end_at, exit_code, signal = (
        (event.end_at, event.exit_code, event.signal) if isinstance(event, RunEnded) else (event.at, None, None)
    )
    return replace(
        run,
        state=RunState.ENDED,
        end_at=end_at,
        exit_code=exit_code,
        signal=signal,
        outcome=JobState.CANCELLED,
        reason_text="stopped: it was open in the job table although no active job had it",
    )
