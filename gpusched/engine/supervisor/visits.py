"""Visits: what its user starts in a running run from outside of it, with `grun --job` or `srun --jobid`.

On the daemon's order the supervisor forks a host for each visit. The host opens a door, a socket in the spool, for one
client, gets from it what to run, starts that as the run's user with the run's control group and environment, relays
its streams, and ends all of it when the client goes. The door stays as long as the host does: a client whose
connection to another node broke comes back through it, as that of a foreground run does, see `attach_protocol`. A visit
that has ended keeps what is left of its output for such a client: nothing of it is in a log.

A visit neither keeps its run alive nor ends it: the result is that of the run's first process, and when that ends, its
visits are hung up and killed. The end of a daemon concerns none of this.
"""

from __future__ import annotations

import os
import time

from gpusched import entry_points
from gpusched.engine import spool as files
from gpusched.engine.attach_protocol import HELLO, HOLD, NO_TOKEN, RUN, read_wanted
from gpusched.engine.linux import proctree
from gpusched.engine.linux.as_user import LaunchError
from gpusched.engine.supervisor import launch
from gpusched.engine.supervisor.interactive import RETURN_S, Session
from gpusched.engine.supervisor.processes import (
    AWAITED,
    ORDER_SIGNAL,
    PR_SET_CHILD_SUBREAPER,
    RunProcesses,
    end_all,
    wake_on_signals,
)
from gpusched.engine.supervisor.run_control import RunControl

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Iterator
    from typing import Any, NoReturn

    from gpusched.engine.attach_protocol import Wanted
    from gpusched.engine.linux.proctree import Process
    from gpusched.engine.supervisor.attach import AttachConnection
    from gpusched.engine.supervisor.supervisor import Supervisor
else:
    import _signal as signal

MOST = 160
"""At once in one part of a run: each has a host, a process with 1.5 MiB that it shares with no other. A script with 100
steps in the background has one for each of them on each node.
"""
WAIT_S = 8.0
"""How long the next one waits for one of them to end; its client waits a little longer."""
ATTACH_S = 20.0
"""How long a door waits for its client, whose way there may break."""
ENDING_S = 0.15
"""Between the first signal and KILL when the run has ended; less than the run's own leftovers have."""
LEFTOVER_S = 1.0
"""The same for what a visit leaves behind."""
FAREWELL_S = 0.5
"""How long the end of a run waits for a client that does not take its output, ..."""
HOST_S = 5.0
"""... and for a host at all."""
OF_THE_JOB = ("SLURM_", "SLURMD_", "GPUSCHED_", "CUDA_")
"""Variables that a visit has from the job rather than from its client."""
FACTS = {"pty": False, "keep": False, "lease_s": None, "client": None}
"""Of the foreground of a visit, as `interactive` of a ticket; its client says whether it is at a terminal."""
NEVER = "CUDA_MPS_"
"""Variables that a client must not add: they select another GPU's MPS, or lift a limit."""


