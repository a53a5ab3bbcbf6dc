"""Why a job waits: facts for scripts, a sentence for people.

Instants are in the facts only (`expected_at`); sentences speak of durations, because the planner
knows no time zone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from gpusched.model.bundles import on_each_node
from gpusched.model.cluster import GPUS_NOT_READ, NodeView
from gpusched.model.job import Request
from gpusched.model.mentions import JOB, RESERVATION, mention_job, mention_jobs, mention_reservation, mentioned_name
from gpusched.model.snapshot import ClassKey, PendingJob, Reason, Window
from gpusched.model.states import ReasonCode
from gpusched.model.units import NAMED, about, gpu_label, name_some
from gpusched.model.value import replace
from gpusched.model.variants import variant_names
from gpusched.scheduler.cluster_state import ClusterState, LayoutGpu
from gpusched.scheduler.filters import Rejection, Tally, pool, reject_card
from gpusched.scheduler.infeasible import describe, describe_where, layout_for, license_text
from gpusched.scheduler.placement import Candidate, candidates, fits
from gpusched.scheduler.request_units import RequestUnits
from gpusched.scheduler.reservation import TimelineReservation, settled_at
from gpusched.scheduler.shortages import Shortage, license_shortages, shortages
from gpusched.scheduler.timeline import FIRST_WINDOW

if TYPE_CHECKING:
    from gpusched.scheduler.planner import Planner
    from gpusched.scheduler.queue import Entry, JobClass
    from gpusched.scheduler.rules import Cycle


class Blocked:
    """The first blocked job of a class, or one variant of it, and the reason if known already."""

    __slots__ = ("entry", "is_foreseen", "job_class", "reason", "reservation")

    def __init__(
        self,
        entry: Entry,
        reason: Reason | None = None,
        reservation: TimelineReservation | None = None,
        *,
        is_foreseen: bool = False,
        variant: JobClass | None = None,
    ) -> None:
        self.is_foreseen = is_foreseen
        """Whether the reservation is hypothetical."""
        self.entry = entry
        self.job_class = entry[2] if variant is None else variant
        self.reason = reason
        self.reservation = reservation

    @property
    def job(self) -> PendingJob:
        return PendingJob(self.entry[1], self.entry[0])

    @property
    def key(self) -> ClassKey:
        return self.job_class.key


class Explainer:
    """Derives the reasons of one cycle, as of its end. `first_blocked` is the first job with a reservation."""

    def __init__(self, cycle: Cycle, first_blocked: Blocked | None) -> None:
        self._cycle = cycle
        self._draft = cycle.draft
        self._idle = ClusterState(cycle.layout)
        self._ceilings = cycle.ceilings
        self._now = cycle.now
        self._first = first_blocked
        self._timeline = cycle.timeline
        self._ahead = list(cycle.timeline.reservations)
        """Actual or hypothetical reservations."""
        if first_blocked is not None and first_blocked.is_foreseen and first_blocked.reservation is not None:
            self._ahead.append(first_blocked.reservation)
        self._name_of = cycle.name_of
        self._known: dict[object, Reason] = {}

    def reason(self, head: Blocked, kept: TimelineReservation | None = None) -> Reason:
        """Why this job, the first blocked one of its class, was not started; `kept` is its reservation."""
        need = RequestUnits.of(head.key.terms.request, head.key.terms.uid)
        if kept is not None:
            return self._of_calendar(head, need, kept) or self._of_reserved(head, need, kept)
        end_at = self._cycle.relied_end_of(head.job_class)
        mark = need.signature, self._timeline.concerns(end_at), end_at == inf
        found = self._known.get(mark)
        if found is None:
            found = self._known[mark] = self._of_calendar(head, need, None) or self._of_other(head, need)
        return found

    # --- what the calendar keeps ------------------------------------------------------------------

    def _of_calendar(self, head: Blocked, need: RequestUnits, kept: TimelineReservation | None) -> Reason | None:
        """Reason if only a calendar window keeps the job from starting."""
        if not self._cycle.windows:
            return None
        window = self._in_time(head, need, kept) if fits(self._draft, need) else self._in_force(need)
        if window is None:
            return None
        if window.start_at > self._now:
            end_at = self._cycle.relied_end_of(head.job_class)
            limit = "the job has no time limit" if end_at == inf else "the job's time limit is longer"
            when = f"begins in {about(window.start_at - self._now)}, and {limit}"
        else:
            when = f"ends in {about(window.end_at - self._now)}"
        # The message of a reservation is for its members only.
        why = f" ({window.message})" if window.message and window.is_maintenance else ""
        text = f"needs {describe(need.request)}; {_of_window(window)} {when}{why}"
        facts: dict[str, object] = {
            "reservation": mentioned_name(RESERVATION, window.name),
            "begins_at": window.start_at,
            "ends_at": window.end_at,
        }
        if kept is not None:
            facts["expected_at"] = kept.start_at
        code = ReasonCode.REQ_NODE_NOT_AVAIL
        if self._is_open(need, self._cycle.relied_end_of(head.job_class)):
            is_ahead = kept is not None or self._first is None or self._first.job.id == head.job.id
            code = ReasonCode.RESOURCES if is_ahead else ReasonCode.PRIORITY
        return Reason(code, text, facts)

    def _is_open(self, need: RequestUnits, end_at: float) -> bool:
        """Whether windows until then leave room for the job where no other job is: it waits for other jobs, too."""
        left = ClusterState(self._draft.layout)
        there = [one.booking for one in self._cycle.inside.now if one.job_id < 0]
        to_come = (one for one in self._timeline.reservations if one.job_id < 0)
        there += [one.booking for one in to_come if one.start_at is not None and one.start_at < end_at]
        for booking in there:
            # Windows after one another may have the same cards.
            if left.has_room(booking):
                left.book(booking)
        return fits(left, need)

    def _window(self, number: int) -> Window:
        return self._cycle.windows[FIRST_WINDOW - number]

    def _in_time(self, head: Blocked, need: RequestUnits, kept: TimelineReservation | None) -> Window | None:
        """Window that begins too soon for the job although there is room now, at the place that leaves most time; None
        where only an earlier job is in its way."""
        places: list[Candidate] = []
        avoid = frozenset[int]()
        for one in sorted((one for one in self._timeline.reservations if one.job_id < 0), key=lambda one: one.start):
            if not one.cards <= avoid:
                # Take the cards reserved earliest last.
                avoid |= one.cards
                places += candidates(self._draft, need, avoid=avoid)
        found = []
        for option in places:
            delayed = self._delayed(head, option, kept)
            if not any(one.job_id < 0 for one in delayed):
                return None
            first = min(delayed, key=lambda one: one.start)
            if first.job_id < 0:
                found.append(self._window(first.job_id))
        return max(found, key=lambda one: (one.start_at, one.name), default=None)

    def _delayed(self, head: Blocked, option: Candidate, kept: TimelineReservation | None) -> list[TimelineReservation]:
        return self._timeline.delayed_by(option.booking, self._cycle.relied_end_of(head.job_class), kept)

    def _in_force(self, need: RequestUnits) -> Window | None:
        """Among the windows in force without which there would be room, the one that ends last; None if beside them
        there would be room but for other jobs."""
        nodes = {self._draft.layout.nodes[place.node].name for place in pool(self._draft.layout, need).places}
        closed = {
            place.node: window
            for window in self._cycle.windows
            if window.is_maintenance and window.start_at <= self._now < window.end_at
            for place in window.held
        }
        if nodes and all(node in closed for node in nodes):
            return min((closed[node] for node in nodes), key=lambda window: (window.end_at, window.name))
        # Keep as many in force as possible, the longest-lasting first.
        there = sorted((one for one in self._cycle.inside.now if one.job_id < 0), key=lambda one: -one.end_at)
        if self._is_open(need, self._now):
            return None
        free = self._draft.copy()
        for one in there:
            free.release(one.booking)
        if not fits(free, need):
            return None
        needed = []
        for one in there:
            free.book(one.booking)
            if not fits(free, need):
                free.release(one.booking)
                needed.append(self._window(one.job_id))
        return max(needed, key=lambda window: (window.end_at, window.name), default=None)

    # --- a job with a reservation -----------------------------------------------------------------

    def _of_reserved(self, head: Blocked, need: RequestUnits, kept: TimelineReservation) -> Reason:
        missing, facts = self._look(need)
        jobs = [number for number in kept.waits_for(self._draft, self._now) if number > 0]
        facts["expected_at"] = kept.start_at
        facts["jobs"] = self._mentioned(jobs)
        if not missing:
            return self._behind(head, need, facts, kept)
        text, code = self._sentence(missing, need), _code(missing)
        gone_at = self._cycle.preemption.gone_at(jobs)
        if gone_at is not None:
            names = [self._name_of(job_id) for job_id in jobs]
            verb = "is being stopped" if len(jobs) == 1 else "are being stopped"
            text += f"; expected in {about(gone_at - self._now)}: {mention_jobs(names)} {verb}"
            epilog_s = self._cycle.preemption.epilog_s(jobs)
            if epilog_s:
                text += f", and {'its' if len(jobs) == 1 else 'their'} epilogs may take {about(epilog_s)}"
            return Reason(code, text, facts | {"expected_at": gone_at})
        soon = self._cycle.may_preempt_at(head, need)
        if soon is None or (kept.start_at is not None and kept.start_at <= soon[0]):
            self._find_bound(head, kept, facts)
            return Reason(code, text + self._prospect(kept), facts)
        at, victims = soon
        names = [self._name_of(job_id) for job_id in victims]
        whose = "its" if len(names) == 1 else "their"
        text += (
            f"; may preempt {mention_jobs(names)} in {about(at - self._now)}, "
            f"once {whose} protected time (min_run_s) is over"
        )
        return Reason(code, text, facts | {"preempt_at": at, "preempts": self._mentioned(victims)})

    def _find_bound(self, head: Blocked, kept: TimelineReservation, facts: dict[str, object]) -> None:
        """Note how long others may start before it or delay it: a fact, since sentences say when it starts itself."""
        if head.is_foreseen:
            # How much longer it may wait depends on its user's use by then.
            is_bounded = kept.start_at is not None and self._cycle.has_dear
            idle_s = kept.idle_s(self._now) if is_bounded else 0.0
            at = self._cycle.queue.ranking.drains_from(head.job_class, head.job.queued_at, idle_s)
            fence_at = self._cycle.planner.fences.get(head.job.id)
            facts["reserves_at"] = at if fence_at is None else min(at, settled_at(self._cycle, fence_at))
        elif kept.fence_at is not None and self._cycle.settings.priority.backfill_by == "prediction":
            facts["delay_ends_at"] = settled_at(self._cycle, kept.fence_at)

    def _prospect(self, kept: TimelineReservation) -> str:
        """Expected start, and which jobs must end for it."""
        waits_for = kept.waits_for(self._draft, self._now)
        names = [self._name_of(number) for number in sorted(waits_for) if number > 0]
        ends = mention_jobs(names)
        windows = [_of_window(self._window(number)) for number in waits_for if number < 0]
        # Reservations that begin later and must end first, too.
        between = [one for one in self._timeline.reservations if one is not kept and one.end == kept.start]
        if windows or between:
            jobs = [self._name_of(one.job_id) for one in between if one.job_id > 0]
            windows += [_of_window(self._window(one.job_id)) for one in between if one.job_id < 0]
            later = [mention_jobs(jobs)] if jobs else []
            names = [*([ends] if ends and not between else []), *later, *dict.fromkeys(windows)]
            ends = name_some("", names)
        if kept.start_at is None:
            limits = "no time limit" if len(names) == 1 else "not all have a time limit"
            return f"; expected when {_end(ends, names)} ({limits})"
        return f"; expected in {about(kept.start_at - self._now)}, when {_end(ends, names)}"

    def _behind(
        self, head: Blocked, need: RequestUnits, facts: dict[str, object], kept: TimelineReservation | None
    ) -> Reason:
        """Reason if it would fit but for others' reservations."""
        for option in sorted(candidates(self._draft, need)):
            ahead = next((one for one in self._delayed(head, option, kept) if one.job_id > 0), None)
            if ahead is not None and ahead.need is not None:
                return self._after(ahead.job_id, _described(ahead.need.request), facts)
        if self._first is not None and self._first.job.id != head.job.id:
            return self._after(self._first.job.id, _described(self._first.key.terms.request), facts)
        text = f"needs {_described(need.request)}, which is kept for earlier jobs"
        return Reason(ReasonCode.PRIORITY, text + ("" if kept is None else self._prospect(kept)), facts)

    def _after(self, job_id: int, wanted: str, facts: dict[str, object]) -> Reason:
        text = f"waits behind {mention_job(self._name_of(job_id))}, which needs {wanted}"
        return Reason(ReasonCode.PRIORITY, text, facts | {"behind": self._mentioned([job_id])[0]})

    def _mentioned(self, jobs: Iterable[int]) -> list[str]:
        return [mentioned_name(JOB, self._name_of(job_id)) for job_id in jobs]

    # --- what is missing --------------------------------------------------------------------------

    def _sentence(self, missing: Sequence[Shortage], need: RequestUnits) -> str:
        """Sentence with the need, what is free, the users of the licenses, and unbooked users of cards."""
        where = describe_where(need.request)
        text = "needs " + ", and ".join(lack.text + users_of(lack, self._cycle) for lack in missing)
        return text + (f" ({where})" if where else "") + _not_available(list(self._intrusions(need)))

    def _look(self, need: RequestUnits) -> tuple[list[Shortage], dict[str, object]]:
        """Current shortages (none if it would fit), and the facts behind them."""
        tally: Tally = Counter()
        missing = [] if candidates(self._draft, need, tally=tally) else shortages(self._draft, need)
        tally.update(pool(self._draft.layout, need).rejected)
        facts: dict[str, object] = {
            "needed": {lack.resource: lack.needed for lack in missing},
            "free": {lack.resource: lack.free for lack in missing},
            "total": {lack.resource: lack.total for lack in missing},
            "rejected": {str(rejection): count for rejection, count in sorted(tally.items())},
        }
        only = {"constraint": need.request.constraint, "nodes": need.request.nodelist, "not": need.request.exclude}
        if any(only.values()):
            facts["only"] = {name: list(value) if isinstance(value, tuple) else value for name, value in only.items()}
        return missing, facts

    def _of_other(self, head: Blocked, need: RequestUnits) -> Reason:
        missing, facts = self._look(need)
        if not fits(self._idle, need):
            return self._not_available(need, facts)
        busy = [] if missing else self._too_busy(need)
        if busy:
            return Reason(ReasonCode.LOAD_CEILING, name_some("", busy), facts | {"load": busy})
        if not missing and self._first is not None:
            return self._behind(head, need, facts, None)
        text, code = self._sentence(missing, need), _code(missing)
        # One that has room kept for another of its variants does not wait for itself.
        others = (one for one in self._ahead if one.job_id != head.job.id)
        ahead = next((one for one in others if self._competes(one, need, missing)), None)
        if ahead is None or ahead.need is None:
            return Reason(code, text, facts)
        wanted = _described(ahead.need.request)
        text = f"{text}; {mention_job(self._name_of(ahead.job_id))}, which needs {wanted}, goes first"
        code = ReasonCode.PRIORITY if code is ReasonCode.RESOURCES else code
        return Reason(code, text, facts | {"behind": self._mentioned([ahead.job_id])[0]})

    def _competes(self, kept: TimelineReservation, need: RequestUnits, missing: Sequence[Shortage]) -> bool:
        """Whether a job with a reservation gets some of the missing resources before this one."""
        if kept.need is None:
            return False
        there = pool(self._draft.layout, need)
        names = {name for name, _ in kept.need.request.resources}
        users = {name for name, _ in kept.need.request.licenses}
        nodes = {place.node for place in there.places}.intersection(piece.node for piece in kept.booking.pieces())
        for lack in missing:
            kind, _, name = lack.resource.partition(":")
            if kind == "license":
                competes = name in users
            elif kind == "resource":
                competes = bool(nodes) and name in names
            elif kind in ("cpus", "mem_mib", "nodes"):
                competes = bool(nodes)
            else:
                competes = any(card.number in kept.cards for cards in there.cards_of for card in cards)
            if competes:
                return True
        return False

    def _too_busy(self, need: RequestUnits) -> list[str]:
        """Objections of the ceilings to each place with room; empty if they admit one of them."""
        if candidates(self._draft, need, self._ceilings):
            return []
        texts: list[str] = []
        for option in candidates(self._draft, need):
            for piece in option.booking.pieces():
                text = self._ceilings.why_not(piece.node, need.request.mem_mib)
                cards = [self._draft.layout.cards[part.card] for part in piece.parts]
                busy = map(self._ceilings.why_not_join, cards) if text is None else iter([text])
                texts.extend(filter(None, busy))
        return texts

    def _not_available(self, need: RequestUnits, facts: dict[str, object]) -> Reason:
        """Matching hardware is unusable now or gone; licenses were removed."""
        for name, count in need.request.licenses:
            total = self._draft.layout.licenses.get(name, 0)
            if count > total:
                there = f"{'is' if total == 1 else 'are'} {total} in all" if total else "are no longer any"
                return Reason(ReasonCode.LICENSES, f"needs {license_text(name, count)}; there {there}", facts)
        obstacles = list(self._obstacles(need))
        what = f"needs {describe(need.request)}"
        if obstacles:
            text = what + _not_available([str(obstacle["why"]) for obstacle in obstacles])
        else:
            where = describe_where(need.request)
            bare = on_each_node(need.request, cpus=0.0, mem_mib=0)
            cards = replace(bare, resources=(), licenses=(), is_exclusive=False)
            if need.request.gpus and fits(self._idle, RequestUnits.of(cards, need.uid)):
                what = f"needs {describe(need.request, full=True)}"
            text = f"{what}{' ' if where else ''}{where}; no node has that now"
        return Reason(ReasonCode.REQ_NODE_NOT_AVAIL, text, facts | {"unavailable": obstacles})

    def _obstacles(self, need: RequestUnits) -> Iterator[dict[str, object]]:
        """Matching nodes and cards that must not be used, each with the reason."""
        layout = self._draft.layout
        for number in pool(layout, need).asked:
            node, cards = layout.nodes[number], layout.cards_of[number]
            if node.why_not is not None:
                yield {"node": node.name, "why": node.why_not}
            elif need.request.gpus and node.gpu_error is not None:
                works = f"the GPU driver of node {node.name} does not work: {node.gpu_error}"
                why = f"node {node.name}: {GPUS_NOT_READ}" if node.gpu_error == GPUS_NOT_READ else works
                yield {"node": node.name, "why": why}
            elif need.request.gpus:
                for card in cards:
                    why_not = _undivided(card, node, need) or _why_not(card, need)
                    if why_not is not None:
                        why = f"{_named(card, node)}: {why_not}"
                        yield {"node": node.name, "gpu": card.view.index, "why": why}

    def _intrusions(self, need: RequestUnits) -> Iterator[str]:
        """Cards without a whole-card booking that intruders keep from this job."""
        layout = self._draft.layout
        if not need.request.gpus:
            return
        for number in pool(layout, need).asked:
            for card in layout.cards_of[number]:
                view = card.view
                is_closed = reject_card(card, need.kind) in (None, Rejection.CARD_FOREIGN)
                is_intruded = view.foreign_mib > view.foreign_limit_mib or view.is_foreign_busy
                if is_closed and is_intruded and view.why_not_whole and not self._draft.wholes[card.number]:
                    yield f"{_named(card, layout.nodes[number])}: {view.why_not_whole}"


