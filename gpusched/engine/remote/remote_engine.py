"""The engine of another machine, as the daemon sees it: everything is left to the `NodeAgent` there.

Nothing blocks. What the daemon asks for changes the state in which the node's runs are to be; changes are repeated
until the node acknowledges their version, events until they are acknowledged here. There is one request under way at a
time; it carries all that has gathered meanwhile. A node that does not answer changes nothing: its runs stay as they
are, and what was asked for stays asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpusched.engine.poller import NEVER, Poller
from gpusched.engine.remote.channel import Channel
from gpusched.engine.remote.messages import (
    MAX_CHANGE_BYTES,
    NodeReport,
    SyncReply,
    SyncRequest,
    pack,
    unpack,
    version_trouble,
)
from gpusched.engine.remote.replica import NodeReplica
from gpusched.engine.remote.streams import MAGIC as STREAM_MAGIC
from gpusched.engine.remote.streams import StreamMux
from gpusched.model.cluster import GpuTargets
from gpusched.model.execution import EngineEvent, OpenRun, Order, RunEnded, StopOrder
from gpusched.model.mig import MigOrder
from gpusched.model.progress import ToldProgress
from gpusched.model.value import decode, replace
from gpusched.ports import Clock

log = logging.getLogger(__name__)

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LinkPace:
    """How often a node is asked. All in seconds."""

    poll_s: float = 1.0
    """Between requests without news."""
    report_s: float = 1.0
    retry_s: float = 0.25
    """Until the first repetition; each one waits twice as long as the one before, ..."""
    retry_max_s: float = 5.0
    """... up to this."""
    silence_s: float = 3.0
    """After this long without an answer the node counts as unreachable."""


@dataclass(slots=True)
class LinkState:
    """What is known of the connection to a node. Instants are by the head's clock."""

    contact_at: float = 0.0
    """Monotonic instant of this process: anything that the node may take for contact with a head was sent before."""
    last_reply_at: float | None = None
    unreachable_since: float | None = None
    """Since when nothing was answered; None while the node answers."""
    why: str | None = None
    """Why it is unreachable, or refuses this head: a sentence. None: no reason is known."""
    is_refused: bool = False
    """The node answers, and takes no orders from this head: `why` says why."""
    clock_skew_s: float | None = None
    """By how much the node's clock is ahead."""
    clock_error_s: float = 0.0
    """By how much that may be wrong."""
    round_trip_s: float | None = None
    version: str | None = None
    epoch: int = 0
    boot_id: str = ""
    trouble: str | None = None
    """What the node's engine fails to do, and tries again."""


