"""What orders and the clock do to the processes of a run: suspend, limit, stop and kill. Instants are monotonic.

One list of timers answers both how long to sleep and what is due, so that nothing can be due for which nobody wakes up.
"""

from __future__ import annotations

import time

from gpusched.engine.linux import proctree

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping
    from typing import Any, Protocol

    from gpusched.engine.supervisor.interactive import Session
    from gpusched.engine.supervisor.logs import Logs
    from gpusched.engine.supervisor.processes import RunProcesses

    Report = Callable[..., None]

    class TimedAction(Protocol):
        """Has something to do at an instant, or never."""

        @property
        def due_at(self) -> float | None: ...

        def act(self, now: float) -> None:
            """Do it, and set the instant of the next time, if any."""

    class RestingAction(TimedAction, Protocol):
        """Waits as long as the run is suspended."""

        def shift(self, passed_s: float) -> None:
            """Exclude the seconds for which the run was suspended."""
else:
    import _signal as signal


NOTICE_S = 0.5
"""Between TSTP, which a process may catch to release resources, and STOP, which it cannot catch."""
LOOK_AGAIN_S = (0.02, 2.0)
"""First and longest interval between rounds of STOP while some process still runs."""
LINGER_S = 0.25
"""How long processes may outlive the job's first one undisturbed: a `tee` behind a shell still has to flush."""
KILL_AGAIN_S = (0.01, 0.5)
"""First and longest interval between rounds of KILL."""
BECAUSE = {
    "timeout": " DUE TO TIME LIMIT",
    "preempt": " DUE TO PREEMPTION",
    "requeue": " DUE TO JOB REQUEUE",
    "lease": " DUE TO END OF LEASE",
    "vram_over": " DUE TO GPU MEMORY BEYOND ITS BOOKING",
    "unbooked_use": " DUE TO USE OF A GPU THAT IT DID NOT BOOK",
    "client_lost": " DUE TO LOSS OF ITS CLIENT",
    "shutdown": " DUE TO SHUTDOWN OF THE MACHINE",
    "gang": " DUE TO FAILURE OF A RANK",
    "node_fail": " DUE TO NODE FAILURE",
    "head_lost": " DUE TO LOSS OF CONTACT WITH THE SCHEDULER",
}
COMES_BACK = ("preempt", "requeue", "shutdown", "head_lost")
"""As in `model.execution`, which supervisors do not import."""


class Timer:
    """One action, done once at the instant that was set. Args: action: gets the present instant."""

    __slots__ = ("_action", "due_at")

    def __init__(self, action: Callable[[float], object]) -> None:
        self._action = action
        self.due_at: float | None = None

    def set_by(self, at: float) -> None:
        """Set an instant, unless an earlier one is set."""
        if self.due_at is None or at < self.due_at:
            self.due_at = at

    def act(self, now: float) -> None:
        self.due_at = None
        self._action(now)

    def shift(self, passed_s: float) -> None:
        if self.due_at is not None:
            self.due_at += passed_s


class RunTimers:
    """All that one run has to do by the clock, in this order where several things are due."""

    def __init__(self, resting: list[RestingAction], always: list[TimedAction]) -> None:
        self.resting = resting
        """What waits while the run is suspended."""
        self.always = always
        self._is_suspended = False

    def suspend(self) -> None:
        """Let rest what waits for the run."""
        self._is_suspended = True

    def resume(self, passed_s: float) -> None:
        """Go on with it. Args: passed_s: since `suspend`."""
        self._is_suspended = False
        for timed in self.resting:
            timed.shift(passed_s)

    def next_at(self) -> float | None:
        """When something is due; None if nothing ever is."""
        return min([timed.due_at for timed in self._running() if timed.due_at is not None], default=None)

    def act(self, now: float) -> None:
        """Do what is due, including what becomes due meanwhile further down the list."""
        for timed in self._running():
            if timed.due_at is not None and now >= timed.due_at:
                timed.act(now)

    def _running(self) -> list[TimedAction]:
        return [*self.always] if self._is_suspended else [*self.resting, *self.always]


