"""Brings the planner up to date: changes of the memory since the last plan go in as events."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

from gpusched.daemon.budgets import BudgetLedger
from gpusched.daemon.nodes import ClusterNodes
from gpusched.daemon.state import DaemonState
from gpusched.daemon.verbs.table_setting import limits_in_force
from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.mentions import mention_job
from gpusched.model.settings import Settings
from gpusched.model.snapshot import CalendarEntry, Snapshot, Window
from gpusched.model.value import replace
from gpusched.ports import Store
from gpusched.ports.tables import CALENDAR, FENCES, KEPT_PLACES, TABLE_SETTINGS, USAGE, WHOLE
from gpusched.scheduler import events
from gpusched.scheduler.calendar import windows
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.plugins import Extensions

_Mark = TypeVar("_Mark", bound=Hashable)


class PlannerSync:
    """The daemon's planner, the memory it was built from, and what it needs beside that: calendar, budgets, limits."""

    def __init__(self, cluster: ClusterNodes, store: Store) -> None:
        self._store = store
        self.windows = CalendarWindows()
        self.budgets = BudgetLedger(cluster.cards)
        self._planner: Planner | None = None
        self._state: DaemonState | None = None
        self._settings: Settings | None = None
        self._extensions: Extensions | None = None

    def snapshot(self, state: DaemonState, settings: Settings, nodes: tuple[NodeView, ...], now: float) -> Snapshot:
        """The policy's current input without the pending jobs."""
        return Snapshot(
            now=now,
            nodes=nodes,
            allocations=tuple(sorted(state.holds.values(), key=lambda held: held.job_id)),
            usage=tuple(state.rows[USAGE][mark] for mark in sorted(state.rows[USAGE])),
            kept=tuple(sorted(state.rows[KEPT_PLACES].items())),
            windows=self.windows.at(state.rows[CALENDAR], now),
            budgets=self.budgets.at(now, settings, state, self._store),
            limits=limits_in_force(settings, state.rows[TABLE_SETTINGS]),
            name_of=state.name_of,
        )

    def update(
        self,
        state: DaemonState,
        settings: Settings,
        extensions: Extensions,
        nodes: tuple[NodeView, ...],
        now: float,
    ) -> Planner:
        planner = self._planner
        is_other = state is not self._state or settings is not self._settings or extensions is not self._extensions
        if planner is None or is_other:
            return self._remake(state, self.snapshot(state, settings, nodes, now), settings, extensions)
        # Changes are passed on only once, so a planner that fails halfway must be rebuilt.
        self._planner = None
        planner.state.apply(events.NodesChanged(nodes))
        planner.state.apply(events.WindowsChanged(self.windows.at(state.rows[CALENDAR], now)))
        planner.state.apply(events.BudgetsChanged(self.budgets.at(now, settings, state, self._store)))
        planner.state.apply(events.LimitsChanged(limits_in_force(settings, state.rows[TABLE_SETTINGS])))
        for event in state.take_events():
            planner.state.apply(event)
        self._planner = planner
        return planner

    def forget(self) -> None:
        self._planner = None

    def _remake(self, state: DaemonState, snapshot: Snapshot, settings: Settings, extensions: Extensions) -> Planner:
        self._state, self._settings, self._extensions = state, settings, extensions
        self._planner = planner_of(state, snapshot, settings, extensions)
        return self._planner


def planner_of(state: DaemonState, snapshot: Snapshot, settings: Settings, extensions: Extensions) -> Planner:
    """A planner made of a snapshot and the pending jobs of the memory, which has sent it everything by then."""
    planner = Planner.from_snapshot(snapshot, settings, extensions)
    for event in state.tell_of_all_jobs():
        planner.state.apply(event)
    return planner


