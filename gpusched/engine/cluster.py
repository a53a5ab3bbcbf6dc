"""The engine of several nodes: each run goes to the engines of its nodes, and a gang is one run to the daemon.

A gang starts and ends as a whole. Its ranks have the same handle on each of its nodes, and their events become those of
one run:

    RunStarted                 every rank has started
    RunStopping, RunResumed    the first that any rank reports
    RunSuspended               every rank is suspended
    RunEnded                   the last rank has ended; the verdict is that of the first rank that failed
    RunLost                    the last rank has ended, and one was lost or never started after others had
    RunNeverStarted            no rank was started

Here a rank is what one node runs. The first that fails stops the others, with the notice and the grace of the job. What
this module knows of a gang comes from the events of its ranks, which their engines deliver again after a restart of the
daemon.

The parts of a run on its other nodes may only hold them, as Slurm's `extern` step does, for steps of the command on the
first node. Such a run ends when its first node's part does, whose verdict it has; the holders are then ended:

    RunStarted      every part has started
    RunEnded        the last part has ended; the verdict is that of the first node's
    RunLost         the same, unless a holder was lost, or never started, and the part on the first node ended for it

A holder does not end by itself. One that does, by a shutdown of its machine for example, ends the part on the first
node, and the verdict is that of the holder.

The ticket of the first rank may say that a port must be free there. Then the others are started once the first has: if
another program has the port, nothing of the gang was started anywhere, and it can be given another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

from gpusched.engine.step_usage import MeasuringEngine
from gpusched.model.execution import (
    EngineEvent,
    EnterOrder,
    OpenRun,
    Order,
    RunEnd,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunStarted,
    RunStopping,
    RunSuspended,
    StopOrder,
    Ticket,
)
from gpusched.model.step import TaskUsage
from gpusched.model.value import replace
from gpusched.ports import Engine

log = logging.getLogger(__name__)


@runtime_checkable
class DistantEngine(Protocol):
    """An engine of another machine, which may be lost for good and whose processes only that machine sees."""

    def forsake(self, run: str) -> None:
        """The run is over for the daemon: end it when that becomes possible, and do not start it any more."""

    def silent_s(self) -> float:
        """How long the machine has certainly had no contact with a daemon, by a clock that cannot be set."""

    def gone(self, processes: Iterable[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        """Which of these processes, by pid and start, have ended as far as is known; watches them, and no others."""


GANG_STOP = StopOrder("gang")
NODE_FAIL = StopOrder("node_fail")
"""The same for a run whose other parts hold."""
JOB_ENDED = StopOrder("job_ended")
"""Ends a holder, whose leftovers then end as those of the first node's part."""
_OF_FIRST = ("lease", "client_lost", "shutdown")
"""Why the first node's part may be stopped where no order stops the holders."""