class Visits:
    """The visits of one run, as its supervisor sees them."""

    def __init__(self, supervisor: Supervisor) -> None:
        """Raises: ValueError for a supervisor of an earlier release, which takes that for a torn order and goes on."""
        if not hasattr(supervisor, "control"):
            raise ValueError("it lets nobody in")
        self._supervisor = supervisor
        self._hosts: set[int] = set()
        self._early: list[str] = []
        """Tokens of visits that wait for the start of the run."""
        self._waiting: dict[str, float] = {}
        """Tokens of visits for which there is no room now; until when their clients wait, on the monotonic clock."""
        self._kill_at: float | None = None

    def admit(self, token: str) -> None:
        """Open a door of this name once there is room; without a process to spare there is none, and the client gives
        up.
        """
        if self._supervisor.control.start_at is None:
            self._early.append(token)
        elif len(self._hosts) < MOST:
            self._open(token)
        elif len(self._waiting) < MOST:
            self._waiting[token] = time.monotonic() + WAIT_S

    def begin(self) -> None:
        """Admit those that have waited for the start."""
        early, self._early = self._early, []
        for token in early:
            self._supervisor.admit(token)

    def _open(self, token: str) -> None:
        # Handlers would write into the pipe of this process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
        try:
            pid = os.fork()
            if pid == 0:
                _become_host(self._supervisor, token)
            self._hosts.add(pid)
        except OSError:
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def forget(self, pid: int) -> bool:
        """Note the end of a child; returns whether it was a host."""
        is_host = pid in self._hosts
        self._hosts.discard(pid)
        now = time.monotonic()
        while is_host and self._waiting and len(self._hosts) < MOST and self._kill_at is None:
            token = next(iter(self._waiting))
            if now < self._waiting.pop(token):
                self._open(token)
        return is_host

    def without_hosts(self, processes: Iterable[Process]) -> Iterator[Process]:
        """The run's processes, visits included: hosts are ours, and no signal to the run is for them."""
        return (process for process in processes if process.pid not in self._hosts)

    def without(self, processes: Iterable[Process]) -> Iterator[Process]:
        """The run's processes without its visits. Args: processes: parents first."""
        inside = set(self._hosts)
        for process in processes:
            if process.pid in inside or process.ppid in inside:
                inside.add(process.pid)
            else:
                yield process

    def hang_up_terminals(self) -> None:
        """End the visits at a terminal, whose shells ignore TERM; the others keep the grace that they have."""
        for pid in self._hosts:
            os.kill(pid, ORDER_SIGNAL)

    def end(self) -> None:
        """Tell the hosts that the run has ended; may be repeated until they are gone."""
        now = time.monotonic()
        if self._kill_at is None:
            self._kill_at = now + HOST_S
        for pid in self._hosts:
            os.kill(pid, signal.SIGTERM if now < self._kill_at else signal.SIGKILL)


def _become_host(supervisor: Supervisor, token: str) -> NoReturn:
    """Serve one visit in the child, then exit; never returns into the supervisor."""
    code = 70
    try:
        # The lock of the run's record above all: it shows that the supervisor is alive.
        launch.close_all(launch.inherited_fds())
        os.setsid()
        import ctypes  # a host alone needs it where systemd starts runs

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if supervisor.home.oom_scores is not None:
            _set_oom_score(supervisor.home.oom_scores.job)
        Visit(supervisor, token).serve()
        code = 0
    except BaseException:
        # Our bug. The supervisor remains, and what is left of the visit becomes a child of it.
        import traceback

        traceback.print_exc()
    finally:
        end_all()
        os._exit(code)


def _set_oom_score(score: int) -> None:
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"%d" % score)
        finally:
            os.close(fd)
    except OSError:
        # It keeps that of the supervisor.
        pass


class VisitSession(Session):
    """The door of a visit, then its foreground."""

    wanted: Wanted | None = None
    was_entered = False
    """Whether there is a client, or was one: there is no other."""
    has_log = False
    first_pid: int | None = None
    """The process that was started for the client."""

    def act(self, now: float) -> None:
        """Keep the client's place while the job is suspended: a client in the same job stands still as well."""
        if self.return_until is not None and now >= self.return_until and self._stands_still():
            self.return_until = now + RETURN_S
        super().act(now)

    def _stands_still(self) -> bool:
        process = None if self.first_pid is None else proctree.read_process(self.first_pid)
        return process is not None and process.state == "T"

    def _admit(self, guest: AttachConnection, kind: int, content: bytes) -> None:
        if kind in (RUN, HOLD, HELLO) and (self.was_entered or guest.uid != self.uid):
            raise ValueError
        if kind == RUN:
            self.wanted = read_wanted(content)
            self.is_terminal, self.signals_to = self.wanted.is_terminal, self.wanted.signals_to
            return
        if kind == HOLD:
            guest.hold()
            return
        if kind == HELLO:
            if self.wanted is None:
                raise ValueError
            self.was_entered = True
        super()._admit(guest, kind, content)

    def _resume(self, guest: AttachConnection, content: bytes) -> None:
        token, received = content.decode("ascii").split(" ")
        if token == NO_TOKEN and not self.was_entered:
            if int(received):
                raise ValueError
            guest.begin_again()
            return
        if token == NO_TOKEN and self.client is not None:
            # It knows the name of this door, and has not read its WELCOME.
            content = f"{self.client.token} {received}".encode()
        super()._resume(guest, content)


