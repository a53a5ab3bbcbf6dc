"""An engine without processes: each run follows its script, on any clock.

For unit tests of the daemon and for the simulator, which moves the clock from one `next_event_at` to the next.
It keeps the promises of `ports.Engine`; orders act as on a real run.
"""

from __future__ import annotations

import heapq
import itertools
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpusched.engine.orders import GivenOrders
from gpusched.model.execution import (
    COMES_BACK,
    EngineEvent,
    EnterOrder,
    LimitOrder,
    NoteOrder,
    OpenRun,
    Order,
    ResumeOrder,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunResumed,
    RunStarted,
    RunStopping,
    RunSuspended,
    SignalOrder,
    StepStopOrder,
    StopOrder,
    SuspendOrder,
    Ticket,
)
from gpusched.ports import Clock

FIRST_PID = 1_000_001
"""Above every pid of a machine with default settings."""
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """Script of a simulated run."""

    runs_s: float = 0.0
    """From start to the end of its first process; infinite for one that must be stopped."""
    exit_code: int = 0
    signal: int | None = None
    """Ends by this signal instead of the exit code."""
    launch_error: str | None = None
    """Cannot be started, for this reason."""
    prolog_fault: str | None = None
    """Is not started, since the site's prolog failed."""
    epilog_fault: str | None = None
    epilog_s: float = 0.0
    """How long its epilogs take; it keeps its GPUs meanwhile."""
    never_starts: bool = False
    lost: bool = False
    """Its supervisor dies when the first process would end."""
    gpu_oom: bool = False
    oom_kills: int = 0
    mem_limit_mib: int | None = None
    """With `oom_kills`: its own limit, at which it was killed."""
    leftovers: tuple[str, ...] = ()
    """Processes that remain for the whole leftover grace."""
    stop_takes_s: float = 0.0
    """From the stop signal to the end; it is killed if that exceeds the grace."""
    stop_code: int | None = None
    """Exit code of its handler for that signal; None: it has none, and ends by the signal."""
    says_done: bool = False
    """It says before its end that nothing is left to do."""
    cpu_s: float = 0.0
    peak_mem_mib: float = 0.0


@dataclass(slots=True)
class SimulatedRun:
    """A run that was started and not yet forgotten."""

    ticket: Ticket
    outcome: SimulatedOutcome
    pid: int
    start_at: float = 0.0
    limit_at: float = NEVER
    finish_at: float = NEVER
    """When its first process ends unless it is stopped."""
    stopped_by: str | None = None
    stop_signal: int = signal.SIGTERM
    exit_code: int | None = None
    """With which its handler ended it; None: as its script says."""
    gone_at: float = NEVER
    """When the stop signal has taken effect, or when leftovers are gone."""
    kill_at: float = NEVER
    lingering: bool = False
    epilog_ends_at: float | None = None
    """While its epilogs run, which no order reaches."""
    killed_by: int | None = None
    """How its command ended, for then."""
    still_since: float | None = None
    """When it was suspended; its script is paused meanwhile."""
    suspended_s: float = 0.0
    end: EngineEvent | None = None
    given: GivenOrders = field(default_factory=GivenOrders)

    def due_at(self) -> float:
        """When the next thing happens unless an order comes."""
        if self.end is not None or self.still_since is not None:
            return NEVER
        if self.epilog_ends_at is not None:
            return self.epilog_ends_at
        if self.lingering:
            return min(self.gone_at, self.kill_at, self.limit_at if self.stopped_by is None else NEVER)
        if self.stopped_by is not None:
            return min(self.finish_at, self.gone_at, self.kill_at)
        return min(self.finish_at, self.limit_at)


