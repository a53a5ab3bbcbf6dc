"""The agent of a node: keeps the engine of its machine in line with what the head wants.

The engine is an ordinary one on the node's spool, and knows nothing of heads. What it lost with a killed agent comes
back in two ways: from the spool, as after a restart of a daemon, and from the head, which tells the state of all runs.

A version is recorded as applied *before* it is: if the agent is killed in between, adopting the state of all runs
brings them in line. A run that was about to be started is then returned to the queue, as its claim is revoked; never is
it started twice. Signals, notes and the like leave no state that could be brought in line. They are recorded as
doubtful first, with a mark of the run that changes as soon as the order is written.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from gpusched.engine.contact import boottime_s
from gpusched.engine.linux import proctree
from gpusched.engine.remote.journal import AgentJournal
from gpusched.engine.remote.messages import (
    EVENTS_PER_REPLY,
    Change,
    ForgetRun,
    NodeReport,
    OrderRun,
    SyncReply,
    SyncRequest,
    WantedRun,
    change_from,
    pack,
    unpack,
    version_trouble,
)
from gpusched.engine.step_usage import MeasuringEngine
from gpusched.model.cluster import GpuReading, GpuTargets, Isolation, Processor
from gpusched.model.execution import EngineEvent, LaunchSite, OpenRun, RunNeverStarted, StopOrder, Ticket
from gpusched.model.mig import MigOrder
from gpusched.model.progress import ToldProgress
from gpusched.model.settings import NodeSettings
from gpusched.model.step import TaskUsage
from gpusched.model.value import decode, replace
from gpusched.ports import Clock, Engine, HostSource

log = logging.getLogger(__name__)

_REPLIES_KEPT = 1024


class GpuMonitor(Protocol):
    """Reads the GPUs in the background, so that a hanging driver delays nothing else."""

    def request(self, orders: Sequence[MigOrder] = ()) -> None:
        """Begin a reading. Args: orders: layouts to be made before it."""

    def want(self, targets: GpuTargets) -> None:
        """Bring the cards in line with what runs want."""

    def poll(self) -> GpuReading | None:
        """A new reading since the last call, or None."""


@dataclass(frozen=True, slots=True)
class NodeSources:
    """What a node's reports are made of, besides its engine."""

    host: HostSource | None = None
    gpus: GpuMonitor | None = None
    isolation: Isolation | None = None
    processors: tuple[Processor, ...] = ()
    site: LaunchSite | None = None
    settings: NodeSettings | None = None
    account_trouble: Callable[[int, str], str | None] = lambda uid, user: None
    """Why runs of this uid and user name cannot be started here: a sentence."""
    trouble: Callable[[], str | None] = lambda: None
    """Why no run can be started here now: a sentence."""
    progress: Callable[[], dict[str, ToldProgress]] = dict
    """Of the runs here."""


