"""Tentative bookings on a copy of the machines, with checkpoint and rollback.

Bookings are whole numbers (thousandths of a core, millionths of a card), so that releasing one restores
exactly the previous state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpusched.model.cluster import Allocation, GpuView, NodeView
from gpusched.model.job import GpuShare
from gpusched.model.leaning import points_of
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement
from gpusched.model.value import Value, replace
from gpusched.scheduler.compiled import take_over
from gpusched.scheduler.request_units import WHOLE_CARD, GpuDemand, RequestUnits, micros_of, millicpus_of, squeeze


class GpuSpeeds:
    """Speeds of GPU models by [gpu] speed."""

    def __init__(self, speeds: Mapping[str, float]) -> None:
        # The longest name first: "a100sxm" says more than "a100".
        self._speeds = sorted(((squeeze(name), speed) for name, speed in speeds.items()), key=lambda one: -len(one[0]))

    def of(self, model: str) -> float:
        """Speed of a model, given by its normalised name; 1 if none is set."""
        return next((speed for name, speed in self._speeds if name in model), 1.0)


def _parent_model(view: GpuView) -> str:
    """For a MIG instance, the normalised model of its parent card; empty for a card."""
    return squeeze(view.name.rpartition(" MIG ")[0]) if view.mig_profile is not None else ""


def is_of_type(view: GpuView, gpu_type: str) -> bool:
    """As `LayoutGpu.is_of_type`, for a GPU outside of a layout."""
    asked, parent = squeeze(gpu_type), _parent_model(view)
    return asked in squeeze(view.name) and (not asked or asked not in parent)


Counts = tuple[tuple[str, int], ...]
"""Names and counts, sorted by name."""


@dataclass(frozen=True, slots=True)
class LayoutGpu:
    """One GPU of the layout. `number` is unique across nodes."""

    number: int
    view: GpuView
    model: str
    slice_total_mib: int | None
    """Most that all slices together may hold: the total less the headroom; None if the total is unknown."""
    parent_model: str = ""
    """For a MIG instance, the model of its parent card."""
    node: int = 0
    host_mib: int = 0
    """Node memory that belongs to a card without memory of its own; 0 for any other card."""
    speed: float = 1.0
    speed_cost: int = 0
    """Points that its speed costs, see `node_costs`."""

    def is_of_type(self, model: str) -> bool:
        """Whether a requested type matches this card. The parent's type does not match an instance."""
        return model in self.model and (not model or model not in self.parent_model)

    def seen_as(self, view: GpuView) -> LayoutGpu:
        """The same card with what stands for or against it now."""
        return LayoutGpu(
            *(self.number, view, self.model, self.slice_total_mib, self.parent_model),
            *(self.node, self.host_mib, self.speed, self.speed_cost),
        )


# Not frozen, though never modified: some are created for each place tried, and a frozen one takes four times as long
# to create.
@dataclass(slots=True, unsafe_hash=True)
class CardShare:
    """What one booking takes of one card: all of it, or VRAM (and, for a fraction, time)."""

    card: int
    is_whole: bool
    vram_mib: int = 0
    micros: int = 0


class AllocationUnits(Value):
    """What one job takes of one node, and of the `others` if it is a gang."""

    node: int
    uid: int
    millicpus: int
    mem_mib: int
    parts: tuple[CardShare, ...]
    resources: Counts = ()
    licenses: Counts = ()
    is_exclusive: bool = False
    others: tuple[AllocationUnits, ...] = ()
    """On the other nodes of a gang; these have no others and no licenses."""
    gpu_mem_mib: int = 0
    """Node memory that its cards take beyond `mem_mib`, if they have none of their own."""

    @property
    def node_mem_mib(self) -> int:
        """Total that it takes of the node's memory."""
        return self.mem_mib + self.gpu_mem_mib

    def pieces(self) -> tuple[AllocationUnits, ...]:
        """This one and the others, one per node."""
        return (self, *self.others)