@dataclass(slots=True)
class Gang:
    """Ranks of one run on several nodes, by what their engines have reported."""

    nodes: tuple[str, ...]
    holds: bool = False
    """All parts but the first hold their nodes."""
    started: dict[str, RunStarted] = field(default_factory=dict)
    ends: dict[str, RunEnd] = field(default_factory=dict)
    """In the order of their arrival."""
    suspended: set[str] = field(default_factory=set)
    is_stopping: bool = False
    """A stop was reported to the daemon."""
    is_ordered: bool = False
    """The daemon has ordered all of it to end."""
    is_failing: bool = False
    """The ranks got a signal to end, since one has failed."""
    held: list[Callable[[], None]] = field(default_factory=list)
    """Starts the other ranks, which wait until the first has been started."""
    is_ended: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether a rank has ended other than by exit code 0."""
        return any(not _is_success(end) for end in self.ends.values())

    @property
    def first_end(self) -> RunEnd | None:
        """How the part on the first node has ended."""
        return self.ends.get(self.nodes[0])

    @property
    def left(self) -> list[str]:
        """Nodes whose rank has not ended."""
        return [node for node in self.nodes if node not in self.ends]


class ClusterEngine:
    """Engines of several nodes as one; see `ports.Engine` and the docstring of the module.

    One class: of its methods, the twenty of an engine of one machine and of several share what it knows of gangs.

    Args: engines: by node; head: name of the daemon's own node, where runs without a node belong.
    """

    def __init__(self, engines: Mapping[str, Engine], head: str) -> None:
        self._engines = dict(engines)
        self._head = head
        self._places: dict[str, tuple[str, ...]] = {}
        """Nodes of each run that is not forgotten."""
        self._gangs: dict[str, Gang] = {}
        self._given_up: dict[tuple[str, str], RunLost] = {}
        """By node and run: what was declared lost there."""
        self._news: list[tuple[str, EngineEvent]] = []
        self._wake: Callable[[], None] | None = None
        self._with_news: dict[str, None] = {}
        """Nodes whose engines have woken the daemon since they were last asked."""

    def add(self, node: str, engine: Engine) -> None:
        """Include the engine of another node, before runs on it are adopted."""
        self._engines[node] = engine
        self._attach(node, engine)

    def silent_s(self, node: str) -> float | None:
        """As `DistantEngine.silent_s`; None for a node that cannot be lost or is not part of the cluster."""
        engine: object = self._engines.get(node)
        return engine.silent_s() if isinstance(engine, DistantEngine) else None

    def gone(self, node: str, processes: Iterable[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        """As `DistantEngine.gone`, for a node other than the daemon's; none for one that does not know."""
        engine: object = self._engines.get(node)
        return engine.gone(processes) if isinstance(engine, DistantEngine) else frozenset()

    def task_usage(self, run: str) -> tuple[TaskUsage, ...]:
        """As `MeasuringEngine.task_usage`, on the daemon's own node."""
        engine: object = self._engines[self._head]
        return engine.task_usage(run) if isinstance(engine, MeasuringEngine) else ()

    def give_up(self, node: str, run: str, detail: str, at: float) -> bool:
        """Declare what a run has on a node lost: it is ended when the node comes back, whatever became of it.

        Again for the same run and node, nothing happens. Returns: whether it did.
        """
        if (node, run) in self._given_up or node not in self._places.get(run, ()):
            return False
        lost = self._given_up[node, run] = RunLost(run, at, detail, is_given_up=True)
        engine: object = self._engines.get(node)
        if isinstance(engine, DistantEngine):
            engine.forsake(run)
        self._news.append((node, lost))
        if self._wake is not None:
            self._wake()
        return True

    # --- the protocol -------------------------------------------------------------------------------

    def adopt(self, runs: Sequence[OpenRun]) -> None:
        by_node = self._by_node(runs)
        for node, engine in self._engines.items():
            # Also without runs: the engine then clears everything that is not in the table.
            engine.adopt(by_node.get(node, []))

    def reconcile(self, runs: Sequence[OpenRun], ended: Iterable[str] = ()) -> None:
        ended = list(ended)
        by_node = self._by_node(runs)
        forgotten = self._nodes_of(ended)
        for node in {**by_node, **forgotten}:
            if (engine := self._engine(node)) is not None:
                engine.reconcile(by_node.get(node, []), forgotten.get(node, []))
        self._drop(ended)

    def order(self, run: str, order: Order) -> None:
        if (gang := self._gangs.get(run)) is not None:
            gang.is_ordered |= isinstance(order, StopOrder)
            self._release(gang)
        for node in self._places.get(run, ()):
            if isinstance(order, EnterOrder) and order.nodes and node not in order.nodes:
                continue
            self._order_on(node, run, order)

    def events(self) -> list[EngineEvent]:
        found: list[EngineEvent] = []
        news, self._news = self._news, []
        # Engines with a waker tell when they have any: with hundreds of nodes, asking all is most of a quiet tick.
        for node in [*self._engines] if self._wake is None else dict.fromkeys((self._head, *self._with_news)):
            news += [(node, event) for event in self._engines[node].events()]
            self._with_news.pop(node, None)
        for node, event in news:
            # A run that the daemon does not know any more is to be forgotten there.
            self._places.setdefault(event.run, (node,))
            gang = self._gangs.get(event.run)
            if gang is None:
                found.append(event)
            elif self._given_up.get((node, event.run), event) is event:
                found += self._of_gang(gang, node, event)
        return found

    def owners(self, pids: Iterable[int]) -> Mapping[int, str]:
        """Of processes of the head; other nodes name the owners with their readings."""
        return self._engines[self._head].owners(pids)

    def checkpoints(self) -> Mapping[str, float]:
        """A gang has saved its work when its last rank has; where only one runs its command, when that one has."""
        found: dict[str, list[float]] = {}
        for node, engine in self._engines.items():
            for run, at in engine.checkpoints().items():
                nodes = self._command_nodes(run)
                if not nodes or node in nodes:
                    found.setdefault(run, []).append(at)
        return {run: min(times) for run, times in found.items() if len(times) == len(self._command_nodes(run) or times)}

    def cpu_seconds(self, runs: Iterable[str]) -> Mapping[str, float]:
        """Of a gang the sum, once every rank has data."""
        found: dict[str, list[float]] = {}
        for node, some in self._nodes_of(runs).items():
            if (engine := self._engine(node)) is not None:
                for run, cpu_s in engine.cpu_seconds(some).items():
                    found.setdefault(run, []).append(cpu_s)
        return {run: sum(parts) for run, parts in found.items() if len(parts) == len(self._places[run])}

    def set_waker(self, wake: Callable[[], None] | None) -> None:
        self._wake = wake
        for node, engine in self._engines.items():
            self._attach(node, engine)

    def _attach(self, node: str, engine: Engine) -> None:
        wake = self._wake

        def on_news() -> None:
            self._with_news[node] = None
            if wake is not None:
                wake()

        # What came before is not announced any more.
        self._with_news[node] = None
        engine.set_waker(None if wake is None else on_news)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    # --- runs and nodes ------------------------------------------------------------------------------

    def _reconcile_on(self, node: str, runs: Sequence[OpenRun]) -> None:
        if (engine := self._engine(node)) is not None:
            engine.reconcile(runs)

    def _engine(self, node: str) -> Engine | None:
        """A node's engine; None for a node that is not part of the cluster now: its runs stay as they are."""
        engine = self._engines.get(node)
        if engine is None:
            log.warning("node %s has runs and is not part of the cluster", node)
        return engine

    def _place(self, run: str, nodes: tuple[str, ...], *, holds: bool) -> None:
        self._places[run] = nodes
        if len(nodes) > 1 and run not in self._gangs:
            self._gangs[run] = Gang(nodes, holds)

    def _drop(self, runs: Iterable[str]) -> None:
        for run in runs:
            self._places.pop(run, None)
            self._gangs.pop(run, None)
        for mark in [mark for mark in self._given_up if mark[1] not in self._places]:
            del self._given_up[mark]

    def _nodes_of(self, runs: Iterable[str]) -> dict[str, list[str]]:
        """These runs by node, as far as they are known."""
        found: dict[str, list[str]] = {}
        for run in runs:
            for node in self._places.get(run, ()):
                found.setdefault(node, []).append(run)
        return found

    def _by_node(self, runs: Sequence[OpenRun]) -> dict[str, list[OpenRun]]:
        """The runs as each node's engine is to know them."""
        found: dict[str, list[OpenRun]] = {}
        for known in runs:
            ticket, first = known.ticket, known
            if known.peers:
                first = replace(known, peers=(), ticket=None if ticket is None else replace(ticket, peers=()))
            self._place(known.run, (known.node or self._head, *(node for node, _ in known.peers)), holds=known.holds)
            if (gang := self._gangs.get(known.run)) is not None:
                gang.is_ordered |= isinstance(known.pending_order, StopOrder)
            found.setdefault(known.node or self._head, []).append(first)
            tickets = {} if ticket is None else {peer.node: peer for peer in ticket.peers}
            others: list[tuple[str, OpenRun]] = []
            for node, boot_id in known.peers:
                rank = replace(
                    first,
                    boot_id=boot_id,
                    # The table names the supervisor of the first rank alone; the others are in their nodes' records.
                    supervisor_pid=None,
                    supervisor_start_ticks=None,
                    ticket=tickets.get(node),
                    node=node,
                )
                others.append((node, rank))
            if not self._hold(known.run, ticket, [partial(self._reconcile_on, node, [rank]) for node, rank in others]):
                for node, rank in others:
                    found.setdefault(node, []).append(rank)
        return found

    def _command_nodes(self, run: str) -> tuple[str, ...]:
        """Nodes on which a command of the run's own runs; empty for a run that is not known."""
        gang = self._gangs.get(run)
        return gang.nodes[:1] if gang is not None and gang.holds else self._places.get(run, ())

    # --- gangs -----------------------------------------------------------------------------------------

    def _hold(self, run: str, ticket: Ticket | None, others: list[Callable[[], None]]) -> bool:
        """Whether the other ranks wait for the first one. Args: ticket: None where nothing is to be started."""
        gang = self._gangs.get(run)
        if gang is None or gang.holds:
            # Holders run nothing that could meet another program.
            return False
        is_held = ticket is not None and ticket.master_port is not None and not (gang.started or gang.ends)
        gang.held = others if is_held else []
        return is_held

    def _release(self, gang: Gang) -> None:
        """Start the ranks that have waited for the first one."""
        held, gang.held = gang.held, []
        for begin in held:
            begin()

    def _of_gang(self, gang: Gang, node: str, event: EngineEvent) -> list[EngineEvent]:
        """What the daemon learns from an event of one rank."""
        if gang.is_ended:
            return []
        if isinstance(event, RunStarted):
            return self._rank_started(gang, node, event)
        if isinstance(event, RunEnd):
            return self._rank_ended(gang, node, event)
        if isinstance(event, RunStopping):
            if event.why == GANG_STOP.why:
                # One of several processes has failed; the end of its node follows when the others have had their grace.
                self._stop(gang, event.run, spared=node)
            # Processes that one rank left behind end on its node; the others continue.
            if gang.holds and node == gang.nodes[0] and event.why in _OF_FIRST:
                self._end_others(gang, event.run, StopOrder(event.why))
            is_news = not gang.is_stopping and event.why != "leftovers"
            gang.is_stopping |= is_news
            return [event] if is_news else []
        if isinstance(event, RunSuspended):
            gang.suspended.add(node)
            return [event] if gang.suspended.issuperset(gang.left) else []
        was_suspended, gang.suspended = bool(gang.suspended), set()
        return [event] if was_suspended else []

    def _rank_started(self, gang: Gang, node: str, event: RunStarted) -> list[EngineEvent]:
        is_news = node not in gang.started
        gang.started[node] = event
        self._release(gang)
        if gang.holds and gang.ends:
            # It was on its way when another ended.
            self._part_ended(gang, event.run)
            return []
        if gang.has_failed:
            # It was on its way when another failed.
            self._stop(gang, event.run)
        if len(gang.started) < len(gang.nodes) or not (is_news or node == gang.nodes[0]):
            return []
        started = gang.started.values()
        moved = _moved(gang, gang.started)
        return [replace(gang.started[gang.nodes[0]], at=max(one.at for one in started), moved=moved)]

    def _rank_ended(self, gang: Gang, node: str, event: RunEnd) -> list[EngineEvent]:
        gang.ends[node] = event
        if gang.held:
            # Nothing was asked of the others, and nothing will be.
            gang.held, gang.nodes = [], (node,)
        if gang.left and gang.holds:
            self._part_ended(gang, event.run)
            if gang.is_stopping or gang.first_end is None:
                return []
            gang.is_stopping = True
            return [RunStopping(event.run, _at(event), "other_nodes")]
        if gang.left:
            if gang.has_failed:
                self._stop(gang, event.run)
            return []
        gang.is_ended = True
        return [_verdict(gang, event.run)]

    def _part_ended(self, gang: Gang, run: str) -> None:
        """End the holders after the part on the first node, and that after a holder, which does not end by itself."""
        if gang.first_end is not None:
            self._end_others(gang, run, JOB_ENDED)
        elif any(isinstance(end, RunEnded) and end.stopped_by == "timeout" for end in gang.ends.values()):
            # So that its grace is that of the time limit, which is about to end it or was changed without the holder.
            self._order_on(gang.nodes[0], run, StopOrder("timeout"))
        elif not gang.is_ordered:
            self._stop(gang, run)

    def _end_others(self, gang: Gang, run: str, order: StopOrder) -> None:
        """Order the holders that have not ended to end."""
        for node in gang.left:
            if node != gang.nodes[0]:
                self._order_on(node, run, order)

    def _order_on(self, node: str, run: str, order: Order) -> None:
        if (engine := self._engine(node)) is not None:
            engine.order(run, order)

    def _stop(self, gang: Gang, run: str, spared: str = "") -> None:
        """Order the ranks that have not ended to end. Args: spared: a node that ends by itself."""
        if spared and gang.is_failing:
            # Each of them reports that it obeys.
            return
        gang.is_failing = True
        for node in gang.left:
            if node != spared:
                self._order_on(node, run, NODE_FAIL if gang.holds else GANG_STOP)


