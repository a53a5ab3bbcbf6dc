"""Notify owners of foreign GPU processes and end these by policy: carries out `lifecycle.foreign`.

Only the system daemon does so. Its records are in memory only: after a restart the times start over, so
messages come later and no process is ended sooner. Messages are sent like alerts, by processes that run as
their recipients. Another thread works out which jobs wait for which GPU.
"""

from __future__ import annotations

import os
import pwd
import signal
import stat
from collections.abc import Mapping, Sequence
from logging import getLogger

from gpusched.daemon.commit import AuditEvent
from gpusched.daemon.core import Scheduler
from gpusched.daemon.forecast import QueueForecast
from gpusched.daemon.watch.looks import BackgroundLook
from gpusched.engine.linux import proctree, terminals
from gpusched.lifecycle.alerts import AdminEvent
from gpusched.lifecycle.foreign import (
    ForeignEnd,
    ForeignGpuUse,
    ForeignNotice,
    ForeignProcess,
    OwnerNotes,
    held_by,
    is_exempt,
    messages,
    steps,
)
from gpusched.model.alerts import Alert, Report
from gpusched.model.cluster import GpuProcess, GpuStatus, GpuView
from gpusched.model.commands import Caller
from gpusched.model.units import printable
from gpusched.model.value import replace
from gpusched.scheduler.whatif import starts_on

log = getLogger("gpusched.daemon")
_LOOK_S = 5.0
"""Time between two searches for jobs blocked by foreign processes: each plans the queue twice."""
_MOST_WAYS = 20
"""Delivery methods remembered per message: they are reported by the recipient's own process."""
_ASSUMED_QUEUES = ("",)
"""Placeholder for the queues of blocked jobs while these are unknown."""
Mark = tuple[int, int]
"""Pid and start ticks."""


