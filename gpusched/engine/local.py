"""The engine of one machine, as the daemon sees it.

Every run passes through these phases, as seen from here:

    ASKED     its ticket went to the launcher (the fork server, or systemd); no answer yet
    CLAIMED   a supervisor holds it and has not reported the job's start
    RUNNING   its job was started
    ORPHANED  its supervisor is gone without a result; leftover processes are being killed
    ENDED     its last event was handed out; kept until the table has it

Every event is learned twice: immediately from the event pipe, and reliably from the spool, which is read when a
supervisor's pidfd reports its end, when the launcher is gone, and when a run is adopted.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from gpusched.engine import spool as files
from gpusched.engine.contact import read_contact
from gpusched.engine.event_pipe import EventPipe, RunRefused, end_of, event_of
from gpusched.engine.janitor import Janitor
from gpusched.engine.launchers import ForkServer, Launcher, ticket_facts
from gpusched.engine.linux import proctree
from gpusched.engine.linux.cgroup import is_populated, leaf_of
from gpusched.engine.linux.cgroup import kill as kill_leaf
from gpusched.engine.linux.cgroup import remove as remove_leaf
from gpusched.engine.linux.proctree import tree_cpu_s
from gpusched.engine.orders import order_line, orders_from
from gpusched.engine.orphans import OrphanedRun, find_orphans, kill_orphans
from gpusched.engine.poller import Poller
from gpusched.engine.step_usage import usage_below
from gpusched.engine.tracked_runs import ALIVE, Phase, SpareRecords, TrackedRun, TrackedRuns
from gpusched.model import value
from gpusched.model.execution import (
    EngineEvent,
    LimitOrder,
    OpenRun,
    Order,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunStarted,
    StopOrder,
    Ticket,
)
from gpusched.model.step import TaskUsage
from gpusched.ports import Clock

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Interval between checks of runs without an event yet or without a pidfd."""
SOON_S = 0.02
"""Interval between checks of something that should change at once, ..."""
PATIENCE_S = 2.0
"""... for this long; then CHECK_S again."""
_MOST_NAMED = 32
"""Of the recorded runs, in each ticket: more than end between two tickets of a supervisor that is kept busy."""