def _is_success(end: RunEnd) -> bool:
    if not isinstance(end, RunEnded) or end.exit_code != 0:
        return False
    return end.stopped_by is None and end.launch_error is None and end.prolog_fault is None


def _verdict(gang: Gang, run: str) -> RunEnd:
    """The end of a gang whose ranks have all ended."""
    ends = list(gang.ends.values())
    last_at = max(_at(end) for end in ends)
    if gang.holds and (of_first := _verdict_of_first(gang, last_at)) is not None:
        return of_first
    lost = next((end for end in ends if isinstance(end, RunLost)), None)
    if lost is not None:
        return replace(lost, at=last_at, detail=f"on {_node_of(gang, lost)}: {lost.detail}")
    ended = [end for end in ends if isinstance(end, RunEnded)]
    commanded = [end for end in ended if not gang.holds or end is gang.first_end]
    unstarted = next((end for end in ends if isinstance(end, RunNeverStarted)), None)
    if unstarted is not None:
        detail = f"on {_node_of(gang, unstarted)}: {unstarted.detail}"
        if not any(end.start_at is not None for end in commanded):
            return replace(unstarted, at=last_at, detail=detail)
        return RunLost(run, last_at, f"a part of it was not started {detail}", unstarted.refused_on)
    unprepared = next((end for end in ended if end.prolog_fault is not None), None)
    if unprepared is not None:
        fault_on = _node_of(gang, unprepared)
        if not any(end.start_at is not None for end in commanded):
            return replace(unprepared, start_at=None, end_at=last_at, fault_on=fault_on)
        # What the other ranks did without this one was for nothing.
        other = min((end for end in commanded if end.start_at is not None), key=_failed_at)
        return replace(other, end_at=last_at, prolog_fault=unprepared.prolog_fault, fault_on=fault_on)
    failed = [end for end in ended if not _is_success(end)]
    # Those that this module stopped failed because of another.
    own = [end for end in failed if end.stopped_by not in (GANG_STOP.why, NODE_FAIL.why)]
    first = min(own or failed or ended, key=_failed_at)
    starts = [end.start_at for end in ended if end.start_at is not None]
    # Often only one of the ranks knows.
    is_done = any(end.is_done for end in ended) and all(end.exit_code == 0 for end in ended)
    return replace(
        _with_others(gang, first, ended, last_at),
        failed_on=_node_of(gang, first) if failed else "",
        start_at=max(starts) if len(starts) == len(ended) else first.start_at,
        is_done=is_done,
        cpu_s=_total([end.cpu_s for end in ended]),
        suspended_s=max(end.suspended_s for end in ended),
        moved=_moved(gang, {node: end for node, end in gang.ends.items() if isinstance(end, RunEnded)}),
        epilog_failure=next((end.epilog_failure for end in ended if end.epilog_failure is not None), None),
    )


