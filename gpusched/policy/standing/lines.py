"""Who waits, in order.

A line is a row for each shape of job, and with weights for each user and number of points beside age: whatever time and
use do, in a row those that came first stay first. So it is the heads of the rows alone that are ranked anew.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping
from heapq import heappop, heappush
from math import inf

from gpusched.model.settings import SPARING_STRATEGIES, Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Snapshot
from gpusched.policy.draft import Layout
from gpusched.policy.filters import pool
from gpusched.policy.need import Need
from gpusched.policy.ordering import AGELESS, Rank, Ranking, by_length, rank_period_s
from gpusched.policy.standing.kinds import Kind, Place, Row, Shape, Waiting
from gpusched.policy.standing.shares import Sharer, Shares
from gpusched.policy.wanted import Wanted

ORDERS = frozenset({"fifo", "sjf", "spf", "saf", "multifactor"})
"""Those in which two waiting jobs keep their places from one `calc_period_s` to the next."""


class Lines:
    """The waiting jobs.

    Invariant: every line is sorted, by ranks as of the last `rank_as_of` and points as of the last comparison.
    """

    def __init__(self, layout: Layout, settings: Settings) -> None:
        self._layout = layout
        self._settings = settings
        self._ranking = Ranking(Snapshot(-inf, layout.nodes), settings, layout)
        self.shares = Shares(settings, self._ranking.capacity)
        self._is_weighted = settings.priority.order == "multifactor"
        self._ages = self._is_weighted or settings.priority.order in AGELESS
        """Whether ranks change with the time that a job has waited."""
        priority = settings.priority
        self.is_by_length = priority.backfill and priority.backfill_depth > 0 and priority.backfill_order == "shortest"
        """Whether the shortest fill gaps first."""
        self._is_by_prediction = (
            self.is_by_length
            or priority.order in ("sjf", "spf", "saf")
            or (self._is_weighted and priority.weight_short != 0)
        )
        """Whether where a job stands depends on how long it is taken to run."""
        self._foreseen: dict[Kind, tuple[int | None, int | None]] = {}
        """What is thought of kinds, but that they stand in line as was thought before."""
        self._is_by_arrival = self._is_weighted and not self.is_by_length
        """Whether rows are; else they are by rank."""
        self._period_s = rank_period_s(settings)
        self._is_flat = len(layout.nodes) == 1 and not layout.cards
        self._kinds: dict[ClassKey, Kind] = {}
        self._shapes: dict[object, Shape] = {}
        self._rows: dict[object, Row] = {}
        self.shapes: dict[Shape, None] = {}
        """Those of which somebody waits."""
        self.heads: list[Place] = []
        """The first of each row, first in line first."""
        self._waiting: dict[int, tuple[PendingJob, Kind]] = {}
        self._by_age: list[tuple[float, int]] = []
        """Those that wait, and some that do so no longer, as a heap."""
        self.complex = 0
        """How many jobs, waiting or running, only `decide` can deal with."""
        self.take_other_places = False
        """Whether it has changed what those who wait and run insist on, and with it where anybody goes best."""
        self._wanted = layout.wanted = Wanted() if settings.placement.strategy in SPARING_STRATEGIES else None
        self.others = 0
        """How many take more than cores."""
        self.new: list[Waiting] = []
        """Who came since the last cycle with their ranks, in no order."""
        self._asks_amid = priority.backfill_depth > 1 if self._is_flat else not priority.backfill_elsewhere
        self.is_amid = False
        """Whether one of those may stand in line before others that were looked at, where anybody asks."""
        self._last: Rank | None = ()
        """No job has come yet that ranks behind this; None: not known."""

    def __len__(self) -> int:
        return len(self._waiting)

    def kind_of(self, key: ClassKey) -> Kind:
        """The kind of all jobs with this key."""
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = self._new_kind(key, is_own=False)
        return found

    def own_kind(self, key: ClassKey) -> Kind:
        """A kind that no other jobs have, whatever their key: it can be foreseen anew."""
        return self._new_kind(key, is_own=True)

    def _new_kind(self, key: ClassKey, *, is_own: bool) -> Kind:
        need = Need.of(key.request, key.uid)
        shape = self._shapes.get(need.signature)
        if shape is None:
            shape = self._shapes[need.signature] = Shape(need)
        request = key.request
        is_of_cores = (
            self._is_flat
            and not (request.mem_mib or request.gpus or request.tail_gpus)
            and request.nodes == 1
            and bool(pool(self._layout, need).places)
        )
        sharer, points = self.shares.of(key.account, key.user), self._own_points(key)
        is_own = is_own and self._is_by_arrival
        mark = (shape, sharer, points) if self._is_by_arrival else shape
        row = None if is_own else self._rows.get(mark)
        if row is None:
            row = Row(shape, sharer, is_of_one_kind=is_own, is_by_length=self.is_by_length)
            if not is_own:
                self._rows[mark] = row
        return Kind(key, row, sharer, points, is_of_cores=is_of_cores)

    def _own_points(self, key: ClassKey) -> float:
        return self._ranking.own_points(key) if self._is_weighted else 0.0

    def foresee(self, kind: Kind, predicted_s: int | None, plan_s: int | None) -> None:
        """All of a kind of its own are expected, and planned, to run for so long.

        The weighted order goes by what is expected as of the last whole period, as it does by age and use.
        """
        if not kind.waiting or not self._is_by_prediction:
            self._foreseen.pop(kind, None)
            kind.foresee(predicted_s, plan_s)
            kind.points = self._own_points(kind.key)
        elif self._is_weighted and kind.key.predicted_s is not None:
            kind.foresee(kind.key.predicted_s, plan_s)
            self._foreseen[kind] = predicted_s, plan_s
        else:
            self._foreseen[kind] = predicted_s, plan_s

    def rank(self, kind: Kind, job: PendingJob) -> Rank:
        """Where it stands, as `Ranking` has it, but for the parts that are the same for all that are plain."""
        if not self._is_weighted:
            return self._ranking.rank(kind.key, job)
        queued_at = job.queued_at
        measure = self._ranking.ageing.measure(queued_at, kind.sharer.points + kind.points)
        return measure[0], queued_at, job.id

    def at(self, row: Row, number: int) -> Place:
        """The job that stands there in its row."""
        return self._rank_at(row, number) if number else row.rank, number, row

    def _rank_at(self, row: Row, number: int) -> Rank:
        rank, job, kind = row.line[number]
        return self.rank(kind, job) if self._is_by_arrival else rank

    def gap_at(self, row: Row, number: int) -> Place:
        """The job that stands there among those of its row that may fill gaps."""
        return (row.by_length[number][0], number, row) if self.is_by_length else self.at(row, number)

    def gaps(self, passed: Mapping[Row, int]) -> list[Place]:
        """The first of each row that may fill gaps, but for so many that have been looked at, in order."""
        if self.is_by_length:
            return sorted(self.gap_at(row, 0) for _, _, row in self.heads)
        if not passed:
            return self.heads.copy()
        found = [head for head in self.heads if head[2] not in passed]
        for row, number in passed.items():
            if number < len(row.line):
                insort(found, self.at(row, number))
        return found

    def gaps_behind(self, rank: Rank) -> list[Place]:
        """The first of each row that may fill gaps and comes after this rank, in order."""
        found = []
        for _, _, row in self.heads:
            if self._is_by_arrival:
                number = bisect_left(row.line, rank, key=lambda entry: self.rank(entry[2], entry[1]))
            else:
                number = bisect_left(row.by_length, (rank,))
            if number < len(row.by_length):
                found.append(self.gap_at(row, number))
        return sorted(found)

    # --- who comes and goes ---------------------------------------------------------------------

    def add(self, kind: Kind, job: PendingJob) -> None:
        """A job waits from now on."""
        rank = self.rank(kind, job)
        came = rank, job, kind
        row = kind.row
        line, entry = row.line, ((job.queued_at, job.id), job, kind) if self._is_by_arrival else came
        is_first = not line
        if is_first:
            row.shape.rows[row] = None
            self.shapes[row.shape] = None
            line.append(entry)
        elif entry[0] < line[-1][0]:
            insort(line, entry)
            is_first = line[0] is entry
            if is_first:
                del self.heads[bisect_left(self.heads, (row.rank,))]
        else:
            line.append(entry)
        if is_first:
            row.rank = rank
            insort(self.heads, (rank, 0, row))
        row.shortest_s = min(row.shortest_s, kind.planned_s)
        if self.is_by_length:
            insort(row.by_length, self.in_gaps(entry))
        self._waiting[job.id] = job, kind
        kind.waiting += 1
        self.new.append(came)
        if self._asks_amid:
            if self._last is None:
                self._last = max(self.at(one, len(one.line) - 1)[0] for _, _, one in self.heads)
            if rank < self._last:
                self.is_amid = True
            else:
                self._last = rank
        if self._ages:
            heappush(self._by_age, (job.queued_at, job.id))
        self.shares.waits(kind.sharer)
        self.complex += not kind.is_plain
        self.others += not kind.is_of_cores
        if kind.micros:
            self._want(kind, kind.micros)

    def entry(self, job_id: int) -> Waiting:
        """A waiting job with its rank."""
        job, kind = self._waiting[job_id]
        return self.rank(kind, job), job, kind

    def take_off(self, entry: Waiting) -> None:
        """A job waits no longer; whether it is `complex` or of the `others` counts until it is `forgotten`."""
        rank, job, kind = entry
        row = kind.row
        self.take(row, bisect_left(row.line, ((job.queued_at, job.id) if self._is_by_arrival else rank,)))

    def take(self, row: Row, number: int) -> Waiting:
        """Take off the job that stands there in its row."""
        line = row.line
        entry = line.pop(number)
        _, job, kind = entry
        del self._waiting[job.id]
        kind.waiting -= 1
        self.shares.waits_no_more(kind.sharer)
        if self.is_by_length:
            del row.by_length[bisect_left(row.by_length, self.in_gaps(entry))]
        if not number:
            del self.heads[bisect_left(self.heads, (row.rank,))]
            if line:
                row.rank = self._rank_at(row, 0)
                insort(self.heads, (row.rank, 0, row))
            else:
                row.shortest_s = inf
                del row.shape.rows[row]
                if not row.shape.rows:
                    del self.shapes[row.shape]
        return entry

    def in_gaps(self, entry: Waiting) -> Waiting:
        """A waiting job as it stands among those that may fill gaps."""
        rank, job, kind = entry
        return (by_length(kind.key, rank), job, kind) if self.is_by_length else entry

    def remember(self, kind: Kind) -> None:
        """One of these runs that never waited here."""
        self.complex += not kind.is_plain
        self.others += not kind.is_of_cores

    def forget(self, kind: Kind) -> None:
        """One of these neither waits nor runs any more."""
        self.complex -= not kind.is_plain
        self.others -= not kind.is_of_cores
        if kind.micros:
            self._want(kind, -kind.micros)

    def _want(self, kind: Kind, micros: int) -> None:
        wanted = self._wanted
        if wanted is not None:
            if wanted.insisted or kind.insists is not None:
                self.take_other_places = True
            wanted.add(kind.insists, micros)

    def seen(self) -> None:
        """A cycle has looked at all that are new."""
        self.new.clear()
        self.is_amid = False

    def in_order(self) -> list[Waiting]:
        """All of them with their ranks, first in line first."""
        return sorted((self.rank(kind, job), job, kind) for job, kind in self._waiting.values())

    def classes(self) -> tuple[PendingClass, ...]:
        """All of them as `decide` wants them."""
        found: dict[ClassKey, list[PendingJob]] = {}
        for job, kind in sorted(self._waiting.values(), key=lambda one: (one[0].queued_at, one[0].id)):
            found.setdefault(kind.key, []).append(job)
        return tuple(PendingClass(key, tuple(jobs), len(jobs)) for key, jobs in found.items())

    # --- what time does -------------------------------------------------------------------------

    def rank_as_of(self, now: float) -> bool:
        """Rank anew where time or use has changed ranks since the last time; whether anything may have changed."""
        at = self._ranking.as_of
        if self._ages or self.shares.weigh:
            at = now - now % self._period_s if self._period_s > 0 else now
        is_later = at != self._ranking.as_of
        if not (is_later or self._foreseen or self.shares.is_due):
            return False
        if is_later:
            self._ranking.move_to(at)
        users = self.shares.compare(at) if self.shares.weigh else ()
        has_aged = self._ages and is_later and self._has_aged(at)
        kinds = self._take_foreseen(is_later=is_later) if self._foreseen else ()
        if not (users or has_aged or kinds):
            return False
        if self._is_by_arrival:
            self._rank_heads(users, kinds, has_aged=has_aged)
        else:
            self._sort(None if users or has_aged else kinds)
        return True

    def _take_foreseen(self, *, is_later: bool) -> Collection[Kind]:
        """Have kinds stand in line as they are thought of now; those of whom somebody waits, to be sorted anew."""
        found: set[Kind] = set()
        left: dict[Kind, tuple[int | None, int | None]] = {}
        for kind, (predicted_s, plan_s) in self._foreseen.items():
            if self._is_weighted and not is_later and kind.waiting and kind.key.predicted_s is not None:
                left[kind] = predicted_s, plan_s
                continue
            kind.foresee(predicted_s, plan_s)
            kind.points = self._own_points(kind.key)
            if kind.waiting:
                found.add(kind)
        self._foreseen = left
        return found

    def _has_aged(self, at: float) -> bool:
        """Whether the age of anybody is more than counts: from then on all others catch up with it.

        In orders without age it goes first from then on, which is seen once.
        """
        waiting, heap = self._waiting, self._by_age
        max_age_s, found = self._settings.priority.max_age_s, False
        while heap:
            queued_at, job_id = heap[0]
            if job_id in waiting:
                if at - queued_at <= max_age_s:
                    break
                found = True
                if self._is_weighted:
                    break
            heappop(heap)
        return found

    def _rank_heads(self, users: Collection[Sharer], kinds: Collection[Kind], *, has_aged: bool) -> None:
        """Rank the heads of those rows anew that are of these users or kinds, or have waited for as long as counts."""
        floor_at = self._ranking.ageing.floor_at if has_aged else -inf
        rows = {kind.row for kind in kinds}
        for number, (_, _, row) in enumerate(self.heads):
            if row.sharer in users or row.line[0][1].queued_at <= floor_at or row in rows:
                row.rank = self._rank_at(row, 0)
                self.heads[number] = row.rank, 0, row
        self.heads.sort()
        self._last = None

    def _sort(self, kinds: Collection[Kind] | None) -> None:
        """Rank these kinds anew, or all of them, and put the rows in order: what is left as it is costs little."""
        rank = self.rank
        rows = [row for _, _, row in self.heads] if kinds is None else {kind.row: None for kind in kinds}
        for row in rows:
            row.line[:] = sorted(
                (rank(entry[2], entry[1]), entry[1], entry[2]) if kinds is None or entry[2] in kinds else entry
                for entry in row.line
            )
            row.rank = row.line[0][0]
            if self.is_by_length:
                row.by_length[:] = sorted(map(self.in_gaps, row.line))
        self.heads = sorted((row.rank, 0, row) for _, _, row in self.heads)
        self._last = None