def differences(planner: Planner, state: DaemonState, theirs: Snapshot) -> list[str]:
    """Differences between a planner's state and the memory, a sentence each; usage is compared as plans are.

    Args: theirs: what the memory knows beside the pending jobs.
    """
    ours = planner.state.snapshot(theirs.now, 1)
    found = [
        f"the planner has other {name}" for name in ("nodes", "windows") if getattr(ours, name) != getattr(theirs, name)
    ]
    usage = [{(one.account, one.user): one for one in snapshot.usage} for snapshot in (ours, theirs)]
    found += [f"the planner has other usage of {user}" for _, user in _unequal(*usage)]
    held = [_by_job(snapshot.allocations) for snapshot in (ours, theirs)]
    found += [f"the planner has {_mention_job(job_id, theirs)} hold something else" for job_id in _unequal(*held)]
    pending = planner.state.queue.ranges(), state.eligible.ranges()
    for key in _unequal(*pending):
        jobs, others = (one.get(key, []) for one in pending)
        first = min(job_id for _, job_id, _ in {*jobs} ^ {*others})
        total, other_total = (sum(last - first + 1 for _, first, last in one) for one in (jobs, others))
        found.append(
            f"the planner has {_mention_job(first, theirs)} pending differently "
            f"({total} jobs of its class, {other_total} in the memory)"
        )
    fences = {job_id: at for job_id, at in state.rows[FENCES].items() if job_id in planner.state.queue}
    found += [
        f"the planner has another fence of {_mention_job(one, theirs)}"
        for one in _unequal(planner.state.fences, fences)
    ]
    return found


def _mention_job(job_id: int, state: DaemonState | Snapshot) -> str:
    return mention_job(state.name_of(job_id))


def table_differences(memory: DaemonState, table: DaemonState) -> list[str]:
    """Differences between the planning memory and the job table, a sentence each.

    Args: table: what a restart would load at the instant of the last tick.
    """
    found: list[str] = []
    rows: list[tuple[str, Mapping[Any, object], Mapping[Any, object]]] = [
        *((one, getattr(memory, one), getattr(table, one)) for one in ("jobs", "open_runs", "releasing", "batches")),
        *((one.name, memory.rows[one], table.rows[one]) for one in WHOLE),
        ("steps", memory.steps.all(), table.steps.all()),
    ]
    for name, ours, theirs in rows:
        unequal = _unequal(ours, theirs)
        found += [f"the memory has another row of {name.replace('_', ' ')}: {_named(mark)}" for mark in unequal]
    eligible = [{job_id for job_id in one.jobs if one.class_of(job_id) is not None} for one in (memory, table)]
    for job_id in sorted(eligible[0] ^ eligible[1]):
        verb = "may start" if job_id in eligible[0] else "has to wait"
        found.append(f"by the memory {_mention_job(job_id, memory)} {verb}, by the table it does not")
    held = [{run: _lasting(one) for run, one in state.holds.items()} for state in (memory, table)]
    return [*found, *(f"the memory has run {run} hold something else" for run in _unequal(*held))]


def _unequal(ours: Mapping[_Mark, object], theirs: Mapping[_Mark, object]) -> list[_Mark]:
    return [mark for mark in {**ours, **theirs} if ours.get(mark) != theirs.get(mark)]


def _by_job(allocations: Iterable[Allocation]) -> dict[int, list[Allocation]]:
    found: dict[int, list[Allocation]] = {}
    for held in allocations:
        found.setdefault(held.job_id, []).append(held)
    return found


def _named(mark: object) -> str:
    return "/".join(map(str, mark)) if isinstance(mark, tuple) else str(mark)


def _lasting(held: Allocation) -> Allocation:
    """The allocation without what no row records: stop, prediction, reports, checkpoint, length of earlier epilogs."""
    end_at = None if held.is_stopping else held.expected_end_at
    return replace(
        held, expected_end_at=end_at, predicted_end_at=None, reported_end_at=None, checkpoint_at=None, epilog_s=0.0
    )


AHEAD_S = 366 * 86400.0
"""How far ahead the policy sees; of a recurring window it sees the first few in any case."""


class CalendarWindows:
    """Calendar windows at an instant, computed once per instant, and the next edge after the last `look`."""

    def __init__(self) -> None:
        self._asked: tuple[float, tuple[CalendarEntry, ...]] | None = None
        self._found: tuple[Window, ...] = ()
        self.edge_at: float | None = None
        """Next begin or end of a window after the last look."""

    def at(self, calendar: Mapping[str, CalendarEntry], now: float) -> tuple[Window, ...]:
        """Current and future windows, by start and name."""
        asked = (now, tuple(calendar.values()))
        if asked != self._asked:
            self._asked = asked
            self._found = windows(asked[1], now, AHEAD_S) if asked[1] else ()
        return self._found

    def look(self, calendar: Mapping[str, CalendarEntry], now: float) -> None:
        """Note the instant of a plan: windows that begin or end later change it."""
        self.edge_at = min(
            (one.start_at if one.start_at > now else one.end_at for one in self.at(calendar, now)), default=None
        )

    def have_moved(self, now: float) -> bool:
        """Whether a window has begun or ended since the last look."""
        return self.edge_at is not None and self.edge_at <= now