def _named(card: LayoutGpu, node: NodeView) -> str:
    return f"GPU {gpu_label(card.view.index)} of node {node.name}"


def _not_available(whys: Sequence[str]) -> str:
    """End of a sentence about these cards and nodes; empty for none."""
    if not whys:
        return ""
    more = f"; and {len(whys) - NAMED} more" if len(whys) > NAMED else ""
    return f"; not available: {'; '.join(whys[:NAMED])}{more}"


def _undivided(card: LayoutGpu, node: NodeView, need: RequestUnits) -> str | None:
    """What a card that lacks the requested MIG profile could do about it."""
    profile, view = need.request.gpu_type, card.view
    if profile is None or view.mig_profile is not None or any(profile == one.mig_profile for one in node.gpus):
        return None
    if view.mig_wanted is not None and profile in view.mig_wanted.profiles:
        return view.why_not
    if any(one.mig_wanted is not None and profile in one.mig_wanted.profiles for one in node.gpus):
        return None
    layout = layout_for(profile, view, node.gpus)
    label = f"{node.name}:{gpu_label(view.index)}"
    return None if layout is None else f"not divided like that; an admin can do that: gctl mig set {label} {layout}"


def _why_not(card: LayoutGpu, need: RequestUnits) -> str | None:
    """Why a card of the right kind must not be used; None if it may, or is of another kind."""
    rejection = reject_card(card, need.kind)
    if rejection is Rejection.CARD_LOST:
        return card.view.why_not or "lost"
    if rejection is Rejection.CARD_DIVIDED:
        return card.view.why_not or "MIG is on"
    if rejection is Rejection.CARD_INSTANCE:
        return f"it is a MIG instance ({card.view.mig_profile}), and a job can use only one"
    if rejection is Rejection.CARD_NOT_AVAILABLE:
        return card.view.why_not
    if rejection is Rejection.CARD_FOREIGN:
        return card.view.why_not_whole
    if rejection is Rejection.CARD_SIZE_UNKNOWN:
        return "its VRAM cannot be read"
    if rejection is Rejection.CARD_UNSHARABLE:
        return "it cannot be shared"
    if rejection is Rejection.CARD_WITHOUT_MPS:
        return card.view.why_not_mps
    return None


