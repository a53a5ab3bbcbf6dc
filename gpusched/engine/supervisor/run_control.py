"""What is done to a run, by orders and by the clock: signals, suspension, limits, the kill. Instants are monotonic."""

from __future__ import annotations

import os
import time

from gpusched.engine import spool as files
from gpusched.engine.linux import proctree
from gpusched.engine.supervisor import launch
from gpusched.engine.supervisor.priority import OomScores, raise_priority
from gpusched.engine.wire import PIPE_BUF, encode_event

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Container, Iterable
    from typing import Any

    from gpusched.engine.linux.cgroup import RunCgroup
    from gpusched.engine.supervisor.contact import ContactWatch
    from gpusched.engine.supervisor.container import RunContainer
    from gpusched.engine.supervisor.interactive import Session
    from gpusched.engine.supervisor.launch import StartCommand
    from gpusched.engine.supervisor.logs import Logs
    from gpusched.engine.supervisor.ranks import Ranks
    from gpusched.engine.supervisor.steps import StepEnds
    from gpusched.engine.supervisor.visits import Visits
else:
    import _signal as signal


NOTICE_S = 0.5
"""Between TSTP, which a process may catch to release resources, and STOP, which it cannot catch."""
LOOK_AGAIN_S = (0.02, 2.0)
"""First and longest interval between rounds of STOP while some process still runs."""


class SuspendClock:
    """How long one run has been suspended. Instants are on the monotonic clock."""

    def __init__(self) -> None:
        self.is_wanted = False
        """Ordered before the job was started: it is suspended from its first instant."""
        self.is_told = False
        """Whether the daemon knows of this one."""
        self.look_at: float | None = None
        """When the next round of STOP is due; None once all processes are stopped."""
        self.pause_s = LOOK_AGAIN_S[0]
        self.since: float | None = None
        self.total_s = 0.0

    def begin(self, now: float) -> None:
        """Stop time for the run."""
        self.since = now
        self.is_told = False
        self.look_at = now + NOTICE_S
        self.pause_s = LOOK_AGAIN_S[0]

    def look_again(self, now: float, is_still: bool) -> None:
        """Schedule the next round of STOP."""
        self.look_at = None if is_still else now + self.pause_s
        self.pause_s = min(2 * self.pause_s, LOOK_AGAIN_S[1])

    def end(self, now: float) -> float:
        """Resume time. Returns: seconds suspended, by which deadlines are moved."""
        passed_s = 0.0 if self.since is None else now - self.since
        self.total_s += passed_s
        self.since = self.look_at = None
        return passed_s

    def so_far_s(self, now: float) -> float:
        """Total suspended time, including the current suspension."""
        return self.total_s + (0.0 if self.since is None else now - self.since)


LINGER_S = 0.25
"""How long processes may outlive the job's first one undisturbed: a `tee` behind a shell still has to flush."""
KILL_AGAIN_S = (0.01, 0.5)
"""First and longest interval between rounds of KILL."""
PROLOG_GRACE_S = 5.0
"""Most between TERM and KILL for a job's own prolog that takes too long."""
LEFTOVERS_NAMED = 256
ORDER_SIGNAL = signal.SIGUSR1
"""Read the order file. Not TERM, which others send: it means a cancel, or that the machine is shutting down."""
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
AWAITED = frozenset({signal.SIGCHLD, signal.SIGTERM, ORDER_SIGNAL})
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


def wake_on_signals(fd: int) -> None:
    """Write the numbers of AWAITED signals, blocked until now, to this descriptor."""
    for number in AWAITED:
        signal.signal(number, lambda *_: None)  # only the wake-up counts
    signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)


class Home:
    """State shared by all runs that one supervisor process serves, one after the other."""

    def __init__(
        self, spool: str, boot_id: str, event_fd: int, start_ticks: int, oom_scores: OomScores | None = None
    ) -> None:
        """Args: oom_scores: of this process and of its jobs; None leaves them alone."""
        self.spool = spool
        self.boot_id = boot_id
        self.event_fd = event_fd
        self.pid = os.getpid()
        self.start_ticks = start_ticks
        self.oom_scores = oom_scores
        self.checkpoints = launch.CheckpointBase()