class ForeignProcessWatch:
    """Checks foreign GPU processes at each poll."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._notes: dict[Mark, OwnerNotes] = {}
        # A failure of messages must not stop jobs, and the scan of processes runs without it.
        self._look_ahead: BackgroundLook[Mapping[str, tuple[int, ...]]] = BackgroundLook(
            "messages to foreign users", scheduler.failures, _LOOK_S
        )

    def notes_of(self, pid: int) -> OwnerNotes | None:
        """Notes on the process that has this pid now."""
        return next((notes for (known, _), notes in self._notes.items() if known == pid), None)

    def heard(self, report: Report, alert: Alert) -> None:
        """Take in the delivery report of a message."""
        if alert.event != "gpu_foreign" or "outcome" not in report:
            return
        pid, _, start_ticks = alert.key.split(" ")[1].partition(".")
        notes = self._notes.get((int(pid), int(start_ticks)))
        if notes is None or notes.uid != alert.uid:
            return
        way = report["target"].removeprefix("@")
        if report["outcome"] == "told":
            if way in notes.told_by or len(notes.told_by) >= _MOST_WAYS:
                return
            notes.told_by.append(way)
            log.info("notified %s about process %s by %s", notes.user, pid, way)
        else:
            notes.untold = f"{way or 'notify'}: {report['error']}"

    def poll(self) -> None:
        """Find foreign processes; notify owners and end processes as due."""
        settings = self._scheduler.settings.foreign
        if not settings.message:
            self._notes.clear()
            return
        now = self._scheduler.now()
        foreign_processes = self._look(now)
        if any(foreign.ending_at is not None for foreign in foreign_processes):
            self._carry_out(
                [step for step in steps(foreign_processes, settings, now) if isinstance(step, ForeignEnd)], now
            )
        if not self._look_ahead.is_due():
            return
        # Assume a blocked job to see whether there is anything to work out at all.
        if not steps([replace(foreign, waiting=_ASSUMED_QUEUES) for foreign in foreign_processes], settings, now):
            return
        outlook = QueueForecast.of(self._scheduler)
        left = {card.uuid: 0 for foreign in foreign_processes for card in foreign.cards}
        self._look_ahead.begin(self._decide, _wanted, outlook, left)

    def _decide(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        now = self._scheduler.now()
        foreign_processes = [self._with_waiting(foreign, wanted) for foreign in self._look(now)]
        self._carry_out(steps(foreign_processes, self._scheduler.settings.foreign, now), now)

    def _with_waiting(self, foreign: ForeignProcess, wanted: Mapping[str, tuple[int, ...]]) -> ForeignProcess:
        ids = sorted({job_id for card in foreign.cards for job_id in wanted.get(card.uuid, ())})
        jobs = [job for job_id in ids if (job := self._scheduler.state.find(job_id)) is not None]
        return replace(foreign, waiting=tuple(job.spec.queue for job in jobs))

    # --- who is there ---------------------------------------------------------------------------

    def _look(self, now: float) -> list[ForeignProcess]:
        """All processes that block a GPU of this node, by pid; drops the notes on processes that are gone."""
        scheduler = self._scheduler
        cards: dict[int, list[ForeignGpuUse]] = {}
        names: dict[int, str] = {}
        bookers: dict[str, set[int]] = {}
        for run in scheduler.state.open_runs.values():
            for share in run.gpus:
                bookers.setdefault(share.uuid, set()).add(scheduler.state.jobs[run.job_id].uid)
        # Of this machine alone: the pid of a process on another node belongs to something else here, if to anything.
        for view in scheduler.head.tracker.views(now):
            status = scheduler.head.tracker.status(view.uuid, now=now)
            for process in _closing(view, status, scheduler.settings.gpu.baseline_mib):
                idle_s = None if status.idle_since is None else max(0.0, now - status.idle_since)
                card = ForeignGpuUse(
                    view.uuid, view.index, process.vram_mib, idle_s, frozenset(bookers.get(view.uuid, ()))
                )
                cards.setdefault(process.pid, []).append(card)
                names[process.pid] = process.name or "?"
        found = []
        seen: set[Mark] = set()
        # A process adopted since the last reading is no longer foreign.
        for pid in sorted(cards.keys() - scheduler.engine.owners(cards).keys()):
            process_now = proctree.read_process(pid)
            if process_now is None:
                # A process of another container or a simulation: its owner is unknown.
                continue
            mark = pid, process_now.start_ticks
            notes = self._notes.get(mark) or self._first_look(pid, now)
            if notes is None:
                continue
            seen.add(mark)
            self._notes[mark] = notes
            found.append(
                ForeignProcess(
                    pid=pid,
                    start_ticks=process_now.start_ticks,
                    uid=notes.uid,
                    user=notes.user,
                    name=names[pid],
                    program=notes.program,
                    cards=tuple(cards[pid]),
                    since_at=notes.since_at,
                    first_told_at=notes.first_told_at,
                    told_at=notes.told_at,
                    ending_at=notes.ending_at,
                )
            )
        self._notes = {mark: notes for mark, notes in self._notes.items() if mark in seen}
        return found

    def _first_look(self, pid: int, now: float) -> OwnerNotes | None:
        """New notes; None for owners without an account here, as in a container: no end without a message."""
        uid = proctree.real_uid(pid)
        if uid is None:
            return None
        try:
            user = pwd.getpwuid(uid).pw_name
        except KeyError:
            return None
        return OwnerNotes(now, uid, user, _program(pid))

    # --- effects ----------------------------------------------------------------------------------

    def _carry_out(self, due: Sequence[ForeignNotice | ForeignEnd], now: float) -> None:
        for step in due:
            mark = step.foreign.pid, step.foreign.start_ticks
            notes = self._notes[mark]
            if isinstance(step, ForeignEnd):
                self._end(step, notes, now)
                continue
            ways = self._scheduler.settings.foreign.message
            notes.told_at, notes.told_by, notes.untold = now, [], None
            notes.first_told_at = notes.first_told_at or now
            log.info("notifying %s about process %d, which blocks %d jobs", notes.user, step.foreign.pid, step.jobs)
            others = terminals.owners() if "wall" in ways else frozenset()
            self._scheduler.alerts.alert_users(messages(step, ways, others, self._scheduler.head.name, now))

    def _end(self, step: ForeignEnd, notes: OwnerNotes, now: float) -> None:
        """Send TERM or KILL to this process, if it is the same and still that user's."""
        foreign = step.foreign
        process = proctree.read_process(foreign.pid)
        settings = self._scheduler.settings.foreign
        is_theirs = process is not None and proctree.real_uid(foreign.pid) == foreign.uid
        if process is None or not is_theirs or process.start_ticks != foreign.start_ticks:
            return
        if is_exempt(foreign, settings) or not proctree.send(process, _signal_of(step)):
            return
        word = "KILL" if step.is_kill else "TERM"
        held = held_by(foreign)
        text = f"process {foreign.pid} ({printable(foreign.name)}) of {foreign.user} on {held}, outside any job"
        log.warning("%s was sent %s", text, word)
        # Wait another grace before the next KILL, so as not to signal an unkillable process all the time.
        notes.ending_at = now
        event = AuditEvent(Caller(os.geteuid(), "[foreign]"), f"send {word} to", f"process {foreign.pid}", foreign.user)
        self._scheduler.signals.audited.send(self._scheduler.failures, event)
        if not step.is_kill:
            jobs = "1 job waits" if step.jobs == 1 else f"{step.jobs} jobs wait"
            node = self._scheduler.head.name
            news = AdminEvent("foreign_ended", f"{text}, was sent TERM: {jobs} for its GPU", node, str(foreign.pid))
            self._scheduler.alerts.alert_admin(news, now, self._scheduler.settings)


def _closing(view: GpuView, status: GpuStatus, least_mib: int) -> Sequence[GpuProcess]:
    """Foreign processes that keep whole-card jobs off a GPU, except those that hold next to nothing of it."""
    foreign = [process for process in status.intruders if process.run is None]
    mib = sum(process.vram_mib or 0 for process in foreign)
    if view.why_not_whole is None or not (mib > view.foreign_limit_mib or view.is_foreign_busy):
        return [process for process in foreign if process.vram_mib is None and view.why_not_whole is not None]
    return [process for process in foreign if process.vram_mib is None or process.vram_mib > least_mib]


def _signal_of(step: ForeignEnd) -> int:
    return signal.SIGKILL if step.is_kill else signal.SIGTERM


def _wanted(outlook: QueueForecast, left: Mapping[str, int]) -> Mapping[str, tuple[int, ...]]:
    return starts_on(outlook.snapshot, outlook.settings, left, outlook.extensions)


def _program(pid: int) -> str | None:
    """Name of the executable if it belongs to root; other names can be forged."""
    path = f"/proc/{pid}/exe"
    try:
        target, found = os.readlink(path), os.stat(path)
    except OSError:
        return None
    if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    return os.path.basename(target)
