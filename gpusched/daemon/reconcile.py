"""Keeps the engine in line with the table: all open runs after a restart, then those whose rows change.

Orders to the engine are never stored; memory only holds which runs may need one. They are derived from the
committed rows each time, so neither a crash nor an exception between the commit and the engine loses any:

    STARTING, unknown to the engine     its ticket
    COMPLETING by a cancel, ...         the stop that the row implies, see `pending_order`
    SUSPENDED, or RUNNING again         the suspension, or the resumption
    changed time limit                  the limit
    no row of an open run any more      the engine may forget it

After a restart the engine reports the fate of open runs (`Engine.adopt`), and the tick applies the events:

    alive                          adopted: RunStarted, later its end
    result file in the spool       RunEnded, as if it had just happened
    recorded but never started     the claim is revoked: RunNeverStarted, the job is pending again
    supervisor gone, no result     its remains are ended: RunLost, the requeue rule decides
    another boot of the machine    nothing can be alive: RunLost

GPUs of ended runs are watched in the same way, see `GpuTracker.reconcile_releases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from logging import getLogger

from gpusched.daemon.failures import StepFailures
from gpusched.daemon.launch.handed_over import native_run
from gpusched.daemon.launch.ticket import CannotStart, started_parts
from gpusched.daemon.state import DaemonState
from gpusched.lifecycle.run_transitions import MISSING
from gpusched.model.execution import (
    EngineEvent,
    LimitOrder,
    OpenRun,
    RunEnded,
    RunNeverStarted,
    StopOrder,
    SuspendOrder,
    Ticket,
)
from gpusched.model.job import Job, Run, run_id
from gpusched.model.settings import Settings
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.ports import Changes, Engine

log = getLogger("gpusched.daemon")
TICKET_PATIENCE_S = 10.0
"""Time after which a run without a ticket is given up, lest its job appear to be running."""


def adopt_open_runs(state: DaemonState, engine: Engine, settings: Settings | None = None) -> None:
    """Hand all open runs to the engine, with their recorded stops or suspensions."""
    known = settings or Settings()
    runs = [open_run(state.jobs[run.job_id], run, known) for _, run in sorted(state.open_runs.items())]
    if runs:
        log.info("adopting %d open runs", len(runs))
    for stray in state.strays.values():
        log.error("run %s is open in the job table, and no active job has it: it is stopped", stray.id)
        runs.append(_to_stop(stray))
    for run in state.releasing.values():
        job = state.jobs[run.job_id]
        if not run.node:  # made in place of a row that is missing
            log.error("job %s is %s in the job table, and %s: it counts as lost", job.id, job.state, MISSING)
        elif job.state is not JobState.COMPLETING:
            text = "job %s is %s in the job table, and its run %s has ended: the job goes on as after %s"
            log.error(text, job.id, job.state, run.id, run.outcome)
    # Call it even without runs: the engine then clears everything without a row in the table.
    engine.adopt(runs)


def open_run(
    job: Job,
    run: Run,
    settings: Settings,
    shutdown_grace_s: float | None = None,
    make_ticket: Callable[[Job, Run], Ticket] | None = None,
) -> OpenRun:
    """Target state of an open run according to its rows; with a ticket if it is to start.

    Args: shutdown_grace_s: set during a shutdown. make_ticket: may raise to refuse.
    """
    order = pending_order(job, settings, shutdown_grace_s)
    # A run that is stopped before its start is never started.
    is_to_start = run.state is RunState.STARTING and order is None
    return OpenRun(
        run=run.id,
        boot_id=run.boot_id,
        supervisor_pid=run.supervisor_pid,
        supervisor_start_ticks=run.supervisor_start_ticks,
        pending_order=order,
        adopted=job.spec.adopted,
        limit=LimitOrder(job.spec.time_limit_s),
        ticket=make_ticket(job, run) if make_ticket is not None and is_to_start else None,
        node=run.node,
        native=native_run(job, run, settings),
        peers=_peers(run, started_parts(job, run)),
        holds=any(part.holds for part in run.parts),
    )


def _peers(run: Run, ranks: Sequence[int]) -> tuple[tuple[str, str], ...]:
    return tuple((run.parts[rank].node, run.parts[rank].boot_id) for rank in ranks[1:])


def _to_stop(stray: Run) -> OpenRun:
    """Target state of an open run that no active job has, and whose end the engine reports."""
    return OpenRun(
        run=stray.id,
        boot_id=stray.boot_id,
        supervisor_pid=stray.supervisor_pid,
        supervisor_start_ticks=stray.supervisor_start_ticks,
        pending_order=StopOrder("cancel"),
        node=stray.node,
        peers=_peers(stray, range(len(stray.nodes))),
        holds=any(part.holds for part in stray.parts),
    )


class Reconciler:
    """Tracks open runs that the engine may not be in line with yet.

    Args: make_ticket: raises CannotStart for good, any other exception if a retry may work. must_wait: whether a
    recorded run is not to be started yet.
    """

    def __init__(
        self,
        make_ticket: Callable[[Job, Run], Ticket],
        failures: StepFailures,
        must_wait: Callable[[Run], bool] = lambda run: False,
    ) -> None:
        self._make_ticket = make_ticket
        self._failures = failures
        self._must_wait = must_wait
        self._changed: dict[str, None] = {}
        self._ended: dict[str, None] = {}
        self._without_ticket: dict[str, float] = {}
        """Runs without a ticket because of an error, and since when."""
        self._hopeless: dict[str, str] = {}
        """Runs that can never be started, and why."""
        self.shutdown: tuple[str, float] | None = None
        """Set while a machine shuts down: node whose runs are to be stopped, and the longest grace."""

    @property
    def is_behind(self) -> bool:
        return bool(self._changed or self._ended)

    def committed(self, changes: Changes, ended: Iterable[str], state: DaemonState) -> None:
        """Note the runs whose rows a commit changed."""
        for run in changes.runs.values():
            if run.state is RunState.STARTING:
                self._changed[run.id] = None
        for job in changes.jobs.values():
            if job.run and (handle := run_id(job.id, job.run)) in state.open_runs:
                self._changed[handle] = None
        self._ended.update(dict.fromkeys(ended))

    def look_at_all(self, state: DaemonState) -> None:
        """Reconsider every open run, since the memory was reloaded or the target of all runs has changed."""
        self._changed.update(dict.fromkeys(sorted((*state.open_runs, *state.strays))))

    def carry_out(self, engine: Engine, state: DaemonState, settings: Settings, now: float) -> None:
        """Bring the engine in line as far as possible; the rest is retried next time."""
        if not self.is_behind:
            return
        wanted: list[OpenRun] = []
        for handle in list(self._changed):
            run = state.open_runs.get(handle)
            if run is None:
                if handle in state.strays:
                    wanted.append(_to_stop(state.strays[handle]))
                else:
                    self._settle(handle)
                continue
            try:
                known = self._wanted(state.jobs[run.job_id], run, settings, now)
                if known is not None and known.ticket is not None and self._must_wait(run):
                    continue
            except Exception as error:
                # An invalid row must not hold up the others.
                self._failures.note("engine", error)
                continue
            if known is not None:
                wanted.append(known)
        self._reconcile(engine, wanted)
        self._note_recovered()

    def _wanted(self, job: Job, run: Run, settings: Settings, now: float) -> OpenRun | None:
        """Target state of the run; None while its ticket cannot be made."""
        try:
            return open_run(job, run, settings, self._shutdown_grace_s(run), self._make_ticket)
        except Exception as error:
            why = self._why_hopeless(run.id, error, now)
        if why is None:
            return None
        # Without a ticket the engine revokes the run, unless it was started after all.
        self._hopeless[run.id] = why
        return open_run(job, run, settings, self._shutdown_grace_s(run))

    def _shutdown_grace_s(self, run: Run) -> float | None:
        """None for a run that the shutdown does not affect: runs on other nodes continue without the daemon."""
        return self.shutdown[1] if self.shutdown is not None and self.shutdown[0] in run.nodes else None

    def judge(self, event: EngineEvent) -> EngineEvent:
        """Return the event, or a failed launch for a run that was revoked because it can never start."""
        why = self._hopeless.pop(event.run, None)
        if why is None or not isinstance(event, RunNeverStarted):
            return event
        return RunEnded(event.run, None, event.at, launch_error=why)

    def _why_hopeless(self, handle: str, error: Exception, now: float) -> str | None:
        """Why a run can never start, as a sentence; None while its ticket may yet be made."""
        if isinstance(error, CannotStart):
            return str(error)
        self._failures.note("ticket", error)
        if now - self._without_ticket.setdefault(handle, now) < TICKET_PATIENCE_S:
            return None
        return f"its start could not be prepared: {type(error).__name__}: {error}"

    def _reconcile(self, engine: Engine, wanted: list[OpenRun]) -> None:
        ended = tuple(self._ended)
        if not (wanted or ended):
            return
        try:
            engine.reconcile(wanted, ended)
        except Exception as error:
            self._failures.note("engine", error)
        else:
            for known in wanted:
                self._settle(known.run)
            self._ended.clear()
            return
        # One by one: an error of one run must not keep the others from starting and ending.
        for known in wanted:
            try:
                engine.reconcile([known])
            except Exception as error:
                self._failures.note("engine", error)
            else:
                self._settle(known.run)
        for handle in ended:
            try:
                engine.reconcile((), [handle])
            except Exception as error:
                self._failures.note("engine", error)
            else:
                del self._ended[handle]

    def _note_recovered(self) -> None:
        """Note recovery only when nothing is left to do: one run's success does not fix another's failure."""
        if not self.is_behind:
            self._failures.recovered("engine")
        if not self._without_ticket:
            self._failures.recovered("ticket")

    def _settle(self, handle: str) -> None:
        del self._changed[handle]
        self._without_ticket.pop(handle, None)


def pending_order(
    job: Job, settings: Settings, shutdown_grace_s: float | None = None
) -> StopOrder | SuspendOrder | None:
    """The lasting order that the row of a job with an open run implies; None: the run should be running.

    Args: shutdown_grace_s: longest grace of any run, during a shutdown.
    """
    order = _recorded_order(job, settings)
    if shutdown_grace_s is None:
        return order
    # Runs stopped by a shutdown are requeued; cancelled ones must not be.
    is_cancelled = isinstance(order, StopOrder) and order.why == "cancel"
    grace_s = min(_grace_s(job, settings), shutdown_grace_s)
    return StopOrder("cancel" if is_cancelled else "shutdown", grace_s=grace_s)


def _recorded_order(job: Job, settings: Settings) -> StopOrder | SuspendOrder | None:
    grace_s = None
    if job.reason is ReasonCode.GPU_IDLE:
        grace_s = max(settings.idle.notice_s, _grace_s(job, settings))
    if job.cancel_at is not None:
        return StopOrder("cancel", grace_s=grace_s)
    if job.preempt_at is not None:
        return StopOrder("requeue" if job.reason is ReasonCode.REQUEUED else "preempt", grace_s=grace_s)
    if job.state is JobState.COMPLETING and job.reason in _STOPPED_FOR:
        return StopOrder(_STOPPED_FOR[job.reason])
    return SuspendOrder() if job.state is JobState.SUSPENDED else None


_STOPPED_FOR = {
    ReasonCode.GPU_MEMORY_OVER: "vram_over",
    ReasonCode.GPU_UNBOOKED_USE: "unbooked_use",
    ReasonCode.GPU_FAILED: "gpu_lost",
}
"""Why runs are stopped by the daemon, other than by cancel or preemption."""


def _grace_s(job: Job, settings: Settings) -> float:
    own_s = job.spec.launch.grace_s
    return settings.life.grace_s if own_s is None else own_s
