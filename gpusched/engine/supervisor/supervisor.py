"""One process per run: claims it, starts it, ends it in time, and records how it ended.

The supervisor leads the run's session and is the subreaper of all its descendants, so a process that leaves the
session or loses its parent is still below it. It ends only when none is left. Nothing here needs the daemon: results
go to the spool, and the event pipe only announces them sooner.
"""

from __future__ import annotations

import os
import time

from gpusched.engine import spool as files
from gpusched.engine.linux import proctree
from gpusched.engine.linux.as_user import LaunchError
from gpusched.engine.supervisor import launch
from gpusched.engine.supervisor.priority import RAISE_AFTER_S, OomScores, lower_priority, raise_priority
from gpusched.engine.supervisor.processes import AWAITED, ORDER_SIGNAL, RunProcesses, exit_of, wake_on_signals
from gpusched.engine.supervisor.result import RunResult
from gpusched.engine.supervisor.run_control import RunControl, Timer
from gpusched.engine.wire import PIPE_BUF, encode_event, shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Container, Iterable
    from typing import Any, TypeVar

    _Started = TypeVar("_Started")

    from gpusched.engine.supervisor.contact import ContactWatch
    from gpusched.engine.supervisor.interactive import Session
    from gpusched.engine.supervisor.launch import StartCommand
    from gpusched.engine.supervisor.ranks import Ranks
    from gpusched.engine.supervisor.steps import StepEnds
else:
    import _signal as signal


TELL_START_AFTER_S = 0.02
"""Delay of the start event, and of its line in the record, unless another event comes first: for a shorter job the
daemon wakes only once, and this process writes the record only once."""
PROLOG_GRACE_S = 5.0
"""Most between TERM and KILL for a job's own prolog that takes too long."""


class Home:
    """State shared by all runs that one supervisor process serves, one after the other."""

    def __init__(
        self, spool: str, boot_id: str, event_fd: int, oom_scores: OomScores | None = None, *, serves_more: bool = False
    ) -> None:
        """Args: oom_scores: of this process and of its jobs; None leaves them alone. serves_more: it may serve several
        runs, and calls `flush_result` before the next and at its end.
        """
        own = proctree.read_process(os.getpid())
        self.spool = spool
        self.boot_id = boot_id
        self.event_fd = event_fd
        self.pid = os.getpid()
        self.start_ticks = own.start_ticks if own else 0
        self.oom_scores = oom_scores
        self.checkpoints = launch.CheckpointBase()
        self.serves_more = serves_more
        self._unflushed: str | None = None
        """The last run, if its result may not be on disk yet."""

    def flush_later(self, run: str) -> None:
        """Leave it to the next call of `flush_result` to have the result of a run on disk."""
        self._unflushed = run

    def flush_result(self, recorded: Container[str] = ()) -> None:
        """See to it that the result of the last run is on disk. Args: recorded: runs whose ends the table has."""
        run, self._unflushed = self._unflushed, None
        if run is not None and run not in recorded:
            files.flush_again(self.spool, run)

    def start_as_job(self, start: Callable[[], _Started]) -> _Started:
        """Call it with the out-of-memory score of a job, so that what it starts has that from its first instant."""
        if self.oom_scores is None:
            return start()
        self.oom_scores.begin_start()
        try:
            return start()
        finally:
            self.oom_scores.end_start()


class EventSender:
    """Writes the events of one run to the pipe. Without room or a reader they are lost: the spool says the same.

    Args: fd: the pipe. settle: gets the record's line of a start before its event is sent, unless that was taken.
    """

    def __init__(self, run: str, fd: int, settle: Callable[[bytes], None]) -> None:
        self._run = run
        self._fd = fd
        self._settle = settle
        self._started = self._start_line = b""
        self.is_heard = True
        """Whether the last event was written."""
        self.timer = Timer(lambda now: self.send(b""))

    def notify(self, event: str, **facts: str | float | None) -> None:
        self.send(encode_event(run=self._run, event=event, **facts))

    def send_later(self, started: bytes, at: float, line: bytes = b"") -> None:
        """Send the start event at this instant, or before the next event. Args: line: of the start, in the record."""
        self._started, self.timer.due_at, self._start_line = started, at, line

    def take_start_line(self) -> bytes:
        """What the record still has to be told of the start; empty if nothing."""
        line, self._start_line = self._start_line, b""
        return line

    def send(self, content: bytes) -> None:
        """Write a line, preceded by a start event that was not sent yet."""
        started, self._started, self.timer.due_at = self._started, b"", None
        if line := self.take_start_line():
            self._settle(line)
        try:
            if started and len(started) + len(content) > PIPE_BUF:
                os.write(self._fd, started)
                started = b""
            os.write(self._fd, started + content)
        except OSError:
            self.is_heard = False
        else:
            self.is_heard = True


