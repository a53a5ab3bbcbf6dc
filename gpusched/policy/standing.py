"""The policy kept standing between cycles: what changes goes in, and each cycle looks only at what that can concern.

`decide` builds the world anew from a snapshot, which costs as much as there are machines, runs and classes. Here the
machines, the order of the line and the ends of the running jobs are kept from one cycle to the next, and

    a shape   jobs that ask for the same have one line; when the first finds no place, none of them does
    screens   whole numbers (free cores, free cards) turn most shapes away before any place is looked at
    arrivals  while nothing has become free, who waited goes on waiting: only those that are new are looked at

The plan is that of `decide`, start for start: the same line, places, reservations and rule of who may pass, from the
same modules. A test lets both run side by side. Where ranks change by themselves or limits are shared (queues, QOS,
fair shares, plug-ins, jobs of unknown length), `decide` itself is called. Calendars are not known here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from math import inf

from gpusched.errors import BrokenInvariant
from gpusched.model.cluster import Allocation, NodeView
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Placement, Plan, Reservation, Snapshot, Start
from gpusched.policy.ceilings import ceilings_of
from gpusched.policy.cycle import decide
from gpusched.policy.draft import Booking, Draft, Layout
from gpusched.policy.extension import NO_EXTENSIONS, Extensions
from gpusched.policy.need import Need
from gpusched.policy.ordering import Rank, Ranking, by_length
from gpusched.policy.placement import find, fits, options, pool
from gpusched.policy.profile import NO_JOB, Ending, Profile
from gpusched.policy.steps import Steps

_STATIC = frozenset({"fifo", "sjf", "spf", "saf"})
"""Orders in which two waiting jobs never change places, but for one that has waited for too long."""

_NOTHING = Plan()


class Kind:
    """A class of jobs that waits here, with what is worked out once for all of them."""

    __slots__ = ("is_of_cores", "is_plain", "key", "planned_s", "shape")

    def __init__(self, key: ClassKey, shape: Shape, is_of_cores: bool) -> None:
        request = key.request
        self.is_of_cores = is_of_cores
        """Whether free cores of the only node are all that it takes."""
        self.key = key
        self.shape = shape
        self.planned_s: float = inf if key.planned_s is None else key.planned_s
        self.is_plain = not (
            self.planned_s == inf
            or request.licenses
            or request.resources
            or request.is_exclusive
            or key.reservation
            or key.throttle
            or key.qos
            or key.inherited
            or key.is_front
        )


class Shape:
    """All waiting jobs that fit in exactly the same places, first in line first."""

    __slots__ = (
        *("booking", "by_length", "can_fit", "cards", "epoch", "line", "millicpus", "need"),
        *("only", "passes", "placement"),
    )

    def __init__(self, need: Need) -> None:
        request = need.request
        self.need = need
        self.line: list[Waiting] = []
        self.by_length: list[Waiting] = self.line
        """The same jobs as they fill gaps: another list where the shortest do so first."""
        self.millicpus = need.millicpus
        self.cards = 0 if need.is_slice else request.gpus
        self.epoch = -1
        """Of which `booking` and `passes` are; both hold until somebody starts or ends."""
        self.booking: Booking | None = None
        """The best place now."""
        self.only: Booking | None = None
        """Where there can be no more than one place, that one, once it was found."""
        self.placement: Placement | None = None
        """As the rest of the program knows it."""
        self.can_fit: bool | None = None
        """Whether it fits when nobody else is there; None before that was asked."""
        self.passes: bool | None = None
        """Whether one that goes there may run past what is kept; None before anybody has asked."""


Waiting = tuple[Rank, PendingJob, Kind]
"""Ranks end in the job's id, so that no comparison goes beyond them."""


class Running:
    """A job that runs."""

    __slots__ = ("ending", "kind", "placement")

    def __init__(self, kind: Kind, ending: Ending, placement: Placement) -> None:
        self.kind = kind
        self.ending = ending
        self.placement = placement


