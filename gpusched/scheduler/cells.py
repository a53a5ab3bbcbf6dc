"""Guarantees of whole groups of linked cards, held so that they can be granted at any time.

A cell is a number of cards of one group: cards that are linked with each other, or, on a node without links,
that are next to the same memory. A preemptible job never keeps a queue from its cells. Any other job
is denied a placement that would leave no way to give every queue all of its cells at once: on cards that are
free, that hold preemptible jobs, or that hold jobs of the same queue.

A group gives each queue the greater of the cards that its jobs hold there and the cells assigned to it
there; the sum must not exceed the cards of the group. Since cards of a group are interchangeable, a
group of eight serves two cells of four, or one of four and two of two.

Source: Zhao et al., HiveD: Sharing a GPU Cluster for Deep Learning with Guarantees (OSDI 2020). There a cell
belongs to a level of a tree of links; here there are two levels, the card and the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpusched.model.queue_settings import QueueSettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey
from gpusched.model.states import ReasonCode
from gpusched.model.units import is_digits
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout, LayoutGpu
from gpusched.scheduler.placement import PlacementVeto
from gpusched.scheduler.plugins import Extensions
from gpusched.scheduler.quota import Quotas

if TYPE_CHECKING:
    from gpusched.scheduler.preemption import Held


_MOST_STEPS = 5000
"""Step limit of one search for an assignment of all cells; beyond it the search counts as failed."""

NOBODY = ""
"""Placeholder for a queue without cells, or for several queues on one card."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A promise to one queue: a number of linked cards, on a given node or on any."""

    queue: str
    size: int
    node: str | None = None

    @property
    def text(self) -> str:
        """The cell as written in the settings."""
        return str(self.size) if self.node is None else f"{self.node}:{self.size}"


def hardest_first(cell: Cell) -> tuple[bool, int, str, str]:
    """Sort key: cells bound to a node first, then the largest."""
    return cell.node is None, -cell.size, cell.queue, cell.node or ""


# --- groups -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CardGroup:
    """Cards of one node that are linked with each other; a single card is a group too."""

    node: str
    cards: frozenset[int]


def groups_of(layout: ClusterLayout, *, as_built: bool = False) -> tuple[CardGroup, ...]:
    """Groups of all cards that can be allocated now, or of all cards present.

    On a node without links the cards next to the same memory form a group; if that is unknown, all cards do.
    """
    groups = []
    for node, cards in zip(layout.nodes, layout.cards_of, strict=True):
        found: dict[object, list[int]] = {}
        for card, bond in zip(cards, _bonds(cards), strict=True):
            if (
                card.view.is_present
                and card.view.mig_profile is None
                and (as_built or _is_usable(card, node.why_not or node.gpu_error))
            ):
                found.setdefault(bond, []).append(card.number)
        groups += [CardGroup(node.name, frozenset(numbers)) for numbers in found.values()]
    return tuple(groups)


def _is_usable(card: LayoutGpu, node_why_not: str | None) -> bool:
    return node_why_not is None and card.view.why_not is None and card.view.why_not_whole is None


def _bonds(cards: Sequence[LayoutGpu]) -> list[object]:
    """Keys that are equal for cards of the same group, by card of one node."""
    marks = [card.view.link_group for card in cards]
    if all(mark is None for mark in marks):
        marks = [card.view.numa for card in cards]
    if all(mark is None for mark in marks):
        return [None] * len(cards)
    return [("card", card.number) if mark is None else mark for card, mark in zip(cards, marks, strict=True)]


# --- whether all cells can be given -----------------------------------------------------------------