class Supervisor:
    """The life of one run, from its claim to its result.

    Args: start: starts the first of the processes, and reports it; returns a sentence on failure.
    """

    def __init__(
        self, ticket: dict[str, Any], home: Home, processes: RunProcesses, start: Callable[[Supervisor], str | None]
    ) -> None:
        self.ticket = ticket
        self.run: str = ticket["run"]
        self.home = home
        self.processes = processes
        self.events = EventSender(self.run, home.event_fd, self.settle)
        self.control = RunControl(self.run, processes, ticket, self.events.notify)
        self.contact: ContactWatch | None = None
        """For a run with a lease."""
        self.record_fd = -1
        self.snapshot_fd: int | None = None
        """Keeps a snapshot that was fetched from being removed."""
        self.order_offset = 0
        self.start_command: StartCommand | None = None
        """Starts the command while the job's own prolog runs."""
        self.prolog = Timer(self.end_prolog)
        self.control.timers.always.insert(0, self.events.timer)
        self.control.timers.resting.append(self.prolog)
        self.launch_error: str | None = None
        self.cause: str | None = None
        """Why the run failed before its command was started, as a sentence."""
        self.faults: dict[str, str | None] = {}
        """How prologs and epilogs failed, as fields of the result."""
        self._env = b""
        self.moved: str | None = None
        """Where the job's output is instead of where it was wanted, as a sentence."""
        self.step_ends: StepEnds | None = None
        """Steps that are being ended; None if none ever was."""
        self.is_raised = False
        """Whether this process goes before its job at the processors."""
        self._start = start

    # --- from claim to result -------------------------------------------------------------------

    def supervise(self) -> bool:
        """Supervise the run; True when the daemon surely knows its end, so that this process may serve another."""
        if (why := self.claim()) is not None:
            self.events.notify("refused", detail=why)
            return False
        is_adopted = self.ticket.get("adopt") is not None
        if not is_adopted:
            # Given before this process existed: after a stop, nothing is started. What runs already must hear of it.
            self.read_orders()
        has_epilog = self.ticket.get("epilog") is not None or self.ticket.get("site_epilog") is not None
        if has_epilog:
            # Few runs have any. Not at the end: by then the package may have been replaced by another release.
            from gpusched.engine.supervisor import prolog_epilog
        is_prepared = self.prepare()
        control, processes = self.control, self.processes
        if self.may_start():
            is_prepared = True
            self.launch_error = self._start(self)
            if control.start_at is not None and processes.tells_ends:
                self.sleep(control.left_s())
            while control.start_at is not None and processes.reap(self.child_ended):
                control.act()
                self.sleep(control.left_s())
        for streams in (control.session, control.logs):
            if streams is not None:
                streams.drain()
        if processes.container is not None:
            processes.container.remove()
        result = RunResult(self)
        if has_epilog:
            prolog_epilog.run_epilogs(self, result, is_prepared)
        result.record()
        is_free = self.events.is_heard and control.session is None and not is_adopted
        if is_free and self.home.serves_more:
            # A daemon that has heard of it records it within milliseconds: waiting for the disk twice is no safer.
            self.home.flush_later(self.run)
        else:
            files.flush(self.record_fd)
        self.close()
        if self.is_raised:
            lower_priority()
        if control.session is not None:
            self.take_leave(control.session, result)
        return is_free

    def claim(self) -> str | None:
        """Claim the run; a sentence where it is refused, so that it may be started elsewhere or again."""
        home, ticket = self.home, self.ticket
        if (port := ticket.get("master_port")) is not None:
            from gpusched.engine.supervisor.ranks import why_taken  # few runs have one

            if (why := why_taken(port)) is not None:
                # It returns to the queue and gets another port.
                return why
        if (lost_after_s := ticket.get("lost_after_s")) is not None:
            from gpusched.engine.supervisor.contact import ContactWatch  # only runs on other nodes have a lease

            self.contact = ContactWatch(home.spool, home.boot_id, lost_after_s, ticket["grace_s"], self.lose_head)
            if self.contact.look() is not None or not self.contact.lasts_from(ticket["contact_at"]):
                # The head may have started it elsewhere by now, and another one be in contact that does not know it.
                return "its node had lost contact with the scheduler"
            self.control.timers.always.insert(0, self.contact)
        try:
            if (why := files.why_full(home.spool, len(ticket["script"] or b""))) is not None:
                return why
            whose = home.pid, home.start_ticks, ticket["uid"], home.boot_id
            fd = files.take_claim(home.spool, self.run, *whose, ticket.get("spare"))
        except OSError as error:
            return f"the spool {home.spool} cannot be written: {error.strerror}"
        if fd is None:
            return "it was claimed or revoked before"
        self.record_fd = fd
        return None

    def prepare(self) -> bool:
        """Do what comes before the start; whether the site's prolog was started."""
        if self.ticket["interactive"] is not None:
            self.launch_error = self.await_client()
        if self.ticket.get("snapshot_limits") is not None and self.may_start():
            self.launch_error = self.fetch_snapshot()
        if self.ticket.get("site_prolog") is None or not self.may_start():
            return False
        from gpusched.engine.supervisor.prolog_epilog import run_site_prolog  # few sites have one

        self.faults["prolog_fault"] = run_site_prolog(self)
        self.read_orders()
        if self.contact is not None:
            self.contact.act(time.monotonic())
        return True

    def may_start(self) -> bool:
        is_fine = self.launch_error is None and self.faults.get("prolog_fault") is None
        return is_fine and self.control.stopped_by is None

    def await_client(self) -> str | None:
        """Open the socket and wait for the client; a sentence if it did not attach."""
        from gpusched.engine.supervisor import interactive  # no batch job needs any of it

        ticket, home = self.ticket, self.home
        try:
            session = interactive.Session(
                ticket, ticket["interactive"], home.spool, home.boot_id, self.processes.cpu_so_far_s
            )
        except OSError as error:
            return f"cannot make a socket for its client: {error.strerror}"
        if ticket.get("slurm"):
            session.signals_to = "srun"
        self.control.attach(session)
        wake_on_signals(session.wake_in)
        until = time.monotonic() + interactive.ATTACH_S
        while session.client is None and self.control.stopped_by is None:
            if session.is_deserted():
                self.control.stop("client_lost", None, None)
                break
            left_s = until - time.monotonic()
            if left_s <= 0:
                return None if session.keeps else f"its client did not attach within {interactive.ATTACH_S:g} s"
            self.sleep(min(left_s, interactive.LOOK_S))
        return None

    def fetch_snapshot(self) -> str | None:
        """See to it that the snapshot of the code is on this node, and stays as long as the run; a sentence if not."""
        from gpusched.engine.supervisor.fetching import SnapshotFetch  # few jobs have one

        def is_given_up(pause_s: float) -> bool:
            self.sleep(pause_s)
            return self.control.stopped_by is not None

        try:
            wanted = SnapshotFetch(self.ticket)
            self.snapshot_fd = wanted.hold()
            if self.snapshot_fd is None:
                why = wanted.fetch(is_given_up)
                self.snapshot_fd = wanted.hold()
                return why
        except LaunchError as error:
            return str(error)
        except OSError as error:
            return f"cannot fetch its snapshot: {error.strerror}"
        return None

    def take_leave(self, session: Session, result: RunResult) -> None:
        """Stay until the client has all output and knows how the run ended.

        A daemon that has missed the end learns of it when this process ends, which therefore must not wait for a slow
        client: a child stays instead.
        """
        session.close()
        if not self.events.is_heard and session.client is not None and os.fork():
            return
        session.farewell(result.exit, self.control.stopped_by, self.launch_error)

    def close(self) -> None:
        os.close(self.record_fd)
        if self.snapshot_fd is not None:
            os.close(self.snapshot_fd)
        for logs in (self.control.logs, self.processes.ranks):
            if logs is not None:
                logs.close()

    # --- the start ------------------------------------------------------------------------------

    def make_box(self) -> None:
        """Make the control group of a run with limits. Raises: LaunchError."""
        from gpusched.engine.linux import cgroup  # a personal daemon's runs have none

        self.processes.box = cgroup.RunCgroup(self.ticket["limits"], self.run)
        self.control.timers.always.insert(0, self.processes.box)

    def has_begun(self, start_at: float, started: float) -> None:
        """Report the start, and do what had to wait for it. Args: start_at, started: by either clock."""
        control = self.control
        control.begin(start_at, started)
        if self.home.oom_scores is not None:
            raising = Timer(self.raise_priority)
            raising.due_at = started + RAISE_AFTER_S
            control.timers.always.insert(0, raising)
        self.moved = self.moved_output()
        self.note_start(started)
        control.set_limit(self.ticket["time_limit_s"])
        if control.suspension.is_wanted:
            control.suspend()
        if self.processes.visits is not None:
            self.processes.visits.begin()

    def note_start(self, now: float) -> None:
        """Record the start of the job's first process and tell the daemon, soon or with its end."""
        home, pid, start_at = self.home, self.processes.first_pid, self.control.start_at
        assert start_at is not None
        started = encode_event(
            run=self.run,
            event="started",
            at=start_at,
            supervisor_pid=home.pid,
            supervisor_start_ticks=home.start_ticks,
            pid=pid,
            moved=self.moved,
        )
        line = files.start_line(pid, start_at, self.moved)
        self.events.send_later(started, now + TELL_START_AFTER_S, line)
        if self.control.session is not None:
            self.events.send(b"")

    def settle(self, line: bytes) -> None:
        """Do what a run does not need that is over at once. Args: line: of its start, in the record."""
        files.note_start(self.record_fd, line)
        if self.start_command is None:
            self.forget_command()

    @property
    def env(self) -> bytes:
        """The environment of the job, NUL-terminated, for visits and the epilog."""
        if not self._env and self.ticket["env"] is not None:
            # `map` and `join` call nothing in Python for each of the dozens of variables.
            words = map("=".join, self.ticket["env"].items())
            self._env = "\0".join((*words, "")).encode("utf-8", "surrogateescape")
        return self._env

    def forget_command(self) -> None:
        """Free what only a start needs: the script may be 10 MB."""
        assert self.env
        self.ticket["script"] = self.ticket["env"] = self.ticket["ranks"] = None

    def raise_priority(self, now: float) -> None:
        self.is_raised = raise_priority()

    def moved_output(self) -> str | None:
        """Why output is not where it was wanted, and where it is, as a sentence; None if all of it is."""
        logs, ranks = self.control.logs, self.processes.ranks
        every = [] if logs is None else [logs, *([] if ranks is None else ranks.logs)]
        found = [moved.why for logs in every for moved in logs.moved.values()]
        if not found:
            return None
        more = "" if len(found) == 1 else f"; so is that of {len(found) - 1} more file{'s' if len(found) > 2 else ''}"
        return shortened(found[0]) + more

    # --- ends of processes ----------------------------------------------------------------------

    def child_ended(self, pid: int, status: int) -> None:
        """Note the end of a process, and of the run with its first one."""
        processes = self.processes
        if processes.ranks is not None:
            if pid in processes.ranks.alive:
                self.rank_ended(processes.ranks, pid, status)
            return
        if pid != processes.first_pid or processes.status is not None:
            return
        if self.start_command is None or not self.prolog_ended(self.start_command, status):
            self.control.first_ended(status)

    def rank_ended(self, ranks: Ranks, pid: int, status: int) -> None:
        """The first rank that fails ends the others, and the last one that ends is the end of the job's processes."""
        control = self.control
        is_first = ranks.take(pid, status)
        if not ranks.alive:
            control.first_ended(ranks.status or 0)
        elif is_first and control.stopping is None:
            if control.logs is not None:
                code, signalled = exit_of(status)
                how = f"exit code {code}" if signalled is None else f"signal {signalled}"
                control.logs.say(f"rank {ranks.failed} ended with {how}; ending the other ranks")
            control.stop("gang", None, None)
            # The verdict is the failed rank's, also if the others need longer than the time limit.
            control.stopped_by = control.limit.due_at = control.notice.due_at = None

    def end_prolog(self, now: float) -> None:
        """End the job's own prolog, which took too long."""
        self.control.terminate()
        self.control.kills.due_at = time.monotonic() + min(self.ticket["grace_s"], PROLOG_GRACE_S)

    def prolog_ended(self, start: StartCommand, status: int) -> bool:
        """Start the command once the job's own prolog has succeeded; False if the run is over instead."""
        was_late, self.prolog.due_at = self.prolog.due_at is None, None
        path = ascii_of(self.ticket["prolog"])
        processes = self.processes
        if self.control.stopping is not None:
            # The command is left unstarted.
            return False
        self.start_command, processes.is_prolog = None, False
        if status or was_late:
            how = f"did not end within {self.ticket['prolog_timeout_s']:g} s" if was_late else "failed"
            why = f"its prolog {path} {how}, and the command was not started"
            if status:
                self.cause = why
            else:
                # It has obeyed TERM and ended well, which says nothing about the command.
                self.launch_error = why
            return False
        try:
            processes.first_pid, self.control.logs, processes.ranks = self.home.start_as_job(start)
        except LaunchError as error:
            self.launch_error = str(error)
            return False
        finally:
            self.forget_command()
        self.note_start(time.monotonic())
        return True

    # --- signals and orders ---------------------------------------------------------------------

    def sleep(self, left_s: float | None) -> None:
        """Sleep until a child ends, an order comes or the time is over; passes on output and input meanwhile."""
        session, logs = self.control.session, self.control.logs
        if session is not None:
            self.handle_signals(session.wait(left_s))
            self.control.handle_session_orders(session)
            return
        if logs is not None and logs.is_copied:
            logs.wait(AWAITED, left_s)
            left_s = 0.0
        self.handle_signals(self.processes.wait(left_s))

    def handle_signals(self, numbers: Iterable[int]) -> None:
        if ORDER_SIGNAL in numbers:
            self.read_orders()
        if signal.SIGTERM in numbers:
            from gpusched.engine.going_down import machine_goes_down  # no run that ends by itself needs it

            self.control.stop("shutdown" if machine_goes_down() else "cancel", None, None)

    def lose_head(self, left_s: float) -> None:
        """End the run, whose lease has ended: the head will start it elsewhere."""
        self.control.stop("head_lost", None, left_s)

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
        """Carry out one order of the file: `stop-step STEP GRACE|- .`, `limit SECONDS|- .`, `note WORDS .`,
        `enter TOKEN .`, and those of `RunControl.handle_order`.
        """
        control = self.control
        if words[-1] != "." or control.is_over:
            return
        if words[0] == "stop-step" and control.start_at is not None:
            self.stop_step(int(words[1]), self.ticket["grace_s"] if words[2] == "-" else float(words[2]))
        elif words[0] == "enter" and self.ticket.get("adopt") is None:
            self.admit(words[1])
        elif words[0] == "note" and control.session is not None:
            control.session.warn(" ".join(words[1:-1]))
        elif words[0] == "limit":
            self.set_limit(None if words[1] == "-" else float(words[1]))
        else:
            control.handle_order(words)

    def set_limit(self, limit_s: float | None) -> None:
        control = self.control
        if limit_s == self.ticket["time_limit_s"]:
            # Sent again by a new daemon; a notice is not given twice.
            return
        self.ticket["time_limit_s"] = limit_s
        if control.start_at is not None and self.processes.status is None and control.stopping is None:
            control.set_limit(limit_s)

    def stop_step(self, number: int, grace_s: float) -> None:
        """End one step; the run continues, or remains suspended."""
        if self.step_ends is None:
            from gpusched.engine.supervisor.steps import StepEnds

            self.step_ends = StepEnds(self.processes.members)
            self.control.timers.always.insert(0, self.step_ends)
        self.step_ends.stop(number, grace_s)

    def admit(self, token: str) -> None:
        """Open a door for a client of the user, unless the run is ending."""
        control, processes = self.control, self.processes
        if processes.status is not None or control.stopping is not None or control.suspension.since_at is not None:
            return
        if processes.visits is None:
            from gpusched.engine.supervisor.visits import Visits  # most jobs have none

            processes.visits = Visits(self)
        processes.visits.admit(token)


