"""Guarantees of whole groups of linked cards, kept so that they can be granted whenever they are wanted.

A cell is a number of cards of one group: cards that are linked with each other, or, on a node without links,
that are next to the same memory. A job that could be made to give way never stands between a queue and its
cells. Any other job is turned away from a place if, with it there, no way would be left to give every queue all
of its cells at once: on cards that are free, that hold jobs which can be made to give way, or that jobs of the
same queue hold already.

A group gives each queue what is the more, the cards that its jobs hold there or the cells that it is to have
there; all of this together must be no more than the cards of the group. Since cards of a group are alike, a
group of eight serves two cells of four, or one of four and two of two.

Source: Zhao et al., HiveD: Sharing a GPU Cluster for Deep Learning with Guarantees (OSDI 2020). There a cell
is of a level of a tree of links; here there are two levels, the card and the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpusched.model.settings import QueueSettings, Settings
from gpusched.scheduler.cell_search import NOBODY, Cell, can_give, givable, groups_of, hardest_first
from gpusched.scheduler.draft import Booking, Layout
from gpusched.scheduler.placement import Guard


def read_cell(queue: str, text: str) -> Cell:
    """The cell in `4` or `n1:4`. Raises: ValueError with a sentence."""
    node, colon, size = text.strip().rpartition(":")
    if not (size.isascii() and size.isdigit()) or not 1 <= int(size[:6]) <= 1024 or (colon and not node):
        raise ValueError(f"{text!r} is no group of GPUs; write 4, or n1:4 for one on node n1")
    return Cell(queue, int(size), node or None)


def cells_of(queues: Mapping[str, QueueSettings]) -> tuple[Cell, ...]:
    """All cells that are promised, the largest first; what cannot be read is left out.

    What is promised to a queue is in the promise of the queue above it, as far as that has the like.
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


class CellGuard:
    """Keeps the cells of one cycle; it has to be told of every start and end in it.

    Args: held: the running jobs as queue, booking and whether the job can be made to give way (it is on
    borrowed cards and may be preempted).

    Where not all promises can be kept even now (cards are lost, the settings are new), those that can are.
    """

    def __init__(self, layout: Layout, settings: Settings, held: Iterable[tuple[str, Booking, bool]]) -> None:
        self._settings = settings
        self._cells = cells_of(settings.queue)
        self._groups = groups_of(layout) if self._cells else ()
        self._owners: dict[str, str] = {}
        self._holders: dict[int, Counter[str]] = {}
        """Per card, the queues with cells whose jobs hold it for good, and in how many jobs."""
        self._promised: tuple[Cell, ...] | None = None
        self._known: dict[tuple[str, frozenset[int]], str | None] = {}
        for queue, booking, is_removable in held:
            self.add(queue, booking, is_removable)

    @property
    def is_needed(self) -> bool:
        """Whether any queue is promised cells."""
        return bool(self._cells)

    def add(self, queue: str, booking: Booking, is_removable: bool) -> None:
        """A job starts."""
        self._count(queue, booking, is_removable, 1)

    def remove(self, queue: str, booking: Booking, is_removable: bool) -> None:
        """A job ends, or is made to."""
        self._count(queue, booking, is_removable, -1)

    def _count(self, queue: str, booking: Booking, is_removable: bool, sign: int) -> None:
        cards = () if is_removable or not self._cells else _cards(booking)
        for card in cards:
            holders = self._holders.setdefault(card, Counter())
            holders[self._owner(queue)] += sign
            if not +holders:
                del self._holders[card]
        if cards:
            self._promised = None
            self._known.clear()

    def guard_for(self, queue: str, amount_is_borrowed: bool, can_requeue: bool) -> Guard:
        """The guard of a job of this queue, good until the next `add` or `remove`.

        Args: amount_is_borrowed: with it the queue holds more than it is guaranteed; can_requeue: it accepts to
        be preempted.
        """
        known = self._settings.queue.get(queue)
        is_removable = amount_is_borrowed and can_requeue and (known is None or known.preemptible)
        return _Claim(self, None if is_removable or not self._cells else queue)

    def avoid(self, queue: str) -> frozenset[int]:
        """Cards of which a job of this queue that cannot be made to give way could not have even one."""
        avoided: set[int] = set()
        if self._cells:
            for group in self._groups:
                free = group.cards - self._holders.keys()
                if free and self.why_not(queue, frozenset((min(free),))) is not None:
                    avoided |= free
        return frozenset(avoided)

    def why_not(self, queue: str, cards: frozenset[int]) -> str | None:
        """A sentence when a job of this queue that cannot be made to give way may not have these cards."""
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
        # A promise to others is the better reason.
        lost = min(left, key=lambda cell: (cell.queue == owner, hardest_first(cell)), default=None)
        if lost is None:
            return "its GPUs are linked with others that are promised together"
        where = "" if lost.node is None else f" on {lost.node}"
        gpus = "1 GPU" if lost.size == 1 else f"{lost.size} linked GPUs"
        return f"queue {lost.queue} is promised {gpus}{where} and could not have them any more"

    def _users(self, owner: str = NOBODY, more: frozenset[int] = frozenset()) -> dict[int, str]:
        users = {}
        for card in self._holders.keys() | more:
            queues = set(self._holders.get(card, ()))
            if card in more:
                queues.add(owner)
            users[card] = queues.pop() if len(queues) == 1 else NOBODY
        return users

    def _owner(self, queue: str) -> str:
        """The queue that a job's cards are counted to: its own or the next one above it that has cells."""
        known = self._owners.get(queue)
        if known is None:
            known = self._owners[queue] = _owner(queue, self._settings.queue, {cell.queue for cell in self._cells})
        return known


@dataclass(frozen=True, slots=True)
class _Claim:
    """The guard of one kind of job; without a queue it lets everything pass."""

    cells: CellGuard
    queue: str | None

    def why_not(self, booking: Booking) -> str | None:
        return None if self.queue is None else self.cells.why_not(self.queue, frozenset(_cards(booking)))


def _cards(booking: Booking) -> tuple[int, ...]:
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


def problems(settings: Settings, layout: Layout | None = None) -> list[tuple[str, str]]:
    """Setting and sentence for each cell that is not one or that no machine has, and for too many of them."""
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
            text = f"the group {cell.text} of queue {cell.queue} is not there beside all others that are promised"
            found.append((f"queue.{cell.queue}.cells", text))
    return found


def _not_there(cell: Cell, layout: Layout) -> str | None:
    if cell.node is not None and layout.node_number(cell.node) is None:
        names = ", ".join(node.name for node in layout.nodes)
        return f"{cell.text!r} is of node {cell.node}, which is none of {names}"
    there = [group for group in groups_of(layout, as_built=True) if cell.node in (None, group.node)]
    most = max((len(group.cards) for group in there), default=0)
    if cell.size <= most:
        return None
    where = "any node" if cell.node is None else cell.node
    return f"{cell.text!r} is of {cell.size} linked GPUs, and {where} has at most {most}"
