"""Why a job waits: facts for scripts, a sentence for people.

Instants are in the facts only (`expected_at`); sentences speak of lengths of time, because the policy
knows no time zone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from gpusched.model.cluster import NodeView
from gpusched.model.snapshot import ClassKey, Reason
from gpusched.model.states import ReasonCode
from gpusched.model.units import gpu_label
from gpusched.policy.calendar.upkeep import Upkeep
from gpusched.policy.ceilings import Ceilings
from gpusched.policy.draft import Card, Draft
from gpusched.policy.ordering import Head
from gpusched.policy.placement import Need, Rejection, Tally, fits, options, pool, reject_card
from gpusched.policy.profile import Kept, Profile
from gpusched.policy.shortage import Lack, lacks
from gpusched.policy.words import NAMED, about, describe, describe_where, name_some


class Explainer:
    """Gives the reasons of one cycle, as of its end."""

    def __init__(
        self,
        draft: Draft,
        ceilings: Ceilings,
        now: float,
        first_blocked: Head | None,
        profile: Profile,
        name_of: Callable[[int], str],
        upkeep: Upkeep,
        relied_end_of: Callable[[ClassKey], float],
    ) -> None:
        self._draft = draft
        self._idle = Draft(draft.layout)
        self._ceilings = ceilings
        self._now = now
        self._first = first_blocked
        self._profile = profile
        self._name_of = name_of
        self._upkeep = upkeep
        self._relied_end_of = relied_end_of
        self._known: dict[object, Reason] = {}

    def reason(self, head: Head, kept: Kept | None = None) -> Reason:
        """Why this job, the first of its class that waits, was not started; `kept` is its reservation."""
        need = Need.of(head.key.request, head.key.uid)
        if self._upkeep and (found := self._of_upkeep(head, need, kept)) is not None:
            return found
        if kept is not None:
            return self._of_reserved(need, kept)
        found = self._known.get(need.signature)
        if found is None:
            found = self._known[need.signature] = self._of_other(need)
        return found

    def _of_upkeep(self, head: Head, need: Need, kept: Kept | None) -> Reason | None:
        """Maintenance, when it alone keeps the job from starting."""
        nodes = {place.node for place in pool(self._draft.layout, need).places}
        free = {piece.node for option in options(self._draft, need) for piece in option.booking.pieces()}
        text = self._upkeep.why_not(nodes, free, self._relied_end_of(head.key))
        if text is None:
            return None
        facts: dict[str, object] = {} if kept is None else {"expected_at": kept.start_at}
        return Reason(ReasonCode.REQ_NODE_NOT_AVAIL, f"needs {describe(need.request)}; {text}", facts)

    def _of_reserved(self, need: Need, kept: Kept) -> Reason:
        missing, facts = self._look(need)
        text = (
            self._sentence(missing, need)
            if missing
            else f"needs {describe(need.request)}, which is kept for earlier jobs"
        )
        facts["expected_at"] = kept.start_at
        facts["jobs"] = list(kept.waits_for)
        return Reason(ReasonCode.RESOURCES, text + self._prospect(kept), facts)

    def _look(self, need: Need) -> tuple[list[Lack], dict[str, object]]:
        """What is missing now (nothing when it would fit), and the facts behind that."""
        tally: Tally = Counter()
        missing = [] if options(self._draft, need, tally=tally) else lacks(self._draft, need)
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

    def _prospect(self, reserved: Kept) -> str:
        jobs = name_some("job", [self._name_of(job_id) for job_id in reserved.waits_for])
        ends = f"{jobs} {'ends' if len(reserved.waits_for) == 1 else 'end'}" if jobs else "running jobs end"
        if reserved.start_at is None:
            return f"; expected when {ends}, which nobody knows without a time limit"
        wait = about(reserved.start_at - self._now)
        return f"; expected in {wait}, when {ends}"

    def _of_other(self, need: Need) -> Reason:
        missing, facts = self._look(need)
        if not fits(self._idle, need):
            return self._not_available(need, facts)
        busy = [] if missing else self._too_busy(need)
        if busy:
            return Reason(ReasonCode.LOAD_CEILING, name_some("", busy), facts | {"load": busy})
        if self._first is None:
            return Reason(ReasonCode.RESOURCES, self._sentence(missing, need), facts)
        ahead = self._first.job.id
        name = self._name_of(ahead)
        wanted = describe(self._first.key.request)
        if missing:
            text = f"{self._sentence(missing, need)}; job {name}, which needs {wanted}, goes first"
        else:
            text = f"waits behind job {name}, which needs {wanted}"
        return Reason(ReasonCode.PRIORITY, text, facts | {"behind": ahead})

    def _too_busy(self, need: Need) -> list[str]:
        """What the ceilings say of each place with room; empty when one of them may take the job."""
        if options(self._draft, need, self._ceilings):
            return []
        texts: list[str] = []
        for option in options(self._draft, need):
            for piece in option.booking.pieces():
                text = self._ceilings.why_not(piece.node, need.request.mem_mib)
                cards = [self._draft.layout.cards[part.card] for part in piece.parts]
                busy = map(self._ceilings.why_not_join, cards) if text is None else iter([text])
                texts.extend(filter(None, busy))
        return texts

    def _not_available(self, need: Need, facts: dict[str, object]) -> Reason:
        """Hardware that would do may not be used now, or is not there any more."""
        obstacles = list(self._obstacles(need))
        what = f"needs {describe(need.request)}"
        if obstacles:
            text = what + _not_available([str(obstacle["why"]) for obstacle in obstacles])
        else:
            where = describe_where(need.request)
            text = f"{what}{' ' if where else ''}{where}; no node has that any more"
        return Reason(ReasonCode.REQ_NODE_NOT_AVAIL, text, facts | {"unavailable": obstacles})

    def _obstacles(self, need: Need) -> Iterator[dict[str, object]]:
        """Nodes and cards, of those that were asked for, that may not be used, each with why."""
        layout = self._draft.layout
        for number in pool(layout, need).asked:
            node, cards = layout.nodes[number], layout.cards_of[number]
            if node.why_not is not None:
                yield {"node": node.name, "why": node.why_not}
            elif need.request.gpus and node.gpu_error is not None:
                why = f"the GPU driver of node {node.name} does not work: {node.gpu_error}"
                yield {"node": node.name, "why": why}
            elif need.request.gpus:
                for card in cards:
                    why_not = _why_not(card, need)
                    if why_not is not None:
                        why = f"{_named(card, node)}: {why_not}"
                        yield {"node": node.name, "gpu": card.view.index, "why": why}

    def _sentence(self, missing: Sequence[Lack], need: Need) -> str:
        """What is missing, and who has taken it without a booking."""
        where = describe_where(need.request)
        text = "needs " + ", and ".join(lack.text for lack in missing) + (f" ({where})" if where else "")
        return text + _not_available(list(self._intrusions(need)))

    def _intrusions(self, need: Need) -> Iterator[str]:
        """Cards that no job has booked whole and that intruders keep from this one."""
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


def _named(card: Card, node: NodeView) -> str:
    return f"GPU {gpu_label(card.view.index)} of node {node.name}"


def _not_available(whys: Sequence[str]) -> str:
    """The end of a sentence about these cards and nodes; empty for none."""
    if not whys:
        return ""
    more = f"; and {len(whys) - NAMED} more" if len(whys) > NAMED else ""
    return f"; not available: {'; '.join(whys[:NAMED])}{more}"


def _why_not(card: Card, need: Need) -> str | None:
    """Why a card of the right kind may not be used; None when it may, or is of another kind."""
    rejection = reject_card(card, need.kind)
    if rejection is Rejection.CARD_LOST:
        return card.view.why_not or "lost"
    if rejection is Rejection.CARD_DIVIDED:
        return card.view.why_not or "MIG is on"
    if rejection is Rejection.CARD_INSTANCE:
        return f"it is a MIG instance ({card.view.mig_profile}), and a job sees one of those only"
    if rejection is Rejection.CARD_NOT_AVAILABLE:
        return card.view.why_not
    if rejection is Rejection.CARD_FOREIGN:
        return card.view.why_not_whole
    if rejection is Rejection.CARD_SIZE_UNKNOWN:
        return "its VRAM cannot be read"
    if rejection is Rejection.CARD_UNSHARABLE:
        return "it cannot be shared"
    return None