class RemoteEngine:
    """See `ports.Engine` and the module's docstring.

    Args: channel: to the node's agent; closed with the engine. session: larger than that of any earlier head of this
    node. node: names it in sentences. on_report: gets each new report of the node.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        session: int,
        clock: Clock,
        node: str = "the node",
        on_report: Callable[[NodeReport], None] | None = None,
        pace: LinkPace | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._session = session
        self._clock = clock
        self._node = node
        self._on_report = on_report
        self._pace = pace or LinkPace()
        self._monotonic = monotonic
        # A head before this one may have been in contact until now.
        self.link = LinkState(contact_at=monotonic())
        self.report: NodeReport | None = None
        """The newest."""
        self._replica = NodeReplica()
        self._forsaken = 0
        """Version of the last change that ends a run which the daemon takes for lost."""
        self._sent = 0
        """Version of the last change that was ever sent."""
        self._base = 0
        """Version as of which the agent got all runs, ..."""
        self._is_base_due = False
        """... or is still to be: changes wait until it confirms that it has adopted them."""
        self._is_void = False
        """Nothing can be sent any more: another head used the session."""
        self._serial = 0
        self._received = 0
        self._reading = 0
        self._is_ack_due = False
        self._events: list[EngineEvent] = []
        self._number = 0
        self._flight = 0
        """Number of the first request of the exchange under way; 0: none."""
        self._asked_at: dict[int, tuple[float, float]] = {}
        """By number of a request of this exchange: when it was sent, monotonic and by the clock."""
        self._tries = 0
        self._fruitless = 0
        """Exchanges in a row that achieved nothing."""
        self._unanswered_since: float | None = None
        self._next_at = self._monotonic()
        """When to send, in the absence of news; for an exchange under way, when to repeat it."""
        self._hold_until = 0.0
        """News are not sent before: the last exchange had some, and achieved nothing."""
        self._had_news = self._wanted_report = False
        self._report_at = self._next_at
        self._wanted_reading = 0
        self._gpu_targets: GpuTargets | None = None
        self._is_reading_awaited = False
        self._mig_orders: tuple[MigOrder, ...] = ()
        self._cpu_of: tuple[str, ...] = ()
        self._watched: tuple[tuple[int, int], ...] = ()
        self._wake: Callable[[], None] | None = None
        self._has_fired = False
        self.streams = StreamMux(channel.send, is_head=True, monotonic=monotonic)
        """For what is no matter of runs' states: output, sockets."""
        self._poller = Poller()
        self._poller.watch(channel.fileno())
        self._is_closed = False
        self._has_way = False
        """Whether frames could travel when last looked."""
        self._pump()

    # --- the protocol -------------------------------------------------------------------------------

    def adopt(self, runs: Sequence[OpenRun]) -> None:
        self._replica.adopt(runs)
        self._base, self._is_base_due = self._replica.version, True
        self.look()

    def reconcile(self, runs: Sequence[OpenRun], ended: Iterable[str] = ()) -> None:
        for run in ended:
            self._replica.forget(run)
        for known in runs:
            started = self._replica.lost_start(known)
            if started is not None:
                self._events.append(started)
            if size := self._replica.want(known):
                self._cannot_send(known.run, size)
        self.look()

    def order(self, run: str, order: Order) -> None:
        self._replica.order(run, order)
        self.look()

    def events(self) -> list[EngineEvent]:
        self._pump()
        events, self._events = self._events, []
        self._has_fired = False
        for event in events:
            self._replica.note_handed_out(event)
        self._poller.rearm()
        return events

    def owners(self, pids: Iterable[int]) -> Mapping[int, str]:
        self.look()
        known = dict(self.report.owners) if self.report is not None else {}
        for started in self._replica.live():
            known[started.pid] = known[started.supervisor_pid] = started.run
        return {pid: known[pid] for pid in pids if pid in known and self._replica.is_live(known[pid])}

    def progress_of(self, run: str) -> ToldProgress | None:
        """The progress of a run by the newest report, dated by the head's clock; None if it reports none."""
        told = self.report.progress.get(run) if self.report is not None else None
        return told and replace(told, changed_at=told.changed_at - (self.link.clock_skew_s or 0.0))

    def checkpoints(self) -> Mapping[str, float]:
        self.look()
        found = self.report.checkpoints if self.report is not None else {}
        return {run: at for run, at in found.items() if self._replica.is_live(run)}

    def cpu_seconds(self, runs: Iterable[str]) -> Mapping[str, float]:
        self._cpu_of = tuple(runs)
        self.look()
        found = self.report.cpu_seconds if self.report is not None else {}
        return {run: found[run] for run in self._cpu_of if run in found and self._replica.is_live(run)}

    def gone(self, processes: Iterable[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        """Which of these processes of the node have ended by its newest report; watches them, and no others."""
        self._watched = tuple(processes)
        return frozenset(self._watched).intersection(self.report.gone if self.report is not None else ())

    def set_waker(self, wake: Callable[[], None] | None) -> None:
        """Must be called inside the running event loop; None detaches from it."""
        self._wake, self._has_fired = wake, False
        self._poller.attach(None if wake is None else self._on_news)
        if self._events:
            self._fire()

    def close(self) -> None:
        """Let go of the node; what it has not acknowledged follows from the table at the next start."""
        if not self._is_closed:
            self._is_closed = True
            self._wake = None
            self._poller.close()
            self._channel.close()

    def forsake(self, run: str) -> None:
        """End a run whenever the node can be reached; the daemon takes it for lost from now on.

        A start that was not acknowledged is taken back: the node applies no version twice, so what it may have applied
        already is ended by the stop, and otherwise never begins.
        """
        stop = StopOrder("cancel", grace_s=0.0)
        self._replica.want(OpenRun(run, self.link.boot_id, None, None, pending_order=stop))
        self._forsaken = self._replica.version
        self._replica.forsake(run)
        self.look()

    def silent_s(self) -> float:
        """How long the node has certainly had no contact with any head."""
        return self._monotonic() - self.link.contact_at

    def request_reading(self, mig_orders: Sequence[MigOrder] = ()) -> None:
        """Ask for a reading of the GPUs that begins after this call; it comes with a report.

        Args: mig_orders: layouts to be made before it.
        """
        self._mig_orders = tuple(mig_orders)
        self._wanted_reading += 1
        self._is_reading_awaited = True
        self._report_at = self._monotonic()
        self.look()

    def want_gpus(self, targets: GpuTargets) -> None:
        """Have the node bring its cards in line with what runs want."""
        before, self._gpu_targets = self._gpu_targets, targets
        if targets != (before or GpuTargets()):
            self.request_reading()

    def look(self) -> None:
        """Send, and take in what has arrived; wake the daemon if it gets events from that."""
        self._pump()
        if self._events:
            self._fire()
        self._poller.rearm()

    def wait(self, timeout_s: float) -> None:
        """Block until `events` may have news, for callers without an event loop."""
        if not self._events:
            self._poller.ready(max(0.0, min(timeout_s, self.next_at() - self._monotonic())))

    def next_at(self) -> float:
        """Monotonic instant at which something is to be done without news, for callers without an event loop."""
        if self._flight:
            return self._next_at
        return max(self._hold_until, 0.0 if self._has_news() else min(self._next_at, self._report_at))

    def _cannot_send(self, run: str, size: int) -> None:
        most = MAX_CHANGE_BYTES // _MIB
        text = (
            f"its script and environment take {size // _MIB} MiB; at most {most} MiB can be sent to {self._node}: "
            "put the data into a file"
        )
        event = RunEnded(run, None, self._clock.now(), launch_error=text)
        if self._replica.is_news(event):
            self._events.append(event)

    # --- the exchange ----------------------------------------------------------------------------------

    def _on_news(self) -> None:
        """Called by the poller: the daemon is woken for events only."""
        self.look()
        self._poller.rearm()

    def _fire(self) -> None:
        """Wake the daemon, once until it collects the events."""
        if self._wake is not None and not self._has_fired:
            self._has_fired = True
            self._wake()

    def _pump(self) -> None:
        if self._is_closed:
            return
        for frame in self._channel.receive():
            self._take(frame)
        now = self._monotonic()
        self._note_silence(now)
        had_way, self._has_way = self._has_way, self._channel.trouble() is None
        if self._has_way and not had_way:
            # What was sent before is lost, and there is a way again.
            self._next_at = min(self._next_at, now)
        if self.next_at() <= now and not self._is_void:
            self._send(now)
            # An agent in this process may have answered already.
            for frame in self._channel.receive():
                self._take(frame)
        self._poller.alarm_at = NEVER if self._is_void else self.next_at()

    def _has_news(self) -> bool:
        return self._is_ack_due or (self.link.epoch > 0 and (self._is_base_due or self._replica.has_changes))

    def _send(self, now: float) -> None:
        self._number += 1
        if not self._flight:
            self._flight, self._tries = self._number, 0
            self._asked_at.clear()
        self._asked_at[self._number] = now, self._clock.now()
        if self._unanswered_since is None:
            self._unanswered_since = now
        self._next_at = now + self._backoff_s(self._tries)
        self._tries += 1
        # Without the agent's epoch nothing is sent that could be applied in another boot of the node.
        changes: list[tuple[int, bytes]] = []
        runs, last = None, self._replica.acked
        if self.link.epoch and self._is_base_due:
            runs, last = self._replica.all_runs(self._base), self._base
        elif self.link.epoch and (changes := self._replica.changes(self.link.boot_id)):
            last = changes[-1][0]
        self._sent = max(self._sent, last)
        # Runs must not get another lease before those have ended that are taken for lost.
        is_contact = not self._is_base_due and self._forsaken <= last
        request = SyncRequest(
            number=self._number,
            session=self._session,
            epoch=self.link.epoch,
            versions=tuple([version for version, _ in changes]),
            as_of=self._base,
            runs=runs,
            acked_event=self._received,
            heard=self._serial if is_contact else 0,
            acked_reading=self._reading,
            wants_report=now >= self._report_at,
            wanted_reading=self._wanted_reading,
            mig_orders=self._mig_orders,
            gpu_targets=self._gpu_targets,
            cpu_of=self._cpu_of,
            watched=self._watched,
        )
        self._is_ack_due = False
        self._had_news, self._wanted_report = bool(changes) or runs is not None, request.wants_report
        self._channel.send(pack(request, [body for _, body in changes]))

    def _note_silence(self, now: float) -> None:
        link = self.link
        trouble = self._channel.trouble()
        if self._unanswered_since is None and trouble is None:
            return
        since = now if self._unanswered_since is None else self._unanswered_since
        if link.unreachable_since is None and (trouble is not None or now - since >= self._pace.silence_s):
            link.unreachable_since = self._clock.now() - (now - since)
            log.warning(
                "%s does not answer%s; its runs stay as they are", self._node, f": {trouble}" if trouble else ""
            )
        if link.unreachable_since is not None and not link.is_refused:
            link.why = trouble

    def _take(self, frame: bytes) -> None:
        """Handle a reply, or a segment of a stream."""
        if frame.startswith(STREAM_MAGIC):
            self._take_segment(frame)
            return
        try:
            unpacked = unpack(frame)
            why = version_trouble(self._node, unpacked)
            reply = None if why is not None else decode(unpacked.parts[0], SyncReply)
        except ValueError as error:
            log.error("%s sent something that is not a reply: %s", self._node, error)
            return
        self.link.version = unpacked.version
        if reply is None:
            self._take_refusal(why or "")
            # The agent stays what it is; what starts next is what is installed by then.
            self._channel.hang_up(why or "")
        elif reply.session == self._session or (reply.session == 0 and reply.refused is not None):
            if reply.refused is not None:
                self._take_refusal(f"{self._node}: {reply.refused}")
            elif reply.epoch >= self.link.epoch and not self._is_void:
                # A lower epoch: of an agent that is gone.
                self._take_reply(reply)

    def _take_segment(self, frame: bytes) -> None:
        try:
            self.streams.take(frame)
        except ValueError as error:
            log.error("%s sent something that is not a segment: %s", self._node, error)

    def _take_refusal(self, why: str) -> None:
        link = self.link
        if link.why != why:
            log.error("%s", why)
        link.is_refused, link.why = True, why
        self._note_answer()
        self._end_exchange(has_progress=False)

    def _take_reply(self, reply: SyncReply) -> None:
        now = self._monotonic()
        has_progress = False
        self.link.is_refused = False
        self._note_answer()
        if reply.epoch > self.link.epoch:
            self._begin_epoch(reply)
            has_progress = True
        is_newest = reply.serial > self._serial
        if is_newest:
            self._serial = reply.serial
            self.link.contact_at = now
            self.link.trouble = reply.trouble
            if self._is_base_due and reply.is_ready and reply.applied >= self._base:
                self._is_base_due, has_progress = False, True
            elif not self._is_base_due and not reply.is_ready:
                self._tell_all(reply.applied)
        has_progress |= self._take_what_it_tells(reply, is_newest)
        asked = self._asked_at.get(reply.number)
        if asked is not None:
            self._measure(reply, now - asked[0], asked[1])
        if self._flight and reply.number >= self._flight:
            self._end_exchange(has_progress)

    def _take_what_it_tells(self, reply: SyncReply, is_newest: bool) -> bool:
        """Take acknowledgements, events and the report; whether it brought the exchange forward."""
        has_progress = self._replica.acknowledge(reply.applied)
        for number, event in enumerate(reply.events, reply.first_event):
            if number == self._received + 1:
                self._received, has_progress, self._is_ack_due = number, True, True
                if self._replica.is_news(event):
                    self._events.append(_named(event, self._node))
        if reply.report is not None and is_newest:
            self._take_report(reply.report)
        return has_progress

    def _take_report(self, report: NodeReport) -> None:
        if report.gpus is not None:
            if report.reading > self._reading:
                self._reading, self._is_reading_awaited = report.reading, False
                # A later agent must not take an order that has an outcome for a new one.
                self._mig_orders = ()
            else:
                # It was taken with an earlier report already.
                report = replace(report, gpus=None)
        self.report = report
        self._report_at = self._monotonic() + (self._pace.retry_s if self._is_reading_awaited else self._pace.report_s)
        if self._on_report is not None:
            self._on_report(report)

    def _begin_epoch(self, reply: SyncReply) -> None:
        """Another agent answers than before: it must learn what this session has done."""
        link = self.link
        is_first, other_boot = link.epoch == 0, link.boot_id != reply.boot_id
        link.epoch, link.boot_id = reply.epoch, reply.boot_id
        self.streams.associate(self._session, reply.epoch)
        self._serial = self._received = self._reading = 0
        if not is_first:
            log.info("the agent of %s was restarted", self._node)
            # What was under way to another boot, or to an agent whose journal is lost, may have been done there, and
            # must not be done again.
            is_unknown = other_boot or reply.applied < self._replica.acked
            self._tell_all(self._sent if is_unknown else reply.applied)
        elif reply.applied:
            self._is_void = link.is_refused = True
            link.why = f"{self._node}: another head has used session {self._session}"
            log.error("%s", link.why)

    def _tell_all(self, applied: int) -> None:
        """Tell a new agent the state of all runs. Args: applied: version that the one before may have applied."""
        self._replica.acknowledge(applied)
        self._base = max(self._base, self._replica.acked)
        self._is_base_due = self._base > 0

    def _note_answer(self) -> None:
        link = self.link
        self._unanswered_since = None
        link.last_reply_at = self._clock.now()
        if link.unreachable_since is not None:
            log.info("%s answers again", self._node)
            link.unreachable_since = None
        if not link.is_refused:
            link.why = None

    def _end_exchange(self, has_progress: bool) -> None:
        now = self._monotonic()
        if has_progress:
            self._fruitless, self._hold_until = 0, 0.0
        elif self._had_news or self.link.is_refused:
            # A node that cannot act on a request is not asked again without a pause.
            self._hold_until = now + self._backoff_s(self._fruitless)
            self._fruitless += 1
        self._flight = 0
        self._next_at = now + self._pace.poll_s
        if self._wanted_report and self._report_at <= now:
            # The node could not make one.
            self._report_at = now + self._pace.retry_s

    def _backoff_s(self, tries: int) -> float:
        return min(self._pace.retry_s * 2.0 ** min(tries, 16), self._pace.retry_max_s)

    def _measure(self, reply: SyncReply, round_trip_s: float, asked_at: float) -> None:
        link = self.link
        best_s = link.round_trip_s
        if best_s is None or round_trip_s <= 2 * best_s:
            # Only quick exchanges tell the clocks apart.
            link.clock_skew_s = reply.at - (asked_at + round_trip_s / 2)
            link.clock_error_s = round_trip_s / 2
        link.round_trip_s = round_trip_s if best_s is None else min(round_trip_s, 1.1 * best_s)


def _named(event: EngineEvent, node: str) -> EngineEvent:
    """The event; why a run could not be launched says on which node, as its paths may be others there."""
    if isinstance(event, RunEnded) and event.launch_error is not None:
        return replace(event, launch_error=f"{event.launch_error} (on node {node})")
    return event
