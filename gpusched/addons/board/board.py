"""The board: what people who watch the queue see, built at most once a second for all of them.

What all viewers share (the jobs in their order, the cards, the forecast) is computed once per round; per viewer only
the rows of their window. A viewer gets what has changed since the version that they have. A round takes
place at most once a second, and less often while rounds take long: together they cost a twentieth of the daemon's time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from logging import getLogger
from typing import Any

from aiohttp import web

from gpusched.access import account_by_default, is_private
from gpusched.addons.board.query import BoardFilter, FilterTerm
from gpusched.addons.board.rows import (
    ROW_FIELDS,
    SORT_VALUES,
    JobEntry,
    card_row,
    expected_json,
    fair_shares,
    job_row,
    matcher,
    node_row,
    planning_id,
)
from gpusched.api.notices import notices
from gpusched.api.queue_rows import queues_and_loans, table_key
from gpusched.api.render import document, encode
from gpusched.api.requests import in_pieces
from gpusched.api.service import ApiService
from gpusched.api.visibility import Viewer
from gpusched.lifecycle import arrays
from gpusched.lifecycle.arrays import job_count
from gpusched.model.job import Job, run_id
from gpusched.model.states import FINAL_STATES, JobState
from gpusched.model.value import Value
from gpusched.ports import JobFilter
from gpusched.scheduler.forecast import StartRange

log = getLogger("gpusched.api")

ROUND_S = 1.0
"""Shortest time between two rounds."""
PAUSE = 20
"""Time between two rounds, in multiples of what the last one took."""
CALM_S = 5.0
"""A round takes place after this time even if nothing has happened: some reasons and orders depend on the time."""
FORECAST_S = 10.0
"""Shortest time between two forecasts of the starts of pending jobs."""
FORECAST_JOBS = 300
"""Jobs from the front of the queue whose starts are forecast."""
HELD_VERSIONS = 4
"""Versions of a window that changes are sent against; viewers with older ones get the whole board."""
MOST_WINDOWS = 256
MOST_OF_USER = 64
"""Windows in memory, in total and of one user; viewers beyond that get the whole board each time."""
FORGET_S = 120.0
"""A window without requests is dropped after this time, since every change of parameters makes one."""
ENDED_S = 86400.0
MOST_ENDED = 2000
MOST_TASKS = 200
"""Tasks without a row that an unfolded array lists."""
_SHARES_S = 10.0


class BoardQuery(Value):
    """What a viewer wants to see: the parameters of GET /v1/board."""

    view: str = "active"
    filter: BoardFilter = BoardFilter()
    sort: str = "queue"
    is_reversed: bool = False
    offset: int = 0
    limit: int = 100
    unfolded: frozenset[int] = frozenset()
    """Arrays whose tasks get their own rows."""
    folds: bool = True
    """Whether arrays have one row, apart from the unfolded ones."""
    folds_alike: bool = False
    """Whether pending jobs that are equal in a table have one row; one whose first job is in `unfolded` has not."""
    find: str | None = None
    """Id of the job whose place among all rows is in the answer."""


@dataclass(slots=True)
class _ListSection:
    """Entries with ids, as JSON."""

    entries: dict[str, bytes]
    facts: bytes = b"{}"


Sections = tuple[dict[str, bytes], dict[str, _ListSection]]
"""Values by name, and lists by name."""


@dataclass(slots=True)
class _Window:
    """The board as one viewer sees it with some parameters, in its last versions."""

    versions: deque[tuple[str, Sections]] = field(default_factory=lambda: deque(maxlen=HELD_VERSIONS))
    round: int = -1
    used_at: float = 0.0

    @property
    def version(self) -> str:
        return self.versions[-1][0]


@dataclass(slots=True)
class _Round:
    """What all viewers share, as of one instant."""

    number: int
    made_at: float
    """On the monotonic clock."""
    jobs: list[Job]
    """Active jobs in queue order."""
    counts: dict[int, Counter[str]]
    """Number of active jobs by state, with `HELD` as one, by uid."""
    codes: Callable[[Job], Any] | None = None
    """Of pending jobs, as of the first time that a filter asks for them."""
    lists: dict[object, list[JobEntry]] = field(default_factory=dict)
    """Rows of a view before it is cut to a window, by what they depend on."""
    sections: dict[object, Any] = field(default_factory=dict)
    """Sections that several viewers share."""


class Board:
    """Rounds, windows and waiting viewers."""

    def __init__(self, service: ApiService) -> None:
        self._service = service
        # Versions of an earlier daemon must not be taken for this one's.
        self._token = f"{os.getpid():x}.{time.time_ns():x}"
        self._number = 0
        self._commits = 0
        self._ends = 0
        self._mark: tuple[object, ...] = ()
        self._round: _Round | None = None
        self._windows: dict[tuple[int, object, BoardQuery], _Window] = {}
        self._busy_s = 0.0
        """Time spent on the current round and its windows."""
        self._ended: tuple[int, float, list[Job]] = (-1, 0.0, [])
        self._forecast: tuple[dict[int, int], dict[int, StartRange]] = ({}, {})
        """Places from 1 and start ranges by planning id, from the last forecast."""
        self._forecast_at = float("-inf")
        self._forecasts = 0
        self._is_forecasting = False
        self._next_forecast_at = 0.0
        self._shares: tuple[float, dict[tuple[str, str], float | None]] = (float("-inf"), {})
        self._waiting = 0
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Lock | None = None

    # --- what happens -----------------------------------------------------------------------------

    def announce(self, jobs: Mapping[int, Job]) -> None:
        """Note that rows of jobs have changed; called after each commit."""
        self._commits += 1
        if any(job.state.is_final for job in jobs.values()):
            self._ends += 1

    def _is_due(self) -> bool:
        """Whether a new round is worth its while: time has passed, and something that is shown may have changed."""
        current = self._round
        if current is None:
            return True
        age_s = time.monotonic() - current.made_at
        if age_s < max(ROUND_S, PAUSE * self._busy_s):
            return False
        state = self._state()
        return (
            age_s >= CALM_S
            or len(state) != len(self._mark)
            or any(one is not other for one, other in zip(self._mark, state, strict=True))
        )

    def _state(self) -> tuple[object, ...]:
        """Objects that are replaced whenever something on the board may have changed."""
        scheduler = self._service.scheduler
        cluster = scheduler.cluster
        readings = tuple(cluster[name].reading for name in self._node_names())
        return (self._commits, self._forecasts, scheduler.settings, scheduler.plan, *readings)

    def _node_names(self) -> list[str]:
        scheduler = self._service.scheduler
        absent = scheduler.cluster.absent
        return [node.name for node in scheduler.nodes(scheduler.now()) if node.name not in absent]

    # --- answers ----------------------------------------------------------------------------------

    async def look(self, viewer: Viewer, query: BoardQuery, after: str | None, timeout_s: float) -> web.Response:
        """The board for a viewer: all of it, or the changes after a version, once there are any or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            window = await self._window(viewer, query)
            left_s = deadline - loop.time()
            if window.version != after or left_s <= 0:
                return web.Response(body=self._answer(window, after), content_type="application/json")
            await self._wait(left_s)

    async def _wait(self, timeout_s: float) -> None:
        """Block until the next round is due, or time is up."""
        self._waiting += 1
        try:
            self._schedule()
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except asyncio.TimeoutError:
            pass  # the caller looks at the clock
        finally:
            self._waiting -= 1
            if not self._waiting and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _schedule(self) -> None:
        if self._timer is None:
            age_s = 0.0 if self._round is None else time.monotonic() - self._round.made_at
            wait_s = max(ROUND_S, PAUSE * self._busy_s) - age_s
            # Also after a round that was not worth it: looks at what has changed are frequent, but cheap.
            self._timer = asyncio.get_running_loop().call_later(max(wait_s, ROUND_S / 4), self._beat)

    def _beat(self) -> None:
        self._timer = None
        if self._is_due():
            news, self._news = self._news, asyncio.Event()
            news.set()
        elif self._waiting:
            self._schedule()

    async def _window(self, viewer: Viewer, query: BoardQuery) -> _Window:
        # The key has all that an answer depends on apart from the state: rights are looked up each time.
        rights = "all" if viewer.is_admin else viewer.caller.uid
        key = viewer.caller.uid, rights, query
        if self._turn is None:
            self._turn = asyncio.Lock()
        # One at a time, so that the daemon serves others between the viewers that a round wakes.
        async with self._turn:
            if self._is_due():
                await self._begin_round()
            current = self._round
            assert current is not None
            window = self._windows.get(key)
            if window is None:
                self._forget(viewer.caller.uid)
                window = self._windows[key] = _Window()
            window.used_at = current.made_at
            if window.round != current.number:
                rows = await self._rows(viewer, rights, query, current)
                moving = [one.job for one in rows[query.offset : query.offset + query.limit] if one.job.run]
                await self._service.refresh_progress(moving)
                people = await self._people(viewer, query, current)
                with self._working():
                    sections = self._sections(viewer, rights, query, rows, people, current)
                if not window.versions or window.versions[-1][1] != sections:
                    self._number += 1
                    window.versions.append((f"{self._token}.{self._number}", sections))
                window.round = current.number
        self._look_ahead()
        return window

    def _forget(self, uid: int) -> None:
        """Drop windows without viewers, and the oldest ones to make room for one of this user."""
        horizon = time.monotonic() - FORGET_S
        self._windows = {key: window for key, window in self._windows.items() if window.used_at >= horizon}
        own = [key for key in self._windows if key[0] == uid]
        self._drop(own, MOST_OF_USER)
        self._drop(list(self._windows), MOST_WINDOWS)

    def _drop(self, keys: list[tuple[int, object, BoardQuery]], most: int) -> None:
        """Drop the oldest of these windows, until there is room for one more."""
        keys.sort(key=lambda key: self._windows[key].used_at)
        for key in keys[: max(0, len(keys) - most + 1)]:
            del self._windows[key]

    def _answer(self, window: _Window, after: str | None) -> bytes:
        version, (parts, lists) = window.versions[-1]
        before = next((sections for number, sections in window.versions if number == after), None)
        is_full = before is None
        old_parts, old_lists = ({}, {}) if before is None else before
        shown = (b'"%s":%s' % (name.encode(), text) for name, text in parts.items() if old_parts.get(name) != text)
        changed = (
            b'"%s":%s' % (name.encode(), _changes(section, old_lists.get(name)))
            for name, section in lists.items()
            if section != old_lists.get(name)
        )
        facts = document(version=version, full=is_full, now=self._service.scheduler.now())
        return encode(facts)[:-1] + b',"parts":{' + b",".join(shown) + b'},"lists":{' + b",".join(changed) + b"}}"

    # --- a round ----------------------------------------------------------------------------------

    async def _begin_round(self) -> None:
        now = time.monotonic()
        if now - self._forecast_at > max(FORGET_S, 2 * (self._next_forecast_at - self._forecast_at)):
            # From when the board last had viewers: no forecast is better than an old one.
            self._forecast = ({}, {})
        self._busy_s = 0.0
        with self._working():
            mark = self._state()
            jobs = [job for job in self._service.scheduler.answers.active_in_order() if job.tasks_left != ""]
        number = 0 if self._round is None else self._round.number + 1
        found: Counter[tuple[int, JobState, bool]] = Counter()
        async for piece in self._pieces(jobs):
            for job in piece:
                found[job.uid, job.state, job.hold is not None] += 1 if job.tasks_left is None else job_count(job)
        # Both at once: a viewer who leaves meanwhile takes this round with them, and another one is due.
        self._mark, self._round = mark, _Round(number, now, jobs, _by_user(found))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count the time as that of the round."""
        began = time.perf_counter()
        yield
        self._busy_s += time.perf_counter() - began

    async def _pieces(self, jobs: Iterable[Job]) -> AsyncIterator[list[Job]]:
        """As `in_pieces`; what is done with a piece counts as time of the round, the turns of others do not."""
        async for piece in in_pieces(jobs):
            with self._working():
                yield piece

    async def _rows(self, viewer: Viewer, rights: object, query: BoardQuery, current: _Round) -> list[JobEntry]:
        """All rows of a view of jobs, in their order, before it is cut to a window."""
        if query.view not in ("active", "ended"):
            return []
        is_about_me = any(term.key == "user" and "me" in term.patterns for term in query.filter.terms)
        whose = viewer.caller.uid if is_about_me else None
        if not viewer.is_restricted and not (viewer.hides_names and _reads_names(query)):
            # All see the same jobs, in the same order; what they see of them is up to the window.
            rights = None
        folding = query.unfolded, query.folds, query.folds_alike
        key = rights, whose, query.view, query.filter, query.sort, query.is_reversed, folding
        found = current.lists.get(key)
        if found is None:
            rows = await self._folded(viewer, query, current)
            with self._working():
                found = current.lists[key] = self._sorted(rows, viewer, query)
        return found

    async def _jobs(self, viewer: Viewer, query: BoardQuery, current: _Round) -> AsyncIterator[Iterable[Job]]:
        """The jobs of a view that the viewer may know of and the filter selects, in pieces."""
        jobs = current.jobs if query.view != "ended" else self._ended_jobs()
        conditions: list[Callable[[Job], bool]] = [viewer.sees] if viewer.is_restricted else []
        conditions += [self._condition(term, viewer, current) for term in query.filter.terms]
        async for piece in self._pieces(jobs):
            shown: Iterable[Job] = piece
            for condition in conditions:
                shown = filter(condition, shown)
            yield shown

    def _ended_jobs(self) -> list[Job]:
        """Jobs that ended within a day, newest first; looked up again once others have ended."""
        ends, at, jobs = self._ended
        now = self._service.scheduler.now()
        if ends != self._ends or now - at > FORGET_S:
            wanted = JobFilter(states=FINAL_STATES, since=now - ENDED_S, limit=MOST_ENDED)
            jobs = self._service.scheduler.store.jobs(wanted)
            jobs.sort(key=lambda job: (job.end_at or 0.0, job.id), reverse=True)
            self._ended = self._ends, now, jobs
        return jobs

    def _condition(self, term: FilterTerm, viewer: Viewer, current: _Round) -> Callable[[Job], bool]:
        matches = matcher(term)
        read: Callable[[Job], Iterable[str]]
        if term.key == "state":
            states = frozenset(term.patterns)
            return lambda job: (job.state.value in states) is not term.is_negated
        if term.key == "user":
            own = viewer.caller.user.lower() if "me" in term.patterns else None
            cache: dict[str, bool] = {}

            def is_theirs(job: Job) -> bool:
                known = cache.get(job.user)
                if known is None:
                    name = job.user.lower()
                    known = cache[job.user] = (matches(name) or name == own) is not term.is_negated
                return known

            return is_theirs
        if term.key == "queue":
            read = lambda job: (job.spec.queue,)  # noqa: E731
        elif term.key == "account":
            read = lambda job: (job.spec.shown_account,)  # noqa: E731
        elif term.key == "qos":
            read = lambda job: (job.spec.shown_qos,)  # noqa: E731
        elif term.key == "id":
            read = lambda job: (job.shown_id, str(job.array_id or job.id))  # noqa: E731
        elif term.key == "reason":
            read = lambda job: (self._code(job, current),)  # noqa: E731
        elif term.key == "node":
            read = self._nodes_of
        else:
            read = lambda job: self._names_of(job) if viewer.sees_name(job) else ()  # noqa: E731
        if term.key is None:
            return lambda job: (any(map(matches, map(str.lower, (*read(job), job.shown_id))))) is not term.is_negated
        return lambda job: any(map(matches, map(str.lower, read(job)))) is not term.is_negated

    def _code(self, job: Job, current: _Round) -> str:
        if job.state is JobState.PENDING:
            if current.codes is None:
                current.codes = self._service.scheduler.answers.reason_codes()
            return str(current.codes(job))
        return "" if job.reason is None else str(job.reason)

    def _names_of(self, job: Job) -> Sequence[str]:
        """The job's name; of a task of a sweep, which has its own, also that of its array."""
        name, array_id = job.spec.name, job.array_id
        if array_id is None or job.spec.array is None or not job.spec.array.sweep:
            return (name,)
        array = self._service.find_all([array_id]).get(array_id)
        return (name,) if array is None else (name, array.spec.name)

    def _nodes_of(self, job: Job) -> Sequence[str]:
        run = self._service.scheduler.state.open_runs.get(run_id(job.id, job.run))
        return () if run is None else run.nodes

    async def _folded(self, viewer: Viewer, query: BoardQuery, current: _Round) -> list[JobEntry]:
        """Rows of jobs: one for each array with its tasks, and if wanted one for pending jobs that look the same, at
        the place of the first, unless it is unfolded."""
        rows: list[JobEntry] = []
        groups: dict[int, JobEntry] = {}
        alike: dict[object, list[Job]] = {}
        key_of = table_key(viewer) if query.folds_alike else None
        async for piece in self._jobs(viewer, query, current):
            for job in piece:
                array_id = job.array_id if job.array_id is not None else job.id if job.is_array else None
                if not query.folds or (array_id is None and (key_of is None or job.state is not JobState.PENDING)):
                    rows.append(JobEntry(job))
                elif array_id is not None:
                    group = groups.get(array_id)
                    if group is None:
                        group = groups[array_id] = JobEntry(job, [])
                        rows.append(group)
                    if group.tasks is not None:
                        group.tasks.append(job)
                elif key_of is not None:
                    key = key_of(job)
                    same = alike.get(key)
                    if same is None:
                        same = alike[key] = []
                        rows.append(JobEntry(job, alike=same))
                    same.append(job)
        with self._working():
            if groups:
                heads = self._service.find_all(groups)
                for array_id, group in groups.items():
                    group.job = heads.get(array_id, group.job)
            return list(self._with_unfolded(rows, query)) if query.unfolded else rows

    def _with_unfolded(self, rows: Iterable[JobEntry], query: BoardQuery) -> Iterator[JobEntry]:
        for row in rows:
            yield row
            if row.job.id not in query.unfolded:
                continue
            if row.tasks is not None:
                row.is_unfolded = True
                yield from self._unfolded(row.tasks)
            elif row.alike is not None and len(row.alike) > 1:
                row.is_unfolded = True
                yield from (JobEntry(job, depth=1) for job in islice(row.alike, 1, MOST_TASKS))

    def _unfolded(self, tasks: Iterable[Job]) -> Iterator[JobEntry]:
        for task in tasks:
            if not task.is_array:
                yield JobEntry(task, depth=1)
                continue
            for number in islice(arrays.tasks_left(task), MOST_TASKS):
                yield JobEntry(arrays.task(task, number), depth=1)

    def _sorted(self, rows: list[JobEntry], viewer: Viewer, query: BoardQuery) -> list[JobEntry]:
        if query.sort == "queue" and not query.is_reversed:
            return rows
        # Tasks stay below their array.
        blocks: list[list[JobEntry]] = []
        for row in rows:
            if row.depth:
                blocks[-1].append(row)
            else:
                blocks.append([row])
        value = self._sort_value(query.sort, viewer)
        if value is not None:
            blocks.sort(key=lambda block: value(block[0]))
        if query.is_reversed:
            blocks.reverse()
        return [row for block in blocks for row in block]

    def _sort_value(self, sort: str, viewer: Viewer) -> Callable[[JobEntry], Any] | None:
        if sort == "expected":
            return lambda row: self._expected_at(row.job)
        if sort == "name":
            # The place must not reveal a hidden name either.
            return lambda row: (viewer.name_of(row.job), row.job.id)
        return SORT_VALUES.get(sort)

    def _expected_at(self, job: Job) -> float:
        if job.state is not JobState.PENDING:
            return 0.0
        found = self._forecast[1].get(planning_id(job))
        if found is None or found.is_unknown:
            return float("inf")
        return found.low_at if found.low_at is not None else found.high_at or 0.0

    # --- sections ---------------------------------------------------------------------------------

    def _sections(
        self,
        viewer: Viewer,
        rights: object,
        query: BoardQuery,
        rows: list[JobEntry],
        people: dict[str, dict[str, Any]],
        current: _Round,
    ) -> Sections:
        shared = current.sections
        if "daemon" not in shared:
            shared["daemon"] = encode(self._daemon())
            shared["notices"] = encode(notices(self._service.scheduler))
        cards = shared.get(("cards", rights))
        if cards is None:
            cards = shared["cards", rights] = self._cards(viewer)
        nodes, gpus, sums = cards
        parts = {
            "daemon": shared["daemon"],
            "notices": shared["notices"],
            "me": encode(self._me(viewer, current)),
            "totals": encode({**self._totals(viewer, current), **sums}),
        }
        if query.view == "people":
            shown = people
        elif query.view == "queues":
            shown = self._queues(viewer)
        else:
            return parts, {"nodes": nodes, "cards": gpus, "rows": self._job_rows(viewer, query, rows)}
        ids = list(shown)
        window = ids[query.offset : query.offset + query.limit]
        facts = {
            "total": len(ids),
            "offset": query.offset,
            "found": ids.index(query.find) if query.find in ids else None,
        }
        return parts, {
            "nodes": nodes,
            "cards": gpus,
            "rows": _ListSection({key: encode(shown[key]) for key in window}, encode(facts)),
        }

    def _daemon(self) -> dict[str, Any]:
        service = self._service
        facts, health = service.daemon.facts, service.daemon.health()
        return {
            "version": facts.get("version"),
            "node": service.scheduler.head.name,
            "cluster_name": service.settings.slurm.cluster_name,
            "warnings": list(health.warnings),
            "failing_steps": [
                {name: step.get(name) for name in ("step", "error", "since_at")} for step in health.failing_steps
            ],
        }

    def _me(self, viewer: Viewer, current: _Round) -> dict[str, Any]:
        caller = viewer.caller
        account = account_by_default(caller, self._service.settings)
        fair = self._fair_shares()
        factor = fair.get((account or "", caller.user))
        if factor is None:
            factor = next((value for (_, user), value in sorted(fair.items()) if user == caller.user), None)
        problem = self._service.scheduler.parts.settings_problem() if viewer.is_admin else None
        return {
            "user": caller.user,
            "uid": caller.uid,
            "is_admin": viewer.is_admin,
            "is_operator": viewer.is_operator,
            "account": account,
            "fair_share": factor,
            "jobs": dict(current.counts.get(caller.uid, {})),
            "config_problem": None if problem is None else "; ".join(problem),
        }

    def _fair_shares(self) -> dict[tuple[str, str], float | None]:
        at, shares = self._shares
        now = time.monotonic()
        if now - at >= _SHARES_S:
            shares = fair_shares(self._service.scheduler)
            self._shares = now, shares
        return shares

    def _totals(self, viewer: Viewer, current: _Round) -> dict[str, Any]:
        found: Counter[str] = Counter()
        if viewer.is_restricted:
            # Numbers of other users' jobs are private, too.
            for job in filter(viewer.sees, current.jobs):
                found[job.state.value] += job_count(job)
                if job.hold is not None and job.state is JobState.PENDING:
                    found[HELD] += job_count(job)
        else:
            for counts in current.counts.values():
                found.update(counts)
        return {"jobs": dict(found)}

    def _cards(self, viewer: Viewer) -> tuple[_ListSection, _ListSection, dict[str, int]]:
        scheduler = self._service.scheduler
        now = scheduler.now()
        views = scheduler.nodes(now)
        held: dict[str, list[Any]] = {}
        for run in (*scheduler.state.open_runs.values(), *scheduler.state.releasing.values()):
            for part in run.on_each_node:
                for share in part.gpus:
                    held.setdefault(share.uuid, []).append((run, share))
        nodes = {node.name: node_row(viewer, node) for node in views}
        cards = {
            card.uuid: card_row(viewer, node, card, held.get(card.uuid, []), now)
            for node in views
            for card in node.gpus
        }
        free = sum(row["state"] == "idle" and nodes[row["node"]]["state"] == "up" for row in cards.values())
        busy = sum(bool(held.get(uuid)) for uuid in cards)
        return (
            _ListSection({name: encode(row) for name, row in nodes.items()}),
            _ListSection({uuid: encode(row) for uuid, row in cards.items()}),
            {"gpus": len(cards), "gpus_free": free, "gpus_busy": busy},
        )

    def _job_rows(self, viewer: Viewer, query: BoardQuery, rows: list[JobEntry]) -> _ListSection:
        window = rows[query.offset : query.offset + query.limit]
        service = self._service
        facts = service.facts_of([one.job for one in window])
        make = viewer.rows(ROW_FIELDS)
        entries: dict[str, bytes] = {}
        for one in window:
            row = job_row(one, facts(one.job), make, viewer)
            if one.job.state is JobState.PENDING and query.view == "active":
                row.update(self._ahead(one.job, viewer))
            entries[row["id"]] = encode(row)
        found = None
        if query.find is not None:
            found = next((place for place, one in enumerate(rows) if one.job.shown_id == query.find), None)
        return _ListSection(entries, encode({"total": len(rows), "offset": query.offset, "found": found}))

    def _ahead(self, job: Job, viewer: Viewer) -> dict[str, Any]:
        """Place in line, and expected start, as of the last forecast."""
        number = planning_id(job)
        places, ranges = self._forecast
        calibration = self._service.scheduler.estimates.calibration()
        # The place would reveal how many jobs of other users wait.
        place = None if viewer.is_restricted else places.get(number)
        found = ranges.get(number)
        expected = expected_json(found, calibration, self._service.scheduler.now())
        return {
            "place": place,
            "expected": expected,
            "expected_is": self._certainty(job.id, number, expected is not None),
        }

    def _certainty(self, job_id: int, number: int, is_known: bool) -> str:
        """Whether an expected start is known, and if not, why; a job that is not in line has none."""
        places, ranges = self._forecast
        if is_known:
            return "known"
        if number in ranges:
            return "unknown"
        if job_id not in self._service.scheduler.state.eligible:
            return "none"
        return "beyond" if number in places else "pending"

    async def _people(self, viewer: Viewer, query: BoardQuery, current: _Round) -> dict[str, dict[str, Any]]:
        """Users with active jobs, those with the most GPUs first; empty in other views."""
        if query.view != "people":
            return {}
        scheduler = self._service.scheduler
        rows: dict[str, dict[str, Any]] = {}
        cards: dict[int, float] = {}
        for held in scheduler.state.holds.values():
            cards[held.job_id] = cards.get(held.job_id, 0.0) + sum(
                1.0 if share.is_whole else share.fraction or 0.0 for share in held.gpus
            )
        async for piece in self._jobs(viewer, query, current):
            for job in piece:
                row = rows.setdefault(
                    job.user, {"id": job.user, "user": job.user, "jobs": Counter(), "gpus": 0.0, "gpus_waiting": 0}
                )
                number = job_count(job)
                row["jobs"][job.state.value] += number
                row["gpus"] += cards.get(job.id, 0.0)
                if job.state is JobState.PENDING:
                    request = job.spec.request
                    row["gpus_waiting"] += request.total_gpus * number
        hides = any(is_private(what, viewer.caller, self._service.settings) for what in ("usage", "accounts"))
        fair = self._fair_shares()
        for user, row in rows.items():
            factors = [value for (_, name), value in sorted(fair.items()) if name == user and value is not None]
            is_shown = factors and (user == viewer.caller.user or not hides)
            row["fair_share"] = factors[0] if is_shown else None
        return dict(sorted(rows.items(), key=lambda entry: (-entry[1]["gpus"], entry[0])))

    def _queues(self, viewer: Viewer) -> dict[str, dict[str, Any]]:
        return {row["name"]: {"id": row["name"], **row} for row in queues_and_loans(viewer)[0]}

    # --- what is to come --------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Begin a forecast on another thread if the last one is old, and jobs are pending."""
        service, current = self._service, self._round
        if self._is_forecasting or time.monotonic() < self._next_forecast_at:
            return
        if current is None or not any(JobState.PENDING.value in counts for counts in current.counts.values()):
            self._forecast = ({}, {})
            return
        question = service.daemon.first_starts(FORECAST_JOBS)
        self._is_forecasting = True
        began = time.monotonic()

        def done(answer: asyncio.Future[tuple[dict[int, int], dict[int, StartRange]]]) -> None:
            self._is_forecasting = False
            self._forecast_at = time.monotonic()
            self._next_forecast_at = self._forecast_at + max(FORECAST_S, PAUSE * (self._forecast_at - began))
            if answer.cancelled():
                return
            if (error := answer.exception()) is not None:
                log.error("cannot forecast when jobs start: %s", error)
                return
            if answer.result() != self._forecast:
                self._forecast = answer.result()
                self._forecasts += 1

        asyncio.get_running_loop().run_in_executor(service.thinker, question).add_done_callback(done)


