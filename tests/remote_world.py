"""A head, a network and a node in one thread on a clock of their own, for tests that kill and lose at will."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_bench import ManualClock, to_start

from gpusched.engine.orders import GivenOrders
from gpusched.engine.remote.journal import AgentJournal
from gpusched.engine.remote.node_agent import NodeAgent
from gpusched.engine.remote.remote_engine import RemoteEngine
from gpusched.model.execution import (
    EngineEvent,
    LimitOrder,
    OpenRun,
    Order,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunStarted,
    SignalOrder,
    StopOrder,
    SuspendOrder,
    Ticket,
)

ENDS = (RunEnded, RunLost, RunNeverStarted)


class Killed(BaseException):
    """kill -9 of the agent."""


@dataclass
class SpooledRun:
    """What the spool and the processes of a run amount to."""

    is_revoked: bool = False
    started: RunStarted | None = None
    end: EngineEvent | None = None
    boot_id: str = ""
    """In which it was started."""
    is_dead: bool = False
    """Its supervisor went down with the machine."""
    given: GivenOrders = field(default_factory=GivenOrders)
    orders: int = 0


@dataclass
class Machine:
    """What survives agents: the spool, and, until a reboot, processes."""

    clock: ManualClock
    boot: int = 1
    spool: dict[str, SpooledRun] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    signals: Counter[int] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    swept: list[str] = field(default_factory=list)
    """Live runs that were killed because no head knew them."""
    listeners: list[Callable[[EngineEvent], None]] = field(default_factory=list)
    may_sweep: Callable[[str], bool] = lambda run: True
    contact_at: float = float("-inf")
    """On the clock of `boottime_s`."""
    boottime_s: Callable[[], float] = lambda: 0.0
    may_claim: Callable[[float], bool] = lambda asked: True
    """Whether a supervisor that is about to start a run still has its lease, by the contact when it was asked for."""
    is_slow: bool = False
    """Supervisors come only when `claim` says so."""
    unclaimed: dict[str, float] = field(default_factory=dict)
    """The last contact when each was asked for."""

    @property
    def boot_id(self) -> str:
        return f"boot-{self.boot}"

    def order_mark(self, run: str) -> int:
        return self.spool[run].orders if run in self.spool else 0

    def live(self) -> list[str]:
        return [name for name, run in self.spool.items() if run.started and not run.end and not run.is_dead]

    def finish(self, name: str, stopped_by: str | None = None) -> None:
        """The run ends."""
        run = self.spool[name]
        assert run.started is not None
        run.end = RunEnded(name, run.started.at, self.clock.now(), exit_code=0, stopped_by=stopped_by)
        for listener in self.listeners:
            listener(run.end)

    def claim(self, name: str) -> None:
        """A supervisor starts the run, unless its claim was revoked, it was stopped before, or its lease has ended."""
        asked = self.unclaimed.pop(name)
        run = self.spool.setdefault(name, SpooledRun(boot_id=self.boot_id))
        if run.is_revoked or run.started is not None:
            return
        if not self.may_claim(asked) or run.given.stop is not None:
            run.is_revoked = True
            said: EngineEvent = RunNeverStarted(name, self.clock.now(), "stopped, or without contact")
        else:
            self.starts[name] += 1
            number = sum(self.starts.values())
            run.boot_id = self.boot_id
            said = run.started = RunStarted(name, self.clock.now(), 1000 + number, number, 5000 + number)
        for listener in self.listeners:
            listener(said)

    def note_contact(self, at: float) -> None:
        self.contact_at = at

    def reboot(self, is_wiped: bool) -> None:
        """Every process ends; the spool stays, unless the disk was wiped."""
        self.boot += 1
        self.contact_at = float("-inf")
        self.unclaimed.clear()
        if is_wiped:
            self.spool.clear()
        for run in self.spool.values():
            run.is_dead = run.end is None


class SpoolEngine:
    """`LocalEngine` in small: what it knows is lost with it, what it did is in the machine.

    Args: step: called between any two steps; may raise Killed.
    """

    def __init__(self, machine: Machine, step: Callable[[], None]) -> None:
        self._machine, self._step = machine, step
        self._tracked: dict[str, bool] = {}
        """Whether the end was handed out."""
        self._events: list[EngineEvent] = []
        machine.listeners.append(self._ended)

    def adopt(self, runs: Sequence[OpenRun]) -> None:
        machine = self._machine
        self._step()
        for known in runs:
            self._take(known)
            self._step()
        for name in [name for name in machine.spool if name not in self._tracked]:
            run = machine.spool[name]
            if run.started is None or run.end is not None or run.is_dead:
                if not run.is_revoked:
                    del machine.spool[name]
            else:
                assert machine.may_sweep(name), f"run {name}, which the head wants, was killed as a stray"
                machine.swept.append(name)
                machine.finish(name, "cancel")
                del machine.spool[name]
            self._step()

    def reconcile(self, runs: Sequence[OpenRun], ended: Iterable[str] = ()) -> None:
        self._forget(ended)
        self._start([known.ticket for known in runs if known.ticket is not None])
        for known in runs:
            if known.run in self._tracked:
                self._bring_in_line(known)
            else:
                self._take(known)
            self._step()

    def _start(self, tickets: Sequence[Ticket]) -> None:
        machine = self._machine
        for ticket in tickets:
            self._step()
            if ticket.run in self._tracked:
                continue
            run = machine.spool.get(ticket.run)
            if run is None and (machine.is_slow or not machine.may_claim(machine.contact_at)):
                self._tracked[ticket.run] = False
                machine.unclaimed[ticket.run] = machine.contact_at
                if not machine.is_slow:
                    machine.claim(ticket.run)
                continue
            if run is None:
                run = machine.spool[ticket.run] = SpooledRun(boot_id=machine.boot_id)
                machine.starts[ticket.run] += 1
                number = sum(machine.starts.values())
                run.started = RunStarted(ticket.run, machine.clock.now(), 1000 + number, number, 5000 + number)
                self._step()
            self._tell(ticket.run, run)

    def order(self, run: str, order: Order) -> None:
        self._step()
        found = self._machine.spool.get(run)
        if found is None and run in self._machine.unclaimed and isinstance(order, StopOrder):
            self._machine.spool[run] = SpooledRun(boot_id=self._machine.boot_id, orders=1)
            self._machine.spool[run].given.add(order)
            return
        if found is None or self._tracked.get(run, True) or found.is_dead:
            return
        found.orders += 1
        found.given.add(order)
        if isinstance(order, SignalOrder):
            self._machine.signals[order.signal] += 1
        elif isinstance(order, StopOrder):
            self._machine.stops[run] += 1
            if found.started is not None:
                self._machine.finish(run, order.why)
        self._step()

    def events(self) -> list[EngineEvent]:
        self._step()
        events, self._events = self._events, []
        return events

    def _forget(self, runs: Iterable[str]) -> None:
        for name in runs:
            self._step()
            if self._tracked.get(name):
                del self._tracked[name]
                run = self._machine.spool.get(name)
                if run is not None and not run.is_revoked:
                    del self._machine.spool[name]

    def owners(self, pids: Iterable[int]) -> Mapping[int, str]:
        return {}

    def checkpoints(self) -> Mapping[str, float]:
        return {}

    def cpu_seconds(self, runs: Iterable[str]) -> Mapping[str, float]:
        return {}

    def set_waker(self, wake: Callable[[], None] | None) -> None:
        """Nobody waits."""

    def close(self) -> None:
        self._machine.listeners.remove(self._ended)

    def _take(self, known: OpenRun) -> None:
        run = self._machine.spool.get(known.run)
        if self._machine.boot_id not in (known.boot_id, run.boot_id if run is not None else ""):
            end = run.end if run is not None else None
            self._hand_out_end(end or RunLost(known.run, self._machine.clock.now(), "the machine was restarted"))
            return
        if run is None:
            run = self._machine.spool[known.run] = SpooledRun(is_revoked=True)
        self._tell(known.run, run)
        self._bring_in_line(known)

    def _bring_in_line(self, known: OpenRun) -> None:
        run = self._machine.spool.get(known.run)
        if run is None and known.run in self._machine.unclaimed and isinstance(known.pending_order, StopOrder):
            self.order(known.run, known.pending_order)
        elif run is not None and not self._tracked[known.run]:
            for order in run.given.missing(known):
                self.order(known.run, order)

    def _tell(self, name: str, run: SpooledRun) -> None:
        now = self._machine.clock.now()
        if run.is_revoked:
            self._hand_out_end(RunNeverStarted(name, now, "revoked"))
        elif run.end is not None:
            self._hand_out_end(run.end)
        elif run.is_dead:
            run.end = RunLost(name, now, "its supervisor is gone")
            self._hand_out_end(run.end)
        else:
            assert run.started is not None
            self._tracked[name] = False
            self._events.append(run.started)

    def _ended(self, event: EngineEvent) -> None:
        if self._tracked.get(event.run) is False and isinstance(event, RunStarted):
            self._events.append(event)
        elif self._tracked.get(event.run) is False:
            self._hand_out_end(event)

    def _hand_out_end(self, end: EngineEvent) -> None:
        self._tracked[end.run] = True
        self._events.append(end)


class MortalJournal(AgentJournal):
    """A journal whose agent may be killed before and after each write."""

    step: Callable[[], None] = staticmethod(lambda: None)

    def _write(self, at: int, *words: Any) -> None:
        self.step()
        super()._write(at, *words)
        self.step()


class Wire:
    """The head's end of the network: what is sent lies there until somebody decides its fate."""

    def __init__(self) -> None:
        self.up: list[bytes] = []
        """To the node."""
        self.arrived: list[bytes] = []
        self.is_closed = False
        self.hung_up: list[str] = []
        self._fd = os.eventfd(0)

    def send(self, frame: bytes) -> None:
        self.up.append(frame)

    def receive(self) -> list[bytes]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def fileno(self) -> int:
        return self._fd

    def trouble(self) -> str | None:
        return None

    def hang_up(self, why: str) -> None:
        self.hung_up.append(why)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            os.close(self._fd)