class Visit:
    """The host's view: a run within a run, which is not recorded."""

    def __init__(self, host: Supervisor, token: str) -> None:
        spool, processes = host.home.spool, host.processes
        self._host = host
        self._processes = RunProcesses(os.getpid(), is_script=False)
        terms = {"grace_s": host.ticket["grace_s"], "leftover_grace_s": LEFTOVER_S}
        self._control = RunControl(host.run, self._processes, terms, _tell_nobody)
        self._session = VisitSession(
            host.ticket,
            FACTS,
            spool,
            host.home.boot_id,
            self._processes.cpu_so_far_s,
            files.door_path(spool, host.run, token),
        )
        self._control.attach(self._session)
        is_inside = processes.container is not None and not processes.container.is_pull
        self._container = processes.container if is_inside else None
        self._rank = None if processes.ranks is None else min(processes.ranks.alive.values(), default=None)
        """Whose container it enters: the first that runs here."""
        self._leave_by: float | None = None
        """When the client has had time enough; None while the run continues."""

    def serve(self) -> None:
        """Serve one client, if it comes; nothing of the visit is left afterwards."""
        session, control = self._session, self._control
        try:
            wake_on_signals(session.wake_in)
            until = time.monotonic() + ATTACH_S
            while not session.was_entered and control.stopped_by is None and (left_s := until - time.monotonic()) > 0:
                self._sleep(left_s)
            if session.client is not None and control.stopped_by is None:
                self._run_wanted()
        finally:
            session.close()

    def _run_wanted(self) -> None:
        """Run what the client wants, and tell it how that ended."""
        session, control, processes = self._session, self._control, self._processes
        error = self._start()
        while control.start_at is not None and processes.reap(self._child_ended):
            control.act()
            self._sleep(control.left_s())
        session.drain()
        session.farewell(processes.exit(), control.stopped_by, error, self._leave_by)

    def _start(self) -> str | None:
        """Start what the client wants; a sentence on failure."""
        host, session, wanted = self._host, self._session, self._session.wanted
        assert wanted is not None
        # It is imported before the identity changes, so a user must not choose it.
        module = entry_points.where(f"visit.{wanted.argv[0]}") if wanted.is_module else None
        if wanted.is_module and module is None:
            return f"module {wanted.argv[0]} cannot be run in a job; start it as a command"
        if module is not None and self._container is not None:
            return "gpusched is not installed in the container of this job, in which this would have to run"
        argv, env = wanted.argv, environment(host.env, wanted.env)
        work_dir = host.ticket["work_dir"]
        if self._container is None:
            work_dir = wanted.work_dir or work_dir
        else:
            added = {name: env[name] for name in wanted.env if name in env}
            argv, env = self._container.enter_command(argv, wanted.work_dir, added, self._rank, wanted.is_terminal)
        # Of the run, but for its command.
        command = {"argv": argv, "env": env, "work_dir": work_dir, "umask": wanted.umask, "script": None}
        try:
            streams = session.open_streams()
            # Its control group is entered by what is started, and never killed as a whole from here.
            pid = launch.start_visitor({**host.ticket, **command}, streams, host.processes.box, module)
        except LaunchError as error:
            return str(error)
        except OSError as error:
            return f"cannot make a terminal or pipes for it: {error.strerror}"
        streams.release()
        session.first_pid = self._processes.first_pid = pid
        self._control.begin(time.time(), time.monotonic())
        return None

    def _child_ended(self, pid: int, status: int) -> None:
        if pid == self._processes.first_pid and self._processes.status is None:
            self._control.first_ended(status)

    def _sleep(self, left_s: float | None) -> None:
        """Pass on output and input; hang up when the run has ended. Its orders are not for this process."""
        numbers = self._session.wait(left_s)
        if signal.SIGTERM in numbers or (ORDER_SIGNAL in numbers and self._session.is_terminal):
            if self._leave_by is None:
                self._leave_by = time.monotonic() + ENDING_S + FAREWELL_S
            self._control.stop("job_ended", None, ENDING_S)
        self._control.handle_session_orders(self._session)


def _tell_nobody(event: str, **facts: str | float | None) -> None:
    """The daemon knows of no visits."""


def environment(of_job: bytes, added: dict[str, str]) -> dict[str, Any]:
    """Variables of a visit: those of the job, and the client's where they are not the scheduler's."""
    found: dict[str, Any] = {}
    for word in of_job.decode("utf-8", "surrogateescape").split("\0"):
        name, equals, value = word.partition("=")
        if equals:
            found[name] = value
    own = {name for name in found if name.startswith(OF_THE_JOB)}
    found.update({k: v for k, v in added.items() if k not in own and not k.startswith(NEVER)})
    return found