class NodeAgent:
    """See the module's docstring.

    Args: make_engine: makes one on the node's spool, which knows of no run yet. boot_id: of the running kernel.
    order_mark: a number that changes with every order written for a run, and survives the engine. sources: for reports.
    note_contact: keeps the instant of the last contact with the head, on the clock `boottime_s`, see `engine.contact`.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        journal: AgentJournal,
        *,
        boot_id: str,
        clock: Clock,
        order_mark: Callable[[str], int],
        sources: NodeSources | None = None,
        note_contact: Callable[[float], None] = lambda at: None,
        boottime_s: Callable[[], float] = boottime_s,
    ) -> None:
        self._make_engine = make_engine
        self._journal = journal
        self._boot_id = boot_id
        self._clock = clock
        self._order_mark = order_mark
        self._sources = sources or NodeSources()
        self._note_contact, self._boottime_s = note_contact, boottime_s
        self._replied: deque[tuple[int, float]] = deque(maxlen=_REPLIES_KEPT)
        """Serials of replies that the head has not answered, and when they were made."""
        self._contact_at: float | None = None
        """Contact with the head that is not noted yet."""
        self._engine: Engine | None = None
        self._wake: Callable[[], None] | None = None
        self._serial = 0
        self._is_ready = False
        self._events: deque[EngineEvent] = deque()
        self._first_event = 1
        self._behind: dict[str, list[Change]] = {}
        """By run: changes that the engine failed to make, in order; tried again at every request."""
        self._cards: GpuReading | None = None
        self._reading: GpuReading | None = None
        self._reading_number = 0
        self._wanted_reading = 0
        self._trouble: str | None = None

    def sync(self, frame: bytes) -> bytes:
        """Apply what is new in a request; returns the reply. Raises: ValueError for anything but a request."""
        unpacked = unpack(frame)
        why = version_trouble("the head", unpacked)
        if why is not None:
            return pack(SyncReply(0, 0, refused=why))
        request = decode(unpacked.parts[0], SyncRequest)
        journal = self._journal
        if request.session < journal.session:
            why = (
                f"another head has taken over this node: its session {journal.session} is newer than yours, "
                f"{request.session}"
            )
            return pack(SyncReply(request.number, request.session, journal.epoch, refused=why))
        if request.session > journal.session:
            self._begin_session(request.session)
        if request.epoch > journal.epoch and not journal.applied:
            # The journal was lost, and the clock is behind that of then: the head would take us for the older agent.
            journal.raise_epoch(request.epoch)
        engine = self._need_engine()
        if request.epoch == journal.epoch:
            self._acknowledge(request.acked_event)
            self._take_contact(request.heard)
            self._take_reading(request.acked_reading)
            if request.runs is not None:
                self._take_over(engine, request.as_of, request.runs)
            elif self._is_ready:
                self._apply_all(engine, request.versions, unpacked.parts[1:])
            if request.gpu_targets is not None and self._sources.gpus is not None:
                self._sources.gpus.want(request.gpu_targets)
            self._request_reading(request.wanted_reading, request.mig_orders)
        self._collect(engine)
        report = self._try_to_report(engine, request.cpu_of, request.watched) if request.wants_report else None
        return self._reply(request.number, request.session, report)

    def push(self) -> bytes | None:
        """An unasked reply with the events that the head has not acknowledged; None without any."""
        if self._engine is None:
            return None
        self._collect(self._engine)
        return self._reply(0, self._journal.session) if self._events else None

    def set_waker(self, wake: Callable[[], None] | None) -> None:
        """Register a callback for new events, called on the event loop's thread: `push` sends them."""
        self._wake = wake
        if self._engine is not None:
            self._engine.set_waker(wake)

    @property
    def association(self) -> tuple[int, int]:
        """Session of the head that it obeys, 0 for none, and its own epoch."""
        return self._journal.session if self._engine is not None else 0, self._journal.epoch

    def run_of(self, pid: int) -> str | None:
        """The run that a process of this machine belongs to."""
        return None if self._engine is None else self._engine.owners([pid]).get(pid)

    def task_usage(self, run: str) -> tuple[TaskUsage, ...]:
        """As `MeasuringEngine.task_usage`."""
        return self._engine.task_usage(run) if isinstance(self._engine, MeasuringEngine) else ()

    def close(self) -> None:
        """Let go of the spool; runs continue."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._journal.close()

    # --- sessions and epochs ---------------------------------------------------------------------------

    def _begin_session(self, session: int) -> None:
        """A head has restarted: let go of the engine, which a fresh one replaces, as at a restart of a daemon."""
        self._journal.begin_session(session)
        log.info("a head has begun session %d", session)
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._wanted_reading = 0

    def _need_engine(self) -> Engine:
        if self._engine is None:
            self._events.clear()
            self._behind.clear()
            self._first_event, self._trouble = 1, None
            journal = self._journal
            if journal.doubtful:
                # Looked at before anything else can write an order for the run.
                was_given = self._order_mark(journal.doubtful_run) != journal.mark
                journal.note_applied(journal.doubtful if was_given else journal.applied)
            self._engine = self._make_engine()
            # Nothing of this session was applied: a fresh engine is in line with it.
            self._is_ready = journal.applied == 0
            if self._wake is not None:
                self._engine.set_waker(self._wake)
        return self._engine

    def _take_over(self, engine: Engine, as_of: int, runs: Sequence[OpenRun]) -> None:
        """Adopt all runs of the node, once; if that fails, the agent is not ready until it succeeds."""
        journal = self._journal
        if self._is_ready and as_of <= journal.applied:
            return
        journal.note_applied(max(as_of, journal.applied))
        try:
            engine.adopt(runs)
        except Exception as error:
            self._note_trouble("the runs of this node cannot be adopted", error)
            self._is_ready = False
        else:
            self._is_ready, self._trouble = True, None

    # --- leases ------------------------------------------------------------------------------------------

    def _take_contact(self, heard: int) -> None:
        """Take an answer of the head to a reply as contact at the instant of that reply, however late it comes."""
        while self._replied and self._replied[0][0] <= heard:
            self._contact_at = self._replied.popleft()[1]

    def _renew_leases(self) -> None:
        """Renew the leases of runs that end without contact."""
        if self._contact_at is None:
            return
        try:
            self._note_contact(self._contact_at)
        except OSError as error:
            self._note_trouble("contact with the head cannot be noted: runs with --lost-after will end", error)
        else:
            self._contact_at = None

    # --- changes ---------------------------------------------------------------------------------------

    def _apply_all(self, engine: Engine, versions: Sequence[int], bodies: Sequence[bytes]) -> None:
        """Apply the changes that are new. Args: versions: of the bodies."""
        self._catch_up(engine)
        applied = self._journal.applied
        pairs = zip(versions, bodies, strict=True)
        try:
            changes = [(version, change_from(body)) for version, body in pairs if version > applied]
        except ValueError as error:
            self._note_trouble("a change of the head cannot be understood", error)
            return
        if not any(_may_end(change) for _, change in changes):
            # Before runs are started, which need contact. Otherwise after those have ended that must have.
            self._renew_leases()
        for kind, group in groupby(changes, lambda entry: type(entry[1])):
            numbered = list(group)
            if kind is OrderRun:
                for version, order in numbered:
                    self._journal.note_doubtful(version, order.run, self._order_mark(order.run))
                    self._apply(engine, order)
                    self._journal.note_applied(version)
            else:
                self._journal.note_applied(numbered[-1][0])
                self._apply_together(engine, [change for _, change in numbered if not self._refuses(change)])
        self._renew_leases()

    def _refuses(self, change: Change) -> bool:
        """Report a run of a user whom this node knows by another uid, whose files it would take for theirs, and one
        whose GPUs are not there any more, instead of starting it.
        """
        ticket = change.known.ticket if isinstance(change, WantedRun) else None
        if ticket is None:
            return False
        node = self._sources.site.node if self._sources.site is not None else ""
        why = trouble = self._sources.account_trouble(ticket.uid, ticket.user)
        if why is None:
            why = _missing_gpu(ticket, self._cards, node)
        if why is not None:
            refused_on = node if trouble is not None else ""
            self._events.append(RunNeverStarted(ticket.run, self._clock.now(), why, refused_on=refused_on))
        return why is not None

    def _apply_together(self, engine: Engine, changes: Sequence[Change]) -> None:
        if not changes:
            return
        if not self._behind:
            try:
                _make(engine, changes)
            except Exception as error:
                log.debug("not all at once: %s", error)
            else:
                return
        # One by one: an error of one run must not keep the others from starting and ending.
        for change in changes:
            self._apply(engine, change)

    def _apply(self, engine: Engine, change: Change) -> None:
        """Make a change, after those of the same run that failed; if it fails, it is tried again at every request."""
        if change.run in self._behind:
            self._behind[change.run].append(change)
            return
        try:
            _make(engine, [change])
        except Exception as error:
            self._note_trouble(f"run {change.run} cannot be brought in line", error)
            self._behind[change.run] = [change]

    def _catch_up(self, engine: Engine) -> None:
        """Try the failed changes again."""
        if not self._behind:
            return
        behind, self._behind = self._behind, {}
        for changes in behind.values():
            for change in changes:
                self._apply(engine, change)
        if not self._behind:
            self._trouble = None

    def _note_trouble(self, what: str, error: Exception) -> None:
        text = f"{what}: {type(error).__name__}: {error}"
        if text != self._trouble:
            log.error("%s", text, exc_info=error)
        self._trouble = text

    # --- events, reports and replies -------------------------------------------------------------------

    def _take_reading(self, acked: int) -> None:
        """Take a new reading for the next report. Args: acked: number of the last one that the head has."""
        gpus = self._sources.gpus
        if gpus is None:
            return
        if acked == self._reading_number:
            self._reading = None
        reading = gpus.poll()
        if reading is not None:
            self._cards = reading
            self._reading = reading if self._reading is None else _with_faults_of(self._reading, reading)
            self._reading_number += 1

    def _request_reading(self, wanted: int, mig_orders: Sequence[MigOrder]) -> None:
        if self._sources.gpus is not None and wanted > self._wanted_reading:
            self._wanted_reading = wanted
            self._sources.gpus.request(mig_orders)

    def _collect(self, engine: Engine) -> None:
        self._events.extend(engine.events())

    def _acknowledge(self, number: int) -> None:
        while self._events and self._first_event <= number:
            self._events.popleft()
            self._first_event += 1

    def _reply(self, number: int, session: int, report: NodeReport | None = None) -> bytes:
        self._serial += 1
        self._replied.append((self._serial, self._boottime_s()))
        events = tuple(self._events)
        return pack(
            SyncReply(
                number=number,
                session=session,
                epoch=self._journal.epoch,
                serial=self._serial,
                boot_id=self._boot_id,
                at=self._clock.now(),
                applied=self._journal.applied,
                is_ready=self._is_ready,
                first_event=self._first_event,
                events=events[:EVENTS_PER_REPLY],
                report=report,
                trouble=self._trouble,
            )
        )

    def _try_to_report(
        self, engine: Engine, cpu_of: Sequence[str], watched: Sequence[tuple[int, int]]
    ) -> NodeReport | None:
        try:
            return self._report(engine, cpu_of, watched)
        except Exception as error:
            self._note_trouble("the state of this node cannot be read", error)
            return None

    def _report(self, engine: Engine, cpu_of: Sequence[str], watched: Sequence[tuple[int, int]]) -> NodeReport:
        host, reading = self._sources.host, self._reading
        pids = []
        for gpu in reading.gpus if reading is not None else ():
            pids += [process.pid for process in (*(gpu.processes or ()), *gpu.openers)]
        return NodeReport(
            at=self._clock.now(),
            host=host.read() if host is not None else None,
            gpus=reading,
            reading=self._reading_number,
            owners=dict(engine.owners(pids)) if pids else {},
            checkpoints=dict(engine.checkpoints()),
            cpu_seconds=dict(engine.cpu_seconds(cpu_of)) if cpu_of else {},
            gone=tuple(one for one in watched if not proctree.lives(*one)),
            isolation=self._sources.isolation,
            processors=self._sources.processors,
            site=self._sources.site,
            settings=self._sources.settings,
            trouble=self._sources.trouble(),
            progress=self._sources.progress(),
        )


def _missing_gpu(ticket: Ticket, cards: GpuReading | None, node: str) -> str | None:
    """Which GPU of a run is not there any more, or is another one now, as a sentence; None while nothing is missing."""
    if cards is None or cards.error is not None:
        # Nothing is known, which is not the same.
        return None
    there = {gpu.uuid: gpu for gpu in cards.gpus if not gpu.is_lost}
    for uuid, index in ticket.gpus:
        if uuid not in there:
            return f"GPU {index} of node {node}, {uuid}, is not there any more"
        if there[uuid].index != index:
            return f"GPU {uuid} of node {node} is number {there[uuid].index} now, and no longer {index}"
    return None


def _with_faults_of(earlier: GpuReading, later: GpuReading) -> GpuReading:
    """The later reading, with the faults of one that the head never got: each is reported once only."""
    faults = {gpu.uuid: gpu.xids for gpu in earlier.gpus if gpu.xids}
    if not faults:
        return later
    return replace(later, gpus=tuple(replace(gpu, xids=(*faults.get(gpu.uuid, ()), *gpu.xids)) for gpu in later.gpus))


def _make(engine: Engine, changes: Sequence[Change]) -> None:
    """Make changes of one kind, of which only orders come singly."""
    if isinstance(changes[0], OrderRun):
        engine.order(changes[0].run, changes[0].order)
    else:
        runs = [change.known for change in changes if isinstance(change, WantedRun)]
        engine.reconcile(runs, [change.run for change in changes if isinstance(change, ForgetRun)])


def _may_end(change: Change) -> bool:
    """Whether it may end a run that the daemon takes for lost."""
    known = change.known if isinstance(change, WantedRun) else None
    # Without a ticket, a run that never started is returned to the queue.
    return known is not None and known.ticket is None and isinstance(known.pending_order, StopOrder)
