"""The machines, the runs, and one cycle after another."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace
from math import inf

from gpusched.errors import BrokenInvariant
from gpusched.model.cluster import NodeView
from gpusched.model.settings import LEARNING_STRATEGIES, Settings
from gpusched.model.snapshot import ClassKey, PendingJob, Placement, Plan, Reservation, Snapshot, Start, Usage
from gpusched.policy.ceilings import ceilings_of
from gpusched.policy.cycle import decide
from gpusched.policy.draft import Booking, Draft, Layout
from gpusched.policy.extension import NO_EXTENSIONS, Extensions
from gpusched.policy.ordering import Rank
from gpusched.policy.placement import fits
from gpusched.policy.profile import Ending, Profile
from gpusched.policy.sharing.usage import footprint
from gpusched.policy.standing.future import Future
from gpusched.policy.standing.kinds import Kind, Place, Row, Running, Waiting
from gpusched.policy.standing.lines import ORDERS, Lines
from gpusched.policy.standing.places import Places
from gpusched.policy.standing.shares import Amounts, amounts_of
from gpusched.policy.steps import Steps

_NOTHING = Plan()


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
        self._lines = Lines(self.layout, settings)
        self._running: dict[int, Running] = {}
        self._gone: list[Running] = []
        """Who has ended since the last cycle, and is yet to be charged."""
        self._future = Future(self._draft)
        self._is_flat = len(self.nodes) == 1 and not self.layout.cards
        """One node without cards: there is one place or none."""
        self._is_alike = len({card.view.vram_total_mib for card in self.layout.cards}) <= 1
        """Whether all cards are of one size."""
        self.is_plain = self._has_one_line()
        """Whether the settings are such that no plan need be made anew."""
        priority = settings.priority
        # Without reservations there is nobody whom others must not pass, with backfill or without.
        self._has_backfill = priority.backfill or not priority.backfill_depth
        self._depth = priority.backfill_depth if priority.backfill else min(1, priority.backfill_depth)
        self._has_one_place = not priority.backfill_elsewhere
        self._places = Places(self._draft, is_flat=self._is_flat, has_one_place=self._has_one_place)
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
        self._is_stale = True
        """Whether who was passed over in the last cycle has to be looked at again."""

    def _has_one_line(self) -> bool:
        settings, over = self.settings, self.settings.oversubscribe
        ceilings = ceilings_of(settings)
        return (
            settings.priority.order in ORDERS
            and self.extensions == NO_EXTENSIONS
            and settings.placement.strategy not in LEARNING_STRATEGIES
            and settings.limit.running_per_user is None
            and not (settings.queue or settings.qos or settings.license)
            and max(over.cpus, over.mem, over.vram) <= 1
            and (ceilings.cpu_fraction, ceilings.mem_fraction, ceilings.gpu_fraction) == (None, None, None)
            and (ceilings.disk_mib_s, ceilings.net_mib_s) == (None, None)
        )

    # --- what changes ---------------------------------------------------------------------------

    def kind_of(self, key: ClassKey) -> Kind:
        """The kind of all jobs with this key, to be handed in with each of them."""
        return self._lines.kind_of(key)

    def own_kind(self, key: ClassKey) -> Kind:
        """A kind for jobs of which `foresee` is to tell: nobody else's, whatever the key."""
        return self._lines.own_kind(key)

    def foresee(self, kind: Kind, predicted_s: int | None, plan_s: int | None) -> None:
        """Those of an own kind that wait are expected and planned to run for so long; who runs, runs as planned."""
        self._lines.foresee(kind, predicted_s, plan_s)
        self._is_stale = True

    def arrived(self, kind: Kind, job: PendingJob) -> None:
        """A job waits from now on."""
        self._lines.add(kind, job)

    def runs(self, key: ClassKey, job_id: int, placement: Placement, start_at: float, end_at: float) -> None:
        """A job that began before runs here, and is planned to end then; of what it has used `used` is to tell."""
        booking = self.layout.booking(key.uid, placement)
        if booking is None:
            return
        kind = self.kind_of(key)
        self._lines.remember(kind)
        self._draft.take(booking)
        ending = Ending(job_id, start_at, end_at, booking)
        self._future.add(ending)
        running = self._running[job_id] = Running(kind, ending, placement)
        if self._lines.shares.weigh:
            running.rate = self._rate(kind, booking)
            self._lines.shares.holds(kind.sharer, running.rate)
        self._places.epoch += 1
        self._is_stale = True

    def used(self, usage: Iterable[Usage]) -> None:
        """What users had used by then, runs that go on included; before any of these is said to run."""
        self._lines.shares.adopt(usage)

    def left(self, job_id: int) -> None:
        """A waiting job waits no longer: it was cancelled, held or changed."""
        entry = self._lines.entry(job_id)
        self._lines.take_off(entry)
        self._lines.forget(entry[2])
        self._is_stale = True

    def ended(self, job_id: int) -> None:
        """A running job is over, and what it held is free. It is charged until the next cycle."""
        one = self._running.pop(job_id)
        ending = one.ending
        self._draft.give_back(ending.booking)
        self._future.remove(ending)
        self._lines.forget(one.kind)
        if self._lines.shares.weigh:
            self._gone.append(one)
        self._places.epoch += 1
        self._is_stale = True

    def expect(self, job_id: int, end_at: float) -> None:
        """A running job that may run on is taken to end then, or at its limit; infinite: nobody knows when."""
        one = self._running[job_id]
        before = one.ending
        if not one.is_guessed:
            return
        if one.kind.is_limited:
            end_at = min(end_at, before.start_at + one.kind.limit_s)
        if before.end_at == end_at:
            return
        self._future.remove(before)
        one.ending = ending = Ending(job_id, before.start_at, end_at, before.booking)
        self._future.add(ending)
        self._is_stale = True

    def _move_to(self, now: float) -> None:
        """Count the time that has passed."""
        lines, shares = self._lines, self._lines.shares
        if lines.rank_as_of(now):
            self._is_stale = True
        if lines.take_other_places:
            self._is_stale, lines.take_other_places = True, False
            self._future.forget_place()
        for one in self._gone:
            shares.ended(one.kind.sharer, one.rate, now)
        self._gone.clear()
        # What was predicted and has not come true says nothing of what is to come.
        late, ends = 0, self._future.ends
        while late < len(ends) and ends[late][0] <= now:
            end_at, start_at, job_id, _ = ends[late]
            if end_at >= start_at + self._running[job_id].kind.limit_s:
                late += 1
            else:
                self.expect(job_id, inf)

    def snapshot(self, now: float) -> Snapshot:
        """The same world as `decide` wants it."""
        self._move_to(now)
        allocations = tuple(held for _, one in sorted(self._running.items()) for held in one.allocations())
        used = self._lines.shares.used() if self._lines.shares.weigh else None
        return Snapshot(now, self.nodes, allocations, self._lines.classes(), used=used)

    # --- a cycle --------------------------------------------------------------------------------

    def decide(self, now: float) -> Plan:
        """Plan one cycle, the starts alone.

        For the rest there are `reservations`, and `decide` with `snapshot` for the reasons: it starts nothing more.
        """
        self._move_to(now)
        lines = self._lines
        if not self.is_plain or lines.complex:
            return self._decide_anew(now)
        self._anew, self._now = None, now
        if not len(lines):
            return self._plan_for_nobody()
        starts: list[Start] = []
        if self._can_plan_in_steps(now):
            self._plan_in_steps(now, starts)
        elif self._must_look_at_all(now):
            self._look_at_all(now, starts)
        elif self._has_backfill:
            if len(lines.new) > 1:
                lines.new.sort(key=lines.in_gaps)
            for entry in lines.new:
                self._look_at(entry, now, starts)
        lines.seen()
        return Plan(starts=tuple(starts)) if starts else _NOTHING

    def _plan_for_nobody(self) -> Plan:
        if self._places.profile.kept:
            self._places.profile = Profile(self._draft, (), self._now)
        self._first = self._blocked = self._steps = None
        self._lines.seen()
        return _NOTHING

    def reservations(self) -> tuple[Reservation, ...]:
        """What was kept for blocked jobs in the last cycle."""
        placement = self.layout.placement
        if self._anew is not None:
            return self._anew.reservations
        if self._steps is not None:
            return tuple(Reservation(job_id, placement(booking), at) for job_id, booking, at in self._planned)
        profile = self._places.profile
        if self._first is not None and not self._has_backfill:
            _, job, kind = self._first
            kept = self._future.keep(job.id, kind.shape.need, kind.planned_s, self._now)
            profile = Profile(self._draft, (), self._now)
            profile.kept.extend(() if kept is None else (kept,))
        return tuple(Reservation(kept.job_id, placement(kept.booking), kept.start_at) for kept in profile.kept)

    def _decide_anew(self, now: float) -> Plan:
        plan = self._anew = decide(self.snapshot(now), self.settings, self.extensions)
        if plan.preempts or plan.resumes:
            raise BrokenInvariant("a plan that preempts was made where nobody follows it up")
        for start in plan.starts:
            entry = self._lines.entry(start.job_id)
            booking = self.layout.booking(entry[2].key.uid, start.placement)
            if booking is None:
                raise BrokenInvariant(f"job {start.job_id} was to start on a node that is not there")
            self._lines.take_off(entry)
            self._book(entry, booking, start, now)
        self._lines.seen()
        self._is_stale = True
        return plan

    # --- a reservation for everybody, on one node -----------------------------------------------

    def _can_plan_in_steps(self, now: float) -> bool:
        # There each is relied upon to end as planned.
        by_plan = self.settings.priority.backfill_by == "prediction"
        is_deep = self._has_backfill and by_plan and self._depth > 1 and self._is_flat
        can = is_deep and not self._lines.others and len(self._lines) <= self._depth
        if not can or (self._future.ends and self._future.ends[0][0] <= now):
            self._steps = None
            return False
        return True

    def _plan_in_steps(self, now: float, starts: list[Start]) -> None:
        """Conservative backfill by planning anew; for jobs at the end of the line alone, by going on."""
        steps = self._steps
        if steps is None or self._is_stale or self._lines.is_amid or any(at <= now for _, _, at in self._planned):
            free = self._draft.free_millicpus[0]
            steps = self._steps = Steps(now, free, ((end[0], end[3].booking.millicpus) for end in self._future.ends))
            self._planned.clear()
            entries = self._lines.in_order()
        else:
            steps.move_on(now)
            entries = sorted(self._lines.new)
        for entry in entries:
            shape = entry[2].shape
            at = steps.take(shape.millicpus, entry[2].planned_s)
            if at is None:
                continue
            if at <= now:
                booking = self._places.find(shape)
                if booking is None:
                    raise BrokenInvariant(f"job {entry[1].id} was planned for now on a node that has no room")
                self._lines.take_off(entry)
                self._start(entry, booking, now, starts)
            else:
                self._planned.append((entry[1].id, shape.on_the_only_node(), at))
        self._is_stale = False

    # --- a reservation for the first --------------------------------------------------------------

    def _must_look_at_all(self, now: float) -> bool:
        """Whether anything but the arrival of jobs at the end of the line has happened since the last cycle."""
        if self._is_stale or self._depth > 1:
            return True
        if not self._depth:
            return False
        blocked = self._blocked
        if blocked is None or any(entry[0] < blocked for entry in self._lines.new):
            return True
        if not self._has_backfill:
            return False
        start_at = self._places.profile.kept[0].start[0]
        if start_at <= now or start_at == inf:
            # For a start that nobody can tell, others are let pass the longer, the longer that has been so.
            return True
        # Where those behind it go best changes with where it goes.
        is_amid = self._lines.is_amid or self._lines.is_by_length
        is_other_place = is_amid and self._has_one_place and not self._is_flat
        return is_other_place and any(self._places.may_fit(entry[2].shape) for entry in self._lines.new)

    def _look_at_all(self, now: float, starts: list[Start]) -> None:
        lines, places = self._lines, self._places
        endings = [end[3] for end in self._future.ends] if self._depth > 1 else ()
        profile = places.profile = Profile(self._draft, endings, now)
        self._is_stale, self._blocked, self._first = False, None, None
        places.epoch += 1
        heap, left = lines.heads.copy(), self._depth
        passed: dict[Row, int] = {}
        while heap and left:
            rank, number, row = heap[0]
            entry = row.line[number]
            booking = places.place(row.shape, now + entry[2].relied_s)
            if booking is not None:
                self._start(lines.take(row, number), booking, now, starts)
            else:
                if self._keep(entry, now):
                    left -= 1
                    self._blocked = rank
                    self._first = self._first or entry
                    if not self._has_backfill:
                        return
                number = passed[row] = number + 1
            if number < len(row.line):
                heapreplace(heap, lines.at(row, number))
            else:
                heappop(heap)
        if heap:
            self._let_pass(passed, now, starts)
        if starts and self._has_one_place and not self._is_flat and profile.kept:
            # What goes elsewhere now may be let pass there in the next cycle.
            self._is_stale = True

    def _let_pass(self, passed: dict[Row, int], now: float, starts: list[Start]) -> None:
        """Go on with those for whom nothing is kept, as far as they delay nobody for whom something is.

        Args: passed: how many of a row have been looked at.
        """
        lines, places, reserved = self._lines, self._places, frozenset[int | None]()
        if lines.is_by_length:
            passed, reserved = {}, frozenset(kept.job_id for kept in places.profile.kept)
        fitting = places.fitting(lines.shapes)
        if not fitting:
            return
        firsts, first = lines.gaps(passed), 0
        others: list[Place] = []
        """Those that are not the first of their row, as a heap."""
        while fitting and (others or first < len(firsts)):
            if others and (first == len(firsts) or others[0] < firsts[first]):
                rank, number, row = heappop(others)
            else:
                rank, number, row = firsts[first]
                first += 1
            if row.shape not in fitting:
                continue
            after = places.next_in(row, number, now)
            if after == number:
                entry = row.by_length[number]
                booking = places.place(row.shape, now + entry[2].relied_s)
                if booking is None or entry[1].id in reserved:
                    if row.shape.epoch == places.epoch and row.shape.booking is None:
                        fitting.discard(row.shape)
                    after = places.next_in(row, number + 1, now)
                else:
                    lines.take_off(lines.entry(entry[1].id)) if lines.is_by_length else lines.take(row, number)
                    self._start(entry, booking, now, starts)
                    fitting = places.fitting(lines.shapes)
                    if self._has_one_place and not self._is_flat:
                        # Others are put elsewhere from here on, and may pass there, those of its own shape included.
                        firsts, first, others = lines.gaps_behind(rank), 0, []
                        continue
                    after = places.next_in(row, number, now)
            if after is not None:
                heappush(others, lines.gap_at(row, after))

    def _look_at(self, entry: Waiting, now: float, starts: list[Start]) -> None:
        """Start a job that is new at the end of the line, if it fits and delays nobody."""
        shape = entry[2].shape
        if not self._places.may_fit(shape):
            return
        booking = self._places.place(shape, now + entry[2].relied_s)
        if booking is not None:
            self._lines.take_off(entry)
            self._start(entry, booking, now, starts)
            self._is_stale = self._has_one_place and not self._is_flat and bool(self._places.profile.kept)

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
        self._places.profile.start(self._book(entry, booking, start, now))
        starts.append(start)

    def _book(self, entry: Waiting, booking: Booking, start: Start, now: float) -> Ending:
        job_id, kind = start.job_id, entry[2]
        self._draft.take(booking)
        end_at = now + kind.planned_s
        ending = Ending(job_id, now, end_at, booking)
        self._future.add(ending)
        running = self._running[job_id] = Running(kind, ending, start.placement)
        if self._lines.shares.weigh:
            running.rate = self._rate(kind, booking)
            self._lines.shares.began(kind.sharer, running.rate, now)
        self._places.epoch += 1
        return ending

    def _rate(self, kind: Kind, booking: Booking) -> Amounts:
        """What its user is charged for, a second; where all cards are alike, the same in all places."""
        rate = kind.rate
        if rate is None:
            qos = self.settings.qos.get(kind.key.qos)
            held = footprint(self.layout, booking)
            rate = amounts_of(held if qos is None else held.times(max(0.0, qos.usage_factor)))
            if self._is_alike and not booking.is_exclusive:
                kind.rate = rate
        return rate

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
            return self._places.profile.reserve(job_id, need, planned_s) is not None
        kept = self._future.keep(job_id, need, planned_s, now, shape.only)
        if kept is not None:
            self._places.profile.kept.append(kept)
            if self._is_flat:
                shape.only = kept.booking
        return kept is not None