class RunControl:
    """The processes of one run from their start on, and all that can be done to them."""

    def __init__(self, ticket: dict[str, Any], home: Home) -> None:
        self.ticket = ticket
        self.run: str = ticket["run"]
        self.is_script = ticket["script"] is not None
        self.home = home
        self.session: Session | None = None
        self.box: RunCgroup | None = None
        self.container: RunContainer | None = None
        self.contact: ContactWatch | None = None
        """For a run with a lease."""
        self.heard = True
        self.record_fd = -1
        self.snapshot_fd: int | None = None
        """Keeps a snapshot that was fetched from being removed."""
        self.order_offset = 0
        self.logs: Logs | None = None
        self.job_pid = 0
        """Of the prolog as long as that runs."""
        self.ranks: Ranks | None = None
        self.start_command: StartCommand | None = None
        """Starts the command while the job's own prolog runs."""
        self.prolog_until: float | None = None
        self.cause: str | None = None
        """Why the run failed before its command was started, as a sentence."""
        self.launch_error: str | None = None
        self.is_over = False
        """Only epilogs are left, which no order reaches."""
        self.start_at: float | None = None
        self.started = 0.0
        self.status: int | None = None
        self.cpu_s = 0.0
        self.system_cpu_s: float | None = 0.0
        self.peak_kib = 0
        self.stopping: str | None = None
        self.stopped_by: str | None = None
        self.done: bool | None = None
        """What `Supervisor.says_done` has found."""
        self.leftovers: dict[int, str] = {}
        self.limit_at: float | None = None
        self.notice_at: float | None = None
        self.is_noticed = False
        self.only_main = False
        """Only the first process got the signal that the run is being stopped."""
        self.still = SuspendClock()
        self.step_ends: StepEnds | None = None
        """Steps that are being ended; None if none ever was."""
        self.visits: Visits | None = None
        """What was started in the run from outside; None if nothing ever was."""
        self.env = b""
        """The environment of the job, NUL-terminated."""
        self.moved: str | None = None
        """Where the job's output is instead of where it was wanted, as a sentence."""
        self.doors: list[str] = []
        """Tokens of visits that wait for the start."""
        self.linger_until: float | None = None
        self.kills_at: float | None = None
        self.kill_pause_s = KILL_AGAIN_S[0]
        self.raise_at: float | None = None
        """When this process goes before its job at the processors."""
        self.is_raised = False
        self.untold = b""
        """That the job was started, as long as the daemon does not know."""
        self.tell_at: float | None = None

    # --- waiting ----------------------------------------------------------------------------------

    def listen(self, session: Session, timeout_s: float | None) -> None:
        """Pass on output and input, and carry out the client's requests."""
        self.handle_signals(session.wait(timeout_s))
        self.handle_session_orders(session)

    def handle_session_orders(self, session: Session) -> None:
        orders, session.orders = session.orders, []
        for line in orders:
            self.handle_order(line.split(" "))

    def members(self, settled: Container[int] = ()) -> Iterable[proctree.Process]:
        """Yield processes of the run as they are found; see `proctree.walk`."""
        found = proctree.walk(self.home.pid, settled)
        return found if self.visits is None else self.visits.without_hosts(found)

    def wait(self) -> None:
        """Sleep until a child ends, an order comes or something is due."""
        moving = (self.limit_at, self.notice_at, self.prolog_until) if self.still.since is None else ()
        looks_at = None if self.box is None else self.box.look_at
        steps_at = None if self.step_ends is None else self.step_ends.due_at
        contact_at = None if self.contact is None else self.contact.look_at
        any_time = (
            self.tell_at,
            self.raise_at,
            self.still.look_at,
            self.linger_until,
            self.kills_at,
            looks_at,
            steps_at,
            contact_at,
        )
        due = [at for at in (*moving, *any_time) if at is not None]
        if self.session is not None:
            at = self.session.due_at() if self.still.since is None else None
            due += [] if at is None else [at]
        self.sleep(max(0.0, min(due) - time.monotonic()) if due else None)

    def sleep(self, left_s: float | None) -> None:
        """Sleep until a child ends, an order comes or the time is over; passes on output and input meanwhile."""
        if self.session is not None:
            self.listen(self.session, left_s)
            return
        if self.logs is not None and self.logs.is_copied:
            self.logs.wait(AWAITED, left_s)
            left_s = 0.0
        info = signal.sigwaitinfo(AWAITED) if left_s is None else signal.sigtimedwait(AWAITED, left_s)
        if info is not None:
            self.handle_signals((info.si_signo,))

    def handle_signals(self, numbers: Iterable[int]) -> None:
        if ORDER_SIGNAL in numbers:
            self.read_orders()
        if signal.SIGTERM in numbers:
            from gpusched.engine.going_down import machine_goes_down  # no run that ends by itself needs it

            self.stop("shutdown" if machine_goes_down() else "cancel", None, None)

    def act(self, now: float) -> None:
        """Do what is due. Notice and limit of a suspended run never are."""
        if self.tell_at is not None and now >= self.tell_at:
            self.send(b"")
        if self.raise_at is not None and now >= self.raise_at:
            self.raise_at = None
            self.is_raised = raise_priority()
        moves = self.still.since is None
        if moves and self.session is not None:
            self.session.act(now)
            self.handle_session_orders(self.session)
        if moves and self.notice_at is not None and now >= self.notice_at:
            self.notice_at = None
            notice = self.ticket["notice"]
            if self.stopping is None:
                self.is_noticed = True
                self.deliver(notice["signal"], self.scope_of(notice))
        if moves and self.limit_at is not None and now >= self.limit_at:
            self.reach_limit()
        if moves and self.prolog_until is not None and now >= self.prolog_until:
            self.end_prolog()
        if self.still.look_at is not None and now >= self.still.look_at:
            self.freeze(now)
        if self.box is not None and self.box.look_at is not None and now >= self.box.look_at:
            self.box.look(now)
        if self.step_ends is not None:
            self.step_ends.act(now)
        if self.contact is not None and self.contact.look_at is not None and now >= self.contact.look_at:
            self.look_for_contact(self.contact)
        if self.linger_until is not None and now >= self.linger_until:
            self.linger_until = None
            self.end_leftovers(now)
        if self.kills_at is not None and now >= self.kills_at:
            killed = proctree.kill_all(self.members)
            if self.box is not None:
                # Including processes that fork faster than they are found.
                self.box.kill()
            if self.visits is not None:
                self.visits.end()
            if self.status is not None:
                self.name_leftovers(killed.values())
            # Again, until the kernel reports no child left: some are found only now.
            self.kills_at = time.monotonic() + self.kill_pause_s
            self.kill_pause_s = min(2 * self.kill_pause_s, KILL_AGAIN_S[1])

    def reach_limit(self) -> None:
        """Handle the time limit, for the job's first process or for leftovers."""
        if self.linger_until is not None:
            # The job has just ended; processes still flushing its output have not outlived the limit.
            self.limit_at = self.linger_until
            return
        self.limit_at = None
        if self.stopping is None:
            self.stop("timeout", None, None)
        elif self.stopped_by is None:
            self.stopped_by = "timeout"
            self.notify_stopping("timeout")

    def look_for_contact(self, contact: ContactWatch) -> None:
        """End the run if its lease has: the head will start it elsewhere."""
        left_s = contact.look()
        if left_s is not None:
            self.stop("head_lost", None, left_s)

    def end_prolog(self) -> None:
        """End the job's own prolog, which took too long."""
        self.prolog_until = None
        self.deliver(signal.SIGTERM)
        self.deliver(signal.SIGCONT)
        self.kills_at = time.monotonic() + min(self.ticket["grace_s"], PROLOG_GRACE_S)

    # --- suspending -------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Give notice and stop the clocks; processes that still run soon after are stopped by force."""
        if self.start_at is None:
            self.still.is_wanted = True
        elif self.stopping is None and self.status is None and self.still.since is None:
            self.still.begin(time.monotonic())
            self.deliver(signal.SIGTSTP)

    def freeze(self, now: float) -> None:
        """Send one round of STOP; reports the suspension once."""
        self.still.look_again(now, proctree.freeze_all(self.members))
        if not self.still.is_told:
            self.still.is_told = True
            self.notify("suspended", at=time.time())

    def resume(self) -> None:
        self.still.is_wanted = False
        if self.still.since is not None:
            self.thaw()
            self.deliver(signal.SIGCONT)

    def thaw(self) -> None:
        """Resume the clocks: deadlines move by the suspended time."""
        if self.still.since is None:
            return
        passed_s = self.still.end(time.monotonic())
        if self.limit_at is not None:
            self.limit_at += passed_s
        if self.notice_at is not None:
            self.notice_at += passed_s
        if self.prolog_until is not None:
            self.prolog_until += passed_s
        if self.session is not None and self.session.lease is not None:
            self.session.lease.shift(passed_s)
        self.notify("resumed", at=time.time(), suspended_s=self.still.total_s)

    # --- ending -----------------------------------------------------------------------------------

    def stop(self, why: str, number: int | None, grace_s: float | None) -> None:
        """Begin to end the run; during a stop, signal it again and perhaps shorten its grace."""
        if self.is_over:
            return
        if self.start_at is None:
            self.stopped_by = "cancel" if why == "cancel" else self.stopped_by or why
            return
        if why in ("preempt", "requeue", "timeout") and self.stopping is not None:
            # Sent again by a new daemon, or for another node: the job is busy saving its work and knows why.
            return
        self.thaw()
        if grace_s is None and why == "timeout":
            grace_s = self.ticket["limit_grace_s"]
        kills_at = time.monotonic() + (self.ticket["grace_s"] if grace_s is None else grace_s)
        if self.stopping is None and self.status is None and not self.has_just_ended():
            self.stopping = self.stopped_by = why
            self.notify_stopping(why)
            if self.session is not None:
                self.session.say(f"job {self.run.partition('.')[0]} is being ended{BECAUSE.get(why, '').lower()}")
        elif why == "cancel" and self.stopped_by in COMES_BACK:
            # A cancelled job must not.
            self.stopped_by = why
        self.kills_at = kills_at if self.kills_at is None else min(self.kills_at, kills_at)
        if kills_at > time.monotonic():
            is_notice = self.announce(why, number)
            if self.session is not None and self.session.is_terminal and not is_notice:
                # A shell at a terminal ignores TERM, and ends with what runs in it when that is hung up.
                self.deliver(signal.SIGHUP)
            # A stopped process would not see it.
            self.deliver(signal.SIGCONT)

    def has_just_ended(self) -> bool:
        """Whether the command has ended by itself and only remains to be reaped, so that no stop can have caused it."""
        if self.start_command is not None:
            # That is its prolog.
            return False
        try:
            return all(
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None for pid in self.first_pids()
            )
        except OSError:
            # An adopted process is no child of this one.
            return False

    def announce(self, why: str, number: int | None) -> bool:
        """Send the first signal of a stop; returns whether it is the one of the job's own notice.

        Source: send_user_signal of slurm.conf(5): the user's signal in place of TERM, unless it was sent already.
        """
        number = self.ticket["stop_signal"] if number is None else number
        notice = self.ticket["notice"]
        # The notice was for its first process alone, which is gone.
        is_past = notice is not None and notice["main_only"] and self.status is not None
        is_plain = "timeout" in (why, self.stopped_by) or (self.ticket.get("slurm") and why != "preempt")
        if number is not None or notice is None or is_past or self.is_noticed or is_plain:
            self.deliver(signal.SIGTERM if number is None else number)
            return False
        self.only_main = notice["main_only"]
        scope = self.scope_of(notice)
        is_left_out = self.deliver(notice["signal"], scope)
        if scope == "steps" and not is_left_out:
            # There are no steps that could react to it.
            self.deliver(signal.SIGTERM)
        elif is_left_out:
            # A script's shell would continue with its next line, and its end would pass for the job's own.
            self.deliver(signal.SIGTERM, "main")
        return True

    def scope_of(self, notice: dict[str, Any]) -> str:
        """Who gets the job's notice; with Slurm's commands its steps."""
        return "main" if notice["main_only"] else "steps" if self.ticket.get("slurm") else "tree"

    def end_leftovers(self, now: float) -> None:
        """End and name the processes that outlived the job's first one."""
        self.thaw()
        if self.container is not None and self.container.is_over(self.members):
            # They hold what podman may need for the user's next container, and nothing of the job's.
            self.kills_at = now
        if self.stopping is not None or self.kills_at == now:
            return
        self.name_leftovers(self.members())
        self.stopping = "leftovers"
        self.notify("stopping", at=time.time(), why="leftovers")
        kills_at = now + self.ticket["leftover_grace_s"]
        self.kills_at = kills_at if self.kills_at is None else min(self.kills_at, kills_at)
        self.deliver(signal.SIGTERM)
        self.deliver(signal.SIGCONT)

    def name_leftovers(self, processes: Iterable[proctree.Process]) -> None:
        """Keep names for the result, up to LEFTOVERS_NAMED. A visit ends with its run, and is none of the job's."""
        if self.container is not None:
            processes = self.container.without_runtime(processes)
        for process in processes if self.visits is None else self.visits.without(processes):
            if len(self.leftovers) >= LEFTOVERS_NAMED:
                return
            if process.is_alive:
                # A newline separates the names in the result.
                self.leftovers.setdefault(process.pid, process.name.replace("\n", "?") + f"({process.pid})")

    def notify_stopping(self, why: str) -> None:
        """Report the stop to the daemon and in the job's output."""
        self.notify("stopping", at=time.time(), why=why)
        if self.logs is not None:
            at = time.strftime("%Y-%m-%dT%H:%M:%S")
            what = f"CANCELLED AT {at}{BECAUSE.get(why, '')}"
            job_id = self.run.partition(".")[0]
            if self.ticket.get("slurm"):
                self.logs.say(f"error: *** JOB {job_id} ON {self.ticket.get('slurm')} {what} ***", "slurmstepd")
            else:
                self.logs.say(f"job {job_id} {what}")

    def deliver(self, number: int, to: str = "tree") -> bool:
        """Signal processes of the run, see `SignalOrder.to`; returns whether only others than the first process got it.

        A notice to the tree spares a script that would die of it, and its shell, while it has a child running. A script
        that is the program itself, by its #! line or by `exec`, and handles the notice gets it.
        """
        if to == "steps" or to.startswith("step:"):
            from gpusched.engine.supervisor.steps import signal_each, tasks_in  # most jobs have none

            return signal_each(tasks_in(self.members, int(to[5:]) if to != "steps" else None), number)
        if to == "full":
            return proctree.signal_all(self.members, number)
        if to != "main":
            box = self.container
            if box is not None and (box.is_pull or number == signal.SIGCONT):
                # What pulls an image is to end, too; and STOP is for everything.
                box = None
            spared = None
            if number in NOTICES and self.is_script:
                first = self.first_pids() if box is None else box.first_of_job(self.members)
                spared = [pid for pid in first if self.is_spared(pid, number)] or None
            find = self.members if box is None else box.of_job(self.members)
            return proctree.signal_all(find, number, spared)
        if self.status is None:
            # Not reaped yet, so the pids are still their own.
            for pid in self.first_pids():
                try:
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    pass
        return False

    def first_pids(self) -> tuple[int, ...]:
        """The process that was started, or every rank that has not ended."""
        return (self.job_pid,) if self.ranks is None else tuple(self.ranks.alive)

    def is_spared(self, pid: int, number: int) -> bool:
        """Whether a notice to all leaves out this first process, a script."""
        return proctree.is_shell(pid) or not proctree.catches(pid, number)

    # --- orders -----------------------------------------------------------------------------------

    def read_orders(self) -> None:
        """Carry out the orders appended since the last call."""
        lines, self.order_offset = files.read_orders(self.home.spool, self.run, self.order_offset)
        for line in lines:
            try:
                self.handle_order(line.split(" "))
            except (ValueError, IndexError):
                # Torn by a crash of the daemon, which sends it again.
                continue

    def handle_order(self, words: list[str]) -> None:
        """Carry out one order: `stop WHY SIGNAL|- GRACE|- .`, `signal NUMBER SCOPE .`, `stop-step STEP GRACE|- .`,
        `limit SECONDS|- .`, `suspend .`, `resume .`, `note WORDS .`, `enter TOKEN .`.
        """
        if words[-1] != "." or self.is_over:
            return
        if words[0] == "stop":
            number = None if words[2] == "-" else int(words[2])
            self.stop(words[1], number, None if words[3] == "-" else float(words[3]))
        elif words[0] == "signal" and self.start_at is not None:
            number = int(words[1])
            # Only a resume order continues a suspended run.
            if number != signal.SIGCONT or self.still.since is None:
                self.deliver(number, words[2])
        elif words[0] == "stop-step" and self.start_at is not None:
            self.stop_step(int(words[1]), self.ticket["grace_s"] if words[2] == "-" else float(words[2]))
        elif words[0] == "enter" and self.ticket.get("adopt") is None:
            self.admit(words[1])
        elif words[0] == "suspend":
            self.suspend()
        elif words[0] == "resume":
            self.resume()
        elif words[0] == "note" and self.session is not None:
            self.session.warn(" ".join(words[1:-1]))
        elif words[0] == "limit":
            limit_s = None if words[1] == "-" else float(words[1])
            if limit_s == self.ticket["time_limit_s"]:
                # Sent again by a new daemon; a notice is not given twice.
                return
            self.ticket["time_limit_s"] = limit_s
            if self.start_at is not None and self.status is None and self.stopping is None:
                self.set_limit(limit_s)

    def stop_step(self, number: int, grace_s: float) -> None:
        """End one step; the run continues, or remains suspended."""
        if self.step_ends is None:
            from gpusched.engine.supervisor.steps import StepEnds

            self.step_ends = StepEnds(self.members)
        self.step_ends.stop(number, grace_s)

    def admit(self, token: str) -> None:
        """Open a door for a client of the user, unless the run is ending."""
        if self.start_at is None:
            self.doors.append(token)
            return
        if self.status is not None or self.stopping is not None or self.still.since is not None:
            return
        if self.visits is None:
            from gpusched.engine.supervisor.visits import Visits  # most jobs have none

            self.visits = Visits(self)
        self.visits.admit(token)

    def set_limit(self, limit_s: float | None) -> None:
        began = self.started + self.still.total_s
        self.limit_at = None if limit_s is None else began + limit_s
        self.notice_at = None
        notice = self.ticket["notice"]
        if notice is not None and self.limit_at is not None:
            self.notice_at = max(began, self.limit_at - notice["before_s"])

    # --- telling ----------------------------------------------------------------------------------

    def notify(self, event: str, **facts: str | float | None) -> None:
        """Write an event to the pipe."""
        self.send(encode_event(run=self.run, event=event, **facts))

    def send(self, content: bytes) -> None:
        """Write a line to the pipe, preceded by an unsent start event, if there is room and a reader.

        If not, the spool says the same.
        """
        started, self.untold, self.tell_at = self.untold, b"", None
        try:
            if started and len(started) + len(content) > PIPE_BUF:
                os.write(self.home.event_fd, started)
                started = b""
            os.write(self.home.event_fd, started + content)
        except OSError:
            self.heard = False
        else:
            self.heard = True

    def main_ended(self) -> None:
        if self.visits is not None:
            self.visits.end()
        if self.stopping is None or self.container is not None:
            self.linger_until = time.monotonic() + LINGER_S
        if self.stopping is not None and self.only_main:
            self.deliver(signal.SIGTERM)
            self.deliver(signal.SIGCONT)