def license_wait(cycle: Cycle, draft: ClusterState, need: RequestUnits) -> Reason | None:
    """Reason for a job with too few free licenses in a draft; None if there are enough."""
    missing = license_shortages(draft, need)
    if not missing:
        return None
    text = "needs " + ", and ".join(lack.text + users_of(lack, cycle) for lack in missing)
    return Reason(ReasonCode.LICENSES, text, {"free": {lack.resource: lack.free for lack in missing}})


def users_of(lack: Shortage, cycle: Cycle) -> str:
    """Users of a license that is short, phrased to follow its name; empty for any other resource."""
    kind, _, license_name = lack.resource.partition(":")
    if kind != "license":
        return ""
    users = [
        mention_job(cycle.name_of(job_id), user)
        for job_id, user, held in sorted(cycle.license_users)
        if any(name == license_name for name, _ in held)
    ]
    return f" (in use by {name_some('', users)})" if users else ""


def _code(missing: Sequence[Shortage]) -> ReasonCode:
    """Reason code; licenses take precedence, as with Slurm: the whole cluster shares them."""
    is_of_licenses = any(lack.resource.startswith("license:") for lack in missing)
    return ReasonCode.LICENSES if is_of_licenses else ReasonCode.RESOURCES


def _described(request: Request) -> str:
    """Request of a job ahead in the queue, with its licenses."""
    names = [describe(request), *(license_text(name, count) for name, count in request.licenses)]
    return name_some("", names, named=len(names))