class ClusterLayout:
    """The machines as seen throughout one cycle: nodes by name, their cards by index."""

    def __init__(self, nodes: Iterable[NodeView], settings: Settings, source: ClusterLayout | None = None) -> None:
        """Args: source: whose fields it takes over, whatever the others say."""
        if source is not None:
            take_over(self, source)
            return
        self.nodes: tuple[NodeView, ...] = tuple(sorted(nodes, key=lambda node: node.name))
        self.cards: list[LayoutGpu] = []
        self.cards_of: list[tuple[LayoutGpu, ...]] = []
        self.slice_limits: list[int] = []
        """Per card, what slices may hold next to foreign use, and to what runs hold beyond their booking; below 0 when
        the total is unknown."""
        self.pools: dict[object, object] = {}
        """Cached filter results that do not change within a cycle."""
        self._node_numbers = {node.name: number for number, node in enumerate(self.nodes)}
        self._card_numbers: dict[tuple[int, str], int] = {}
        self.strategy: str = settings.placement.strategy
        self.typical: tuple[tuple[RequestUnits, float], ...] = ()
        """Typical jobs with their frequency, for strategies that use them; see `fragmentation.typical_of`."""
        self.wanted: GpuDemand | None = None
        """Demand, for strategies that leave cards to jobs that insist on them; see `scarcity`."""
        self.has_leanings = settings.priority.backfill_elsewhere
        """Whether jobs may lean towards nodes. Not where each waits for its best placement: they would wait for it."""
        self.by_history = settings.placement.by_history
        """Whether earlier runs say anything about nodes."""
        over = settings.oversubscribe
        self.is_oversubscribed = max(over.cpus, over.mem, over.vram) > 1
        self.licenses: dict[str, int] = dict(settings.license)
        self.millicpus = [millicpus_of(node.cpus * settings.oversubscribe.cpus) for node in self.nodes]
        """Bookable cores per node; with oversubscription more than there are."""
        self.mem_mib = [int(node.mem_mib * settings.oversubscribe.mem) for node in self.nodes]
        headroom_mib = settings.gpu.share_headroom_mib
        speeds = GpuSpeeds(settings.gpu.speed)
        for number, node in enumerate(self.nodes):
            first = len(self.cards)
            # Cards without memory of their own share the node's equally.
            host_mib = self.mem_mib[number] // max(1, sum(view.has_host_memory for view in node.gpus))
            for view in sorted(node.gpus, key=lambda gpu: (gpu.index, gpu.uuid)):
                total = None if view.vram_total_mib is None else max(0, view.vram_total_mib - headroom_mib)
                if view.has_host_memory:
                    total = max(0, host_mib - headroom_mib)
                elif total is not None:
                    total = int(total * settings.oversubscribe.vram)
                self._card_numbers[number, view.uuid] = len(self.cards)
                parent = _parent_model(view)
                of_host = host_mib if view.has_host_memory else 0
                model = squeeze(view.name)
                speed = speeds.of(model)
                cost = points_of(1 / speed) if self.has_leanings else 0
                card = LayoutGpu(len(self.cards), view, model, total, parent, number, of_host, speed, cost)
                self.cards.append(card)
                self.slice_limits.append(_slice_limit(card, headroom_mib))
            self.cards_of.append(tuple(self.cards[first:]))
        self.has_speeds = any(card.speed != 1.0 for card in self.cards)
        self.has_host_memory = any(card.host_mib for card in self.cards)
        """Whether any card takes the memory of its node."""
        self.whole_parts = tuple(CardShare(card.number, True) for card in self.cards)
        """All of each card."""
        self.is_flat = len(self.nodes) == 1 and not self.cards
        """Whether there is one place alone: a node without cards."""

    def renew(self, nodes: tuple[NodeView, ...], settings: Settings) -> bool:
        """Take in views of the same machines and cards, of which what stands against them may have changed.

        Numbers stay, and with them all bookings. Lists are exchanged rather than changed, since copies share them.
        Returns: False, without any change, if anything else differs.
        """
        changed = [number for number, (old, new) in enumerate(zip(self.nodes, nodes, strict=True)) if old is not new]
        if not all(_is_same_machine(self.nodes[number], nodes[number]) for number in changed):
            return False
        self.nodes, self.pools = nodes, {}
        self.cards, self.cards_of, self.slice_limits = self.cards.copy(), self.cards_of.copy(), self.slice_limits.copy()
        headroom_mib = settings.gpu.share_headroom_mib
        for number in changed:
            views = {view.uuid: view for view in nodes[number].gpus}
            for card in self.cards_of[number]:
                made = self.cards[card.number] = card.seen_as(views[card.view.uuid])
                self.slice_limits[card.number] = _slice_limit(made, headroom_mib)
            first = self.cards_of[number][0].number if self.cards_of[number] else 0
            self.cards_of[number] = tuple(self.cards[first : first + len(self.cards_of[number])])
        return True

    def node_number(self, name: str) -> int | None:
        """Index of a node by name; None if it is gone."""
        return self._node_numbers.get(name)

    def booking(self, uid: int, held: Allocation | Placement) -> AllocationUnits | None:
        """Booking of an allocation or placement; None if its node is gone."""
        node = self._node_numbers.get(held.node)
        if node is None:
            return None
        # A card that has left the machine has nothing to give to another job.
        parts = tuple(
            self._part(card, share)
            for share in held.gpus
            if (card := self._card_numbers.get((node, share.uuid))) is not None
        )
        others: tuple[AllocationUnits, ...] = ()
        if isinstance(held, Placement) and held.others:
            others = tuple(filter(None, (self.booking(uid, other) for other in held.others)))
        return AllocationUnits(
            node,
            uid,
            millicpus_of(held.cpus),
            held.mem_mib,
            parts,
            held.resources,
            held.licenses,
            held.is_exclusive,
            others,
            self.gpu_mem_mib(held.mem_mib, parts),
        )

    def booking_of(self, allocations: Sequence[Allocation]) -> AllocationUnits | None:
        """Booking of a job on all of its nodes that still exist; None without any."""
        pieces = [booking for held in allocations if (booking := self.booking(held.terms.uid, held)) is not None]
        if not pieces:
            return None
        return replace(pieces[0], others=tuple(pieces[1:])) if len(pieces) > 1 else pieces[0]

    @property
    def sizes(self) -> tuple[object, ...]:
        """Properties of the machines that the sizes of jobs are measured by."""
        cards = tuple((card.view.name, card.view.vram_total_mib, card.view.is_present) for card in self.cards)
        return tuple((node.name, node.cpus, node.mem_mib, len(node.gpus)) for node in self.nodes), cards

    def gpu_mem_mib(self, mem_mib: int, parts: Iterable[CardShare]) -> int:
        """Node memory that these parts take beyond the `mem_mib` booked beside them.

        A slice takes what it books. A whole card takes all of its memory, which includes what is booked beside it.
        """
        if not self.has_host_memory:
            return 0
        wholes_mib = slices_mib = 0
        for part in parts:
            card = self.cards[part.card]
            if part.is_whole:
                wholes_mib += card.host_mib
            elif card.host_mib:
                slices_mib += part.vram_mib
        return max(0, wholes_mib - mem_mib) + slices_mib

    def slowness(self, booking: AllocationUnits) -> float:
        """How many times as long as at speed 1 a job takes on these GPUs: the slowest holds up the others."""
        if not self.has_speeds:
            return 1.0
        parts = (part for piece in booking.pieces() for part in piece.parts)
        return 1.0 / min((self.cards[part.card].speed for part in parts), default=1.0)

    def node_mem_mib(self, held: Allocation | Placement) -> int:
        """Total that an allocation or placement takes of its first node's memory."""
        booking = self.booking(0, held)
        return held.mem_mib if booking is None else booking.node_mem_mib

    def _part(self, card: int, share: GpuShare) -> CardShare:
        if share.is_whole:
            return CardShare(card, True)
        micros = 0 if share.fraction is None else micros_of(share.fraction)
        vram_mib = share.vram_mib
        if vram_mib is None:
            vram_mib = (self.cards[card].slice_total_mib or 0) * micros // WHOLE_CARD
        return CardShare(card, False, vram_mib, micros)

    def share(self, part: CardShare) -> GpuShare:
        """Convert a part of a booking into the share of a card that a run records."""
        view = self.cards[part.card].view
        if part.is_whole:
            return GpuShare(view.uuid, view.index)
        fraction = part.micros / WHOLE_CARD if part.micros else None
        return GpuShare(view.uuid, view.index, part.vram_mib, fraction)

    def placement(self, booking: AllocationUnits) -> Placement:
        """Convert the booking into a placement as used outside the scheduler."""
        return Placement(
            node=self.nodes[booking.node].name,
            gpus=tuple(self.share(part) for part in booking.parts),
            cpus=booking.millicpus / 1000,
            mem_mib=booking.mem_mib,
            resources=booking.resources,
            licenses=booking.licenses,
            is_exclusive=booking.is_exclusive,
            others=tuple(self.placement(other) for other in booking.others),
        )


