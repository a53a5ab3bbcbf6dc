"""One cycle: what starts now, who makes room, what is kept free, and why everything else waits.

Waiting jobs are taken in order. For each, the first of these that is possible, the least disruptive first:

    limit     a limit of its queue or QOS keeps it waiting; it holds up those alone who would use up what it waits for
    start     it fits now, and nothing that is kept for an earlier job is delayed
    preempt   others hold what is its own: they make room, and it is kept for it
    reserve   room is kept for it at the earliest instant, for the first so many
    wait      behind those

Jobs that the policy has suspended go on as soon as they fit, before any job that could not have suspended them.

The work is done per class of equal jobs: a start advances its class, a job that cannot start blocks its class
for the rest of the cycle. So the cost is that of the starts and the classes, whatever the number of jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from gpusched.model.resources import Resources
from gpusched.model.settings import LEARNING_STRATEGIES, SPARING_STRATEGIES, Settings
from gpusched.model.snapshot import ClassKey, Plan, Reason, Reservation, Resume, Snapshot, Start
from gpusched.model.states import ReasonCode
from gpusched.model.units import plural
from gpusched.model.value import replace
from gpusched.policy.calendar.inside import Inside, licenses_of
from gpusched.policy.ceilings import Ceilings
from gpusched.policy.draft import Booking, Counts, Draft, Layout
from gpusched.policy.explain import Explainer, license_wait
from gpusched.policy.extension import NO_EXTENSIONS, Extensions
from gpusched.policy.fragmentation import typical_of
from gpusched.policy.guards import Guards
from gpusched.policy.ordering import Head, Line, Ranking
from gpusched.policy.placement import Guard, Need, find, fits, options
from gpusched.policy.preemption import Held, Preemption, Victim, held_by_job
from gpusched.policy.profile import Ending, Kept, Profile, end_of, endings
from gpusched.policy.scarcity import wanted_of
from gpusched.policy.sharing.limits import Denial
from gpusched.policy.sharing.quota import Quotas
from gpusched.policy.sharing.turns import Runner, Turns
from gpusched.policy.sharing.usage import footprint
from gpusched.policy.words import name_some


@dataclass(frozen=True, slots=True)
class Blocked:
    """The first job of a class that stays, and why where that is known already."""

    head: Head
    reason: Reason | None = None
    kept: Kept | None = None


class Cycle:
    """The state that the steps share."""

    def __init__(self, snapshot: Snapshot, settings: Settings, extensions: Extensions = NO_EXTENSIONS) -> None:
        self.now = snapshot.now
        self.settings = settings
        self.name_of = snapshot.name_of
        self.extensions = extensions
        self.layout = Layout(snapshot.nodes, settings)
        if self.layout.strategy in LEARNING_STRATEGIES:
            self.layout.typical = typical_of(snapshot)
        if self.layout.strategy in SPARING_STRATEGIES:
            self.layout.wanted = wanted_of(snapshot)
        self.draft = Draft(self.layout)
        self.inside = Inside(snapshot, self.layout)
        self.windows = snapshot.windows
        outside = [held for held in snapshot.allocations if not self.inside.holds(held)]
        running = [*endings(self.layout, outside, self.now), *self.inside.now]
        for ending in running:
            self.draft.book(ending.booking)
        self.profile = Profile(self.draft, running, self.now)
        for window in self.inside.later:
            self.profile.keep_window(*window)
        held = held_by_job(self.layout, snapshot.allocations)
        self.quotas = Quotas(settings, self.layout)
        for one in held.values():
            self.quotas.add(one.first.queue, one.first.user, one.first.qos, one.amount)
            if one.first.is_stopping:
                self.quotas.leave(one.first.queue, one.amount)
        self.ranking = Ranking(snapshot, settings, self.layout, self.quotas, extensions)
        self.ceilings = Ceilings(self.layout, settings, snapshot.allocations)
        others = {job_id: one for job_id, one in held.items() if not self.inside.holds(one.first)}
        self.preemption = Preemption(others, self.quotas, settings, self.ranking.capacity, self.now, snapshot.name_of)
        self.guards = Guards(self.layout, settings, held.values(), self.quotas, extensions)
        self.line = Line(snapshot.pending, self.ranking)
        self.turns = Turns(self.quotas, self.now, lambda: map(self._runner, held.values()))
        self.starts: list[Start] = []
        self.resumes: list[Resume] = []
        self.blocked: dict[ClassKey, Blocked] = {}
        self.reservations: list[Kept] = []
        """Those made for jobs, in the order in which they were made."""
        self.license_users: list[tuple[int, str, Counts]] = [
            (job_id, one.first.user, booking.licenses)
            for job_id, one in held.items()
            for booking in one.bookings
            if booking.licenses
        ]
        """Who holds which licenses: job, user, licenses."""
        self._tasks = Counter(one.first.array_id for one in held.values() if one.first.array_id is not None)
        """How many tasks run of each array."""
        self._suspended = [one for one in held.values() if one.first.is_suspended]
        self._idle = Draft(self.layout)
        self.has_one_place = not settings.priority.backfill_elsewhere
        """A job goes where it is put best, whatever is kept, or it waits."""
        self._hopeless: set[object] = set()

    # --- what becomes of the first job in line --------------------------------------------------

    def start(self, head: Head, booking: Booking) -> None:
        """Start the first job in line here."""
        key = head.key
        taken = booking if key.reservation is None else licenses_of(booking)
        if key.reservation is None or taken.licenses:
            self.draft.book(taken)
            self.profile.start(Ending(head.job.id, self.now, self.end_of(key), taken))
        self.inside.start(key.reservation, booking)
        self.ceilings.add(booking)
        amount = footprint(self.layout, booking)
        self.guards.started(key, booking, amount)
        self.quotas.add(key.queue, key.user, key.qos, amount)
        self.turns.started(key, amount, self.end_of(key))
        self.ranking.started(key, booking)
        if key.throttle is not None:
            self._tasks[key.throttle[0]] += 1
        if booking.licenses:
            self.license_users.append((head.job.id, key.user, booking.licenses))
        self.starts.append(Start(head.job.id, self.layout.placement(booking)))
        self.line.advance()

    def _runner(self, one: Held) -> Runner:
        first = one.first
        return Runner(first.queue, first.user, first.qos, one.amount, first.start_at, end_of(first, self.now))

    def whose_turn(self, head: Head) -> Reason | None:
        """Who is next below a limit that the first job in line would use up; None when it may go on.

        What its queue is guaranteed a job need not leave to anybody.
        """
        key = head.key
        turn = self.turns.in_the_way(key, head.wanted, self.relied_end_of(key))
        if turn is None or (self.quotas.is_capacity and self.quotas.is_within_guarantee(key.queue, head.wanted)):
            return None
        name, limit = self.name_of(turn.job_id), turn.limit
        what = f"{'QOS' if limit.where == 'qos' else 'queue'} {limit.name}"
        who = "" if limit.user is None else f"user {limit.user} in "
        text = f"would use up what {who}{what} may still hold, and job {name} goes first"
        return Reason(ReasonCode.PRIORITY, text, {"behind": name})

    def why_throttled(self, key: ClassKey) -> Reason | None:
        """Why no more tasks of the same array may run; None when they may."""
        if key.throttle is None or self._tasks[key.throttle[0]] < key.throttle[1]:
            return None
        array, limit = key.throttle
        text = f"array {array} may run {plural(limit, 'task')} at once"
        facts = {"array": array, "limit": limit, "held": self._tasks[array]}
        return Reason(ReasonCode.JOB_ARRAY_TASK_LIMIT, text, facts)

    def block(self, head: Head, reason: Reason | None = None) -> None:
        """The first job in line stays: so does its class, but where its place may change with what others take."""
        self.blocked.setdefault(head.key, Blocked(head, reason))
        if self.has_one_place and self.profile.kept and fits(self.draft, Need.of(head.key.request, head.key.uid)):
            self.line.skip()
        else:
            self.line.drop()

    def keep(self, head: Head, need: Need, guard: Guard | None, reason: Reason | None = None) -> None:
        """Keep room for the first job in line; its class goes on only while there are reservations left to make."""
        duration_s = self._reserved_s(head.key)
        mark = "reserve", need.signature, guard, duration_s, len(self.preemption.chosen)
        kept = None if self.is_hopeless(mark) else self.profile.reserve(head.job.id, need, duration_s, guard)
        if kept is None:
            self.give_up(mark)
        else:
            self.reservations.append(kept)
            for limit in self.quotas.limits_over(head.key):
                self.turns.wait(head.job.id, limit, head.wanted, kept.start[0])
        self.blocked.setdefault(head.key, Blocked(head, reason, kept))
        # Where nothing can be kept for one, nothing can for those just like it.
        if kept is not None and self.has_reservations_left:
            self.line.skip()
        else:
            self.line.drop()

    def claim(self, head: Head, need: Need, guard: Guard | None, reason: Reason | None = None) -> None:
        """Keep what others are leaving for the first job in line, also when all reservations are made."""
        before = len(self.reservations)
        # As good as held: the next of its queue must not take back more than is left of the guarantee.
        self.quotas.add(head.key.queue, head.key.user, head.key.qos, head.wanted)
        self.keep(head, need, guard, _preempting(self.preemption, head, self.name_of) or reason)
        for kept in self.reservations[before:]:
            self.preemption.claimed.append(kept.booking)

    def take_over(self, head: Head, need: Need, guard: Guard | None, reason: Reason | None = None) -> bool:
        """Keep for the first job in line what others are leaving already; whether that is enough."""
        preemption = self.preemption
        if not preemption.frees_soon(head.key, self.draft, need, guard) or not self._fits_soon((), head, need, guard):
            return False
        self.claim(head, need, guard, reason)
        return True

    def preempt(self, head: Head, need: Need, guard: Guard | None, reason: Reason | None = None) -> bool:
        """Have others make room for the first job in line, and keep it for that job; whether that helps."""
        preemption = self.preemption
        helps = partial(self._fits_soon, head=head, need=need, guard=guard)
        if not preemption.choose(head.job.id, head.key, need, self.draft, guard, helps):
            return False
        # What those leave can be kept for others from then on.
        self.profile.end_early(*preemption.departures())
        self.claim(head, need, guard, reason)
        return True

    def _fits_soon(self, victims: Sequence[Victim], head: Head, need: Need, guard: Guard | None) -> bool:
        """Whether there is room beside what is kept once all that are being stopped, and these too, have ended.

        Else they would make room for others, who may have no right to it.
        """
        return self.profile.fits_after(*self.preemption.departures(victims), need, self._reserved_s(head.key), guard)

    def may_preempt_at(self, head: Head, need: Need) -> tuple[float, tuple[int, ...]] | None:
        """When protected runs could be preempted for a blocked job, and which; None when that does not help."""
        found = self.preemption.possible_at(head.key, need, self.draft, self.guards.of(head.key, head.wanted))
        return None if found is None else (found[0], tuple(sorted(victim.job_id for victim in found[1])))

    @property
    def has_reservations_left(self) -> bool:
        """Whether another blocked job gets a reservation."""
        return len(self.reservations) < self.settings.priority.backfill_depth

    def end_of(self, key: ClassKey) -> float:
        """When a job of this class that starts now is planned to have ended."""
        return self._after(key.time_limit_s if self._is_held_to_limit(key) else key.planned_s)

    def relied_end_of(self, key: ClassKey) -> float:
        """When it is relied upon to have ended, by those for whom something is kept."""
        return self._after(self._relied_s(key))

    def _relied_s(self, key: ClassKey) -> int | None:
        by = self.settings.priority.backfill_by
        return key.time_limit_s if self._is_held_to_limit(key) else key.relied_s(by)

    def _reserved_s(self, key: ClassKey) -> float:
        # Before a window as long as it is relied upon: a shorter plan would find room where it may not start.
        lasts_s = self._relied_s(key) if self.inside.later else key.planned_s
        return inf if lasts_s is None else float(lasts_s)

    def _is_held_to_limit(self, key: ClassKey) -> bool:
        """What the calendar keeps is not to be met by one that runs on: before that its limit counts."""
        return key.plan_s is not None and bool(self.inside.later)

    def _after(self, lasts_s: int | None) -> float:
        return inf if lasts_s is None else self.now + lasts_s

    def is_hopeless(self, mark: object) -> bool:
        """Whether a job with the same mark was turned away; what is free only shrinks in a cycle."""
        return mark in self._hopeless

    def give_up(self, mark: object) -> None:
        """Turn later jobs with this mark away unseen."""
        self._hopeless.add(mark)

    def waits_for_others(self, need: Need, guard: Guard | None) -> bool:
        """Whether it is others, running or with a reservation, that keep this job from starting.

        Else it is the measured load, a drain or a fault, for which nothing can be kept.
        """
        if fits(self.draft, need):
            return bool(self.profile.kept) and bool(options(self.draft, need, self.ceilings, guard=guard))
        return fits(self._idle, need)

    # --- suspended jobs -------------------------------------------------------------------------

    def resume_before(self, head: Head | None) -> None:
        """Let suspended jobs go on, but for those that the next job in line could suspend again."""
        for one in list(self._suspended):
            if head is not None and self.preemption.may_preempt(head.key, one.first):
                continue
            booking = _taken_up_again(one)
            if not self.draft.has_room(booking):
                continue
            cores = Resources(cpus=one.first.suspended_cpus)
            if self._is_behind(one, cores, head) or self._is_limited(one, cores):
                continue
            if self.profile.admits(booking, inf):
                self.draft.book(booking)
                self.quotas.add(one.first.queue, one.first.user, one.first.qos, cores, jobs=0)
                self.profile.start(Ending(one.first.job_id, self.now, inf, booking))
                self.resumes.append(Resume(one.first.job_id))
                self._suspended.remove(one)

    def _is_behind(self, one: Held, cores: Resources, head: Head | None) -> bool:
        """Whether the queue of the next job in line goes before that of a suspended job."""
        if head is None or not self.quotas.is_capacity:
            return False
        theirs = self.quotas.rank(head.key.queue, head.wanted)
        return theirs < self.quotas.rank(one.first.queue, one.amount + cores)

    def _is_limited(self, one: Held, cores: Resources) -> bool:
        """Whether a limit of its queue or QOS keeps a suspended job from going on."""
        first = one.first
        self.quotas.remove(first.queue, first.user, first.qos, one.amount)
        denial = self.quotas.denial(first.queue, first.user, first.qos, one.amount + cores)
        self.quotas.add(first.queue, first.user, first.qos, one.amount)
        return denial is not None


def _taken_up_again(one: Held) -> Booking:
    """The cores that a suspended job has given up; all else it holds still."""
    booking = one.bookings[0]
    millicpus = round(one.first.suspended_cpus * 1000)
    return replace(
        booking, millicpus=millicpus, mem_mib=0, gpu_mem_mib=0, parts=(), resources=(), licenses=(), is_exclusive=False
    )


# --- the walk along the line --------------------------------------------------------------------


def take_in_order(cycle: Cycle) -> None:
    """Deal with every head in order of rank; those that may only fill gaps, the shortest first where that is asked."""
    is_by_length = cycle.settings.priority.backfill_order == "shortest"
    while (head := cycle.line.first()) is not None:
        if is_by_length and cycle.reservations and not cycle.has_reservations_left:
            cycle.line.shortest_first()
            is_by_length = False
            continue
        cycle.resume_before(head)
        take(cycle, head)
    cycle.resume_before(None)


def take(cycle: Cycle, head: Head) -> None:
    """Start the first job in line, make or keep room for it, or let it wait."""
    key = head.key
    throttled = cycle.why_throttled(key)
    if throttled is not None:
        cycle.block(head, throttled)
        return
    denial = cycle.quotas.why_not(key, head.wanted)
    need = Need.of(key.request, key.uid)
    if denial is not None:
        if not _takes_back_below_maximum(cycle, head, need, denial):
            if denial.limit is not None:
                cycle.turns.wait(head.job.id, denial.limit, head.wanted)
            cycle.block(head, Reason(denial.code, denial.text, denial.facts))
        return
    turn = cycle.whose_turn(head)
    if turn is not None:
        cycle.block(head, turn)
        return
    if key.reservation is not None:
        _take_inside(cycle, head, need, key.reservation)
        return
    if cycle.reservations and not cycle.settings.priority.backfill:
        cycle.block(head)
        return
    guard = cycle.guards.of(key, head.wanted)
    booking = _place(cycle, head, need, guard)
    if booking is not None:
        text = None
        if cycle.extensions.permits:
            text = cycle.extensions.why_not_now(key, head.job, cycle.layout.placement(booking))
        if text is None:
            cycle.start(head, booking)
        else:
            cycle.block(head, Reason(ReasonCode.PLUGIN, text))
        return
    _make_room(cycle, head, need, guard)


def _place(cycle: Cycle, head: Head, need: Need, guard: Guard | None) -> Booking | None:
    """The best place now that delays nothing that is kept."""
    key = head.key
    end_at = cycle.relied_end_of(key)
    concerns = cycle.profile.concerns(end_at)
    mark = need.signature, guard, concerns
    if cycle.is_hopeless(mark) or cycle.is_hopeless((*mark[:2], ())):
        return None
    avoid = cycle.guards.avoid(key, head.wanted)
    if cycle.has_one_place and concerns:
        booking = find(cycle.draft, need, cycle.ceilings, guard=guard)
        if booking is None:
            cycle.give_up((*mark[:2], ()))
        return booking if booking is not None and cycle.profile.admits(booking, end_at) else None
    if not concerns and not avoid and not cycle.extensions.scores:
        booking = find(cycle.draft, need, cycle.ceilings, guard=guard)
        if booking is None:
            cycle.give_up(mark)
        return booking
    if concerns:
        avoid = avoid | cycle.profile.cards_kept(end_at)
    places = options(cycle.draft, need, cycle.ceilings, avoid=avoid, guard=guard)
    if not places:
        cycle.give_up((*mark[:2], ()))
    places.sort()
    if cycle.extensions.scores:
        places.sort(key=lambda place: -cycle.extensions.score(key, cycle.layout.nodes[place.booking.node]))
    for place in places:
        if not concerns or cycle.profile.admits(place.booking, end_at):
            return place.booking
    cycle.give_up(mark)
    return None


def _make_room(cycle: Cycle, head: Head, need: Need, guard: Guard | None) -> None:
    """Preempt for it, keep room for it, or let it wait behind those for whom room is kept."""
    key, preemption = head.key, cycle.preemption
    if not cycle.waits_for_others(need, guard):
        cycle.block(head, _turned_down(cycle, need, guard))
        return
    leaving = "leaving", need.signature, guard, len(preemption.claimed)
    if not cycle.is_hopeless(leaving):
        if cycle.take_over(head, need, guard):
            return
        cycle.give_up(leaving)
    if _may_preempt_at_all(cycle, head, need, guard):
        if cycle.preempt(head, need, guard):
            return
        cycle.give_up(_preempt_mark(key, need, guard))
    if cycle.has_reservations_left:
        cycle.keep(head, need, guard)
    else:
        cycle.block(head)


def _turned_down(cycle: Cycle, need: Need, guard: Guard | None) -> Reason | None:
    """The word of the guard when it alone is against the best place."""
    booking = None if guard is None else find(cycle.draft, need, cycle.ceilings)
    if guard is None or booking is None:
        return None
    return Reason(cycle.guards.reason(), guard.why_not(booking) or "every place with room is kept for others")


def _takes_back_below_maximum(cycle: Cycle, head: Head, need: Need, denial: Denial) -> bool:
    """Make room for a job whose siblings have borrowed up to the maximum of a queue above them all.

    There may be free cards enough: it is the maximum that stands between the queue and its guarantee.
    """
    key, amount = head.key, head.wanted
    if denial.code is not ReasonCode.QUEUE_MAX or not cycle.quotas.is_within_guarantee(key.queue, amount):
        return False
    guard = cycle.guards.of(key, amount)
    reason = Reason(denial.code, denial.text, denial.facts)
    if cycle.take_over(head, need, guard, reason):
        return True
    if not _may_preempt_at_all(cycle, head, need, guard):
        return False
    return cycle.preempt(head, need, guard, reason)


def _preempt_mark(key: ClassKey, need: Need, guard: Guard | None) -> object:
    return "preempt", need.signature, key.queue, key.qos, key.inherited, guard


def _may_preempt_at_all(cycle: Cycle, head: Head, need: Need, guard: Guard | None) -> bool:
    key = head.key
    if cycle.preemption.is_off or cycle.is_hopeless(_preempt_mark(key, need, guard)):
        return False
    names = (key.qos, key.inherited.qos) if key.inherited else (key.qos,)
    by_qos = any((qos := cycle.settings.qos.get(name)) is not None and qos.preempts for name in names)
    return by_qos or (cycle.quotas.is_capacity and cycle.quotas.is_within_guarantee(key.queue, head.wanted))


def _preempting(preemption: Preemption, head: Head, name_of: Callable[[int], str]) -> Reason | None:
    """Why it still waits: others are being stopped for it."""
    mine = sorted(one.job_id for one in preemption.chosen.values() if one.for_job == head.job.id)
    if not mine:
        return None
    names = [name_of(job_id) for job_id in mine]
    text = f"{name_some('job', names)} {'make' if len(mine) > 1 else 'makes'} room for it"
    return Reason(ReasonCode.PREEMPTING, text, {"preempted": names})


def _take_inside(cycle: Cycle, head: Head, need: Need, name: str) -> None:
    """A job that asked for a reservation of the calendar runs inside it or not at all."""
    limit_s = head.key.time_limit_s
    end_at = inf if limit_s is None else cycle.now + limit_s
    text = cycle.inside.why_not(name, head.key, end_at, cycle.now)
    if text is not None:
        cycle.block(head, Reason(ReasonCode.RESERVATION, text, {"reservation": name}))
        return
    guard = cycle.guards.of(head.key, head.wanted)
    inside = cycle.inside.draft(name, cycle.now, end_at)
    lacking = license_wait(cycle, inside, need)
    if lacking is not None:
        cycle.block(head, lacking)
        return
    booking = find(inside, need, cycle.ceilings, guard=guard)
    if booking is None or not cycle.profile.leaves_licenses(booking.licenses, cycle.relied_end_of(head.key)):
        text = f"waits for others inside reservation {name}"
        cycle.block(head, Reason(ReasonCode.RESERVATION, text, {"reservation": name}))
        return
    cycle.start(head, booking)


# --- the plan -----------------------------------------------------------------------------------


def decide(snapshot: Snapshot, settings: Settings, extensions: Extensions = NO_EXTENSIONS) -> Plan:
    """Plan one cycle. Equal inputs give equal plans; the snapshot is not changed.

    Invariant: the starts of the plan together with the snapshot's allocations book nothing twice.
    """
    cycle = Cycle(snapshot, settings, extensions)
    take_in_order(cycle)
    return Plan(
        starts=tuple(cycle.starts),
        preempts=tuple(cycle.preemption.chosen[job_id] for job_id in sorted(cycle.preemption.chosen)),
        resumes=tuple(cycle.resumes),
        reservations=tuple(
            Reservation(kept.job_id, cycle.layout.placement(kept.booking), kept.start_at) for kept in cycle.reservations
        ),
        reasons=Reasons(cycle),
        first_blocked=cycle.reservations[0].job_id if cycle.reservations else None,
        has_more=cycle.line.cut_short is not None,
    )


class Reasons(Mapping[ClassKey, Reason]):
    """Why each class waits, worked out when somebody asks: most plans are carried out and forgotten.

    All are as of the end of the cycle, so that what they call free is free when the plan is carried out.
    """

    def __init__(self, cycle: Cycle) -> None:
        first = next((one.head for one in cycle.blocked.values() if one.kept is not None), None)
        self._explainer = Explainer(cycle, first)
        self._blocked = cycle.blocked
        self._known = {
            key: Reason(ReasonCode.PRIORITY, "is next in line and about to be looked at") for key in cycle.line.rest()
        }
        self._keys = dict.fromkeys((*cycle.blocked, *self._known))

    def __getitem__(self, key: ClassKey) -> Reason:
        found = self._known.get(key)
        if found is None:
            one = self._blocked[key]
            found = self._known[key] = one.reason or self._explainer.reason(one.head, one.kept)
        return found

    def __iter__(self) -> Iterator[ClassKey]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