@dataclass
class Node:
    """A machine and its agent, if that lives."""

    machine: Machine
    journal: Path
    agent: NodeAgent | None = None
    parts: list[Any] = field(default_factory=list)
    fuse: int = 0
    """Steps until the agent is killed; 0 for never."""
    epochs: int = 0

    def revive(self) -> NodeAgent:
        """The agent, after its start if it was dead."""
        if self.agent is None:
            journal = MortalJournal(str(self.journal), int(self.machine.clock.now() * 1000))
            journal.step = self._step  # type: ignore[method-assign]
            self.parts = [journal]
            self.epochs += 1
            self.agent = NodeAgent(
                self._make_engine,
                journal,
                boot_id=self.machine.boot_id,
                clock=self.machine.clock,
                order_mark=self.machine.order_mark,
                note_contact=self.machine.note_contact,
                boottime_s=self.machine.boottime_s,
            )
        return self.agent

    def sync(self, frame: bytes) -> bytes | None:
        """What the agent answers; None if it is dead or dies of it."""
        if self.agent is None:
            return None
        try:
            reply = self.agent.sync(frame)
            self._step()
        except Killed:
            self.kill()
            return None
        return reply

    def push(self) -> bytes | None:
        """What the agent says unasked."""
        if self.agent is None:
            return None
        try:
            return self.agent.push()
        except Killed:
            self.kill()
            return None

    def kill(self) -> None:
        """kill -9."""
        self.agent, self.fuse = None, 0
        self.machine.listeners.clear()
        # Tickets that its fork server had not handed on are gone with it.
        self.machine.unclaimed.clear()
        for part in self.parts:
            part.close()
        self.parts = []

    def _make_engine(self) -> SpoolEngine:
        return SpoolEngine(self.machine, self._step)

    def _step(self) -> None:
        if self.fuse:
            self.fuse -= 1
            if not self.fuse:
                raise Killed


