"""Who waits, in order: a line for each shape of job, sorted anew where time or use has changed ranks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from heapq import heappop, heappush
from itertools import chain
from math import inf

from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Snapshot
from gpusched.policy.draft import Layout
from gpusched.policy.filters import pool
from gpusched.policy.need import Need
from gpusched.policy.ordering import AGELESS, Rank, Ranking, by_length, ranked_at
from gpusched.policy.standing.kinds import Kind, Shape, Waiting
from gpusched.policy.standing.shares import Shares

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
        self._is_flat = len(layout.nodes) == 1 and not layout.cards
        self._kinds: dict[ClassKey, Kind] = {}
        self._shapes: dict[object, Shape] = {}
        self._lines: dict[Shape, None] = {}
        self._waiting: dict[int, tuple[PendingJob, Kind]] = {}
        self._by_age: list[tuple[float, int]] = []
        """Those that wait, and some that do so no longer, as a heap."""
        self.complex = 0
        """How many jobs, waiting or running, only `decide` can deal with."""
        self.others = 0
        """How many take more than cores."""
        self.new: list[Waiting] = []
        """Who came since the last cycle, in no order."""
        self.is_amid = False
        """Whether one of those may stand in line before others that were looked at."""
        self._last: Rank = ()
        """No job has come yet that ranks behind this."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def shapes(self) -> Collection[Shape]:
        """Those of which somebody waits."""
        return self._lines.keys()

    def kind_of(self, key: ClassKey) -> Kind:
        """The kind of all jobs with this key."""
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = self.own_kind(key)
        return found

    def own_kind(self, key: ClassKey) -> Kind:
        """A kind that no other jobs have, whatever their key: it can be foreseen anew."""
        need = Need.of(key.request, key.uid)
        shape = self._shapes.get(need.signature)
        if shape is None:
            shape = self._shapes[need.signature] = Shape(need, is_by_length=self.is_by_length)
        request = key.request
        is_of_cores = (
            self._is_flat
            and not (request.mem_mib or request.gpus or request.tail_gpus)
            and request.nodes == 1
            and bool(pool(self._layout, need).places)
        )
        sharer = self.shares.of(key.account, key.user)
        return Kind(key, shape, sharer, self._own_points(key), is_of_cores=is_of_cores)

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
        """Where it stands, as `Ranking` has it; the first parts are the same for all that are plain."""
        if not self._is_weighted:
            return self._ranking.rank(kind.key, job)
        measure = self._ranking.ageing.measure(job.queued_at, kind.sharer.points + kind.points)
        return (), 0, True, True, measure, job.queued_at, job.id

    # --- who comes and goes ---------------------------------------------------------------------

    def add(self, kind: Kind, job: PendingJob) -> None:
        """A job waits from now on."""
        entry = self.rank(kind, job), job, kind
        line = kind.shape.line
        if not line:
            self._lines[kind.shape] = None
            line.append(entry)
        elif entry < line[-1]:
            insort(line, entry)
        else:
            line.append(entry)
        if self.is_by_length:
            insort(kind.shape.by_length, self.in_gaps(entry))
        self._waiting[job.id] = job, kind
        kind.waiting += 1
        self.new.append(entry)
        if entry[0] < self._last:
            self.is_amid = True
        else:
            self._last = entry[0]
        if self._ages:
            heappush(self._by_age, (job.queued_at, job.id))
        self.shares.waits(kind.sharer)
        self.complex += not kind.is_plain
        self.others += not kind.is_of_cores

    def entry(self, job_id: int) -> Waiting:
        """A waiting job as it stands in line."""
        job, kind = self._waiting[job_id]
        return self.rank(kind, job), job, kind

    def take_off(self, entry: Waiting) -> None:
        """A job waits no longer; whether it is `complex` or of the `others` counts until it is `forgotten`."""
        _, job, kind = entry
        del self._waiting[job.id]
        kind.waiting -= 1
        self.shares.waits_no_more(kind.sharer)
        line = kind.shape.line
        del line[0 if line[0] is entry else bisect_left(line, entry)]
        if self.is_by_length:
            others = kind.shape.by_length
            del others[bisect_left(others, self.in_gaps(entry))]
        if not line:
            del self._lines[kind.shape]

    def in_gaps(self, entry: Waiting) -> Waiting:
        """A waiting job as it stands among those that may fill gaps."""
        rank, job, kind = entry
        return (by_length(kind.key, rank), job, kind) if self.is_by_length else entry

    def forget(self, kind: Kind) -> None:
        """One of these neither waits nor runs any more."""
        self.complex -= not kind.is_plain
        self.others -= not kind.is_of_cores

    def seen(self) -> None:
        """A cycle has looked at all that are new."""
        self.new.clear()
        self.is_amid = False

    def in_order(self) -> list[Waiting]:
        """All of them, first in line first."""
        return sorted(chain.from_iterable(shape.line for shape in self._lines))

    def classes(self) -> tuple[PendingClass, ...]:
        """All of them as `decide` wants them."""
        found: dict[ClassKey, list[PendingJob]] = {}
        for job, kind in sorted(self._waiting.values(), key=lambda one: (one[0].queued_at, one[0].id)):
            found.setdefault(kind.key, []).append(job)
        return tuple(PendingClass(key, tuple(jobs), len(jobs)) for key, jobs in found.items())

    # --- what time does -------------------------------------------------------------------------

    def rank_as_of(self, now: float) -> bool:
        """Sort anew where time or use has changed ranks since the last time; whether anything may have changed."""
        at = ranked_at(now, self._settings)
        is_later = at != self._ranking.as_of
        if is_later:
            self._ranking.move_to(at)
        changed = self.shares.weigh and self.shares.compare(at)
        if self._ages and is_later and self._has_aged(at):
            changed = True
        foreseen = self._take_foreseen(is_later=is_later) if self._foreseen else ()
        if changed:
            self._sort(self._lines, None)
        elif foreseen:
            self._sort({kind.shape: None for kind in foreseen}, foreseen)
        return changed or bool(foreseen)

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

    def _sort(self, shapes: Iterable[Shape], kinds: Collection[Kind] | None) -> None:
        """Rank these kinds anew, or all of them, and put the lines in order: what is left as it is costs little."""
        rank = self.rank
        for shape in shapes:
            if kinds is None:
                line = [(rank(kind, job), job, kind) for _, job, kind in shape.line]
            else:
                line = [
                    (rank(entry[2], entry[1]), entry[1], entry[2]) if entry[2] in kinds else entry
                    for entry in shape.line
                ]
            line.sort()
            shape.line[:] = line
            if self.is_by_length:
                shape.by_length[:] = sorted(map(self.in_gaps, line))
        self._last = max((shape.line[-1][0] for shape in self._lines), default=())