class Suspension:
    """How long one run has been suspended, and the rounds of STOP until all of it is."""

    def __init__(self, processes: RunProcesses, report: Report) -> None:
        self._processes = processes
        self._report = report
        self.is_wanted = False
        """Ordered before the job was started: it is suspended from its first instant."""
        self.since_at: float | None = None
        self.total_s = 0.0
        self.rounds = Timer(self.freeze)
        """Set until all processes are stopped."""
        self._is_told = False
        """Whether the daemon knows of this one."""
        self._pause_s = LOOK_AGAIN_S[0]

    def begin(self, now: float) -> None:
        """Stop time for the run."""
        self.since_at = now
        self.rounds.due_at = now + NOTICE_S
        self._is_told = False
        self._pause_s = LOOK_AGAIN_S[0]

    def freeze(self, now: float) -> None:
        """Send one round of STOP; reports the suspension once."""
        if not proctree.freeze_all(self._processes.members):
            self.rounds.due_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LOOK_AGAIN_S[1])
        if not self._is_told:
            self._is_told = True
            self._report("suspended", at=time.time())

    def end(self, now: float) -> float:
        """Resume time. Returns: seconds suspended."""
        passed_s = 0.0 if self.since_at is None else now - self.since_at
        self.total_s += passed_s
        self.since_at = self.rounds.due_at = None
        return passed_s

    def so_far_s(self, now: float) -> float:
        """Total suspended time, including the current suspension."""
        return self.total_s + (0.0 if self.since_at is None else now - self.since_at)