class Standing:
    """The cluster, its line and its runs between one cycle and the next.

    Invariant: every start of a plan is taken for carried out; `ended` says when one is over.
    """

    def __init__(self, nodes: Iterable[NodeView], settings: Settings, extensions: Extensions = NO_EXTENSIONS) -> None:
        self.nodes = tuple(sorted(nodes, key=lambda node: node.name))
        self.settings = settings
        self.extensions = extensions
        self.layout = Layout(self.nodes, settings)
        self._draft = Draft(self.layout)
        self._ranking = Ranking(Snapshot(-inf, self.nodes), settings, self.layout)
        self._kinds: dict[ClassKey, Kind] = {}
        self._shapes: dict[object, Shape] = {}
        self._lines: dict[Shape, None] = {}
        """Shapes of which somebody waits."""
        self._running: dict[int, Running] = {}
        self._waiting: dict[int, Waiting] = {}
        self._ends: list[tuple[float, float, int, Ending]] = []
        """Running jobs by their planned ends."""
        self._complex = 0
        """How many jobs, waiting or running, only `decide` can deal with."""
        self._others = 0
        """How many take more than cores."""
        self._is_flat = len(self.nodes) == 1 and not self.layout.cards
        """One node without cards: there is one place or none."""
        self._is_plain = self._has_one_line()
        priority = settings.priority
        # Without reservations there is nobody whom others must not pass, with backfill or without.
        self._has_backfill = priority.backfill or not priority.backfill_depth
        self._depth = priority.backfill_depth if priority.backfill else min(1, priority.backfill_depth)
        self._has_one_place = not priority.backfill_elsewhere
        self._is_by_length = self._has_backfill and self._depth > 0 and priority.backfill_order == "shortest"
        """Whether the shortest fill gaps first."""
        self._profile = Profile(self._draft, (), 0.0)
        self._epoch = 0
        self._most_free = -1, 0
        """The most cards that are free on any node, and the epoch of which that is."""
        self._now = -inf
        """Of the last cycle."""
        self._first: Waiting | None = None
        """The first that is blocked, if any."""
        self._blocked: Rank | None = None
        """Where in line the last one stands for whom something is kept."""
        self._anew: Plan | None = None
        """The last plan, where that was made by `decide`."""
        self._steps: Steps | None = None
        """Where everybody has a reservation on the only node: free cores from the last cycle on, all of those taken."""
        self._planned: list[tuple[int, Booking, float]] = []
        """Those reservations: job, place, start."""
        self._last: Rank = ()
        """No job has come yet that ranks behind this."""
        self._is_amid = False
        """Whether one of the new ones may stand in line before others that were looked at."""
        self._new: list[Waiting] = []
        self._is_stale = True
        """Whether who was passed over in the last cycle has to be looked at again."""

    def _has_one_line(self) -> bool:
        settings, over = self.settings, self.settings.oversubscribe
        ceilings = ceilings_of(settings)
        is_static = settings.priority.order in _STATIC
        is_ageless = settings.priority.order != "fifo" and settings.priority.max_age_s < inf
        return (
            is_static
            and not is_ageless
            and self.extensions == NO_EXTENSIONS
            and settings.placement.strategy != "fgd"
            and settings.limit.running_per_user is None
            and not (settings.queue or settings.qos or settings.license)
            and max(over.cpus, over.mem, over.vram) <= 1
            and (ceilings.cpu_fraction, ceilings.mem_fraction, ceilings.gpu_fraction) == (None, None, None)
            and (ceilings.disk_mib_s, ceilings.net_mib_s) == (None, None)
        )

    # --- what changes ---------------------------------------------------------------------------

    def kind_of(self, key: ClassKey) -> Kind:
        """The kind of all jobs with this key, to be handed in with each of them."""
        found = self._kinds.get(key)
        if found is None:
            need = Need.of(key.request, key.uid)
            shape = self._shapes.get(need.signature)
            if shape is None:
                shape = self._shapes[need.signature] = Shape(need)
                if self._is_by_length:
                    shape.by_length = []
            request = key.request
            is_of_cores = (
                self._is_flat
                and not (request.mem_mib or request.gpus or request.tail_gpus)
                and request.nodes == 1
                and bool(pool(self.layout, need).places)
            )
            found = self._kinds[key] = Kind(key, shape, is_of_cores)
        return found

    def arrived(self, kind: Kind, job: PendingJob) -> None:
        """A job waits from now on."""
        entry = self._ranking.rank(kind.key, job), job, kind
        line = kind.shape.line
        if not line:
            self._lines[kind.shape] = None
            line.append(entry)
        elif entry < line[-1]:
            insort(line, entry)
        else:
            line.append(entry)
        if self._is_by_length:
            insort(kind.shape.by_length, self._in_gaps(entry))
        self._waiting[job.id] = entry
        self._new.append(entry)
        if entry[0] < self._last:
            self._is_amid = True
        else:
            self._last = entry[0]
        self._complex += not kind.is_plain
        self._others += not kind.is_of_cores

    def left(self, job_id: int) -> None:
        """A waiting job waits no longer: it was cancelled, held or changed."""
        entry = self._waiting.pop(job_id)
        self._take_off(entry)
        self._complex -= not entry[2].is_plain
        self._others -= not entry[2].is_of_cores
        self._is_stale = True

    def ended(self, job_id: int) -> None:
        """A running job is over, and what it held is free."""
        one = self._running.pop(job_id)
        ending = one.ending
        self._draft.release(ending.booking)
        self._draft.settle()
        ends, mark = self._ends, (ending.end_at, ending.start_at, job_id)
        del ends[bisect_left(ends, mark)]
        self._complex -= not one.kind.is_plain
        self._others -= not one.kind.is_of_cores
        self._epoch += 1
        self._is_stale = True

    def _take_off(self, entry: Waiting) -> None:
        shape = entry[2].shape
        line = shape.line
        del line[0 if line[0] is entry else bisect_left(line, entry)]
        if self._is_by_length:
            del shape.by_length[bisect_left(shape.by_length, self._in_gaps(entry))]
        if not line:
            del self._lines[shape]

    def _in_gaps(self, entry: Waiting) -> Waiting:
        """The same job as it stands among those that may fill gaps."""
        rank, job, kind = entry
        return (by_length(kind.key, rank), job, kind) if self._is_by_length else entry

    def _correct(self, now: float) -> None:
        """Who has run on for longer than was planned is taken to end at its limit."""
        ends = self._ends
        late = 0
        while late < len(ends) and ends[late][0] <= now:
            job_id, before = ends[late][2], ends[late][3]
            one = self._running[job_id]
            limit_at = before.start_at + (one.kind.key.time_limit_s or inf)
            if limit_at <= before.end_at:
                late += 1
                continue
            del ends[late]
            one.ending = Ending(job_id, before.start_at, limit_at, before.booking)
            insort(ends, (limit_at, before.start_at, job_id, one.ending))
            self._is_stale = True

    def snapshot(self, now: float) -> Snapshot:
        """The same world as `decide` wants it."""
        allocations = tuple(held for job_id, one in sorted(self._running.items()) for held in _allocations(job_id, one))
        classes: dict[ClassKey, list[PendingJob]] = {}
        for _, job, kind in sorted(self._waiting.values(), key=lambda entry: (entry[1].queued_at, entry[1].id)):
            classes.setdefault(kind.key, []).append(job)
        pending = tuple(PendingClass(key, tuple(jobs), len(jobs)) for key, jobs in classes.items())
        return Snapshot(now, self.nodes, allocations, pending)

    # --- a cycle --------------------------------------------------------------------------------

    def decide(self, now: float) -> Plan:
        """Plan one cycle, the starts alone.

        For the rest there are `reservations`, and `decide` with `snapshot` for the reasons: it starts nothing more.
        """
        if not self._is_plain or self._complex:
            return self._decide_anew(now)
        if self._ends and self._ends[0][0] <= now:
            self._correct(now)
        self._anew, self._now = None, now
        starts: list[Start] = []
        if self._can_plan_in_steps(now):
            self._plan_in_steps(now, starts)
        elif self._must_look_at_all(now):
            self._look_at_all(now, starts)
        elif self._has_backfill:
            if len(self._new) > 1:
                self._new.sort(key=self._in_gaps)
            for entry in self._new:
                self._look_at(entry, now, starts)
        self._new.clear()
        self._is_amid = False
        return Plan(starts=tuple(starts)) if starts else _NOTHING

    def reservations(self) -> tuple[Reservation, ...]:
        """What was kept for blocked jobs in the last cycle."""
        placement = self.layout.placement
        if self._anew is not None:
            return self._anew.reservations
        if self._steps is not None:
            return tuple(Reservation(job_id, placement(booking), at) for job_id, booking, at in self._planned)
        profile = self._profile
        if self._first is not None and not self._has_backfill:
            _, job, kind = self._first
            profile = Profile(self._draft, (), self._now)
            profile.reserve_first(job.id, kind.shape.need, kind.planned_s, self._ends)
        return tuple(
            Reservation(kept.job_id or NO_JOB, placement(kept.booking), kept.start_at) for kept in profile.kept
        )

    def _decide_anew(self, now: float) -> Plan:
        plan = self._anew = decide(self.snapshot(now), self.settings, self.extensions)
        if plan.preempts or plan.resumes:
            raise BrokenInvariant("a plan that preempts was made where nobody follows it up")
        for start in plan.starts:
            entry = self._waiting[start.job_id]
            booking = self.layout.booking(entry[2].key.uid, start.placement)
            if booking is None:
                raise BrokenInvariant(f"job {start.job_id} was to start on a node that is not there")
            self._take_off(entry)
            self._book(entry, booking, start, now)
        self._new.clear()
        self._is_stale = True
        return plan

    # --- a reservation for everybody, on one node -----------------------------------------------

    def _can_plan_in_steps(self, now: float) -> bool:
        can = self._depth > 1 and self._is_flat and not self._others and len(self._waiting) <= self._depth
        if not can or (self._ends and self._ends[0][0] <= now):
            self._steps = None
            return False
        return self._has_backfill

    def _plan_in_steps(self, now: float, starts: list[Start]) -> None:
        """Conservative backfill by planning anew; for jobs at the end of the line alone, by going on."""
        steps = self._steps
        if steps is None or self._is_stale or self._is_amid or any(at <= now for _, _, at in self._planned):
            free = self._draft.free_millicpus[0]
            steps = self._steps = Steps(now, free, ((end[0], end[3].booking.millicpus) for end in self._ends))
            self._planned.clear()
            entries = sorted(self._waiting.values())
        else:
            steps.move_on(now)
            entries = sorted(self._new)
        for entry in entries:
            shape = entry[2].shape
            at = steps.take(shape.millicpus, entry[2].planned_s)
            if at is None:
                continue
            if at <= now:
                booking = self._find(shape)
                if booking is None:
                    raise BrokenInvariant(f"job {entry[1].id} was planned for now on a node that has no room")
                self._take_off(entry)
                self._start(entry, booking, now, starts)
            else:
                self._planned.append((entry[1].id, shape.only or _on_the_node(shape), at))
        self._is_stale = False

    # --- a reservation for the first --------------------------------------------------------------

    def _must_look_at_all(self, now: float) -> bool:
        """Whether anything but the arrival of jobs at the end of the line has happened since the last cycle."""
        if self._is_stale or self._depth > 1:
            return True
        if not self._depth:
            return False
        blocked = self._blocked
        if blocked is None or any(entry[0] < blocked for entry in self._new):
            return True
        if not self._has_backfill:
            return False
        if self._profile.kept[0].start[0] <= now:
            return True
        # Where those behind it go best changes with where it goes.
        is_other_place = (self._is_amid or self._is_by_length) and self._has_one_place and not self._is_flat
        return is_other_place and any(self._may_fit(entry[2].shape) for entry in self._new)

    def _look_at_all(self, now: float, starts: list[Start]) -> None:
        endings = [end[3] for end in self._ends] if self._depth > 1 else ()
        profile = self._profile = Profile(self._draft, endings, now)
        self._is_stale, self._blocked, self._first = False, None, None
        self._epoch += 1
        heap = [(shape.line[0], 0, shape) for shape in self._lines]
        heapify(heap)
        left = self._depth
        while heap and left:
            entry, place, shape = heap[0]
            booking = self._place(shape, now + entry[2].planned_s)
            if booking is not None:
                self._take_off(entry)
                self._start(entry, booking, now, starts)
            else:
                if self._keep(entry, now):
                    left -= 1
                    self._blocked = entry[0]
                    self._first = self._first or entry
                    if not self._has_backfill:
                        return
                place += 1
            if place < len(shape.line):
                heapreplace(heap, (shape.line[place], place, shape))
            else:
                heappop(heap)
        if heap:
            self._let_pass(heap, now, starts)
        if starts and self._has_one_place and not self._is_flat and profile.kept:
            # What goes elsewhere now may be let pass there in the next cycle.
            self._is_stale = True

    def _let_pass(self, heap: list[tuple[Waiting, int, Shape]], now: float, starts: list[Start]) -> None:
        """Go on with those for whom nothing is kept, as far as they delay nobody for whom something is."""
        if self._is_by_length:
            shapes = [(0, shape) for shape in self._lines]
        else:
            shapes = [(first, shape) for _, first, shape in heap]
        heap = self._heads(shapes, now)
        reserved = {kept.job_id for kept in self._profile.kept} if self._is_by_length else ()
        while heap:
            entry, place, shape = heap[0]
            booking = self._place(shape, now + entry[2].planned_s)
            if booking is not None and entry[1].id not in reserved:
                waiting = self._waiting[entry[1].id]
                self._take_off(waiting)
                self._start(waiting, booking, now, starts)
                if self._has_one_place and not self._is_flat:
                    # Others are put elsewhere from here on, and may pass there, those of its own shape included.
                    heap = self._heads([(bisect_left(one.by_length, entry), one) for _, one in shapes], now)
                    continue
            else:
                place += 1
            after = self._next(shape, place, now)
            if after is None:
                heappop(heap)
            else:
                heapreplace(heap, (shape.by_length[after], after, shape))

    def _heads(self, shapes: Iterable[tuple[int, Shape]], now: float) -> list[tuple[Waiting, int, Shape]]:
        """The next of each shape that could start now, from this place in its line on, as a heap."""
        heap = []
        for first, shape in shapes:
            after = self._next(shape, first, now)
            if after is not None:
                heap.append((shape.by_length[after], after, shape))
        heapify(heap)
        return heap

    def _next(self, shape: Shape, place: int, now: float) -> int | None:
        """Where in the line of its shape the next job stands that could start now, from this place on."""
        line = shape.by_length
        if place >= len(line) or not self._may_fit(shape):
            return None
        known = shape.epoch == self._epoch
        if known and shape.booking is None:
            return None
        kept = self._profile.kept
        if len(kept) != 1:
            return place
        if self._is_flat:
            passes: bool | None = shape.millicpus <= kept[0].state.free_millicpus[0]
        else:
            passes = shape.passes if known else None
        if passes is not False:
            return place
        longest_s = kept[0].pass_until - now
        for number in range(place, len(line)):
            if line[number][2].planned_s <= longest_s:
                return number
        return None

    def _look_at(self, entry: Waiting, now: float, starts: list[Start]) -> None:
        """Start a job that is new at the end of the line, if it fits and delays nobody."""
        shape = entry[2].shape
        if not self._may_fit(shape):
            return
        booking = self._place(shape, now + entry[2].planned_s)
        if booking is not None:
            self._take_off(entry)
            self._start(entry, booking, now, starts)
            self._is_stale = self._has_one_place and not self._is_flat and bool(self._profile.kept)

    def _may_fit(self, shape: Shape) -> bool:
        """A first look, by numbers alone; whether there is a place is another question."""
        draft = self._draft
        if self._is_flat:
            return shape.millicpus <= draft.free_millicpus[0]
        if self._most_free[0] != self._epoch:
            self._most_free = self._epoch, max(draft.free_cards)
        return shape.cards <= self._most_free[1]

    def _place(self, shape: Shape, end_at: float) -> Booking | None:
        """The best place now for a job of this shape that delays nothing that is kept, as in `cycle`."""
        if shape.epoch != self._epoch:
            shape.booking = self._find(shape) if self._may_fit(shape) else None
            shape.epoch, shape.passes = self._epoch, None
        booking, profile = shape.booking, self._profile
        kept = profile.kept
        if booking is None or not kept:
            return booking
        if len(kept) == 1:
            if end_at <= kept[0].pass_until:
                return booking
            if shape.passes is False:
                return None
        elif not profile.concerns(end_at):
            return booking
        if self._has_one_place or self._is_flat:
            found = booking if profile.admits(booking, end_at) else None
        else:
            places = options(self._draft, shape.need, avoid=profile.cards_kept(end_at))
            places.sort()
            found = next((one.booking for one in places if profile.admits(one.booking, end_at)), None)
        if len(kept) == 1:
            shape.passes = found is not None
        return found

    def _find(self, shape: Shape) -> Booking | None:
        """The best place now, whatever is kept."""
        only = shape.only
        if only is None:
            only = find(self._draft, shape.need)
            if self._is_flat:
                shape.only = only
            return only
        return only if self._draft.has_room(only) else None

    # --- what it comes to -----------------------------------------------------------------------

    def _start(self, entry: Waiting, booking: Booking, now: float, starts: list[Start]) -> None:
        shape = entry[2].shape
        if booking is shape.only:
            placement = shape.placement
            if placement is None:
                placement = shape.placement = self.layout.placement(booking)
        else:
            placement = self.layout.placement(booking)
        start = Start(entry[1].id, placement)
        self._profile.start(self._book(entry, booking, start, now))
        starts.append(start)

    def _book(self, entry: Waiting, booking: Booking, start: Start, now: float) -> Ending:
        job_id, kind = start.job_id, entry[2]
        del self._waiting[job_id]
        self._draft.book(booking)
        self._draft.settle()
        end_at = now + kind.planned_s
        ending = Ending(job_id, now, end_at, booking)
        insort(self._ends, (end_at, now, job_id, ending))
        self._running[job_id] = Running(kind, ending, start.placement)
        self._epoch += 1
        return ending

    def _keep(self, entry: Waiting, now: float) -> bool:
        """Keep room for the first job that is blocked; False when it never fits."""
        shape = entry[2].shape
        need, job_id, planned_s = shape.need, entry[1].id, entry[2].planned_s
        if not self._has_backfill:
            # Nobody passes it, so that nothing need be kept but for whoever asks; see `reservations`.
            if shape.can_fit is None:
                shape.can_fit = fits(Draft(self.layout), shape.need)
            return shape.can_fit
        if self._depth > 1:
            return self._profile.reserve(job_id, need, planned_s) is not None
        return self._profile.reserve_first(job_id, need, planned_s, self._ends) is not None


def _on_the_node(shape: Shape) -> Booking:
    """The only place that cores of one node can be taken from."""
    return Booking(0, shape.need.uid, shape.millicpus, 0, ())


def _allocations(job_id: int, one: Running) -> Iterator[Allocation]:
    """What a job holds on each of its nodes."""
    key, ending = one.kind.key, one.ending
    for place in (one.placement, *one.placement.others):
        yield Allocation(
            job_id,
            key.uid,
            place.node,
            place.gpus,
            place.cpus,
            place.mem_mib,
            ending.start_at,
            None if key.time_limit_s is None else ending.start_at + key.time_limit_s,
            ending.start_at + one.kind.planned_s if key.plan_s is not None or key.time_limit_s is None else None,
            user=key.user,
            account=key.account,
            queue=key.queue,
            qos=key.qos,
            resources=place.resources,
            licenses=place.licenses,
            is_exclusive=place.is_exclusive,
        )