@dataclass
class TableRow:
    """What the daemon's table has of a run."""

    boot_id: str
    started: RunStarted | None = None
    end: EngineEvent | None = None
    stop: StopOrder | None = None
    limit_s: float | None = None
    is_suspended: bool = False
    is_forgotten: bool = False
    is_forsaken: bool = False
    """An operator has declared it lost."""


class Head:
    """A daemon in small: one session, over a table that survives it."""

    def __init__(
        self,
        table: dict[str, TableRow],
        session: int,
        clock: ManualClock,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        self.table, self.session, self.clock = table, session, clock
        self.wire = Wire()
        self.ends: Counter[str] = Counter()
        """End events of this session."""
        self.starts: Counter[str] = Counter()
        self.engine = RemoteEngine(self.wire, session=session, clock=clock, monotonic=monotonic or clock.now)
        self.engine.adopt([self.wanted(run) for run, row in table.items() if row.end is None])

    def wanted(self, run: str, ticket: Ticket | None = None) -> OpenRun:
        """The row as the engine gets it."""
        row = self.table[run]
        started = row.started
        pid, ticks = (started.supervisor_pid, started.supervisor_start_ticks) if started else (None, None)
        order = row.stop or (SuspendOrder() if row.is_suspended else None)
        return OpenRun(run, row.boot_id, pid, ticks, pending_order=order, limit=LimitOrder(row.limit_s), ticket=ticket)

    def collect(self) -> dict[str, EngineEvent]:
        """Record the events; returns what a crash of the daemon before its commit would lose."""
        fresh: dict[str, EngineEvent] = {}
        for event in self.engine.events():
            row = self.table[event.run]
            if row.is_forsaken and row.end is not None:
                assert not isinstance(event, RunStarted) or not self.ends[event.run], "a start after the end"
                row.is_forgotten = False
                continue
            if isinstance(event, RunStarted):
                self.starts[event.run] += 1
                assert self.starts[event.run] == 1, f"the start of run {event.run} was delivered twice"
                row.started = event
            else:
                assert isinstance(event, ENDS)
                self.ends[event.run] += 1
                assert self.ends[event.run] == 1, f"the end of run {event.run} was delivered twice"
                assert row.end is None
                row.end = event
            fresh[event.run] = event
        return fresh

    def forget_ended(self) -> None:
        """Release what is recorded."""
        gone = [run for run, row in self.table.items() if row.end is not None and not row.is_forgotten]
        self.engine.reconcile((), gone)
        for run in gone:
            self.table[run].is_forgotten = True


class Lab:
    """One head, one node, and old heads that do not know that they are."""

    def __init__(
        self, folder: Path, make_ticket: Callable[[str], Ticket], monotonic: Callable[[], float] | None = None
    ) -> None:
        """Args: monotonic: the head's; default: the one clock."""
        self._monotonic = monotonic
        self.clock = ManualClock()
        self.machine = Machine(self.clock)
        self.node = Node(self.machine, folder / "spool.agent")
        self.table: dict[str, TableRow] = {}
        self.machine.may_sweep = self._may_sweep
        self._make_ticket = make_ticket
        self.sessions = 1
        self.head = Head(self.table, 1, self.clock, monotonic)
        self.old_heads: list[Head] = []
        self.replies: list[tuple[Wire, bytes]] = []
        """Under way to heads."""
        self.signals: dict[int, tuple[int, str]] = {}
        """Session in which each was asked for, and its run."""
        self.forbidden: set[str] = set()
        """Runs that only an old head wants."""
        self.is_wiped = False
        self._jobs = 0
        self.last_batch: dict[str, EngineEvent] = {}

    def _may_sweep(self, run: str) -> bool:
        row = self.table.get(run)
        return row is None or row.end is not None

    # --- what the daemon does ----------------------------------------------------------------------------

    def start(self, count: int) -> None:
        tickets = []
        for _ in range(count):
            self._jobs += 1
            run = f"{self._jobs}.1"
            self.table[run] = TableRow(self.head.engine.link.boot_id or self.machine.boot_id)
            tickets.append(self._make_ticket(run))
        self.head.engine.reconcile([self.head.wanted(ticket.run, ticket) for ticket in tickets])

    def open_run(self, index: int) -> str | None:
        names = [run for run, row in self.table.items() if row.end is None]
        return names[index % len(names)] if names else None

    def signal(self, index: int) -> None:
        run = self.open_run(index)
        if run is not None:
            number = len(self.signals) + 1
            self.signals[number] = self.head.session, run
            self.head.engine.order(run, SignalOrder(number))

    def stop(self, index: int) -> None:
        run = self.open_run(index)
        if run is not None:
            self.table[run].stop = StopOrder("cancel")
            self.head.engine.reconcile([self.head.wanted(run)])

    def change(self, index: int, limit_s: float | None, is_suspended: bool) -> None:
        """Another time limit, and a suspension or its end; a run that has not started yet has a ticket all the same."""
        run = self.open_run(index)
        if run is not None:
            row = self.table[run]
            row.limit_s, row.is_suspended = limit_s, is_suspended
            ticket = None if row.started or row.stop or is_suspended else self._make_ticket(run)
            self.head.engine.reconcile([self.head.wanted(run, ticket)])

    def forsake(self, index: int) -> None:
        """An operator declares a run lost: it may go on elsewhere, and must never begin here from now on."""
        run = self.open_run(index)
        if run is not None:
            row = self.table[run]
            row.end, row.is_forsaken = RunLost(run, self.clock.now(), "declared lost"), True
            self.head.engine.forsake(run)

    def reconcile_all(self) -> None:
        self.head.engine.reconcile(
            [self.head.wanted(run) for run, row in self.table.items() if row.started and not row.end]
        )

    def collect(self) -> None:
        self.last_batch = self.head.collect()

    def restart_head(self, loses_events: bool) -> None:
        """A new head; the old one goes on in the belief to be the only one. Args: loses_events: not yet committed."""
        if loses_events:
            for run, event in self.last_batch.items():
                row = self.table[run]
                if row.is_forgotten or row.is_forsaken:
                    continue
                row.end = None
                if row.started is event:
                    row.started = None
        self.last_batch = {}
        self.old_heads.append(self.head)
        self.sessions += 1
        self.head = Head(self.table, self.sessions, self.clock, self._monotonic)

    def old_head_acts(self) -> None:
        if self.old_heads and not self.is_wiped:
            old = self.old_heads[-1]
            run = f"{10_000 + len(self.forbidden)}.1"
            journal = self.node.parts[0].session if self.node.agent is not None else 0
            if journal == self.sessions:
                self.forbidden.add(run)
                old.engine.reconcile(to_start([self._make_ticket(run)]))

    # --- what happens to frames, and to the node -----------------------------------------------------------

    def carry(self, index: int, fate: str) -> None:
        """Deliver, drop or copy one of the frames under way, in any order."""
        heads = [self.head, *self.old_heads]
        under_way: list[tuple[Head | None, int]] = [
            (head, place) for head in heads for place in range(len(head.wire.up))
        ]
        under_way += [(None, place) for place in range(len(self.replies))]
        if not under_way:
            return
        head, place = under_way[index % len(under_way)]
        if head is not None:
            frame = head.wire.up[place] if fate == "copy" else head.wire.up.pop(place)
            if fate != "drop":
                reply = self.node.sync(frame)
                if reply is not None:
                    self.replies.append((head.wire, reply))
        else:
            wire, reply = self.replies[place] if fate == "copy" else self.replies.pop(place)
            if fate != "drop":
                wire.arrived.append(reply)

    def exchange(self) -> None:
        """One exchange in fair weather, unless the agent is about to be killed."""
        self.node.revive()
        self.clock.at += 6.0
        self.pump()
        wire = self.head.wire
        frames, wire.up = wire.up, []
        for frame in frames:
            reply = self.node.sync(frame)
            if reply is not None:
                wire.arrived.append(reply)

    def push(self) -> None:
        reply = self.node.push()
        if reply is not None:
            self.replies.append((self.head.wire, reply))

    def reboot(self, is_wiped: bool) -> None:
        self.node.kill()
        self.machine.reboot(is_wiped)
        # Without its journal, only the time that this takes tells the next agent from the one before.
        self.clock.at += 1.0
        if is_wiped:
            self.is_wiped = True
            self.node.journal.unlink(missing_ok=True)
        self.node.revive()

    def finish_one(self, index: int) -> None:
        live = self.machine.live()
        if live:
            self.machine.finish(live[index % len(live)])

    def pump(self) -> None:
        for head in (self.head, *self.old_heads[-1:]):
            head.engine._pump()

    def settle(self) -> None:
        """Fair weather until nothing is under way."""
        self.node.fuse = 0
        self.node.revive()
        for _ in range(60):
            self.clock.at += 1.0
            self.pump()
            for _ in range(40):
                if not (self.replies or self.head.wire.up or any(old.wire.up for old in self.old_heads)):
                    break
                self.carry(0, "deliver")
            self.collect()
            if self.is_settled():
                return
        raise AssertionError(f"never settled: {self.head.engine.link}, {list(self.head.engine._replica._changes)[:3]}")

    def is_settled(self) -> bool:
        engine = self.head.engine
        live = set(self.machine.live())
        if any(self.table[run].is_forsaken for run in live if run in self.table):
            return False
        is_known = all(row.end is not None or (run in live and row.started) for run, row in self.table.items())
        return not (engine._replica.has_changes or engine._is_base_due) and engine.link.epoch > 0 and is_known

    def close(self) -> None:
        for head in (self.head, *self.old_heads):
            head.engine.close()
        self.node.kill()