class RunControl:
    """Suspends, limits and stops one run. One class: orders, the clock and the ends of processes ask the same facts.

    Args: run: its name, for messages. terms: how it wants to be stopped, as in a ticket: `grace_s`, `leftover_grace_s`;
    and where it has them `limit_grace_s`, `notice`, `stop_signal`, `slurm`. report: tells the daemon of an event.
    """

    def __init__(self, run: str, processes: RunProcesses, terms: Mapping[str, Any], report: Report) -> None:
        self.run = run
        self.processes = processes
        self.terms = terms
        self.report = report
        self.session: Session | None = None
        """Of a foreground run."""
        self.logs: Logs | None = None
        self.start_at: float | None = None
        self.started = 0.0
        self._early_signals: list[list[str]] = []
        """Orders that came before the start, and wait for it as the kernel keeps signals pending."""
        self.is_over = False
        """Only epilogs are left, which no order reaches."""
        self.stopping: str | None = None
        self.stopped_by: str | None = None
        self.is_noticed = False
        self.only_main = False
        """Only the first process got the signal that the run is being stopped."""
        self.suspension = Suspension(processes, report)
        self.notice, self.limit = Timer(self.give_notice), Timer(self.reach_limit)
        self.linger = Timer(self.end_leftovers)
        self.kills = Timer(self.kill)
        self.kill_pause_s = KILL_AGAIN_S[0]
        # KILL comes last: what is found to be over by the others is killed at once.
        self.timers = RunTimers([self.notice, self.limit], [self.suspension.rounds, self.linger, self.kills])

    def attach(self, session: Session) -> None:
        """Take demands of the client and the clock from the foreground of the run."""
        self.session = session
        self.timers.resting.append(session)

    def begin(self, start_at: float, started: float) -> None:
        """Note the start, and deliver the signals that have waited for it. Args: instants by either clock."""
        self.start_at, self.started = start_at, started
        early, self._early_signals = self._early_signals, []
        for words in early:
            self.handle_order(words)

    def left_s(self) -> float | None:
        """How long to sleep at most; None: until something comes."""
        at = self.timers.next_at()
        return None if at is None else max(0.0, at - time.monotonic())

    def act(self) -> None:
        """Do what is due."""
        self.timers.act(time.monotonic())
        if self.session is not None:
            self.handle_session_orders(self.session)

    # --- orders -----------------------------------------------------------------------------------

    def handle_session_orders(self, session: Session) -> None:
        orders, session.orders = session.orders, []
        for line in orders:
            self.handle_order(line.split(" "))

    def handle_order(self, words: list[str]) -> None:
        """Carry out `stop WHY SIGNAL|- GRACE|- .`, `signal NUMBER SCOPE .`, `suspend .` or `resume .`."""
        if self.is_over:
            return
        if words[0] == "stop":
            number = None if words[2] == "-" else int(words[2])
            self.stop(words[1], number, None if words[3] == "-" else float(words[3]))
        elif words[0] == "signal" and self.start_at is None:
            self._early_signals.append(words)
        elif words[0] == "signal":
            number = int(words[1])
            # Only a resume order continues a suspended run.
            if number != signal.SIGCONT or self.suspension.since_at is None:
                self.processes.deliver(number, words[2])
        elif words[0] == "suspend":
            self.suspend()
        elif words[0] == "resume":
            self.resume()

    # --- the time limit ---------------------------------------------------------------------------

    def set_limit(self, limit_s: float | None) -> None:
        began = self.started + self.suspension.total_s
        self.limit.due_at = None if limit_s is None else began + limit_s
        self.notice.due_at = None
        notice = self.terms.get("notice")
        if notice is not None and self.limit.due_at is not None:
            self.notice.due_at = max(began, self.limit.due_at - notice["before_s"])

    def give_notice(self, now: float) -> None:
        notice = self.terms["notice"]
        if self.stopping is None:
            self.is_noticed = True
            self.processes.deliver(notice["signal"], self.scope_of(notice))

    def scope_of(self, notice: Mapping[str, Any]) -> str:
        """Who gets the job's notice; with Slurm's commands its steps."""
        return "main" if notice["main_only"] else "steps" if self.terms.get("slurm") else "tree"

    def reach_limit(self, now: float) -> None:
        """Handle the time limit, for the job's first process or for leftovers."""
        if self.linger.due_at is not None:
            # The job has just ended; processes still flushing its output have not outlived the limit.
            self.limit.due_at = self.linger.due_at
        elif self.stopping is None:
            self.stop("timeout", None, None)
        elif self.stopped_by is None:
            self.stopped_by = "timeout"
            self.tell_stop("timeout")

    # --- suspending -------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Give notice and stop the clocks; processes that still run soon after are stopped by force."""
        if self.start_at is None:
            self.suspension.is_wanted = True
        elif self.stopping is None and self.processes.status is None and self.suspension.since_at is None:
            self.suspension.begin(time.monotonic())
            self.timers.suspend()
            self.processes.deliver(signal.SIGTSTP)

    def resume(self) -> None:
        self.suspension.is_wanted = False
        if self.suspension.since_at is not None:
            self.thaw()
            self.processes.deliver(signal.SIGCONT)

    def thaw(self) -> None:
        """Resume the clocks: deadlines move by the suspended time."""
        if self.suspension.since_at is None:
            return
        self.timers.resume(self.suspension.end(time.monotonic()))
        self.report("resumed", at=time.time(), suspended_s=self.suspension.total_s)

    # --- ending -----------------------------------------------------------------------------------

    def stop(self, why: str, number: int | None, grace_s: float | None) -> None:
        """Begin to end the run; during a stop, signal it again and perhaps shorten its grace."""
        if self.is_over or not self.processes.takes_stop(why, grace_s):
            return
        if self.start_at is None:
            self.stopped_by = "cancel" if why == "cancel" else self.stopped_by or why
            return
        if why in ("preempt", "requeue", "timeout") and self.stopping is not None:
            # Sent again by a new daemon, or for another node: the job is busy saving its work and knows why.
            return
        self.thaw()
        if grace_s is None and why == "timeout":
            grace_s = self.terms["limit_grace_s"]
        if self.stopping is None and self.processes.status is None and not self.processes.has_just_ended():
            self.stopping = self.stopped_by = why
            self.tell_stop(why)
            if self.session is not None:
                self.session.say(f"job {self.run.partition('.')[0]} is being ended{BECAUSE.get(why, '').lower()}")
        elif why == "cancel" and self.stopped_by in COMES_BACK:
            # A cancelled job must not.
            self.stopped_by = why
        # The grace begins here, so that reporting the stop takes nothing from it.
        grace_s = self.terms["grace_s"] if grace_s is None else grace_s
        self.kills.set_by(time.monotonic() + grace_s)
        if grace_s > 0:
            is_notice = self.announce(why, number)
            if self.session is not None and self.session.is_terminal and not is_notice:
                # A shell at a terminal ignores TERM, and ends with what runs in it when that is hung up.
                self.processes.deliver(signal.SIGHUP)
            # A stopped process would not see it.
            self.processes.deliver(signal.SIGCONT)

    def announce(self, why: str, number: int | None) -> bool:
        """Send the first signal of a stop; returns whether it is the one of the job's own notice.

        Source: send_user_signal of slurm.conf(5): the user's signal in place of TERM, unless it was sent already.
        """
        processes, notice = self.processes, self.terms.get("notice")
        number = self.terms.get("stop_signal") if number is None else number
        # The notice was for its first process alone, which is gone.
        is_past = notice is not None and notice["main_only"] and processes.status is not None
        is_plain = "timeout" in (why, self.stopped_by) or (self.terms.get("slurm") and why != "preempt")
        if number is not None or notice is None or is_past or self.is_noticed or is_plain:
            processes.deliver(signal.SIGTERM if number is None else number)
            return False
        self.only_main = notice["main_only"]
        scope = self.scope_of(notice)
        is_left_out = processes.deliver(notice["signal"], scope)
        if scope == "steps" and not is_left_out:
            # There are no steps that could react to it.
            processes.deliver(signal.SIGTERM)
        elif is_left_out:
            # A script's shell would continue with its next line, and its end would pass for the job's own.
            processes.deliver(signal.SIGTERM, "main")
        return True

    def terminate(self) -> None:
        """Send TERM to all of it, and see to it that it is seen."""
        self.processes.deliver(signal.SIGTERM)
        self.processes.deliver(signal.SIGCONT)

    def tell_stop(self, why: str) -> None:
        """Report the stop to the daemon and in the job's output."""
        self.report("stopping", at=time.time(), why=why)
        if self.logs is not None:
            what = f"CANCELLED AT {time.strftime('%Y-%m-%dT%H:%M:%S')}{BECAUSE.get(why, '')}"
            job_id = self.run.partition(".")[0]
            if node := self.terms.get("slurm"):
                self.logs.say(f"error: *** JOB {job_id} ON {node} {what} ***", "slurmstepd")
            else:
                self.logs.say(f"job {job_id} {what}")

    def first_ended(self, status: int) -> None:
        """The job's first process has ended: end what is left of it."""
        self.processes.status = status
        self.notice.due_at = self.suspension.rounds.due_at = None
        if self.processes.visits is not None:
            self.processes.visits.end()
        if self.stopping is None or self.processes.container is not None:
            self.linger.due_at = time.monotonic() + LINGER_S
        if self.stopping is not None and self.only_main:
            self.terminate()

    def end_leftovers(self, now: float) -> None:
        """End and name the processes that outlived the job's first one."""
        self.thaw()
        container = self.processes.container
        if container is not None and container.is_over(self.processes.members):
            # They hold what podman may need for the user's next container, and nothing of the job's.
            self.kills.due_at = now
            return
        if self.stopping is not None:
            return
        self.processes.name_leftovers(self.processes.members())
        self.stopping = "leftovers"
        self.report("stopping", at=time.time(), why="leftovers")
        self.kills.set_by(now + self.terms["leftover_grace_s"])
        self.terminate()

    def kill(self, now: float) -> None:
        """One round of KILL, and again, until the kernel reports no child left: some are found only now."""
        self.processes.kill()
        self.kills.due_at = time.monotonic() + self.kill_pause_s
        self.kill_pause_s = min(2 * self.kill_pause_s, KILL_AGAIN_S[1])