class _Search:
    """Exact search, with a step limit, for an assignment of cells, with the queues' own jobs where they are."""

    def __init__(self, groups: Sequence[CardGroup], users: Mapping[int, str]) -> None:
        self._nodes = [group.node for group in groups]
        held = [Counter(users[card] for card in group.cards if card in users) for group in groups]
        self._room = [len(group.cards) - counts.total() for group, counts in zip(groups, held, strict=True)]
        """Cards that are in no cell and not held by a non-removable job."""
        self._own = [{queue: counts[queue] for queue in counts if queue != NOBODY} for counts in held]
        """Cards that a queue's jobs hold and that are not assigned to its cells yet."""
        self._steps = 0

    def can_give_all(self, cells: Sequence[Cell]) -> bool:
        self._steps = 0
        return self._give(cells, 0)

    def _give(self, cells: Sequence[Cell], at: int) -> bool:
        if at == len(cells):
            return True
        cell = cells[at]
        for _, _, number in self._choices(cell):
            self._steps += 1
            if self._steps > _MOST_STEPS:
                return False
            own, room = self._own[number], self._room[number]
            before = own.get(cell.queue, 0)
            taken = max(0, cell.size - before)
            own[cell.queue], self._room[number] = max(0, before - cell.size), room - taken
            if self._give(cells, at + 1):
                return True
            own[cell.queue], self._room[number] = before, room
        return False

    def _choices(self, cell: Cell) -> list[tuple[int, int, int]]:
        """Groups with room: first those that hold jobs of the queue, then the tightest; equivalent groups only once."""
        seen = set()
        choices = []
        for number, node in enumerate(self._nodes):
            own = self._own[number]
            taken = max(0, cell.size - own.get(cell.queue, 0))
            if taken > self._room[number] or cell.node not in (None, node):
                continue
            mark = (node, self._room[number], tuple(sorted((queue, cards) for queue, cards in own.items() if cards)))
            if mark not in seen:
                seen.add(mark)
                choices.append((taken, self._room[number] - taken, number))
        return sorted(choices)


def can_give(groups: Sequence[CardGroup], users: Mapping[int, str], cells: Sequence[Cell]) -> bool:
    """Whether all cells can be granted at once. Args: users: per card held by a non-preemptible job, its queue."""
    return _Search(groups, users).can_give_all(cells)