HELD = "HELD"
"""Count of held jobs, which are pending, too."""


def _reads_names(query: BoardQuery) -> bool:
    """Whether which rows there are depends on names of jobs, which not every viewer may read."""
    return query.sort == "name" or query.folds_alike or any(term.key in (None, "name") for term in query.filter.terms)


def _by_user(found: Mapping[tuple[int, JobState, bool], int]) -> dict[int, Counter[str]]:
    """Number of jobs by state, with `HELD` as one, by uid. Args: found: by uid, state and whether they are held."""
    counts: dict[int, Counter[str]] = {}
    for (uid, state, is_held), number in found.items():
        mine = counts.setdefault(uid, Counter())
        mine[state.value] += number
        if is_held and state is JobState.PENDING:
            mine[HELD] += number
    return counts


def _changes(section: _ListSection, before: _ListSection | None) -> bytes:
    old = {} if before is None else before.entries
    changed = b",".join(text for key, text in section.entries.items() if old.get(key) != text)
    is_same_order = before is not None and list(old) == list(section.entries)
    order = b"null" if is_same_order else encode(list(section.entries))
    return b'{"order":%s,"set":[%s],"facts":%s}' % (order, changed, section.facts)


BOARD: web.AppKey[Board] = web.AppKey("board", Board)
