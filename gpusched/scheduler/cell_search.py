"""Whether groups of linked cards that are promised can all be given at once: an exact search, with a limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpusched.scheduler.draft import Card, Layout

_MOST_STEPS = 5000
"""Steps of one search for a way to give all cells; after them there is taken to be none."""

NOBODY = ""
"""In the place of a queue without cells, or of several queues on one card."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A promise to one queue: so many linked cards, on this node or on any."""

    queue: str
    size: int
    node: str | None = None

    @property
    def text(self) -> str:
        """As the settings say it."""
        return str(self.size) if self.node is None else f"{self.node}:{self.size}"


def hardest_first(cell: Cell) -> tuple[bool, int, str, str]:
    """Sort key: cells of a node first, then the largest."""
    return cell.node is None, -cell.size, cell.queue, cell.node or ""


# --- groups -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """Cards of one node that are linked with each other; one alone is a group too."""

    node: str
    cards: frozenset[int]


def groups_of(layout: Layout, *, as_built: bool = False) -> tuple[Group, ...]:
    """The groups of all cards that can be given to a job now, or that are there at all.

    On a node without links the cards next to the same memory are a group; where nobody knows that, all are.
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
        groups += [Group(node.name, frozenset(numbers)) for numbers in found.values()]
    return tuple(groups)


def _is_usable(card: Card, node_why_not: str | None) -> bool:
    return node_why_not is None and card.view.why_not is None and card.view.why_not_whole is None


def _bonds(cards: Sequence[Card]) -> list[object]:
    """Equal for cards of one node that are of one group."""
    marks = [card.view.link_group for card in cards]
    if all(mark is None for mark in marks):
        marks = [card.view.numa for card in cards]
    if all(mark is None for mark in marks):
        return [None] * len(cards)
    return [("card", card.number) if mark is None else mark for card, mark in zip(cards, marks, strict=True)]


# --- whether all cells can be given -----------------------------------------------------------------


class _Search:
    """Looks for a way to give cells, with the queues' own jobs where they are."""

    def __init__(self, groups: Sequence[Group], users: Mapping[int, str]) -> None:
        self._nodes = [group.node for group in groups]
        held = [Counter(users[card] for card in group.cards if card in users) for group in groups]
        self._room = [len(group.cards) - counts.total() for group, counts in zip(groups, held, strict=True)]
        """Cards that nobody holds for good and no cell has."""
        self._own = [{queue: counts[queue] for queue in counts if queue != NOBODY} for counts in held]
        """Cards that a queue's jobs hold and that are in none of its cells yet."""
        self._steps = 0

    def can_give_all(self, cells: Sequence[Cell]) -> bool:
        """Whether all of them can be given at once."""
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
        """Groups with room, those first where the queue's own jobs are, then the tightest; like ones once."""
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


def can_give(groups: Sequence[Group], users: Mapping[int, str], cells: Sequence[Cell]) -> bool:
    """Whether all cells can be given at once. Args: users: per card that is held for good, the queue that holds it."""
    return _Search(groups, users).can_give_all(cells)


def givable(groups: Sequence[Group], users: Mapping[int, str], cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """All cells, or as many as can be given, those that are hard to give first."""
    if can_give(groups, users, cells):
        return tuple(cells)
    kept: list[Cell] = []
    for cell in cells:
        if can_give(groups, users, [*kept, cell]):
            kept.append(cell)
    return tuple(kept)