def _slice_limit(card: LayoutGpu, headroom_mib: int) -> int:
    """What slices of a card may hold next to foreign use, see `ClusterLayout.slice_limits`."""
    # The headroom is for contexts; use by runs beyond it reduces the room of the next job.
    taken_mib = card.view.foreign_mib + max(0, card.view.over_mib - headroom_mib)
    return -1 if card.slice_total_mib is None else card.slice_total_mib - taken_mib


def differs_in_load_alone(old: NodeView, new: NodeView) -> bool:
    """Whether two views of one node differ in nothing but its measured load and the utilisation of its GPUs."""
    if old.load is None or new.load is None or old.load.mem_total_mib != new.load.mem_total_mib:
        return False
    if len(old.gpus) != len(new.gpus) or replace(old, load=new.load, gpus=new.gpus) != new:
        return False
    return all(
        one is other or replace(one, utilisation=other.utilisation) == other
        for one, other in zip(old.gpus, new.gpus, strict=True)
    )


def _is_same_machine(old: NodeView, new: NodeView) -> bool:
    """Whether two views are of the same machine with the same cards, in the same state of repair."""
    of_old, of_new = ((one.name, one.cpus, one.mem_mib, one.resources, len(one.gpus)) for one in (old, new))
    return of_old == of_new and all(map(_is_same_card, old.gpus, new.gpus))