def _verdict_of_first(gang: Gang, last_at: float) -> RunEnd | None:
    """The end of a run whose other parts held their nodes; None if a holder ended it."""
    first, node = gang.first_end, gang.nodes[0]
    if isinstance(first, RunLost | RunNeverStarted):
        return replace(first, at=last_at, detail=f"on {node}: {first.detail}")
    assert first is not None
    if first.stopped_by == NODE_FAIL.why:
        return None
    ended = [end for end in gang.ends.values() if isinstance(end, RunEnded)]
    if gang.is_ordered and first.stopped_by is None and not _is_success(first):
        # Without the holders that the order has reached sooner its command has failed.
        reached = (end.stopped_by for end in ended if end.stopped_by not in (None, JOB_ENDED.why, NODE_FAIL.why))
        first = replace(first, stopped_by=next(reached, None))
    limited = next((end for end in ended if end.at_mem_limit), first)
    whole = _with_others(gang, first, ended, last_at)
    return replace(
        whole,
        failed_on="" if _is_success(first) else node,
        cpu_s=_added(first.cpu_s, [end.cpu_s for end in ended if end is not gang.first_end]),
        system_cpu_s=_added(first.system_cpu_s, [end.system_cpu_s for end in ended if end is not gang.first_end]),
        # What is started on the other nodes runs out of memory for the job as well.
        oom_kills=sum(end.oom_kills for end in ended),
        at_mem_limit=limited.at_mem_limit,
        mem_limit_mib=limited.mem_limit_mib,
        fault_on=node if whole.epilog_fault is None and first.prolog_fault is not None else whole.fault_on,
    )


