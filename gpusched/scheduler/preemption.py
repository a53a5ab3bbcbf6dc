"""Choice of victims for a job that cannot start: borrowed capacity first, then lower QOS, then least lost work.

A job may preempt others for resources that its queue is guaranteed and they have borrowed, or that its QOS entitles
it to. Exempt are runs within their protected time, runs already being stopped, and runs started in this very
cycle. Among the sets of victims that free enough room it takes the cheapest.

Jobs suspended to make room resume here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from gpusched.model.cluster import Allocation
from gpusched.model.mentions import mention_job
from gpusched.model.resources import NOTHING, Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, Preempt, PreemptMode, ResumeRun
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout, ClusterState
from gpusched.scheduler.placement import PlacementVeto, best_placement
from gpusched.scheduler.priority import tier_of
from gpusched.scheduler.quota import Quotas
from gpusched.scheduler.request_units import RequestUnits
from gpusched.scheduler.timeline import RunningJob
from gpusched.scheduler.usage import demand, footprint

if TYPE_CHECKING:
    from gpusched.scheduler.queue import JobClass
    from gpusched.scheduler.rules import Cycle


@dataclass(frozen=True, slots=True)
class Held:
    """A running job with its holdings on every node."""

    first: Allocation
    bookings: tuple[AllocationUnits, ...]
    amount: Resources

    def gone_at(self, now: float, mode: str = PreemptMode.REQUEUE) -> float:
        """When it has given up its resources at the latest, if its stop was ordered already or is now."""
        first = self.first
        if mode == PreemptMode.SUSPEND:
            return now + first.grace_s
        latest_at = now + first.grace_s + first.epilog_s
        if not first.is_stopping or first.expected_end_at is None or first.expected_end_at <= now:
            return latest_at
        return min(latest_at, first.expected_end_at)

    def given_up(self, mode: str) -> tuple[Resources, int]:
        """What its queue and user hold less after preemption, and by how many jobs: a suspended job still counts."""
        if mode == PreemptMode.SUSPEND:
            return Resources(cpus=self.amount.cpus), 0
        return self.amount, 1

    def leave(self, draft: ClusterState, mode: str) -> None:
        """Release what preemption frees: everything, or only the cores if suspended."""
        for booking in self.bookings:
            draft.release(booking)
            if mode == PreemptMode.SUSPEND:
                draft.book(replace(booking, millicpus=0))

    def stay(self, draft: ClusterState, mode: str) -> None:
        for booking in self.bookings:
            if mode == PreemptMode.SUSPEND:
                draft.release(replace(booking, millicpus=0))
            draft.book(booking)


def held_by_job(layout: ClusterLayout, allocations: Iterable[Allocation]) -> dict[int, Held]:
    """Running jobs by id; the pieces of a gang are one."""
    pieces: dict[int, list[tuple[Allocation, AllocationUnits]]] = {}
    for allocation in allocations:
        booking = layout.booking(allocation.terms.uid, allocation)
        if booking is not None:
            pieces.setdefault(allocation.job_id, []).append((allocation, booking))
    found = {}
    for job_id, parts in pieces.items():
        bookings = tuple(booking for _, booking in parts)
        amount = NOTHING
        for booking in bookings:
            amount = amount + footprint(layout, booking)
        found[job_id] = Held(parts[0][0], bookings, amount)
    return found


@dataclass(frozen=True, slots=True)
class Victim:
    """A running job that could be preempted, and the cost of that."""

    held: Held
    is_reclaimed: bool
    """Whether it holds what its queue has borrowed from that of the claimant."""
    cuts: bool
    """Whether its queue would fall below its guarantee: it is only partly on borrowed resources."""
    mode: str
    lost: float
    """Lost work: seconds, times the dominant share of the cluster that did them."""

    @property
    def job_id(self) -> int:
        return self.held.first.job_id

    @property
    def amount(self) -> Resources:
        """Resources that it gives up."""
        return self.held.given_up(self.mode)[0]

    @property
    def is_filler(self) -> bool:
        return self.held.first.is_filler

    def cost(self, settings: Settings) -> tuple[bool, bool, bool, int, bool, float, int]:
        """Sort key; the first in order is preempted first."""
        is_last = self.mode == PreemptMode.CANCEL
        tier = tier_of(self.held.first.terms.qos, settings)
        return not self.is_filler, not self.is_reclaimed, self.cuts, tier, is_last, self.lost, -self.job_id


def safe_until(qos: str, start_at: float, settings: Settings) -> float:
    """End of the time in which a run of this QOS may not be preempted."""
    own = settings.qos.get(qos)
    return start_at + (settings.preempt.min_run_s if own is None or own.min_run_s is None else own.min_run_s)


class Claim:
    """What a job that cannot start needs, and of which machines."""

    def __init__(self, key: ClassKey, need: RequestUnits, draft: ClusterState, guard: PlacementVeto | None) -> None:
        self.key, self.need, self.draft, self.guard = key, need, draft, guard
        self.amount = demand(draft.layout, need.request)

    def fits(self, trial: ClusterState, limits: Quotas) -> bool:
        """Whether the job could start on these machines and below these limits."""
        is_below = limits.why_not(self.key.terms, self.amount) is None
        return is_below and best_placement(trial, self.need, guard=self.guard) is not None


Helps = Callable[[Sequence[Victim]], bool]
"""Whether the freed room can be reserved for the claimant, rather than for jobs ahead of it in the queue."""


class Preemption:
    """The running jobs of one cycle as possible victims."""

    def __init__(
        self,
        held: Mapping[int, Held],
        quotas: Quotas,
        settings: Settings,
        capacity: Resources,
        now: float,
        name_of: Callable[[int], str],
    ) -> None:
        self._held = held
        self._quotas = quotas
        self._settings = settings
        self._capacity = capacity
        self._now = now
        self._name_of = name_of
        self.chosen: dict[int, Preempt] = {}
        """Decided in this cycle, by victim."""
        self.claimed: list[AllocationUnits] = []
        """Reserved parts of the room that victims will free."""
        self._stopping = [one for one in held.values() if one.first.is_stopping]
        self.is_off = settings.preempt.mode == "off"
        self._soon: tuple[object, ClusterState] | None = None
        """What is free once all jobs being stopped have ended, after so many bookings, and beside the first claims."""
        self._claimed_soon = 0
        """Number of those claims."""
        self._claimants: dict[int, Sequence[JobClass]] = {}
        self._quotas_soon: tuple[object, Quotas] | None = None

    def departures(self, victims: Sequence[Victim] = ()) -> tuple[dict[int, float], set[int]]:
        """Latest end of each job being stopped, those of this cycle and `victims` included.

        Also returns which of them are only suspended.
        """
        leaving = [*self._leaving(), *((victim.held, victim.mode) for victim in victims)]
        ends_at = {one.first.job_id: one.gone_at(self._now, mode) for one, mode in leaving}
        return ends_at, {one.first.job_id for one, mode in leaving if mode == PreemptMode.SUSPEND}

    def gone_at(self, job_ids: Sequence[int]) -> float | None:
        """Latest end of all these jobs, which are being stopped; None if one of them is not, or for none."""
        ends_at = {one.first.job_id: one.gone_at(self._now) for one in self._stopping}
        if not job_ids or any(job_id not in ends_at for job_id in job_ids):
            return None
        return max(ends_at[job_id] for job_id in job_ids)

    def epilog_s(self, job_ids: Sequence[int]) -> float:
        """The longest that the epilogs of one of these jobs may take, in seconds; 0 without any."""
        return max((self._held[job_id].first.epilog_s for job_id in job_ids if job_id in self._held), default=0.0)

    def frees_soon(
        self,
        key: ClassKey,
        draft: ClusterState,
        need: RequestUnits,
        guard: PlacementVeto | None,
        booked: object,
        claims: int,
    ) -> bool:
        """Whether the jobs already being stopped free enough room, limits included.

        Args: booked: the same as long as the cycle starts, resumes and preempts nothing more. claims: number of jobs
        that count as held already, for the limits.
        """
        if not self._stopping and not self.chosen:
            return False
        if self._soon is None or self._soon[0] != booked:
            trial = draft.copy()
            self._release_leaving(trial)
            self._soon = booked, trial
        else:
            trial = self._soon[1]
            for booking in self.claimed[self._claimed_soon :]:
                trial.book(booking)
        self._claimed_soon = len(self.claimed)
        if best_placement(trial, need, guard=guard) is None:
            return False
        if not self._quotas.has_limits(key.terms):
            return True
        if self._quotas_soon is None or self._quotas_soon[0] != (booked, claims):
            self._quotas_soon = (booked, claims), self._without_leaving()
        return self._quotas_soon[1].why_not(key.terms, demand(draft.layout, need.request)) is None

    def _leaving(self) -> Iterable[tuple[Held, str]]:
        stopping = ((one, PreemptMode.REQUEUE) for one in self._stopping)
        return (*stopping, *((self._held[job_id], one.mode) for job_id, one in self.chosen.items()))

    def _without_leaving(self) -> Quotas:
        """Quotas after the end of all jobs being stopped."""
        quotas = self._quotas.copy()
        for one, mode in self._leaving():
            first = one.first
            quotas.remove(first.terms, *one.given_up(mode), is_filler=first.is_filler)
        return quotas

    def _release_leaving(self, draft: ClusterState) -> None:
        for one, mode in self._leaving():
            one.leave(draft, mode)
        for booking in self.claimed:
            draft.book(booking)

    def may_preempt(self, key: ClassKey, amount: Resources, victim: Allocation) -> bool:
        """Whether the claimant's QOS, or that of a job depending on it, is above the victim's and may preempt.

        Every claimant is within its budget, and may preempt a filler. Args: amount: what one job of it takes.
        """
        if victim.is_filler:
            return True
        settings = self._settings
        theirs = settings.qos.get(victim.terms.qos)
        if theirs is not None and not theirs.preemptible:
            return False
        names = [key.terms.qos]
        if key.inherited and self._quotas.may_act_for(key.inherited.qos, key.terms.user, amount):
            names.append(key.inherited.qos)
        return any(
            victim.terms.qos in mine.preempts and mine.tier > tier_of(victim.terms.qos, settings)
            for name in names
            if (mine := settings.qos.get(name)) is not None
        )

    def claimants(self, victim: Allocation, classes: Iterable[JobClass]) -> Sequence[JobClass]:
        """Those of these classes whose jobs may preempt a run; the same for the whole cycle."""
        if victim.job_id not in self._claimants:
            self._claimants[victim.job_id] = [one for one in classes if self.may_preempt(one.key, one.wanted, victim)]
        return self._claimants[victim.job_id]

    def victims(
        self, key: ClassKey, amount: Resources, *, may_suspend: bool = True, at: float | None = None
    ) -> list[Victim]:
        """All possible victims, now or at a later instant, in order of preference."""
        if self.is_off:
            return []
        at = self._now if at is None else at
        found = []
        reclaims = self._settings.preempt.reclaim and self._quotas.is_capacity
        for job_id, held in self._held.items():
            one = held.first
            if one.is_stopping or one.is_suspended or job_id in self.chosen or self._safe_until(one) > at:
                continue
            mode = self._mode(one, may_suspend)
            lost, _ = held.given_up(mode)
            queues = key.terms.queue, amount, one.terms.queue, lost
            takes_back = reclaims and not one.is_filler and self._quotas.may_reclaim(*queues)
            cuts = not takes_back and reclaims and not one.is_filler
            cuts = cuts and self._quotas.may_reclaim(*queues, may_cut=True)
            if takes_back or cuts or self.may_preempt(key, amount, one):
                found.append(Victim(held, takes_back or cuts, cuts, mode, self._lost(held)))
        found.sort(key=lambda victim: victim.cost(self._settings))
        return found

    def _safe_until(self, one: Allocation) -> float:
        """End of its protected time; a filler has none."""
        return one.start_at if one.is_filler else safe_until(one.terms.qos, one.start_at, self._settings)

    def _mode(self, one: Allocation, may_suspend: bool) -> str:
        if may_suspend and self._settings.preempt.mode == "suspend" and one.terms.can_suspend:
            return PreemptMode.SUSPEND
        return PreemptMode.REQUEUE if one.terms.can_requeue else PreemptMode.CANCEL

    def _lost(self, held: Held) -> float:
        saved_at = held.first.start_at if held.first.checkpoint_at is None else held.first.checkpoint_at
        lost_s = max(0.0, self._now - max(saved_at, held.first.start_at))
        return lost_s * held.amount.dominant_share(self._capacity)

    def choose(
        self,
        job_id: int,
        claim: Claim,
        helps: Helps,
        *,
        only_fillers: bool = False,
    ) -> tuple[Victim, ...]:
        """The cheapest victims that let this job start, recorded in `chosen`; empty if no set suffices."""
        best = self._best(claim, helps, only_fillers=only_fillers)
        for victim in best:
            if not victim.is_filler:
                self._quotas.leave(victim.held.first.terms.queue, victim.amount)
            text = f"made room for {mention_job(self._name_of(job_id))} ({self._why(claim.key, victim)})"
            self.chosen[victim.job_id] = Preempt(victim.job_id, victim.mode, job_id, text)
        return best

    def possible_at(self, claim: Claim) -> tuple[float, tuple[Victim, ...]] | None:
        """First instant at which runs now protected could free enough room, and those runs; None for never."""
        instants = sorted({at for one in self._held.values() if (at := self._safe_until(one.first)) > self._now})
        found, low, high = None, 0, 0 if self.is_off else len(instants)
        # The later, the more runs may be preempted.
        while low < high:
            middle = (low + high) // 2
            best = self._best(claim, lambda _: True, instants[middle])
            if best:
                found, high = (instants[middle], best), middle
            else:
                low = middle + 1
        return found

    def _best(
        self, claim: Claim, helps: Helps, at: float | None = None, *, only_fillers: bool = False
    ) -> tuple[Victim, ...]:
        """The cheapest victims, suspended if that suffices."""
        victims = [one for one in self.victims(claim.key, claim.amount, at=at) if one.is_filler or not only_fillers]
        best = self._cheapest(victims, claim, helps) if victims else ()
        if not best and any(victim.mode == PreemptMode.SUSPEND for victim in victims):
            # Their cores are not enough, and suspended jobs keep the rest.
            victims = self.victims(claim.key, claim.amount, may_suspend=False, at=at)
            best = self._cheapest(victims, claim, helps)
        return best

    def _cheapest(self, victims: Sequence[Victim], claim: Claim, helps: Helps) -> tuple[Victim, ...]:
        """The cheapest of the sets that free enough room."""
        best: tuple[Victim, ...] = ()
        for group in self._groups(victims, claim.need):
            picked = self._pick(group, claim)
            if picked and (not best or self._price(picked) < self._price(best)) and helps(picked):
                best = picked
        return best

    def _groups(self, victims: Sequence[Victim], need: RequestUnits) -> Iterable[Sequence[Victim]]:
        """All victims, and for a job of one node those of each node: few on one node beat many on several."""
        yield victims
        if need.request.nodes == 1:
            nodes = sorted({booking.node for victim in victims for booking in victim.held.bookings})
            if len(nodes) > 1:
                for node in nodes:
                    yield [one for one in victims if any(booking.node == node for booking in one.held.bookings)]

    def _pick(self, victims: Sequence[Victim], claim: Claim) -> tuple[Victim, ...]:
        """Enough victims, none of which would then precede the claimant in the queue and reclaim its place."""
        left = list(victims)
        while True:
            picked, quotas = self._enough(left, claim)
            if not quotas.is_capacity:
                return picked
            mine = quotas.rank(claim.key.terms.queue, claim.amount)
            held = ((one, one.held) for one in picked if not one.is_filler)
            first = [one for one, its in held if quotas.rank(its.first.terms.queue, its.amount) < mine]
            if not first:
                return picked
            left = [one for one in left if one not in first]

    def _enough(self, victims: Sequence[Victim], claim: Claim) -> tuple[tuple[Victim, ...], Quotas]:
        """Add victims until the job fits, then drop the unneeded, dearest first; with the quotas without them."""
        trial, amount, queue = claim.draft.copy(), claim.amount, claim.key.terms.queue
        self._release_leaving(trial)
        borrowed, limits = self._quotas.copy(), self._without_leaving()
        picked: list[Victim] = []
        for victim in victims:
            one = victim.held.first
            lost, jobs = victim.held.given_up(victim.mode)
            if victim.is_reclaimed:
                # Every victim reduces its queue's holdings; no queue may fall below its own guarantee.
                is_borrowed = borrowed.may_reclaim(queue, amount, one.terms.queue, lost, may_cut=victim.cuts)
                if not is_borrowed and not self.may_preempt(claim.key, amount, one):
                    continue
                borrowed.leave(one.terms.queue, lost)
            limits.remove(one.terms, lost, jobs, is_filler=one.is_filler)
            victim.held.leave(trial, victim.mode)
            picked.append(victim)
            if claim.fits(trial, limits):
                break
        else:
            return (), limits
        for victim in sorted(picked, key=lambda one: one.cost(self._settings), reverse=True):
            one, mark = victim.held.first, trial.checkpoint()
            lost, jobs = victim.held.given_up(victim.mode)
            victim.held.stay(trial, victim.mode)
            limits.add(one.terms, lost, jobs, is_filler=one.is_filler)
            if claim.fits(trial, limits):
                picked.remove(victim)
            else:
                trial.rollback(mark)
                limits.remove(one.terms, lost, jobs, is_filler=one.is_filler)
        return tuple(picked), limits

    def _price(self, victims: Sequence[Victim]) -> tuple[int, int, int, int, int, float, int]:
        """Cost of a whole set: few but fillers, few not borrowed, low tier, few that lose for good, little work, few
        victims."""
        return (
            sum(not victim.is_filler for victim in victims),
            sum(not victim.is_reclaimed for victim in victims),
            sum(victim.cuts for victim in victims),
            max(tier_of(victim.held.first.terms.qos, self._settings) for victim in victims),
            sum(victim.mode == PreemptMode.CANCEL for victim in victims),
            sum(victim.lost for victim in victims),
            len(victims),
        )

    def _why(self, key: ClassKey, victim: Victim) -> str:
        if victim.is_reclaimed:
            return f"queue {key.terms.queue} takes back what queue {victim.held.first.terms.queue} has borrowed"
        if victim.is_filler:
            return f"it was a filler: the budget of account {victim.held.first.terms.account} was spent"
        inherited = key.inherited.qos if key.inherited else ""
        mine = max((key.terms.qos, inherited), key=lambda name: tier_of(name, self._settings))
        return f"QOS {mine} goes before QOS {victim.held.first.terms.qos}"


# --- suspended jobs -----------------------------------------------------------------------------


def resume_before(cycle: Cycle, head: JobClass | None) -> None:
    """Resume suspended jobs, except those that this job or a later one in the queue could suspend again."""
    for one in list(cycle.suspended):
        if head is not None and _is_awaited(cycle, one.first):
            continue
        booking = _taken_up_again(one)
        if not cycle.draft.has_room(booking):
            continue
        cores = Resources(cpus=one.first.suspended_cpus)
        if _is_behind(cycle, one, cores, head) or _is_limited(cycle, one, cores):
            continue
        if cycle.timeline.admits(booking, inf):
            _resume(cycle, one.first, booking, cores)
            cycle.resumes = (*cycle.resumes, ResumeRun(one.first.job_id))
            cycle.suspended.remove(one)


def _is_awaited(cycle: Cycle, first: Allocation) -> bool:
    """Whether a job that has not had its turn may take the room that this run has given up."""
    claimants = cycle.preemption.claimants(first, cycle.queue.classes)
    return any(one.jobs and cycle.blocked.keys().isdisjoint(one.variants or (one,)) for one in claimants)


def _resume(cycle: Cycle, first: Allocation, booking: AllocationUnits, cores: Resources) -> None:
    cycle.draft.take(booking)
    cycle.quotas.add(first.terms, cores, jobs=0)
    running = RunningJob(first.job_id, cycle.now, inf, booking)
    cycle.timeline.start(running)

    def undo() -> None:
        cycle.quotas.remove(first.terms, cores, jobs=0)
        if cycle.draft is cycle.planner.draft:
            cycle.draft.give_back(booking)
            if running in (end[3] for end in cycle.planner.timeline.ends):
                cycle.planner.timeline.remove(running)

    cycle.placements.epoch += 1
    cycle.undo = (*cycle.undo, undo)


def _is_behind(cycle: Cycle, one: Held, cores: Resources, head: JobClass | None) -> bool:
    """Whether the queue of the next job in line precedes that of a suspended job."""
    if head is None or not cycle.quotas.is_capacity:
        return False
    theirs = cycle.quotas.rank(head.key.terms.queue, head.wanted)
    return theirs < cycle.quotas.rank(one.first.terms.queue, one.amount + cores)


def _is_limited(cycle: Cycle, one: Held, cores: Resources) -> bool:
    """Whether a limit of its queue or QOS keeps a suspended job from resuming."""
    first = one.first
    cycle.quotas.remove(first.terms, one.amount)
    denial = cycle.quotas.why_not(first.terms, one.amount + cores)
    cycle.quotas.add(first.terms, one.amount)
    return denial is not None


def _taken_up_again(one: Held) -> AllocationUnits:
    """The cores that a suspended job has released; it still holds the rest."""
    booking = one.bookings[0]
    return AllocationUnits(booking.node, booking.uid, round(one.first.suspended_cpus * 1000), 0, ())