def _is_same_card(old: GpuView, new: GpuView) -> bool:
    return old is new or (
        (old.uuid, old.index, old.name, old.vram_total_mib) == (new.uuid, new.index, new.name, new.vram_total_mib)
        and (old.has_host_memory, old.mig_profile) == (new.has_host_memory, new.mig_profile)
        and (old.is_present, old.is_divided) == (new.is_present, new.is_divided)
    )


class ClusterState:
    """Free resources, changed by `book` and `release`; both can be rolled back.

    The lists are indexed by node number (cores, memory) and card number (the rest).
    """

    def __init__(self, layout: ClusterLayout, source: ClusterState | None = None) -> None:
        """Args: source: whose bookings it begins with; none by default."""
        self.layout = layout
        self._log: list[tuple[AllocationUnits, int]] = []
        if source is not None:
            self._take_over(source)
            return
        cards = len(layout.cards)
        self.free_millicpus = layout.millicpus.copy()
        self.free_mem_mib = layout.mem_mib.copy()
        self.jobs = [0] * len(layout.nodes)
        """Number of bookings per node."""
        self.exclusive = [0] * len(layout.nodes)
        self.free_resources = [dict(node.resources) for node in layout.nodes]
        self.free_licenses = dict(layout.licenses)
        self.free_cards = [len(cards_of) for cards_of in layout.cards_of]
        """Number of entirely free cards per node."""
        self.shared_cards = [0] * len(layout.nodes)
        """Number of cards with slices per node."""
        self.wholes = [0] * cards
        self.slices = [0] * cards
        self.owner = [-1] * cards
        """User id of the slices on a card; meaningless without slices."""
        self.vram_mib = [0] * cards
        self.micros = [0] * cards

    def _take_over(self, source: ClusterState) -> None:
        self.free_millicpus = source.free_millicpus.copy()
        self.free_mem_mib = source.free_mem_mib.copy()
        self.jobs = source.jobs.copy()
        self.exclusive = source.exclusive.copy()
        self.free_resources = list(map(dict.copy, source.free_resources))
        self.free_licenses = source.free_licenses.copy()
        self.free_cards = source.free_cards.copy()
        self.shared_cards = source.shared_cards.copy()
        self.wholes = source.wholes.copy()
        self.slices = source.slices.copy()
        self.owner = source.owner.copy()
        self.vram_mib = source.vram_mib.copy()
        self.micros = source.micros.copy()

    def copy(self) -> ClusterState:
        """An independent draft with the same bookings and an empty log."""
        return ClusterState(self.layout, self)

    def limit_to(self, *others: ClusterState) -> None:
        """Reduce free resources to those free in all; for look-ups only, since it is not logged."""
        if not others:
            return
        # All at once: there may be dozens of reservations, and thousands of cards.
        self.free_millicpus = list(map(min, self.free_millicpus, *(other.free_millicpus for other in others)))
        self.free_mem_mib = list(map(min, self.free_mem_mib, *(other.free_mem_mib for other in others)))
        self.jobs = list(map(max, self.jobs, *(other.jobs for other in others)))
        self.exclusive = list(map(max, self.exclusive, *(other.exclusive for other in others)))
        self.wholes = list(map(max, self.wholes, *(other.wholes for other in others)))
        for other in others:
            if any(other.free_resources):
                for free, theirs in zip(self.free_resources, other.free_resources, strict=True):
                    _limit_counts(free, theirs)
            _limit_counts(self.free_licenses, other.free_licenses)
            if any(other.shared_cards):
                self._limit_slices(other)
        self.count_cards()

    def _limit_slices(self, other: ClusterState) -> None:
        for card, count in enumerate(other.slices):
            if not count:
                continue
            if not self.slices[card]:
                self.owner[card] = other.owner[card]
            elif self.owner[card] != other.owner[card]:
                # Slices of different users at the two instants: neither user has room throughout.
                self.wholes[card] = 1
            self.slices[card] = max(self.slices[card], count)
            self.vram_mib[card] = max(self.vram_mib[card], other.vram_mib[card])
            self.micros[card] = max(self.micros[card], other.micros[card])

    def count_cards(self) -> None:
        """Recount `free_cards` and `shared_cards` after cards were changed by other means than a booking."""
        first, has_slices = 0, any(self.slices)
        for node, cards in enumerate(self.layout.cards_of):
            last = first + len(cards)
            if not has_slices:
                self.free_cards[node], self.shared_cards[node] = self.wholes[first:last].count(0), 0
                first = last
                continue
            wholes, slices = self.wholes[first:last], self.slices[first:last]
            if any(slices):
                self.free_cards[node] = sum(not (whole or count) for whole, count in zip(wholes, slices, strict=True))
                self.shared_cards[node] = len(slices) - slices.count(0)
            else:
                self.free_cards[node], self.shared_cards[node] = wholes.count(0), 0
            first = last

    def book(self, booking: AllocationUnits) -> None:
        """Subtract the booking, whether or not it is free."""
        self.take(booking)
        self._log.append((booking, 1))

    def release(self, booking: AllocationUnits) -> None:
        self.take(booking, -1)
        self._log.append((booking, -1))

    def give_back(self, booking: AllocationUnits) -> None:
        """Release permanently, outside of the rollback log."""
        self.take(booking, -1)

    def checkpoint(self) -> int:
        """Return a mark for `rollback`."""
        return len(self._log)

    def settle(self) -> None:
        """Clear the log: nothing earlier can be rolled back."""
        self._log.clear()

    def rollback(self, mark: int) -> None:
        """Undo everything since the mark, without trace."""
        log = self._log
        while len(log) > mark:
            booking, sign = log.pop()
            self.take(booking, -sign)

    def take(self, booking: AllocationUnits, sign: int = 1) -> None:
        """Book permanently, outside of the rollback log. Args: sign: -1 releases it."""
        node = booking.node
        self.free_millicpus[node] -= sign * booking.millicpus
        self.free_mem_mib[node] -= sign * (booking.mem_mib + booking.gpu_mem_mib)
        self.jobs[node] += sign
        if booking.is_exclusive:
            self.exclusive[node] += sign
        if booking.resources or booking.licenses:
            self._count(booking, sign)
        for other in booking.others:
            self.take(other, sign)
        if booking.parts:
            self._apply_parts(booking, sign)

    def _count(self, booking: AllocationUnits, sign: int) -> None:
        free = self.free_resources[booking.node]
        for name, count in booking.resources:
            free[name] = free.get(name, 0) - sign * count
        for name, count in booking.licenses:
            self.free_licenses[name] = self.free_licenses.get(name, 0) - sign * count

    def _apply_parts(self, booking: AllocationUnits, sign: int) -> None:
        node, wholes, slices, changed = booking.node, self.wholes, self.slices, 0
        for part in booking.parts:
            card = part.card
            if part.is_whole:
                before = wholes[card]
                wholes[card] = after = before + sign
                if not (before and after) and not slices[card]:
                    changed += 1
                continue
            before = slices[card]
            if not before:
                self.owner[card] = booking.uid
            slices[card] = after = before + sign
            if not (before and after):
                self.shared_cards[node] += sign
                if not wholes[card]:
                    changed += 1
            self.vram_mib[card] += sign * part.vram_mib
            self.micros[card] += sign * part.micros
        self.free_cards[node] -= sign * changed

    def is_unbooked(self, card: int) -> bool:
        """Whether no job holds any part of the card."""
        return not (self.wholes[card] or self.slices[card])

    def has_room(self, booking: AllocationUnits) -> bool:
        """Whether the booking could be added without overbooking anything."""
        node = booking.node
        if booking.millicpus and booking.millicpus > self.free_millicpus[node]:
            return False
        mem_mib = booking.mem_mib + booking.gpu_mem_mib
        if mem_mib and mem_mib > self.free_mem_mib[node]:
            return False
        if self.exclusive[node] or (booking.is_exclusive and self.jobs[node]):
            return False
        if booking.resources and not has_counts(self.free_resources[node], booking.resources):
            return False
        if booking.licenses and not has_counts(self.free_licenses, booking.licenses):
            return False
        for part in booking.parts:
            if not self.has_room_for(part, booking.uid):
                return False
        # The pieces of a gang are on different nodes, so none takes the room of another.
        return not booking.others or all(self.has_room(other) for other in booking.others)

    def has_room_for(self, part: CardShare, uid: int) -> bool:
        """Whether this user could book this part of a card without overbooking it."""
        card = part.card
        if part.is_whole:
            return self.is_unbooked(card)
        return (
            not self.wholes[card]
            and (not self.slices[card] or self.owner[card] == uid)
            and self.vram_mib[card] + part.vram_mib <= self.layout.slice_limits[card]
            and self.micros[card] + part.micros <= WHOLE_CARD
        )


def has_counts(free: dict[str, int], wanted: Counts) -> bool:
    return all(count <= free.get(name, 0) for name, count in wanted)


def _limit_counts(free: dict[str, int], other: dict[str, int]) -> None:
    for name, count in other.items():
        free[name] = min(free.get(name, 0), count)
