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
from gpusched.engine.linux.as_user import LaunchError, as_user
from gpusched.engine.supervisor import launch
from gpusched.engine.supervisor.priority import RAISE_AFTER_S, lower_priority
from gpusched.engine.supervisor.run_control import AWAITED, COMES_BACK, Home, RunControl, wake_on_signals
from gpusched.engine.wire import encode_event, joined, shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping
    from typing import Any

    from gpusched.engine.supervisor.interactive import Session
    from gpusched.engine.supervisor.ranks import Ranks
else:
    import _signal as signal


WALL = 0x40000000
"""__WALL of waitpid(2): includes children that announce their end with another signal."""
TELL_START_AFTER_S = 0.02
"""Delay of the start event, unless another event comes first: for a shorter job the daemon wakes only once."""
RESULT_RETRY_S = (0.2, 10.0)
REAP_S = 0.05
"""Longest time spent reaping before anything else is done: the ends of a fork bomb's processes never cease."""
FAULT_CHARACTERS = 150
"""Of each sentence on a prolog or epilog, which are ASCII, and of the cause beside one: the event has room for all."""
RESULT_RETRIES = 400
"""With the intervals above: more than an hour to free space on a full disk."""


class Supervisor(RunControl):
    """The life of one run, from its claim to its result."""

    # --- from claim to result -------------------------------------------------------------------

    def supervise(self) -> bool:
        """Supervise the run; True when the daemon surely knows its end, so that this process may serve another."""
        home = self.home
        if (port := self.ticket.get("master_port")) is not None:
            from gpusched.engine.supervisor.ranks import why_taken  # few runs have one

            if (why := why_taken(port)) is not None:
                # Not claimed, so that it returns to the queue and gets another port.
                self.notify("refused", detail=why)
                return False
        if (lost_after_s := self.ticket.get("lost_after_s")) is not None:
            from gpusched.engine.supervisor.contact import ContactWatch  # only runs on other nodes have a lease

            self.contact = ContactWatch(home.spool, home.boot_id, lost_after_s, self.ticket["grace_s"])
            if self.contact.look() is not None:
                # The head may have started it elsewhere by now.
                self.notify("refused", detail="its node had lost contact with the scheduler")
                return False
        try:
            if (why := files.why_full(home.spool, len(self.ticket["script"] or b""))) is not None:
                self.notify("refused", detail=why)
                return False
            whose = home.pid, home.start_ticks, self.ticket["uid"], home.boot_id
            fd = files.take_claim(home.spool, self.run, *whose, self.ticket.get("spare"))
        except OSError as error:
            self.notify("refused", detail=f"the spool {home.spool} cannot be written: {error.strerror}")
            return False
        if fd is None:
            self.notify("refused", detail="it was claimed or revoked before")
            return False
        self.record_fd = fd
        self.read_early_orders()
        launch_error = None
        if self.ticket["interactive"] is not None:
            launch_error = self.await_client()
        if self.stopped_by is None and launch_error is None and self.ticket.get("snapshot_limits") is not None:
            launch_error = self.fetch_snapshot()
        faults: dict[str, str | None] = {}
        is_prepared = False
        if self.ticket.get("site_prolog") is not None and self.stopped_by is None and launch_error is None:
            from gpusched.engine.supervisor.prolog_epilog import run_site_prolog  # few sites have one

            is_prepared = True
            faults["prolog_fault"] = run_site_prolog(self)
            self.read_orders()
            if self.contact is not None:
                self.look_for_contact(self.contact)
        if self.stopped_by is None and launch_error is None and faults.get("prolog_fault") is None:
            is_prepared = True
            launch_error = self.start()
            while self.start_at is not None and self.reap():
                self.act(time.monotonic())
                self.wait()
            launch_error = launch_error or self.launch_error
        if self.session is not None:
            self.session.drain()
        if self.logs is not None:
            self.logs.drain()
        if self.container is not None:
            self.container.remove()
        counted, failure = self.counted(), self.failure()
        if self.ticket.get("epilog") is not None or self.ticket.get("site_epilog") is not None:
            faults |= self.run_epilogs(launch_error, counted, failure, faults, is_prepared)
        self.finish(launch_error, counted, failure, faults)
        self.close()
        if self.is_raised:
            lower_priority()
        if self.session is not None:
            self.take_leave(self.session, launch_error)
            return False
        return self.heard

    def run_epilogs(
        self,
        launch_error: str | None,
        counted: Mapping[str, Any],
        failure: Mapping[str, Any],
        faults: Mapping[str, str | None],
        is_prepared: bool,
    ) -> dict[str, str | None]:
        """Execute the epilogs; returns how they failed, as fields of the result.

        If this process is killed meanwhile, the command has ended all the same, and is not repeated.

        Args: as of `finish`; is_prepared: the site's prolog or the job was started, so that the site's epilog has
        something to end.
        """
        from gpusched.engine.supervisor import prolog_epilog  # few runs have any

        self.is_over = True
        result = prolog_epilog.result_variables(self, launch_error, failure, counted)
        has_own = self.ticket.get("epilog") is not None and self.start_at is not None
        has_site = self.ticket.get("site_epilog") is not None and is_prepared
        if (has_own or has_site) and self.start_at is not None and self.stopping is None:
            self.notify("stopping", at=time.time(), why="epilog")
        if self.start_at is not None:
            cut = prolog_epilog.cut_short(self, has_own, has_site)
            files.note_outcome(self.record_fd, self.result_line(launch_error, counted, failure, {**faults, **cut}))
        failed = prolog_epilog.run_own_epilog(self, result) if has_own else None
        if has_own and self.logs is not None:
            self.logs.drain()
        fault = prolog_epilog.run_site_epilog(self, result) if has_site else None
        return {"epilog_failure": failed, "epilog_fault": fault}

    def read_early_orders(self) -> None:
        """Read orders that were given before this process existed: after a stop, nothing is started."""
        self.read_orders()

    def await_client(self) -> str | None:
        """Open the socket and wait for the client; a sentence if it did not attach."""
        from gpusched.engine.supervisor import interactive  # no batch job needs any of it

        try:
            self.session = interactive.Session(self.ticket, self.home.spool, self.home.boot_id, self.cpu_so_far_s)
        except OSError as error:
            return f"cannot make a socket for its client: {error.strerror}"
        wake_on_signals(self.session.wake_in)
        until = time.monotonic() + interactive.ATTACH_S
        while self.session.client is None and self.stopped_by is None:
            if self.session.is_deserted():
                self.stop("client_lost", None, None)
                break
            left_s = until - time.monotonic()
            if left_s <= 0:
                return None if self.session.keeps else f"its client did not attach within {interactive.ATTACH_S:g} s"
            self.listen(self.session, min(left_s, interactive.LOOK_S))
        return None

    def fetch_snapshot(self) -> str | None:
        """See to it that the snapshot of the code is on this node, and stays as long as the run; a sentence if not."""
        from gpusched.engine.supervisor.fetching import SnapshotFetch  # few jobs have one

        def is_given_up(pause_s: float) -> bool:
            if self.session is not None:
                self.listen(self.session, pause_s)
            elif (info := signal.sigtimedwait(AWAITED, pause_s)) is not None:
                self.handle_signals((info.si_signo,))
            return self.stopped_by is not None

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

    def take_leave(self, session: Session, launch_error: str | None) -> None:
        """Stay until the client has all output and knows how the run ended.

        A daemon that has missed the end learns of it when this process ends, which therefore must not wait for a slow
        client: a child stays instead.
        """
        code, number = self.how_it_ended()
        words = f"{'-' if code is None else code} {'-' if number is None else number} {self.stopped_by or '-'}"
        session.close()
        if not self.heard and session.client is not None and os.fork():
            return
        session.farewell(words, launch_error or "")

    def start(self) -> str | None:
        """Start the job and report it; a sentence on failure."""
        home = self.home
        try:
            start_at, started = time.time(), time.monotonic()
            streams = None if self.session is None else self.session.open_streams()
            if self.ticket["limits"] is not None:
                from gpusched.engine.linux import cgroup  # a personal daemon's runs have none

                self.box = cgroup.RunCgroup(self.ticket["limits"], self.run)
            if self.ticket.get("container") is not None:
                from gpusched.engine.supervisor.container import RunContainer  # most runs have none

                self.container = RunContainer(self.ticket, home.spool)
            if home.oom_scores is not None:
                home.oom_scores.begin_start()
            try:
                self.job_pid, self.logs, self.ranks, self.start_command = launch.start(
                    self.ticket, home.spool, home.checkpoints, streams, self.box, self.container
                )
            finally:
                if home.oom_scores is not None:
                    home.oom_scores.end_start()
        except LaunchError as error:
            return str(error)
        except OSError as error:
            return f"cannot make a terminal or pipes for it: {error.strerror}"
        if self.session is not None:
            self.session.begin(self.logs)
        self.has_begun(start_at, started)
        if self.start_command is None:
            self.forget_command()
        else:
            self.prolog_until = started + self.ticket["prolog_timeout_s"]
        return None

    def has_begun(self, start_at: float, started: float) -> None:
        """Report the start, and do what had to wait for it. Args: start_at, started: by either clock."""
        self.start_at, self.started = start_at, started
        if self.home.oom_scores is not None:
            self.raise_at = started + RAISE_AFTER_S
        self.moved = self.moved_output()
        self.note_start(started)
        # The environment is for visits and the epilog alone.
        words = (f"{name}={value}\0" for name, value in self.ticket["env"].items())
        self.env = "".join(words).encode("utf-8", "surrogateescape")
        self.set_limit(self.ticket["time_limit_s"])
        if self.still.is_wanted:
            self.suspend()
        while self.doors:
            self.admit(self.doors.pop())

    def note_start(self, now: float) -> None:
        """Record the start of the job's first process, and tell the daemon soon."""
        home = self.home
        assert self.start_at is not None
        files.note_start(self.record_fd, self.job_pid, self.start_at, self.moved)
        self.untold = encode_event(
            run=self.run,
            event="started",
            at=self.start_at,
            supervisor_pid=home.pid,
            supervisor_start_ticks=home.start_ticks,
            pid=self.job_pid,
            moved=self.moved,
        )
        if self.session is None:
            self.tell_at = now + TELL_START_AFTER_S
        else:
            self.send(b"")

    def forget_command(self) -> None:
        """Free what only a start needs: the script may be 10 MB."""
        self.ticket["script"] = self.ticket["env"] = self.ticket["ranks"] = None

    def prolog_ended(self, status: int) -> bool:
        """Start the command once the job's own prolog has succeeded; False if the run is over instead."""
        was_late, self.prolog_until = self.prolog_until is None, None
        path = ascii_of(self.ticket["prolog"])
        if self.stopping is not None:
            # The command is left unstarted.
            return False
        start, self.start_command = self.start_command, None
        if start is None:
            return False
        if status or was_late:
            how = f"did not end within {self.ticket['prolog_timeout_s']:g} s" if was_late else "failed"
            self.cause = f"its prolog {path} {how}, and the command was not started"
            return False
        scores = self.home.oom_scores
        try:
            if scores is not None:
                scores.begin_start()
            try:
                self.job_pid, self.logs, self.ranks = start()
            finally:
                if scores is not None:
                    scores.end_start()
        except LaunchError as error:
            self.launch_error = str(error)
            return False
        finally:
            self.forget_command()
        self.note_start(time.monotonic())
        return True

    def moved_output(self) -> str | None:
        """Why output is not where it was wanted, and where it is, as a sentence; None if all of it is."""
        every = [] if self.logs is None else [self.logs, *([] if self.ranks is None else self.ranks.logs)]
        found = [moved.why for logs in every for moved in logs.moved.values()]
        if not found:
            return None
        more = "" if len(found) == 1 else f"; so is that of {len(found) - 1} more file{'s' if len(found) > 2 else ''}"
        return shortened(found[0]) + more

    def reap(self) -> bool:
        """Reap ended processes; False when no descendant is left."""
        until = time.monotonic() + REAP_S
        while True:
            if time.monotonic() > until:
                # There may be more: come back at once.
                os.kill(self.home.pid, signal.SIGCHLD)
                return True
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | WALL)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self.cpu_s += usage.ru_utime + usage.ru_stime
            self.system_cpu_s = (self.system_cpu_s or 0.0) + usage.ru_stime
            if self.visits is not None and self.visits.forget(pid):
                continue
            self.peak_kib = max(self.peak_kib, usage.ru_maxrss)
            if self.ranks is not None:
                if pid in self.ranks.alive:
                    self.rank_ended(self.ranks, pid, status)
            elif pid == self.job_pid and self.status is None:
                if self.start_command is not None and self.prolog_ended(status):
                    continue
                self.status = status
                self.notice_at = self.still.look_at = None
                self.main_ended()

    def rank_ended(self, ranks: Ranks, pid: int, status: int) -> None:
        """The first rank that fails ends the others, and the last one that ends is the end of the job's processes."""
        is_first = ranks.take(pid, status)
        if not ranks.alive:
            self.status = ranks.status
            self.notice_at = self.still.look_at = None
            self.main_ended()
        elif is_first and self.stopping is None:
            if self.logs is not None:
                code, signalled = exit_of(status)
                how = f"exit code {code}" if signalled is None else f"signal {signalled}"
                self.logs.say(f"rank {ranks.failed} ended with {how}; ending the other ranks")
            self.stop("gang", None, None)
            # The verdict is the failed rank's, also if the others need longer than the time limit.
            self.stopped_by = self.limit_at = self.notice_at = None

    def close(self) -> None:
        os.close(self.record_fd)
        if self.snapshot_fd is not None:
            os.close(self.snapshot_fd)
        if self.logs is not None:
            self.logs.close()
        if self.ranks is not None:
            self.ranks.close()

    def counted(self) -> dict[str, Any]:
        """What the run used, as fields of its result; empty if nothing was started."""
        if self.status is None:
            return {}
        return {
            "cpu_s": self.cpu_s,
            "system_cpu_s": self.system_cpu_s,
            "peak_mem_mib": self.peak_kib / 1024,
            **({} if self.box is None else self.box.facts()),
        }

    def result_line(
        self,
        launch_error: str | None,
        counted: Mapping[str, Any],
        failure: Mapping[str, Any],
        faults: Mapping[str, str | None],
    ) -> bytes:
        """The result as of now. Args: as of `finish`."""
        code, number = self.how_it_ended()
        told = {name: text[:FAULT_CHARACTERS] for name, text in faults.items() if text is not None}
        cause = failure.get("cause")
        if told and cause is not None:
            failure = {**failure, "cause": cause[:FAULT_CHARACTERS]}
        pulled = self.pulled()
        return encode_event(
            run=self.run,
            event="ended",
            start_at=self.start_at,
            end_at=time.time(),
            exit_code=code,
            signal=number,
            stopped_by=self.stopped_by,
            launch_error=None if launch_error is None else shortened(launch_error),
            **failure,
            leftovers=joined(list(self.leftovers.values()), "".join((cause or "", *told.values(), *pulled.values()))),
            suspended_s=self.still.so_far_s(time.monotonic()),
            moved=self.moved,
            **({"is_done": True} if self.says_done() else {}),
            **pulled,
            **({} if self.ranks is None else {"rank": self.ranks.failed, "failed_at": self.ranks.failed_at}),
            **told,
            **counted,
        )

    def finish(
        self,
        launch_error: str | None,
        counted: Mapping[str, Any],
        failure: Mapping[str, Any],
        faults: Mapping[str, str | None],
    ) -> None:
        """Write the result, then report it. Args: counted, failure: of the command; faults: of prologs and epilogs."""
        if self.box is not None:
            self.box.close()
        content = self.result_line(launch_error, counted, failure, faults)
        self.record_fd = files.restore_record(self.home.spool, self.run, self.record_fd)
        pause_s = RESULT_RETRY_S[0]
        for _ in range(RESULT_RETRIES):
            try:
                files.write_result(self.record_fd, content)
            except OSError:
                # A full disk. The daemon may record the end from the pipe, and then removes the record.
                self.send(content)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, RESULT_RETRY_S[1])
                if os.fstat(self.record_fd).st_nlink == 0:
                    break
            else:
                self.send(content)
                return
        self.heard = False

    def how_it_ended(self) -> tuple[int | None, int | None]:
        """Exit code of the job's first process, or the signal that ended it."""
        # A prolog that obeys a stop with exit code 0 says nothing about the command.
        is_unstarted = self.start_command is not None and self.status == 0
        is_unknown = self.status is None or self.launch_error is not None or is_unstarted
        return (None, None) if is_unknown else exit_of(self.status or 0)

    def says_done(self) -> bool:
        """Whether a run that is to be followed by another one has left word that nothing is left to do."""
        if self.stopped_by not in COMES_BACK or self.how_it_ended() != (0, None):
            return False
        if self.done is None:
            # Before an epilog may change it.
            self.done = files.says_done(self.home.spool, self.run)
        return self.done

    def cpu_so_far_s(self) -> float:
        """CPU time of all processes of the run, ended and alive."""
        return self.cpu_s + proctree.descendants_cpu_s(self.home.pid)

    def pulled(self) -> dict[str, str]:
        """The image that a pull has found, by digest."""
        if self.container is None or not self.container.is_pull or self.status != 0 or self.logs is None:
            return {}
        return {"detail": self.container.take_digest(self.logs)}

    def failure(self) -> dict[str, Any]:
        """What the end of the output says about a failure of the job's own."""
        if self.cause is not None:
            return {"cause": self.cause}
        logs = self.logs
        if not self.status or self.stopped_by is not None or logs is None:
            return {}
        from gpusched.engine.supervisor import output_tail  # most runs succeed

        def look() -> list[bytes]:
            tails = [*(() if self.ranks is None else self.ranks.tails()), *logs.tails()]
            return [output_tail.read_tail(fd, begin) for fd, begin in tails]

        try:
            # The file may be where root has no rights: on a disk of another machine.
            tails = look() if logs.owner is None else as_user(logs.owner, look)
        except LaunchError:
            return {}
        if self.container is not None and self.container.is_pull:
            return {"cause": output_tail.last_line(tails)}
        # What is killed from outside says nothing about it.
        is_killed = exit_of(self.status)[1] in (signal.SIGKILL, signal.SIGTERM)
        return {
            "gpu_oom": bool(self.ticket["has_gpus"]) and any(map(output_tail.shows_oom, tails)),
            "cause": None if is_killed else output_tail.find_cause(tails),
        }


def ascii_of(text: str) -> str:
    """A path for sentences about a prolog or epilog."""
    return text.encode("ascii", "replace").decode()


def exit_of(status: int) -> tuple[int | None, int | None]:
    """Exit code of a process, or the signal that ended it, of its wait status."""
    return (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)


def supervisor_of(ticket: dict[str, Any], home: Home) -> Supervisor:
    if ticket.get("holds"):
        from gpusched.engine.supervisor.holding import HoldingSupervisor  # few parts do

        return HoldingSupervisor(ticket, home)
    if ticket.get("adopt") is None:
        return Supervisor(ticket, home)
    from gpusched.engine.supervisor.adopted import AdoptedSupervisor  # hardly any run needs it

    return AdoptedSupervisor(ticket, home)
