"""The rules of one cycle, applied to each job: limits, placement, victims, reservations, reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from math import inf
from typing import TYPE_CHECKING

from gpusched.model.cluster import JobTerms
from gpusched.model.mentions import RESERVATION, mention_reservation, mentioned_name
from gpusched.model.resources import Resources
from gpusched.model.snapshot import ClassKey, PendingJob, Reason, ResumeRun, Snapshot, Start
from gpusched.model.states import ReasonCode
from gpusched.scheduler.budget import BudgetGate
from gpusched.scheduler.calendar import ReservedNodes, licenses_of
from gpusched.scheduler.cells import PlacementVetoes
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterState
from gpusched.scheduler.gates import Gate, QuotaGate, ThrottleGate
from gpusched.scheduler.limit_reservations import LimitReservations
from gpusched.scheduler.limits import Denial
from gpusched.scheduler.load_limits import LoadLimits
from gpusched.scheduler.placement import PlacementVeto, best_placement, candidates, fits
from gpusched.scheduler.preemption import Claim, Preemption
from gpusched.scheduler.priority import Rank
from gpusched.scheduler.queue import BLOCKED, NEXT_IN_CLASS, STARTED, Entry, JobClass
from gpusched.scheduler.reasons import Blocked, license_wait
from gpusched.scheduler.request_units import RequestUnits
from gpusched.scheduler.reservation import TimelineReservation, is_settled, reserve_room
from gpusched.scheduler.room_making import RoomMaker
from gpusched.scheduler.timeline import RunningJob, Timeline
from gpusched.scheduler.usage import footprint
from gpusched.scheduler.user_limits import UserLimitGate
from gpusched.scheduler.variants import schedule_variants

if TYPE_CHECKING:
    from gpusched.scheduler.state import PlannerState

GATES: tuple[type[Gate], ...] = (
    ThrottleGate,
    BudgetGate,
    UserLimitGate,
    QuotaGate,
    LimitReservations,
)
"""All limits, in the order in which they are asked."""

_DOUBTED_BANDS = 3
"""Maximum number of bands for which the predictions of users who have used more are doubled."""


class Cycle:
    """One cycle, which later arrivals can extend: its plan so far, and what becomes of each job.

    It is one large class because each outcome is told to all that count within the cycle: gates, ceilings, vetoes,
    reservations, reasons. Who is next is up to `backfill`, and what others give up to `room_making`.
    """

    __slots__ = (
        *("_ceilings", "_gates", "_idle", "_infeasible", "_inside", "_room", "_vetoes", "blocked", "claims"),
        *("closed", "depth", "draft", "extensions", "fillers", "first_patient", "has_backfill", "has_dear"),
        *("has_one_place", "has_passed", "has_spare", "has_windows", "is_continued", "is_general", "is_strict"),
        *("last_reserved", "layout", "name_of", "now", "placements", "planner", "queue", "quotas"),
        *("reservations", "reserved_band", "resumes", "settings", "starts", "suspended", "timeline", "undo"),
        "windows",
    )

    def __init__(self, planner: PlannerState, now: float) -> None:
        self.planner = planner
        self.now = now
        self.settings = planner.settings
        self.name_of = planner.name_of
        self.extensions = planner.extensions
        self.layout = planner.layout
        self.queue = planner.queue
        self.quotas = planner.quotas
        self.placements = planner.placements
        self.windows = planner.windows
        self.starts: list[Start] = []
        self.blocked: dict[JobClass, Blocked] = {}
        self.closed: set[JobClass] = set()
        """Classes of which all that are pending wait, where that was looked into."""
        self.fillers: list[tuple[JobClass, int]] = []
        """Classes whose jobs from this index on have spent their budget, and start only after all others."""
        self.reservations: list[TimelineReservation] = []
        """Reservations of jobs, in the order of their creation."""
        priority = self.settings.priority
        self.is_strict = not priority.backfill
        """Whether no job passes one with a reservation."""
        self.has_backfill = priority.backfill or not priority.backfill_depth
        self.depth = priority.backfill_depth
        self.has_one_place = not priority.backfill_elsewhere
        self.suspended = (
            [one.held for _, one in sorted(planner.runs.items()) if one.is_suspended] if planner.odd_runs else []
        )
        self.has_windows = bool(self.windows)
        self.is_general = bool(
            planner.examines_all
            or self.has_windows
            or self.suspended
            or planner.odd_runs
            or planner.fillers
            or (planner.queue.must_see and any(planner.may_preempt(one.key) for one in planner.queue.must_see))
        )
        """Whether every class is subject to all rules."""
        self.last_reserved: Rank | None = None
        self.reserved_band: float = inf
        """The first band among jobs with a reservation."""
        self.has_passed = False
        """Whether a started job still runs when some reservation begins, or changes other jobs' placements."""
        self.has_dear = False
        """Whether a reservation was dropped for what it would leave idle."""
        self.has_spare = False
        """Whether one would be, if more jobs were pending."""
        self.is_continued = False
        self.first_patient: Entry | None = None
        """The first blocked job without a reservation because it has not waited long enough."""
        self.resumes: Sequence[ResumeRun] = ()
        self._infeasible: Set[object] = frozenset()
        self.claims: Sequence[tuple[JobTerms, Resources]] = ()
        """What counts as held by jobs for which room is being made."""
        self.undo: Sequence[Callable[[], None]] = ()
        self._idle: ClusterState | None = None
        self._inside: ReservedNodes | None = None
        self._room: RoomMaker | None = None
        self._vetoes: PlacementVetoes | None = None
        self._ceilings: LoadLimits | None = None
        self._gates: Sequence[Gate] | None = None
        if self.has_windows:
            self._open_windows()
        else:
            self.draft = planner.draft
            self.timeline: Timeline = planner.timeline
            self.timeline.begin(now)
        if planner.fillers and not planner.can_never_preempt:
            # What fillers hold is free for any job after their grace: nothing may be planned around them.
            gone_at = {job_id: planner.runs[job_id].held.gone_at(now) for job_id in planner.fillers}
            self.timeline = self.timeline.ending_early(gone_at)

    def _open_windows(self) -> None:
        """Adapt the machines for this cycle: remove jobs inside windows in force, and reserve the windows."""
        planner, now = self.planner, self.now
        view = Snapshot(now, self.layout.nodes, planner.allocations(), windows=self.windows)
        self._inside = inside = ReservedNodes(view, self.layout)
        self.draft = planner.draft.copy()
        outside = []
        for one in planner.runs.values():
            if inside.holds(one.first):
                self.draft.give_back(one.running.booking)
            else:
                outside.append(one.running)
        for window in inside.now:
            self.draft.take(window.booking)
        self.timeline = Timeline(self.draft, [*outside, *inside.now], now)
        for later in inside.later:
            self.timeline.reserve_window(*later)

    # --- what is made when it is needed -----------------------------------------------------------

    @property
    def inside(self) -> ReservedNodes:
        if self._inside is None:
            self._inside = ReservedNodes(Snapshot(self.now, self.layout.nodes, windows=self.windows), self.layout)
        return self._inside

    @property
    def gates(self) -> Sequence[Gate]:
        """The limits in force."""
        if self._gates is None:
            self._gates = [gate(self) for gate in self.planner.gates]
        return self._gates

    @property
    def limit_reservations(self) -> LimitReservations:
        """Promises below limits, one of the gates wherever there are such limits."""
        return next(gate for gate in self.gates if isinstance(gate, LimitReservations))

    @property
    def room(self) -> RoomMaker:
        """What others may give up."""
        if self._room is None:
            inside, runs = self._inside, self.planner.runs_before(self)
            others = {job_id: one.held for job_id, one in runs if inside is None or not inside.holds(one.first)}
            self._room = RoomMaker(self, others)
        return self._room

    @property
    def preemption(self) -> Preemption:
        """The running jobs as possible victims."""
        return self.room.preemption

    @property
    def made_preemption(self) -> Preemption | None:
        """`preemption`, if it was ever needed."""
        return None if self._room is None else self._room.preemption

    def may_continue_at(self, now: float) -> bool:
        """Whether the passage of time alone changes no outcome up to this instant."""
        if self.is_general:
            return False
        return self._gates is None or all(gate.holds_until(now) for gate in self._gates)

    def move_to(self, now: float) -> None:
        """Advance the clock; further jobs have arrived at the end of the queue."""
        self.now, self.is_continued = now, True
        self.timeline.move_to(now)

    @property
    def vetoes(self) -> PlacementVetoes:
        """Vetoes against placements that have room."""
        if self._vetoes is None:
            held = (one.held for _, one in self.planner.runs_before(self))
            self._vetoes = PlacementVetoes(self.layout, self.settings, held, self.quotas, self.extensions)
        return self._vetoes

    @property
    def ceilings(self) -> LoadLimits:
        if self.planner.inert_load_limits is not None:
            return self.planner.inert_load_limits
        if self._ceilings is None:
            allocations = (piece for _, one in self.planner.runs_before(self) for piece in one.allocations)
            self._ceilings = LoadLimits(self.layout, self.settings, allocations)
        return self._ceilings

    @property
    def license_users(self) -> list[tuple[int, str, tuple[tuple[str, int], ...]]]:
        """Holders of licenses: job, user, licenses."""
        return [
            (job_id, one.terms.user, piece.licenses)
            for job_id, one in self.planner.runs.items()
            for piece in one.running.booking.pieces()
            if piece.licenses
        ]

    def _idle_draft(self) -> ClusterState:
        if self._idle is None:
            self._idle = ClusterState(self.layout)
        return self._idle

    @property
    def has_claims(self) -> bool:
        """Whether anything is booked for this cycle only."""
        return bool(self.claims or self.undo or (self._room is not None and self._room.is_open))

    def close(self) -> None:
        """Undo everything booked for this cycle only."""
        for step in reversed(self.undo):
            step()
        for terms, amount in self.claims:
            self.quotas.remove(terms, amount)
        self.undo, self.claims = (), ()
        if self._room is not None:
            self._room.close()

    # --- what becomes of a job ---------------------------------------------------------------------

    def wait_patiently(self, entry: Entry) -> None:
        """Record a blocked job without a reservation."""
        first, rank = self.first_patient, self.queue.rank
        if first is None or (
            self.is_continued and rank(entry[2], entry[0], entry[1]) < rank(first[2], first[0], first[1])
        ):
            self.first_patient = entry

    def _reserved(
        self, job_class: JobClass, number: int, reservation: TimelineReservation, reason: Reason | None = None
    ) -> None:
        self.reservations.append(reservation)
        if job_class.order == "response_ratio":
            self.reserved_band = min(self.reserved_band, job_class.entity.band)
        entry, queue = job_class.jobs[number], self.queue
        is_ranked = not (number or queue.ranking.is_dynamic)
        self.last_reserved = entry[2].rank if is_ranked else queue.rank(entry[2], entry[0], entry[1])
        if job_class not in self.blocked:
            self.blocked[job_class] = Blocked(entry, reason, reservation, variant=job_class)

    def _start(
        self, job_class: JobClass, number: int, booking: AllocationUnits, *, is_filler: bool = False
    ) -> RunningJob:
        shape = job_class.shape
        if booking is shape.only:
            placement = shape.placement
            if placement is None:
                placement = shape.placement = self.layout.placement(booking)
        else:
            placement = self.layout.placement(booking)
        entry = self.queue.take(job_class, number)
        start = Start(entry[1], placement, is_filler, job_class.variant)
        self.starts.append(start)
        running = self.planner.book(entry, booking, start, self.now, job_class)
        if self.timeline is not self.planner.timeline:
            self.timeline.start(running)
        elif self.timeline.reservations:
            passes = self.timeline.pass_by(running)
            if not self.placements.is_flat and (passes or self.has_one_place):
                # Later jobs get other placements from now on, and may be able to pass there.
                self.has_passed = True
        return running

    # --- the rules --------------------------------------------------------------------------------

    def schedule_job(self, job_class: JobClass, number: int) -> int:
        """Start this job, preempt or reserve for it, or let it wait."""
        if job_class.variants:
            return schedule_variants(self, job_class, number)
        denial = self.denial(job_class)
        if denial is not None:
            return self._held(job_class, number, denial)
        entry, guard = job_class.jobs[number], self.veto(job_class)
        found = self.place_now(job_class, entry, guard)
        if isinstance(found, AllocationUnits):
            self.start(job_class, number, found)
            return STARTED
        if isinstance(found, Reason):
            return self.block(job_class, entry, found)
        return self._make_room(job_class, number, guard)

    def schedule_unlimited(self, job_class: JobClass, number: int) -> int:
        """Schedule a job that no limit, window or QOS affects."""
        if self.reservations and not self.has_backfill:
            return BLOCKED
        shape = job_class.shape
        # Without reservations an end matters to none.
        end_at = self.relied_end_of(job_class) if self.reservations else self.now
        booking = self.placements.place(shape, end_at)
        if booking is not None:
            self._start(job_class, number, booking)
            return STARTED
        if len(self.reservations) >= self.depth:
            # With fixed ranks, a start has the jobs behind it examined again instead.
            can_move = self.queue.ranking.is_dynamic and self.has_one_place and not self.placements.is_flat
            return NEXT_IN_CLASS if can_move and self.reservations and fits(self.draft, shape.need) else BLOCKED
        entry = job_class.jobs[number]
        if not self.queue.ranking.has_patience(job_class, entry[0]):
            self.wait_patiently(entry)
            return BLOCKED
        if not self.has_backfill:
            # No job passes it, so its reservation is computed only on demand.
            if shape.can_fit is None:
                shape.can_fit = fits(self._idle_draft(), shape.need)
            if not shape.can_fit:
                return BLOCKED
        reservation = reserve_room(self, entry, shape.need, job_class.planned_s, None, shape.only)
        if reservation is None or self._is_dear(job_class, entry, reservation):
            return BLOCKED
        if self.placements.is_flat:
            shape.only = reservation.booking
        self._reserved(job_class, number, reservation)
        if len(self.reservations) < self.depth:
            return NEXT_IN_CLASS
        self.closed.add(job_class)
        return BLOCKED

    def denial(self, job_class: JobClass, *, is_filler: bool = False) -> Denial | None:
        """The first limit that blocks it."""
        for gate in self.gates if self._gates is None else self._gates:
            if gate.holds_fillers or not is_filler:
                found = gate.why_not(job_class)
                if found is not None:
                    return found
        return None

    def _held(self, job_class: JobClass, number: int, denial: Denial) -> int:
        """Block a job by a limit, unless others make room below it or the job may start as a filler."""
        entry = job_class.jobs[number]
        if denial.may_fill:
            self.blocked.setdefault(job_class, Blocked(entry, denial.reason))
            self.closed.add(job_class)
            self.fillers.append((job_class, number))
            return BLOCKED
        if denial.limit is not None:
            outcome = self.reclaim_below_limit(job_class, number, denial)
            if outcome is not None:
                return outcome
            self.limit_reservations.wait(entry[1], denial.limit, job_class.wanted)
        return self.block(job_class, entry, denial.reason)

    def place_now(
        self, job_class: JobClass, entry: Entry, guard: PlacementVeto | None
    ) -> AllocationUnits | Reason | None:
        """Where a job that no limit blocks starts now, or what keeps it from any place; None if it lacks room."""
        key = job_class.key
        if key.terms.reservation is not None:
            return self._place_inside(job_class, key.terms.reservation, guard)
        if self.reservations and self.is_strict:
            return None
        booking = self.place(job_class, guard)
        if booking is None or not self.extensions.permits:
            return booking
        placement = self.layout.placement(booking)
        text = self.extensions.why_not_now(key, PendingJob(entry[1], entry[0]), placement)
        return booking if text is None else Reason(ReasonCode.PLUGIN, text)

    def schedule_filler(self, job_class: JobClass, number: int) -> int:
        """Start this job, whose budget is spent, if that takes nothing from others: it never preempts or reserves.

        Every limit counts for it. It is blocked already, with its budget as the reason.
        """
        if not job_class.variants:
            return self._start_as_filler(job_class, number)
        has_started = any(self._start_as_filler(variant, number) == STARTED for variant in job_class.variants)
        return STARTED if has_started else BLOCKED

    def _start_as_filler(self, job_class: JobClass, number: int) -> int:
        if self.denial(job_class, is_filler=True) is not None:
            return BLOCKED
        entry = job_class.jobs[number]
        found = self.place_now(job_class, entry, self.veto(job_class))
        if not isinstance(found, AllocationUnits):
            return BLOCKED
        origin = entry[2]
        self.start(job_class, number, found, is_filler=True)
        if not job_class.jobs:
            for one in origin.variants or (origin,):
                del self.blocked[one]
        return STARTED

    def veto(self, job_class: JobClass) -> PlacementVeto | None:
        return self.vetoes.of(job_class.key, job_class.wanted) if self.planner.has_vetoes else None

    def start(self, job_class: JobClass, number: int, booking: AllocationUnits, *, is_filler: bool = False) -> None:
        """Start this job here, and update all counts."""
        key = job_class.key
        if self.has_windows:
            self._start_beside_windows(job_class, number, booking, is_filler=is_filler)
        else:
            self._start(job_class, number, booking, is_filler=is_filler)
        if self._ceilings is not None:
            self._ceilings.add(booking)
        amount = footprint(self.layout, booking)
        if self.planner.has_vetoes:
            # Must precede `quotas.add`: guards see quotas without this job.
            self.quotas.remove(key.terms, amount, is_filler=is_filler)
            self.vetoes.started(key, booking, amount)
            self.quotas.add(key.terms, amount, is_filler=is_filler)
        end_at = self.end_of(job_class)
        for gate in self.gates:
            gate.started(job_class, amount, end_at, is_filler=is_filler)

    def _start_beside_windows(
        self, job_class: JobClass, number: int, booking: AllocationUnits, *, is_filler: bool
    ) -> None:
        key = job_class.key
        entry = self.queue.take(job_class, number)
        start = Start(entry[1], self.layout.placement(booking), is_filler, job_class.variant)
        self.starts.append(start)
        running = self.planner.book(entry, booking, start, self.now, job_class)
        taken = booking if key.terms.reservation is None else licenses_of(booking)
        if key.terms.reservation is None or taken.licenses:
            self.draft.take(taken)
            self.timeline.start(RunningJob(running.job_id, self.now, self.end_of(job_class), taken))
        self.inside.start(key.terms.reservation, booking)

    def block(self, job_class: JobClass, entry: Entry, reason: Reason | None = None) -> int:
        """Block this job, and its class unless its best placement may change with the bookings of others."""
        if job_class not in self.blocked:
            self.blocked[job_class] = Blocked(entry, reason)
        if self.has_one_place and self.timeline.reservations and fits(self.draft, job_class.shape.need):
            return NEXT_IN_CLASS
        self.closed.add(job_class)
        return BLOCKED

    def reserve(
        self, job_class: JobClass, number: int, guard: PlacementVeto | None, reason: Reason | None = None
    ) -> int:
        """Reserve room for this job; its class continues only while more reservations are allowed."""
        entry, need = job_class.jobs[number], job_class.shape.need
        duration_s = self.reserved_s(job_class)
        leaving = 0 if self._room is None else len(self._room.preemption.chosen)
        mark = "reserve", need.signature, guard, duration_s, leaving
        reservation = None
        if not self.is_known_infeasible(mark):
            reservation = reserve_room(self, entry, need, duration_s, guard)
        if reservation is not None and not leaving and self._is_dear(job_class, entry, reservation):
            return self.block(job_class, entry, reason)
        if reservation is not None:
            self._reserved(job_class, number, reservation, reason)
            for limit in self.quotas.limits_over(job_class.key.terms):
                self.limit_reservations.wait(entry[1], limit, job_class.wanted, reservation.start[0])
        else:
            self.remember_infeasible(mark)
            self.blocked.setdefault(job_class, Blocked(entry, reason, variant=job_class))
        if reservation is not None and len(self.reservations) < self.depth:
            return NEXT_IN_CLASS
        self.closed.add(entry[2])
        return BLOCKED

    def _is_dear(self, job_class: JobClass, entry: Entry, reservation: TimelineReservation) -> bool:
        """Whether to drop this reservation for now: too much would be idle until its start, though others could use it.

        Runs that outlive their predictions make it dearer, so that one which stood before may be dropped.
        """
        if not job_class.patience_s or reservation.start[0] == inf:
            return False
        ranking = self.queue.ranking
        as_of = ranking.patient_as_of
        if as_of >= ranking.drains_from(job_class, entry[0], reservation.idle_s(as_of)):
            return False
        if is_settled(self, self.planner.fences.get(entry[1])):
            return False
        if not self.queue.asks_for_all(job_class):
            self.has_spare = True
            return False
        self.timeline.drop(reservation)
        self.wait_patiently(entry)
        self.has_dear = True
        return True

    def may_preempt_at(self, job: Blocked, need: RequestUnits) -> tuple[float, tuple[int, ...]] | None:
        """When protected runs could be preempted for a blocked job, and which; None if that does not help."""
        if self.planner.can_never_preempt:
            return None
        found = self.preemption.possible_at(Claim(job.key, need, self.draft, self.veto(job.job_class)))
        return None if found is None else (found[0], tuple(sorted(victim.job_id for victim in found[1])))

    def end_of(self, job_class: JobClass) -> float:
        """Planned end of a job of this class that starts now."""
        if self.is_held_to_limit(job_class.key):
            return self.now + job_class.limit_s
        return self.now + job_class.planned_s

    def relied_end_of(self, job_class: JobClass) -> float:
        """End of a job starting now that reservations rely on."""
        relied_s = self._relied_s(job_class) if self.has_windows else job_class.relied_s
        bands = job_class.entity.band - self.reserved_band
        if bands > 0:
            # The prediction may err at the expense of jobs with a reservation whose users have used less. It doubles
            # for each band between them, up to the time limit, which is enforced.
            relied_s = min(job_class.limit_s, relied_s * 2.0 ** min(_DOUBTED_BANDS, bands))
        return self.now + relied_s

    def _relied_s(self, job_class: JobClass) -> float:
        return job_class.limit_s if self.is_held_to_limit(job_class.key) else job_class.relied_s

    def reserved_s(self, job_class: JobClass) -> float:
        # Before a window, as long as others rely on: a shorter plan would find room where it must not start.
        return self._relied_s(job_class) if self.has_windows and self.inside.later else job_class.planned_s

    def is_held_to_limit(self, key: ClassKey) -> bool:
        """Whether its limit counts instead of its prediction: calendar windows must not meet a job that overruns."""
        return key.plan_s is not None and self.has_windows and bool(self.inside.later)

    def is_known_infeasible(self, mark: object) -> bool:
        """Whether a job with the same mark was rejected; free resources only shrink in a cycle."""
        return mark in self._infeasible

    def remember_infeasible(self, mark: object) -> None:
        """Reject later jobs with this mark without a search."""
        if not isinstance(self._infeasible, set):
            self._infeasible = set()
        self._infeasible.add(mark)

    def waits_for_others(self, need: RequestUnits, guard: PlacementVeto | None) -> bool:
        """Whether other jobs, running or with a reservation, block this one.

        Otherwise the cause is measured load, a drain or a fault, for which nothing can be reserved.
        """
        if fits(self.draft, need):
            return bool(self.timeline.reservations) and bool(candidates(self.draft, need, self.ceilings, guard=guard))
        return fits(self._idle_draft(), need)

    def place(self, job_class: JobClass, guard: PlacementVeto | None) -> AllocationUnits | None:
        """Best placement now that delays no reservation."""
        key, need = job_class.key, job_class.shape.need
        end_at = self.relied_end_of(job_class)
        timeline = self.timeline
        concerns = timeline.concerns(end_at)
        mark = need.signature, guard, concerns
        if self.is_known_infeasible(mark) or self.is_known_infeasible((*mark[:2], ())):
            return None
        avoid = self.vetoes.avoid(key, job_class.wanted) if self.planner.has_vetoes else frozenset[int]()
        if self.has_one_place and concerns:
            booking = best_placement(self.draft, need, self.ceilings, guard=guard)
            if booking is None:
                self.remember_infeasible((*mark[:2], ()))
            return booking if booking is not None and timeline.admits(booking, end_at) else None
        if not concerns and not avoid and not self.extensions.scores:
            booking = best_placement(self.draft, need, self.ceilings, guard=guard)
            if booking is None:
                self.remember_infeasible(mark)
            return booking
        if concerns:
            avoid = avoid | timeline.cards_reserved(end_at)
        places = candidates(self.draft, need, self.ceilings, avoid=avoid, guard=guard)
        if not places:
            self.remember_infeasible((*mark[:2], ()))
        places.sort()
        if self.extensions.scores:
            places.sort(key=lambda place: -self.extensions.score(key, self.layout.nodes[place.booking.node]))
        found = timeline.first_admitted(places, end_at)
        if found is None:
            self.remember_infeasible(mark)
        return found

    def _make_room(self, job_class: JobClass, number: int, guard: PlacementVeto | None) -> int:
        """Preempt for it, reserve room for it, or let it wait behind jobs with a reservation."""
        entry, need = job_class.jobs[number], job_class.shape.need
        if self.reservations and self.is_strict:
            return self.block(job_class, entry)
        if not self.waits_for_others(need, guard):
            return self.block(job_class, entry, self.turned_down(need, guard))
        outcome = self.take_from_others(job_class, number, guard)
        if outcome is not None:
            return outcome
        if self.may_reserve(job_class, entry):
            return self.reserve(job_class, number, guard)
        return self.block(job_class, entry)

    def take_from_others(self, job_class: JobClass, number: int, guard: PlacementVeto | None) -> int | None:
        """Reserve for this job what others are leaving, or are preempted for; None if that does not help."""
        if not (self.planner.odd_runs or self._room is not None or self.may_preempt(job_class)):
            return None
        return self.room.take_from_others(job_class, number, guard)

    def may_preempt(self, job_class: JobClass) -> bool:
        if self.settings.preempt.mode == "off":
            return False
        return (
            bool(self.planner.fillers)
            or self.planner.may_preempt(job_class.key)
            or (self.quotas.is_capacity and self.is_within_guarantee(job_class))
        )

    def is_within_guarantee(self, job_class: JobClass) -> bool:
        """Whether its queue has this much of its guarantee left."""
        return self.quotas.is_within_guarantee(job_class.key.terms.queue, job_class.wanted)

    def may_reserve(self, job_class: JobClass, entry: Entry) -> bool:
        """Whether this blocked job may have a reservation; one that must still be patient is noted."""
        if len(self.reservations) >= self.depth:
            return False
        if self.queue.ranking.has_patience(job_class, entry[0]):
            return True
        self.wait_patiently(entry)
        return False

    def turned_down(self, need: RequestUnits, guard: PlacementVeto | None) -> Reason | None:
        """Reason if the guard alone objects to the best placement."""
        booking = None if guard is None else best_placement(self.draft, need, self.ceilings)
        if guard is None or booking is None:
            return None
        return Reason(self.vetoes.reason(), guard.why_not(booking) or "all free places are reserved for others")

    def reclaim_below_limit(self, job_class: JobClass, number: int, denial: Denial) -> int | None:
        """Make room for a job whose siblings have borrowed up to the maximum of a common ancestor, or where fillers
        have used up a limit; None if that does not help.

        Enough cards may be free: the maximum is what keeps the queue from its guarantee.
        """
        is_within = denial.code is ReasonCode.QUEUE_MAX and self.is_within_guarantee(job_class)
        if not is_within and not self.planner.fillers:
            return None
        return self.room.reclaim_below_limit(job_class, number, denial.reason, only_fillers=not is_within)

    def _place_inside(self, job_class: JobClass, name: str, guard: PlacementVeto | None) -> AllocationUnits | Reason:
        """Best placement now inside a calendar reservation, or why there is none."""
        need = job_class.shape.need
        end_at = self.now + job_class.limit_s
        text = self.inside.why_not(name, job_class.key, end_at, self.now)
        if text is not None:
            return Reason(ReasonCode.RESERVATION, text, {"reservation": mentioned_name(RESERVATION, name)})
        inside = self.inside.draft(name, self.now, end_at)
        lacking = license_wait(self, inside, need)
        if lacking is not None:
            return lacking
        booking = best_placement(inside, need, self.ceilings, guard=guard)
        if booking is None or not self.timeline.leaves_licenses(booking.licenses, self.relied_end_of(job_class)):
            text = f"waits for others inside {mention_reservation(name)}"
            return Reason(ReasonCode.RESERVATION, text, {"reservation": mentioned_name(RESERVATION, name)})
        return booking