def _of_window(window: Window) -> str:
    """`reservation course`, `maintenance upgrade of node n1`."""
    if not window.is_maintenance:
        return mention_reservation(window.name)
    return f"maintenance {window.name} of {name_some('node', sorted({place.node for place in window.held}))}"


def _end(ends: str, names: Sequence[str]) -> str:
    return f"{ends} {'ends' if len(names) == 1 else 'end'}" if ends else "running jobs end"


_TRIED = 10
"""Classes from the front of the queue that are tried as the one that others wait behind."""


class Reasons(Mapping[ClassKey, Reason]):
    """Lazy reasons of all classes: most plans are carried out and dropped without a look at them.

    All are as of the end of the cycle, so that resources called free are free once the plan is carried out. If the
    planner has changed since, they get a separate cycle as of the same instant.
    """

    def __init__(self, planner: Planner, now: float, cycle: Cycle | None) -> None:
        self._planner = planner
        self._now = now
        self._cycle = cycle
        self._version = planner.state.version
        self._explainer: Explainer | None = None
        self._blocked: dict[ClassKey, Blocked] = {}
        self._known: dict[ClassKey, Reason] = {}

    def _look(self) -> Cycle:
        cycle = self._cycle
        if cycle is None or self._version != self._planner.state.version:
            cycle = self._cycle = self._planner.cycle_for_reasons(self._now)
            self._version, self._explainer = self._planner.state.version, None
            self._known.clear()
        if self._explainer is None:
            self._blocked = {one.key: one for one in reversed(cycle.blocked.values()) if not one.job_class.variant}
            first = next((one for one in cycle.blocked.values() if one.reservation is not None), None)
            if first is None and cycle.first_patient is not None:
                first = self._foreseen(cycle, cycle.first_patient) or self._next_foreseen(cycle)
            self._explainer = Explainer(cycle, first)
        return cycle

    def _foreseen(self, cycle: Cycle, entry: Entry) -> Blocked | None:
        """The first job in line if it has no reservation yet, with the one it would get now."""
        job_class = entry[2]
        twin = cycle.timeline.copy(cycle.draft)
        soonest, soonest_at = job_class, None
        for variant in job_class.variants:
            at = twin.earliest(variant.shape.need, variant.planned_s)
            if at is not None and (soonest_at is None or at < soonest_at):
                soonest, soonest_at = variant, at
        reservation = twin.reserve(entry[1], soonest.shape.need, soonest.planned_s)
        if reservation is None:
            return None
        found = cycle.blocked[soonest] = Blocked(entry, None, reservation, is_foreseen=True, variant=soonest)
        if soonest is job_class:
            self._blocked[job_class.key] = found
        return found

    def _next_foreseen(self, cycle: Cycle) -> Blocked | None:
        """The same of the first job that can start at all, where the first in line cannot: others wait behind it."""
        rank, started = cycle.queue.rank, {one.job_id for one in cycle.starts}
        reasons = {one.job_class: one.reason for one in cycle.blocked.values()}
        heads = [one.jobs[0] for one in cycle.queue.classes if one.jobs and reasons.get(one) is None]
        heads = sorted((one for one in heads if one[1] not in started), key=lambda one: rank(one[2], one[0], one[1]))
        for one in heads[:_TRIED]:
            if (found := self._foreseen(cycle, one)) is not None:
                return found
        return None

    def __getitem__(self, key: ClassKey) -> Reason:
        cycle = self._look()
        found = self._known.get(key)
        if found is None:
            one = self._blocked.get(key)
            if one is None:
                job_class = cycle.queue.class_with(key)
                if job_class is None or not job_class.jobs:
                    raise KeyError(key)
                one = Blocked(job_class.jobs[0])
            found = self._known[key] = self._of_variants(one) if one.job_class.variants else self._of(one)
        return found

    def _of(self, one: Blocked) -> Reason:
        assert self._explainer is not None
        return one.reason or self._explainer.reason(one, one.reservation)

    def _of_variants(self, first: Blocked) -> Reason:
        """The reason of each variant; the code is that of the one that has a reservation, else of the first one."""
        assert self._cycle is not None
        blocked = [
            self._cycle.blocked.get(variant) or Blocked(first.entry, variant=variant)
            for variant in first.job_class.variants
        ]
        reasons = [self._of(one) for one in blocked]
        names = variant_names([(one.key.terms.request, one.key.time_limit_s) for one in blocked])
        texts = [f"with {name}: {reason.text}" for name, reason in zip(names, reasons, strict=True)]
        kept = next((number for number, one in enumerate(blocked) if one.reservation is not None), 0)
        facts = {
            **reasons[kept].facts,
            "variant": kept,
            "variants": [
                {"request": name, "code": str(reason.code), "text": reason.text, "facts": dict(reason.facts)}
                for name, reason in zip(names, reasons, strict=True)
            ],
        }
        return Reason(reasons[kept].code, " | ".join(texts), facts)

    def __iter__(self) -> Iterator[ClassKey]:
        cycle = self._look()
        pending = dict.fromkeys(one.key for one in cycle.queue.classes)
        return iter(
            {
                **dict.fromkeys(one.key for one in cycle.blocked.values() if not one.job_class.variant),
                **pending,
            }
        )

    def __len__(self) -> int:
        return len(list(iter(self)))