@dataclass(slots=True)
class SimulatedEngine:
    """See `ports.Engine` and the module's docstring.

    Args: clock: any; outcome: called once per start with the ticket; boot_id: runs of another boot are lost.
    """

    clock: Clock
    outcome: Callable[[Ticket], SimulatedOutcome] = lambda ticket: SimulatedOutcome()
    boot_id: str = "simulated"
    signals: list[tuple[str, SignalOrder]] = field(default_factory=list)
    step_stops: list[tuple[str, StepStopOrder]] = field(default_factory=list)
    entered: list[tuple[str, EnterOrder]] = field(default_factory=list)
    """Signals delivered to live runs, for tests."""
    saved_at: dict[str, float] = field(default_factory=dict)
    """When runs saved their work, set by tests."""
    cpu_s_of: dict[str, float] = field(default_factory=dict)
    """CPU time of runs, set by tests."""
    _runs: dict[str, SimulatedRun] = field(default_factory=dict)
    _revoked: set[str] = field(default_factory=set)
    _given_back: set[str] = field(default_factory=set)
    """Runs named by `reconcile` and not found, until they are forgotten."""
    _events: list[EngineEvent] = field(default_factory=list)
    _due: list[tuple[float, int, str]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _pids: itertools.count[int] = field(default_factory=lambda: itertools.count(FIRST_PID, 2))
    _wake: Callable[[], None] | None = None

    # --- the protocol -------------------------------------------------------------------------------

    def adopt(self, runs: Sequence[OpenRun]) -> None:
        """See `ports.Engine`; hands out again what was handed out and not forgotten."""
        self._advance()
        self._events.clear()
        for known in runs:
            run = self._runs.get(known.run)
            if run is None:
                self._events.append(self._missing(known))
            elif run.end is not None:
                self._events.append(run.end)
            else:
                self._events.append(self._started(run))
                self._bring_in_line(run, known)
        self._fire()

    def reconcile(self, runs: Sequence[OpenRun], ended: Iterable[str] = ()) -> None:
        self._forget(ended)
        lost = [known.run for known in runs if known.supervisor_pid is None and known.run in self._runs]
        fresh = [known.ticket for known in runs if known.ticket is not None and known.run not in self._given_back]
        self._start(fresh)
        for known in runs:
            run = self._runs.get(known.run)
            if run is None:
                if known.run not in self._given_back:
                    self._given_back.add(known.run)
                    self._events.append(self._missing(known))
            elif run.end is None:
                if known.run in lost:
                    self._events.append(self._started(run))
                self._bring_in_line(run, known)
        self._fire()

    def _bring_in_line(self, run: SimulatedRun, wanted: OpenRun) -> None:
        for order in run.given.missing(wanted):
            self.order(run.ticket.run, order)

    def _start(self, tickets: Sequence[Ticket]) -> None:
        self._advance()
        now = self.clock.now()
        for ticket in tickets:
            if ticket.run in self._runs:
                continue
            outcome = self.outcome(ticket)
            run = SimulatedRun(ticket, outcome, next(self._pids), start_at=now)
            run.given.limit = LimitOrder(ticket.time_limit_s)
            self._runs[ticket.run] = run
            if outcome.never_starts or ticket.run in self._revoked:
                self._revoked.add(ticket.run)
                self._end(run, RunNeverStarted(ticket.run, now, "it was claimed or revoked before"))
            elif ticket.interactive is not None:
                text = "the simulated engine has no terminals and no clients: it cannot run a job in the foreground"
                self._end(run, RunEnded(ticket.run, None, now, launch_error=text))
            elif outcome.prolog_fault is not None:
                self._end(run, RunEnded(ticket.run, None, now, prolog_fault=outcome.prolog_fault))
            elif outcome.launch_error is not None:
                self._end(run, RunEnded(ticket.run, None, now, launch_error=outcome.launch_error))
            else:
                run.finish_at = NEVER if ticket.holds and not outcome.lost else now + outcome.runs_s
                run.limit_at = NEVER if ticket.time_limit_s is None else now + ticket.time_limit_s
                self._events.append(self._started(run))
                self._schedule(run)
        self._fire()

    def order(self, run: str, order: Order) -> None:
        self._advance()
        found = self._runs.get(run)
        if found is None or found.end is not None:
            return
        now = self.clock.now()
        if isinstance(order, StopOrder):
            self._stop(found, now, order)
        elif isinstance(order, LimitOrder):
            limit_s = order.time_limit_s
            found.limit_at = NEVER if limit_s is None else found.start_at + found.suspended_s + limit_s
        elif isinstance(order, SuspendOrder):
            self._suspend(found, now)
        elif isinstance(order, ResumeOrder):
            self._resume(found, now)
        elif isinstance(order, NoteOrder):
            pass  # there is no terminal to show it
        elif isinstance(order, StepStopOrder):
            self.step_stops.append((run, order))
        elif isinstance(order, EnterOrder):
            self.entered.append((run, order))
        else:
            assert isinstance(order, SignalOrder)
            self.signals.append((run, order))
            if order.signal == signal.SIGKILL:
                self._resume(found, now)
                found.finish_at = now
                found.outcome = SimulatedOutcome(signal=signal.SIGKILL)
        found.given.add(order)
        self._schedule(found)
        self._fire()

    def events(self) -> list[EngineEvent]:
        self._advance()
        events, self._events = self._events, []
        return events

    def _forget(self, runs: Iterable[str]) -> None:
        for run in runs:
            self._given_back.discard(run)
            found = self._runs.get(run)
            if found is not None and found.end is not None:
                del self._runs[run]

    def owners(self, pids: Iterable[int]) -> Mapping[int, str]:
        alive = {run.pid: run.ticket.run for run in self._runs.values() if run.end is None}
        return {pid: alive[pid] for pid in pids if pid in alive}

    def checkpoints(self) -> Mapping[str, float]:
        return {run: at for run, at in self.saved_at.items() if run in self._runs and self._runs[run].end is None}

    def cpu_seconds(self, runs: Iterable[str]) -> Mapping[str, float]:
        living = {run for run, found in self._runs.items() if found.end is None}
        return {run: self.cpu_s_of[run] for run in runs if run in self.cpu_s_of and run in living}

    def set_waker(self, wake: Callable[[], None] | None) -> None:
        """See `ports.Engine`. Time alone triggers no wake-up: the caller that moves the clock asks for the events."""
        self._wake = wake
        self._fire()

    def close(self) -> None:
        self._wake = None

    # --- for the caller that moves the clock ------------------------------------------------------------------

    def next_event_at(self) -> float | None:
        """When `events` will have something new; None when no run ends by itself."""
        if self._events:
            return self.clock.now()
        while self._due:
            at, _, name = self._due[0]
            run = self._runs.get(name)
            if run is not None and run.due_at() == at:
                return at
            heapq.heappop(self._due)
        return None

    # --- what happens -----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Apply everything due, each at its own instant."""
        now = self.clock.now()
        while self._due and self._due[0][0] <= now:
            at, _, name = heapq.heappop(self._due)
            run = self._runs.get(name)
            if run is not None and run.due_at() == at:
                self._happen(run, at)
                self._schedule(run)

    def _happen(self, run: SimulatedRun, at: float) -> None:
        name, outcome = run.ticket.run, run.outcome
        if run.epilog_ends_at is not None:
            self._finish(run, at, run.killed_by)
        elif run.lingering and run.stopped_by is None and run.limit_at <= at < min(run.gone_at, run.kill_at):
            run.stopped_by = "timeout"
            self._events.append(RunStopping(name, at, "timeout"))
        elif run.lingering:
            self._finish(run, at, outcome.signal, leftovers=outcome.leftovers)
        elif run.finish_at <= at:
            if outcome.lost:
                self._end(run, RunLost(name, at, "its supervisor ended without a result"))
            elif outcome.leftovers and run.stopped_by is None:
                run.lingering = True
                run.gone_at = at + run.ticket.leftover_grace_s
                self._events.append(RunStopping(name, at, "leftovers"))
            else:
                self._finish(run, at, outcome.signal)
        elif run.stopped_by is not None:
            killed = run.kill_at <= at and run.gone_at > at
            if outcome.stop_code is not None and not killed:
                run.exit_code = outcome.stop_code
                self._finish(run, at, None)
            else:
                self._finish(run, at, signal.SIGKILL if killed else run.stop_signal)
        else:
            self._stop(run, at, StopOrder("timeout", grace_s=run.ticket.limit_grace_s))

    def _stop(self, run: SimulatedRun, at: float, order: StopOrder) -> None:
        ticket = run.ticket
        if ticket.holds and order.why == "job_ended":
            # What is left of a stop ends as well: nothing enters simulated runs.
            self._finish(run, at, None)
            return
        if run.epilog_ends_at is not None or (order.why in ("preempt", "requeue") and run.stopped_by is not None):
            return
        self._resume(run, at)
        run.kill_at = min(run.kill_at, at + (ticket.grace_s if order.grace_s is None else order.grace_s))
        if run.lingering:
            return
        if run.stopped_by is None:
            run.stopped_by = order.why
            run.stop_signal = _first_signal(run, at, order)
            run.gone_at = at + (0.0 if ticket.holds else run.outcome.stop_takes_s)
            self._events.append(RunStopping(ticket.run, at, order.why))
        elif order.why == "cancel" and run.stopped_by in ("preempt", "requeue"):
            run.stopped_by = "cancel"

    def _suspend(self, run: SimulatedRun, at: float) -> None:
        if run.still_since is None and run.stopped_by is None and not run.lingering:
            run.still_since = at
            self._events.append(RunSuspended(run.ticket.run, at))

    def _resume(self, run: SimulatedRun, at: float) -> None:
        if run.still_since is None:
            return
        passed_s = at - run.still_since
        run.still_since = None
        run.suspended_s += passed_s
        run.finish_at += passed_s
        run.limit_at += passed_s
        self._events.append(RunResumed(run.ticket.run, at, run.suspended_s))

    def _finish(self, run: SimulatedRun, at: float, number: int | None, leftovers: tuple[str, ...] = ()) -> None:
        outcome = run.outcome
        code = outcome.exit_code if run.exit_code is None else run.exit_code
        if outcome.epilog_s and run.epilog_ends_at is None:
            run.epilog_ends_at, run.killed_by = at + outcome.epilog_s, number
            if run.stopped_by is None:
                self._events.append(RunStopping(run.ticket.run, at, "epilog"))
            return
        self._end(
            run,
            RunEnded(
                run.ticket.run,
                run.start_at,
                at,
                exit_code=code if number is None else None,
                signal=None if number is None else int(number),
                stopped_by=run.stopped_by,
                is_done=outcome.says_done and run.stopped_by in COMES_BACK and code == 0 and number is None,
                gpu_oom=outcome.gpu_oom and run.stopped_by is None,
                epilog_fault=outcome.epilog_fault,
                oom_kills=outcome.oom_kills,
                at_mem_limit=outcome.mem_limit_mib is not None,
                mem_limit_mib=outcome.mem_limit_mib,
                cpu_s=outcome.cpu_s,
                peak_mem_mib=outcome.peak_mem_mib,
                leftovers=leftovers,
                suspended_s=run.suspended_s,
            ),
        )

    def _end(self, run: SimulatedRun, event: EngineEvent) -> None:
        run.end = event
        self._events.append(event)

    def _missing(self, known: OpenRun) -> EngineEvent:
        """Event for a run that this engine never had or has lost."""
        now = self.clock.now()
        if known.boot_id != self.boot_id:
            return RunLost(known.run, now, "the machine was restarted")
        if known.supervisor_pid is not None:
            return RunLost(known.run, now, "its supervisor ended without a result")
        self._revoked.add(known.run)
        return RunNeverStarted(known.run, now, "it was not started before the daemon ended")

    def _started(self, run: SimulatedRun) -> RunStarted:
        return RunStarted(run.ticket.run, run.start_at, run.pid + 1, 1, run.pid)

    def _schedule(self, run: SimulatedRun) -> None:
        at = run.due_at()
        if at < NEVER:
            heapq.heappush(self._due, (at, next(self._order), run.ticket.run))

    def _fire(self) -> None:
        if self._wake is not None and self._events:
            self._wake()


def _first_signal(run: SimulatedRun, at: float, order: StopOrder) -> int:
    """First signal of a stop."""
    number = run.ticket.launch.stop_signal if order.signal is None else order.signal
    if number is not None:
        return number
    notice = run.ticket.launch.notice
    if notice is None or order.why == "timeout" or at >= run.limit_at - notice.before_s:
        return signal.SIGTERM
    return notice.signal