class LocalEngine:
    """Runs jobs under one supervisor each on this machine; see `ports.Engine` and the module's docstring.

    One class: each of its many small methods is a step of the phases above, on one run and on the same spool.
    """

    def __init__(
        self,
        spool_dir: str | os.PathLike[str],
        *,
        boot_id: str,
        clock: Clock,
        launcher: Callable[[str, str, int], Launcher] = ForkServer,
        pam: bool = False,
        run_cgroups: str | None = None,
    ) -> None:
        """Create the spool and start the launcher.

        Args: boot_id: of this boot of the kernel, without blanks; clock: dates losses; launcher: creates one, from
        the spool, the boot id and the write end of the event pipe; pam: apply limits.conf to other users' jobs, if
        there is a PAM file for them; run_cgroups: parent control group of runs with limits;
        None: each in its unit's.
        Raises: OSError when the spool cannot be created or the launcher cannot be started.
        """
        self._make_launcher = launcher
        self._pam = pam
        self._spool = os.path.abspath(spool_dir)
        self._spool_id = files.make_spool(self._spool)
        self._lacks_records = not files.has_lock(self._spool)
        """The spool is new: of runs that were asked for before, nothing in it says whether they were started."""
        self._spool_lost_at = -PATIENCE_S
        """Monotonic instant at which the spool was last found removed."""
        self._spool_error = ""
        self._boot_id = boot_id
        self._run_cgroups = run_cgroups
        self._clock = clock
        self._events: list[EngineEvent] = []
        self._spares = SpareRecords()
        self._recorded: deque[str] = deque(maxlen=_MOST_NAMED)
        """Runs whose ends the table has, the latest ones: their supervisors need not have them on disk, too."""
        self._janitor = Janitor(self._clear, "engine-janitor")
        # Revocations of forgotten runs may be removed only while no process can claim.
        self._may_sweep = files.is_server_gone(self._spool)
        self._pipe = EventPipe()
        self._poller = Poller()
        self._runs = TrackedRuns(self._poller)
        self._poller.watch(self._pipe.fileno())
        self._server: Launcher | None = None
        self._servers = 0
        try:
            self._need_server()
        except BaseException:
            self.close()
            raise

    # --- the protocol -------------------------------------------------------------------------------

    def adopt(self, runs: Sequence[OpenRun]) -> None:
        self._track(runs, "it was not started before the daemon ended")
        self._lacks_records = False
        for run in sorted(files.runs_in(self._spool)):
            if run not in self._runs:
                self._sweep(run)
        files.remove_doors(self._spool, self._runs.__contains__)
        if self._events:
            self._poller.fire()
        self._poller.rearm()

    def reconcile(self, runs: Sequence[OpenRun], ended: Iterable[str] = ()) -> None:
        self._forget(ended)
        tickets = [known.ticket for known in runs if known.ticket is not None]
        if tickets:
            self._start(tickets)
        self._track(runs, "it was stopped before it was started")
        if self._events:
            self._poller.fire()
        self._poller.rearm()

    def _track(self, runs: Sequence[OpenRun], detail: str) -> None:
        """Track these runs and send each the orders that it lacks. `detail`: for one that was not claimed."""
        now = time.monotonic()
        for known in runs:
            tracked = self._runs.get(known.run)
            if tracked is None:
                tracked = TrackedRun(known.run, Phase.ASKED, now, supervisor=known.supervisor_pid, other_files=True)
                tracked.start_ticks = known.supervisor_start_ticks or 0
                tracked.adopted = known.adopted
                self._runs.add(tracked)
                if known.boot_id != self._boot_id and not self._is_of_this_boot(tracked):
                    self._resolve_other_boot(tracked)
                    continue
                if self._lacks_records and known.supervisor_pid is None and self._has_orphans(known.run):
                    self._mark_orphaned(tracked)
                    continue
                for given in orders_from(files.read_orders(self._spool, known.run, 0)[0]):
                    tracked.given.add(given)
                self._resolve(tracked, detail)
            elif known.supervisor_pid is None and tracked.phase is Phase.RUNNING:
                self._hand_out_start_again(tracked)
            for order in tracked.given.missing(known):
                self.order(known.run, order)

    def _start(self, tickets: Sequence[Ticket]) -> None:
        now = time.monotonic()
        try:
            self._need_spool()
            server = self._need_server()
        except OSError as error:
            self._never_start(tickets, f"no supervisor can be started: {error.strerror}")
            return
        self._may_sweep = False
        recorded = [*self._recorded]
        for ticket in tickets:
            if ticket.run not in self._runs:
                # First: a ticket that cannot be written leaves nothing behind, and may come again.
                facts = ticket_facts(ticket, self._spool, self._pam, self._run_cgroups)
                facts["spare"], facts["recorded"] = self._spares.take(), recorded
                if ticket.lost_after_s is not None:
                    facts["contact_at"] = read_contact(self._spool, self._boot_id)
                server.send(ticket, facts)
                tracked = TrackedRun(ticket.run, Phase.ASKED, now, server=self._servers)
                has_files = (ticket.script, ticket.interactive, ticket.container)
                tracked.other_files = any(one is not None for one in has_files)
                tracked.adopted = ticket.adopt
                tracked.given.limit = LimitOrder(ticket.time_limit_s)
                self._runs.add(tracked)
        self._flush(server)
        self._take_refusals(server)
        self._poller.alarm_within(CHECK_S)
        self._poller.rearm()

    def order(self, run: str, order: Order) -> None:
        """Give an order. On a full disk it is kept and written later; a cancel works immediately."""
        tracked = self._runs.get(run)
        if tracked is None or tracked.phase in (Phase.ORPHANED, Phase.ENDED):
            return
        tracked.other_files = True
        tracked.unsent.append(order_line(order))
        self._send_orders(tracked)
        if tracked.unsent and isinstance(order, StopOrder) and order.why == "cancel":
            try:
                files.order_cancel(self._spool, run)
            except OSError:
                # Not even a name can be created: retry at the next timed check.
                pass
            else:
                self._runs.poke(tracked)
        tracked.given.add(order)
        self._poller.rearm()

    def events(self) -> list[EngineEvent]:
        try:
            self._look()
        finally:
            # Also after an error: else nothing would ever wake the daemon again.
            self._poller.rearm()
        events, self._events = self._events, []
        return events

    def _look(self) -> None:
        ready = self._poller.ready()
        if ready:
            # Looked up before the pipe is read, which closes and opens pidfds: a number may change its meaning.
            gone = self._runs.with_news(ready)
            # The pipe goes first: a supervisor speaks before it ends, and then its pidfd adds nothing new.
            self._read_pipe()
            for tracked in gone:
                if tracked.phase is not Phase.ENDED:
                    self._supervisor_gone(tracked)
            server = self._server
            if server is not None and server.fileno() in ready:
                self._look_after_server(server)
            elif server is not None:
                self._flush(server)
        if self._poller.take_alarm():
            self._look_by_clock()

    def _forget(self, runs: Iterable[str]) -> None:
        for run in runs:
            tracked = self._runs.get(run)
            if tracked is not None and tracked.phase is Phase.ENDED:
                self._recorded.append(run)
                self._remove(tracked)
                self._runs.remove(tracked)

    def owners(self, pids: Iterable[int]) -> Mapping[int, str]:
        return self._runs.owners(pids)

    def checkpoints(self) -> Mapping[str, float]:
        found = ((w.run, files.checkpoint_at(self._spool, w.run)) for w in self._runs if w.phase is Phase.RUNNING)
        return {run: at for run, at in found if at is not None}

    def cpu_seconds(self, runs: Iterable[str]) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for run in runs:
            tracked = self._runs.get(run)
            if tracked is not None and tracked.supervisor is not None and tracked.phase is Phase.RUNNING:
                root = tracked.supervisor if tracked.adopted is None else tracked.adopted.pid
                cpu_s = tree_cpu_s(root, with_root=tracked.adopted is not None)
                if cpu_s is not None:
                    found[run] = cpu_s
        return found

    def task_usage(self, run: str) -> tuple[TaskUsage, ...]:
        """As `MeasuringEngine.task_usage`."""
        tracked = self._runs.get(run)
        return () if tracked is None or tracked.supervisor is None else usage_below(tracked.supervisor)

    def set_waker(self, wake: Callable[[], None] | None) -> None:
        """Must be called inside the running event loop; None detaches from it."""
        self._poller.attach(wake)
        if self._events:
            self._poller.fire()

    def close(self) -> None:
        if self._pipe.is_closed:
            return
        self._poller.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._janitor.close(finish=True)
        self._runs.close()
        self._pipe.close()

    def wait(self, timeout_s: float) -> None:
        """Block until `events` may have news, for callers without an event loop."""
        until = min(time.monotonic() + timeout_s, self._poller.alarm_at)
        if not self._events:
            self._poller.ready(max(0.0, until - time.monotonic()))

    # --- the launcher ---------------------------------------------------------------------------------

    @property
    def server_pid(self) -> int | None:
        return self._server.pid if self._server is not None else None

    def _need_server(self) -> Launcher:
        if self._server is None:
            self._server = self._make_launcher(self._spool, self._boot_id, self._pipe.write_fd)
            self._servers += 1
            self._poller.watch(self._server.fileno())
            self._flush(self._server)
        return self._server

    def _never_start(self, tickets: Sequence[Ticket], detail: str) -> None:
        log.error("%s", detail)
        for ticket in tickets:
            if ticket.run not in self._runs:
                tracked = TrackedRun(ticket.run, Phase.ASKED, time.monotonic())
                self._runs.add(tracked)
                self._resolve(tracked, detail)
        self._poller.fire()
        self._poller.rearm()

    def _flush(self, server: Launcher) -> None:
        if server.has_tickets:
            self._poller.watch(server.fileno(), also_writable=not server.flush(), again=True)

    def _look_after_server(self, server: Launcher) -> None:
        gone = server.is_gone()
        self._take_refusals(server)
        if gone:
            self._replace_server()
        else:
            self._flush(server)

    def _take_refusals(self, server: Launcher) -> None:
        for run, detail in server.refusals():
            tracked = self._runs.get(run)
            if tracked is not None and tracked.phase is Phase.ASKED:
                log.error("run %s: %s", run, detail)
                self._resolve(tracked, detail)

    def _heard(self, tracked: TrackedRun) -> None:
        if self._server is not None:
            self._server.heard(tracked.run)

    def _replace_server(self) -> None:
        """Settle runs whose tickets went to a launcher that is gone or hangs. The next start creates a new one."""
        server = self._server
        assert server is not None
        self._end_server(server)
        for tracked in self._runs:
            if tracked.phase is Phase.ASKED:
                self._resolve(tracked, f"{server.name} was gone before it was started")

    def _need_spool(self) -> None:
        """Recreate the spool if it was removed, and replace the launcher, which locks deleted files.

        Runs with live supervisors continue: these hold their records open, and orders reach them by the new folder.
        Raises: OSError when it cannot be created.
        """
        try:
            status = os.stat(self._spool)
        except FileNotFoundError:
            pass
        else:
            if (status.st_dev, status.st_ino) == self._spool_id:
                return
        self._spool_id = files.make_spool(self._spool)
        self._spool_lost_at = time.monotonic()
        log.error("the spool folder %s was removed while the daemon runs; it was made again", self._spool)
        if self._server is not None:
            self._end_server(self._server)
        self._poller.alarm_within(CHECK_S)

    def _end_server(self, server: Launcher) -> None:
        self._poller.unwatch(server.fileno())
        log.warning("%s", server.kill())
        self._server = None
        self._read_pipe()

    # --- what became of a run -------------------------------------------------------------------------

    def _resolve(self, tracked: TrackedRun, detail: str) -> None:
        """Read the state of a run from the spool; revoke it if no supervisor claimed it."""
        run = tracked.run
        self._heard(tracked)
        try:
            record = files.read_record(self._spool, run)
            if record is None and tracked.supervisor is not None:
                self._resolve_unrecorded(tracked)
                return
            if record is None or (record.pid is None and not record.is_revoked):
                revoked = files.revoke(self._spool, run)
                if not revoked:
                    # Claimed just now, or about to be.
                    self._resolve_later(tracked, SOON_S)
                    return
                record = None
        except ValueError as error:
            log.error("%s", error)
            self._mark_orphaned(tracked)
            return
        except OSError as error:
            self._complain(tracked, f"run {run} cannot be settled yet: {error}")
            self._resolve_later(tracked, CHECK_S)
            return
        if record is None or record.is_revoked:
            self._end(tracked, RunNeverStarted(run, self._clock.now(), detail))
            return
        tracked.supervisor, tracked.start_ticks = record.pid, record.start_ticks
        if record.result is not None:
            self._end(tracked, end_of(record.result))
        elif not record.is_held:
            self._mark_orphaned(tracked)
        else:
            tracked.phase = Phase.CLAIMED
            self._follow(tracked)
            self._take_start(tracked, record)
            if tracked.other_files and files.has_orders(self._spool, run):
                self._runs.poke(tracked)

    def _resolve_later(self, tracked: TrackedRun, seconds: float) -> None:
        tracked.server = 0
        self._poller.alarm_within(seconds)

    def _resolve_unrecorded(self, tracked: TrackedRun) -> None:
        """Settle a run that had been started and whose record was removed from the spool."""
        assert tracked.supervisor is not None
        process = proctree.read_process(tracked.supervisor)
        if process is None or process.start_ticks != tracked.start_ticks:
            self._mark_orphaned(tracked)
        else:
            log.warning("the record of run %s is gone from the spool; its supervisor lives", tracked.run)
            tracked.phase = Phase.RUNNING
            self._follow(tracked)

    def _is_of_this_boot(self, tracked: TrackedRun) -> bool:
        """Whether its record says so, whatever the table has in mind: its head may not have known of a restart."""
        record = self._read(tracked)
        return record is not None and record.boot_id == self._boot_id

    def _resolve_other_boot(self, tracked: TrackedRun) -> None:
        if self._take_result(tracked):
            return
        if (outcome := self._outcome(tracked)) is not None:
            # What an epilog has not put in order is as after any restart.
            self._end(tracked, value.replace(outcome, epilog_fault=None))
        else:
            self._end(tracked, RunLost(tracked.run, self._clock.now(), "the machine was restarted"))

    def _take_start(self, tracked: TrackedRun, record: files.Record) -> None:
        """Hand out RunStarted once the record says so."""
        if tracked.phase is not Phase.CLAIMED:
            return
        if record.job_pid is None or record.start_at is None or record.pid is None:
            self._look_again(tracked)
            return
        tracked.phase = Phase.RUNNING
        self._hand_out(
            tracked,
            RunStarted(tracked.run, record.start_at, record.pid, record.start_ticks, record.job_pid, record.moved),
        )

    def _hand_out_start_again(self, tracked: TrackedRun) -> None:
        """Repeat a start that the table lost in a failed commit."""
        record = self._read(tracked)
        if record is not None and record.job_pid is not None and record.pid is not None and record.start_at is not None:
            at, ticks = record.start_at, record.start_ticks
            self._hand_out(tracked, RunStarted(tracked.run, at, record.pid, ticks, record.job_pid, record.moved))

    def _take_result(self, tracked: TrackedRun) -> bool:
        record = self._read(tracked)
        if record is None or record.result is None:
            return False
        self._end(tracked, end_of(record.result))
        return True

    def _read(self, tracked: TrackedRun) -> files.Record | None:
        try:
            return files.read_record(self._spool, tracked.run)
        except (OSError, ValueError) as error:
            self._complain(tracked, f"the record of run {tracked.run} cannot be read: {error}")
            return None

    def _complain(self, tracked: TrackedRun, text: str) -> None:
        """Log a complaint once, not at every check."""
        if tracked.complaint != text:
            tracked.complaint = text
            log.error("%s", text)

    def _supervisor_gone(self, tracked: TrackedRun) -> None:
        self._runs.unfollow(tracked)
        if self._take_result(tracked):
            return
        record = self._read(tracked)
        if record is not None and record.is_held:
            # Its last moment: a fork of it that is about to become the job holds the lock as well.
            self._poller.alarm_within(SOON_S)
            return
        tracked.witnessed = True
        self._mark_orphaned(tracked)

    def _mark_orphaned(self, tracked: TrackedRun) -> None:
        self._runs.unfollow(tracked)
        tracked.phase, tracked.since = Phase.ORPHANED, time.monotonic()
        self._poller.alarm_within(0.0)

    def _end(self, tracked: TrackedRun, event: EngineEvent) -> None:
        self._runs.unfollow(tracked)
        if tracked.phase is Phase.ENDED:
            return
        tracked.phase, tracked.has_result = Phase.ENDED, isinstance(event, RunEnded)
        self._hand_out(tracked, event)
        if tracked.stray:
            if isinstance(event, RunEnded):
                # It was running: that is not to pass in silence.
                self._events.append(event)
            self._runs.remove(tracked)
            self._remove(tracked)
            log.warning("run %s, which belongs to no job in the table, has ended", tracked.run)

    def _hand_out(self, tracked: TrackedRun, event: EngineEvent) -> None:
        if not tracked.stray:
            self._events.append(event)

    # --- watching ---------------------------------------------------------------------------------------

    def _follow(self, tracked: TrackedRun) -> None:
        """Watch for the end of its supervisor; without pidfds by the lock on the record."""
        if not self._runs.follow(tracked):
            self._supervisor_gone(tracked)
        elif tracked.pidfd is None:
            self._poller.alarm_within(CHECK_S)

    def _read_pipe(self) -> None:
        started: list[TrackedRun] = []
        for line in self._pipe.lines():
            try:
                self._take_line(line, started)
            except (ValueError, KeyError, TypeError):
                # The spool says the same; the lines behind it must not be lost as well.
                log.exception("not an event of a run: %r", line[:200])
        for tracked in started:
            # Most short runs have ended within the same batch and need no watching.
            if tracked.phase is Phase.RUNNING:
                self._follow(tracked)
                if tracked.poke:
                    self._runs.poke(tracked)

    def _take_line(self, line: bytes, started: list[TrackedRun]) -> None:
        """Handle one event from the pipe; a run to be tracked from now on goes to `started`."""
        event = event_of(line)
        tracked = self._runs.get(event.run)
        if tracked is None or tracked.phase is Phase.ENDED:
            return
        if isinstance(event, RunRefused):
            if tracked.phase is Phase.ASKED:
                self._resolve(tracked, event.detail)
            return
        if tracked.phase is Phase.ASKED:
            self._heard(tracked)
        if isinstance(event, RunEnded):
            self._end(tracked, event)
        elif not isinstance(event, RunStarted):
            self._hand_out(tracked, event)
        elif tracked.phase in (Phase.ASKED, Phase.CLAIMED):
            tracked.phase = Phase.RUNNING
            tracked.supervisor, tracked.start_ticks = event.supervisor_pid, event.supervisor_start_ticks
            self._hand_out(tracked, event)
            started.append(tracked)

    # --- orders -------------------------------------------------------------------------------------------

    def _send_orders(self, tracked: TrackedRun) -> None:
        """Write the pending orders, then make the supervisor read them."""
        try:
            while tracked.unsent:
                files.append_order(self._spool, tracked.run, tracked.unsent[0])
                del tracked.unsent[0]
        except OSError as error:
            self._complain(tracked, f"an order for run {tracked.run} cannot be written yet: {error}")
            self._poller.alarm_within(CHECK_S)
        self._runs.poke(tracked)

    # --- looks by the clock -------------------------------------------------------------------------------

    def _look_by_clock(self) -> None:
        """Check the runs that no descriptor reports on."""
        now = time.monotonic()
        try:
            self._need_spool()
        except OSError as error:
            if self._spool_error != str(error):
                self._spool_error = str(error)
                log.error("the spool folder %s was removed and cannot be made again: %s", self._spool, error)
        if self._server is not None:
            self._look_after_server(self._server)
        for tracked in self._runs:
            if tracked.phase is Phase.ENDED:
                continue
            if tracked.unsent:
                self._send_orders(tracked)
            if tracked.phase is Phase.ASKED:
                self._look_at_asked(tracked, now)
            elif tracked.phase is Phase.CLAIMED:
                record = self._read(tracked)
                if record is not None:
                    self._take_start(tracked, record)
            if tracked.phase in ALIVE and tracked.pidfd is None:
                self._poller.alarm_within(CHECK_S)
                record = self._read(tracked)
                if record is not None and not record.is_held:
                    self._supervisor_gone(tracked)
        self._kill_orphans()

    def _look_again(self, tracked: TrackedRun) -> None:
        is_fresh = time.monotonic() - tracked.since < PATIENCE_S
        self._poller.alarm_within(SOON_S if is_fresh else CHECK_S)

    def _look_at_asked(self, tracked: TrackedRun, now: float) -> None:
        self._poller.alarm_within(CHECK_S)
        if now - self._spool_lost_at < PATIENCE_S:
            # It may have been claimed in the folder that is gone, and is about to say that it started.
            return
        if tracked.server != self._servers or self._server is None:
            self._resolve(tracked, "its launcher was gone before it was started")
            return
        record = self._read(tracked) if now - tracked.since > CHECK_S else None
        if record is not None and record.pid is not None:
            # It was claimed, and the pipe was too full to say so.
            self._resolve(tracked, "")
        elif self._server.is_stuck(now - tracked.since):
            log.error("%s has not started run %s", self._server.name, tracked.run)
            self._replace_server()

    def _kill_orphans(self) -> None:
        """Kill what dead supervisors left behind; report the runs with nothing left."""
        orphaned = [tracked for tracked in self._runs if tracked.phase is Phase.ORPHANED]
        if not orphaned:
            return
        if self._run_cgroups is not None:
            for tracked in orphaned:
                kill_leaf(leaf_of(self._run_cgroups, tracked.run))
        lost = [OrphanedRun(tracked.run, tracked.supervisor, tracked.witnessed, tracked.left) for tracked in orphaned]
        alive = {w.supervisor for w in self._runs if w.phase in ALIVE}
        spared = frozenset(pid for pid in (*alive, self.server_pid) if pid is not None)
        left = kill_orphans(lost, self._spool, spared)
        for tracked in orphaned:
            tracked.left = left[tracked.run]
            if tracked.left or self._lives_in_its_cgroup(tracked):
                self._look_again(tracked)
                continue
            if (outcome := self._outcome(tracked)) is not None:
                self._end(tracked, value.replace(outcome, end_at=self._clock.now()))
                continue
            detail = f"its supervisor (pid {tracked.supervisor}) ended without a result"
            if tracked.supervisor is None:
                detail = "its record was removed from the spool while no daemon ran"
            elif not os.path.exists(files.record_path(self._spool, tracked.run)):
                detail += ", and its record was removed from the spool"
            self._end(tracked, RunLost(tracked.run, self._clock.now(), detail))

    def _outcome(self, tracked: TrackedRun) -> RunEnded | None:
        """How the command of a run ended whose supervisor was killed during its epilogs."""
        record = self._read(tracked)
        return None if record is None or record.outcome is None else end_of(record.outcome)

    def _has_orphans(self, run: str) -> bool:
        """Whether processes of a run are alive that the spool does not know."""
        return bool(find_orphans([OrphanedRun(run, None, witnessed=False)], self._spool, frozenset()))

    def _lives_in_its_cgroup(self, tracked: TrackedRun) -> bool:
        """Whether its control group still holds a process, which may take long to die; an empty one is removed."""
        if self._run_cgroups is None:
            return False
        leaf = leaf_of(self._run_cgroups, tracked.run)
        return not remove_leaf(leaf, patience_s=0.1) and is_populated(leaf)

    # --- files ------------------------------------------------------------------------------------------

    def _remove(self, tracked: TrackedRun) -> None:
        """Remove a run's files, except a revocation, which must outlast late starters; a later `adopt` sweeps it."""
        ways = [files.checkpoint_path, files.progress_path]
        if tracked.supervisor is not None:
            if tracked.has_result:
                self._spares.add(tracked.run)
            ways.append(files.record_path)
        if tracked.other_files:
            ways += [files.script_path, files.env_path, files.order_path, files.attach_path]
        self._janitor.add((tracked.run, ways))

    def _clear(self, left: tuple[str, Sequence[Callable[[str, str], str]]]) -> None:
        """Clean up; called on the janitor's thread."""
        run, ways = left
        self._spares.withdraw(run)
        try:
            files.remove(way(self._spool, run) for way in ways)
        except OSError as error:
            log.warning("files of run %s stay in the spool: %s", run, error)

    def _sweep(self, run: str) -> None:
        """Handle files of a run that is not in the table: remove those of an ended run, stop a live one."""
        tracked = TrackedRun(run, Phase.ASKED, time.monotonic(), other_files=True, stray=True)
        record = self._read(tracked)
        if record is None or record.pid is None:
            if self._may_sweep:
                files.remove([files.record_path(self._spool, run)])
            ways = (files.script_path, files.env_path, files.order_path, files.checkpoint_path, files.progress_path)
            files.remove([way(self._spool, run) for way in (*ways, files.attach_path)])
            return
        if record.result is not None and not record.is_held:
            # It has ended and is recorded: the daemon was killed before the cleanup.
            tracked.supervisor = record.pid
            self._remove(tracked)
            return
        log.warning("the spool holds run %s, which belongs to no job in the table", run)
        self._runs.add(tracked)
        self._resolve(tracked, "")
        self.order(run, StopOrder("cancel"))