def _with_others(gang: Gang, end: RunEnded, ended: Sequence[RunEnded], last_at: float) -> RunEnded:
    """The end of one part, with what those of the others add to it."""
    faulty = next((one for one in ended if one.epilog_fault is not None), None)
    return replace(
        end,
        end_at=last_at,
        peak_mem_mib=max((one.peak_mem_mib for one in ended if one.peak_mem_mib is not None), default=None),
        leftovers=tuple(name for one in ended for name in one.leftovers),
        epilog_fault=None if faulty is None else faulty.epilog_fault,
        fault_on="" if faulty is None else _node_of(gang, faulty),
    )


def _added(own: float | None, others: Sequence[float | None]) -> float | None:
    """The sum, without what is unknown of holders: those that nothing was started in know of nothing."""
    return None if own is None else own + sum(part for part in others if part is not None)


def _moved(gang: Gang, told: Mapping[str, RunStarted | RunEnded]) -> str | None:
    """What the nodes of a gang say of output that is not where it was wanted."""
    found = [moved for node in gang.nodes if node in told and (moved := told[node].moved) is not None]
    return "; ".join(found) or None


def _at(end: RunEnd) -> float:
    return end.end_at if isinstance(end, RunEnded) else end.at


def _failed_at(end: RunEnded) -> float:
    return end.end_at if end.failed_at is None else end.failed_at


def _node_of(gang: Gang, end: RunEnd) -> str:
    return next(node for node, one in gang.ends.items() if one is end)


def _total(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