def givable(groups: Sequence[CardGroup], users: Mapping[int, str], cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """All cells, or as many as can be granted, hardest first."""
    if can_give(groups, users, cells):
        return tuple(cells)
    kept: list[Cell] = []
    for cell in cells:
        if can_give(groups, users, [*kept, cell]):
            kept.append(cell)
    return tuple(kept)


def read_cell(queue: str, text: str) -> Cell:
    """Parse a cell, `4` or `n1:4`. Raises: ValueError with a sentence."""
    node, colon, size = text.strip().rpartition(":")
    if not is_digits(size) or not 1 <= int(size[:6]) <= 1024 or (colon and not node):
        raise ValueError(f"{text!r} is not a group of GPUs; write 4, or n1:4 for one on node n1")
    return Cell(queue, int(size), node or None)


def cells_of(queues: Mapping[str, QueueSettings]) -> tuple[Cell, ...]:
    """All promised cells, largest first; unparsable ones are skipped.

    A queue's cell is part of its parent's promise, as far as the parent has matching cells.
    """
    found: list[Cell] = []
    for name in sorted(queues):
        below = Counter(text for queue in queues.values() if queue.parent == name for text in queue.cells)
        for text in (Counter(queues[name].cells) - below).elements():
            try:
                found.append(read_cell(name, text))
            except ValueError:
                continue
    return tuple(sorted(found, key=hardest_first))


# --- the guard ----------------------------------------------------------------------------------


class CellVeto:
    """Guards the cells during one cycle; it must see every start and end.

    Args: held: the running jobs as queue, booking and whether the job is removable (on borrowed cards and
    preemptible).

    If not all promises can be kept even now (lost cards, new settings), it guards those that can.
    """

    def __init__(
        self, layout: ClusterLayout, settings: Settings, held: Iterable[tuple[str, AllocationUnits, bool]]
    ) -> None:
        self._settings = settings
        self._cells = cells_of(settings.queue)
        self._groups = groups_of(layout) if self._cells else ()
        self._owners: dict[str, str] = {}
        self._holders: dict[int, Counter[str]] = {}
        """Per card, the queues with cells that hold it non-removably, and in how many jobs."""
        self._promised: tuple[Cell, ...] | None = None
        self._known: dict[tuple[str, frozenset[int]], str | None] = {}
        for queue, booking, is_removable in held:
            self.add(queue, booking, is_removable)

    @property
    def is_needed(self) -> bool:
        return bool(self._cells)

    def add(self, queue: str, booking: AllocationUnits, is_removable: bool) -> None:
        self._count(queue, booking, is_removable, 1)

    def remove(self, queue: str, booking: AllocationUnits, is_removable: bool) -> None:
        """Record that a job ends or is preempted."""
        self._count(queue, booking, is_removable, -1)

    def _count(self, queue: str, booking: AllocationUnits, is_removable: bool, sign: int) -> None:
        cards = () if is_removable or not self._cells else _cards(booking)
        for card in cards:
            holders = self._holders.setdefault(card, Counter())
            holders[self._owner(queue)] += sign
            if not +holders:
                del self._holders[card]
        if cards:
            self._promised = None
            self._known.clear()

    def veto_for(self, queue: str, amount_is_borrowed: bool, can_requeue: bool) -> PlacementVeto:
        """The veto for a job of this queue, valid until the next `add` or `remove`.

        Args: amount_is_borrowed: with it the queue holds more than it is guaranteed; can_requeue: the job accepts
        preemption.
        """
        known = self._settings.queue.get(queue)
        is_removable = amount_is_borrowed and can_requeue and (known is None or known.preemptible)
        return _Claim(self, None if is_removable or not self._cells else queue)

    def avoid(self, queue: str) -> frozenset[int]:
        """Cards that a non-removable job of this queue could not be given even singly."""
        avoided: set[int] = set()
        if self._cells:
            for group in self._groups:
                free = group.cards.difference(self._holders)
                if free and self.why_not(queue, frozenset((min(free),))) is not None:
                    avoided |= free
        return frozenset(avoided)

    def why_not(self, queue: str, cards: frozenset[int]) -> str | None:
        """Sentence if a non-removable job of this queue may not have these cards."""
        mark = (self._owner(queue), cards)
        if cards and mark not in self._known:
            self._known[mark] = self._look(*mark)
        return self._known.get(mark)

    def _look(self, owner: str, cards: frozenset[int]) -> str | None:
        if self._promised is None:
            self._promised = givable(self._groups, self._users(), self._cells)
        users = self._users(owner, cards)
        if can_give(self._groups, users, self._promised):
            return None
        left = Counter(self._promised) - Counter(givable(self._groups, users, self._promised))
        # Prefer naming another queue's promise.
        lost = min(left, key=lambda cell: (cell.queue == owner, hardest_first(cell)), default=None)
        if lost is None:
            return "its GPUs are linked with others that a queue is promised together"
        where = "" if lost.node is None else f" on {lost.node}"
        gpus = "1 GPU" if lost.size == 1 else f"{lost.size} linked GPUs"
        return f"queue {lost.queue} is promised {gpus}{where} and could no longer get them"

    def _users(self, owner: str = NOBODY, more: frozenset[int] = frozenset()) -> dict[int, str]:
        users = {}
        for card in self._holders.keys() | more:
            queues = set(self._holders.get(card, ()))
            if card in more:
                queues.add(owner)
            users[card] = queues.pop() if len(queues) == 1 else NOBODY
        return users

    def _owner(self, queue: str) -> str:
        """Queue that the job's cards count towards: its own or the nearest ancestor with cells."""
        known = self._owners.get(queue)
        if known is None:
            known = self._owners[queue] = _owner(queue, self._settings.queue, {cell.queue for cell in self._cells})
        return known


@dataclass(frozen=True, slots=True)
class _Claim:
    """The veto for one kind of job; without a queue it admits everything."""

    cells: CellVeto
    queue: str | None

    def why_not(self, booking: AllocationUnits) -> str | None:
        return None if self.queue is None else self.cells.why_not(self.queue, frozenset(_cards(booking)))


def _cards(booking: AllocationUnits) -> tuple[int, ...]:
    return tuple({part.card for piece in booking.pieces() for part in piece.parts})


def _owner(queue: str, queues: Mapping[str, QueueSettings], with_cells: set[str]) -> str:
    passed: set[str] = set()
    at: str | None = queue
    while at is not None and at not in passed:
        if at in with_cells:
            return at
        passed.add(at)
        at = queues[at].parent if at in queues else None
    return NOBODY


# --- settings -----------------------------------------------------------------------------------


def cell_problems(settings: Settings, layout: ClusterLayout | None = None) -> list[tuple[str, str]]:
    """Setting and sentence for each malformed cell, each that no machine has, and for too many of them."""
    found: list[tuple[str, str]] = []
    for name in sorted(settings.queue):
        for text in settings.queue[name].cells:
            try:
                cell = read_cell(name, text)
            except ValueError as error:
                found.append((f"queue.{name}.cells", str(error)))
            else:
                if layout is not None and (problem := _not_there(cell, layout)) is not None:
                    found.append((f"queue.{name}.cells", problem))
    cells = cells_of(settings.queue)
    if layout is not None and not found:
        groups = groups_of(layout, as_built=True)
        left = Counter(cells) - Counter(givable(groups, {}, cells))
        for cell in sorted(left.elements(), key=hardest_first):
            text = f"the group {cell.text} of queue {cell.queue} is not available beside all other promised groups"
            found.append((f"queue.{cell.queue}.cells", text))
    return found


def _not_there(cell: Cell, layout: ClusterLayout) -> str | None:
    if cell.node is not None and layout.node_number(cell.node) is None:
        names = ", ".join(node.name for node in layout.nodes)
        return f"{cell.text!r} names node {cell.node}, which is not one of {names}"
    there = [group for group in groups_of(layout, as_built=True) if cell.node in (None, group.node)]
    most = max((len(group.cards) for group in there), default=0)
    if cell.size <= most:
        return None
    where = "any node" if cell.node is None else cell.node
    return f"{cell.text!r} asks for {cell.size} linked GPUs, and {where} has at most {most}"


_NO_CARDS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _NodeFilter:
    """Plug-ins that filter the nodes of a placement before `then` does."""

    extensions: Extensions
    key: ClassKey
    layout: ClusterLayout
    then: PlacementVeto | None

    def why_not(self, booking: AllocationUnits) -> str | None:
        for piece in booking.pieces():
            text = self.extensions.why_not_node(self.key, self.layout.nodes[piece.node])
            if text is not None:
                return text
        return None if self.then is None else self.then.why_not(booking)


class PlacementVetoes:
    """Creates the veto of each class; nearly always None."""

    def __init__(
        self,
        layout: ClusterLayout,
        settings: Settings,
        held: Iterable[Held],
        quotas: Quotas,
        extensions: Extensions,
    ) -> None:
        self._layout = layout
        self._settings = settings
        self._quotas = quotas
        self._extensions = extensions
        self._can_take_back = settings.preempt.mode != "off" and settings.preempt.reclaim
        self._cells: CellVeto | None = None
        if any(queue.cells for queue in settings.queue.values()):
            self._cells = CellVeto(layout, settings, self._running(held))

    def _running(self, held: Iterable[Held]) -> Iterator[tuple[str, AllocationUnits, bool]]:
        """Running jobs and whether they are removable: a queue's oldest use its guarantee, the rest has borrowed."""
        quotas = Quotas(self._settings, self._layout)
        for one in sorted(held, key=lambda one: (one.first.start_at, one.first.job_id)):
            first = one.first
            gives_way = first.is_filler or self._gives_way(first.terms.queue, one.amount, quotas)
            quotas.add(first.terms, one.amount, is_filler=first.is_filler)
            for booking in one.bookings:
                yield first.terms.queue, booking, gives_way

    def _gives_way(self, queue: str, amount: Resources, quotas: Quotas) -> bool:
        """Whether a job with this additional amount is on borrowed cards and preemptible."""
        known = self._settings.queue.get(queue)
        is_preemptible = self._can_take_back and (known is None or known.preemptible)
        return is_preemptible and not quotas.is_within_guarantee(queue, amount)

    def of(self, key: ClassKey, amount: Resources) -> PlacementVeto | None:
        guard: PlacementVeto | None = None
        if self._cells is not None and key.terms.request.gpus:
            guard = self._cells.veto_for(key.terms.queue, self._gives_way(key.terms.queue, amount, self._quotas), True)
        if self._extensions.filters:
            guard = _NodeFilter(self._extensions, key, self._layout, guard)
        return guard

    def reason(self) -> ReasonCode:
        """Reason code for placements that a veto denies."""
        return ReasonCode.PLUGIN if self._cells is None else ReasonCode.QUEUE_GUARANTEE

    def avoid(self, key: ClassKey, amount: Resources) -> frozenset[int]:
        """Cards that this class should avoid."""
        if self._cells is None or self._gives_way(key.terms.queue, amount, self._quotas):
            return _NO_CARDS
        return self._cells.avoid(key.terms.queue)

    def started(self, key: ClassKey, booking: AllocationUnits, amount: Resources) -> None:
        """Count a job that starts in this cycle; the quotas do not include it yet."""
        if self._cells is not None:
            self._cells.add(key.terms.queue, booking, self._gives_way(key.terms.queue, amount, self._quotas))