def ascii_of(text: str) -> str:
    """A path for sentences about a prolog or epilog."""
    return text.encode("ascii", "replace").decode()


def supervisor_of(ticket: dict[str, Any], home: Home) -> Supervisor:
    if ticket.get("holds"):
        from gpusched.engine.supervisor import holding  # few parts do

        return Supervisor(ticket, home, holding.HeldProcesses(home.pid), holding.hold)
    if ticket.get("adopt") is not None:
        from gpusched.engine.supervisor import adopted  # hardly any run needs it

        return Supervisor(ticket, home, adopted.AdoptedProcesses(ticket), adopted.adopt)
    return Supervisor(ticket, home, RunProcesses(home.pid, ticket["script"] is not None), start)


def start(run: Supervisor) -> str | None:
    """Start the job and report it; a sentence on failure."""
    control, processes, ticket = run.control, run.processes, run.ticket
    session = control.session
    try:
        start_at, started = time.time(), time.monotonic()
        streams = None if session is None else session.open_streams()
        if ticket["limits"] is not None:
            run.make_box()
        if ticket.get("container") is not None:
            from gpusched.engine.supervisor.container import RunContainer  # most runs have none

            processes.container = RunContainer(ticket, run.home.spool)
        processes.first_pid, control.logs, processes.ranks, run.start_command = run.home.start_as_job(
            lambda: launch.start(
                ticket, run.home.spool, run.home.checkpoints, streams, processes.box, processes.container
            )
        )
    except LaunchError as error:
        return str(error)
    except OSError as error:
        return f"cannot make a terminal or pipes for it: {error.strerror}"
    if session is not None:
        session.begin(control.logs)
    run.has_begun(start_at, started)
    if run.start_command is not None:
        processes.is_prolog = True
        run.prolog.due_at = started + ticket["prolog_timeout_s"]
    return None
