"""Where every job of a schedule ran, from when until when, in a few dozen bytes each.

All that depends on time (fragments, shares, balance, what Gantt shows) is worked out of it afterwards, in one walk over
`moments`, so that a simulation that nobody wants to look into pays nothing for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpusched.errors import BrokenInvariant
from gpusched.model.cluster import NodeView
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement
from gpusched.policy.amounts import WHOLE_CARD
from gpusched.policy.draft import Booking, Layout, Part
from gpusched.simulate.trace import TraceJob

COMPLETED = "completed"


@dataclass(frozen=True, slots=True)
class Moment:
    """All that happens at one instant, in the order in which it counts. Numbers are of runs, or of jobs."""

    at: int
    ended: Sequence[int]
    """Runs."""
    arrived: Sequence[int]
    """Jobs."""
    began: Sequence[int]
    """Runs."""


class Timeline:
    """The runs of a schedule, in the order in which they were added.

    A run is a job's number in the schedule, begin and end in seconds, how it ended (a state in small letters) and what
    it held.
    """

    __slots__ = (
        "_booked",
        "_cards",
        "_first",
        "_how",
        "_known",
        "_nodes",
        "_words",
        "begin_s",
        "end_s",
        "job",
        "layout",
    )

    def __init__(self, nodes: Iterable[NodeView], settings: Settings | None = None) -> None:
        self.layout = Layout(nodes, settings or Settings())
        """The machines; numbers of nodes and cards are those in it."""
        self.job = array("q")
        self.begin_s = array("q")
        self.end_s = array("q")
        self._how = bytearray()
        self._words: list[str] = [COMPLETED]
        self._first = array("q")
        """Per run, where in `_booked` what it held begins."""
        self._booked = array("q")
        """One after the other: how many nodes, and of each its number, cores in thousandths, memory in MiB, how many
        cards, and of each its number, VRAM in MiB and millionths (0 and 0: all of it)."""
        self._known: dict[bytes, int] = {}
        """What was held before, and where in `_booked` that is."""
        self._nodes = {node.name: number for number, node in enumerate(self.layout.nodes)}
        self._cards = {
            (number, card.view.uuid): card.number for number, cards in enumerate(self.layout.cards_of) for card in cards
        }

    def __len__(self) -> int:
        return len(self.job)

    def add(self, job: int, begin_s: int, end_s: int, placement: Placement, how: str = COMPLETED) -> None:
        """Put down one run.

        Raises: BrokenInvariant for one that ends before it begins, or on a node that is not there.
        """
        if end_s < begin_s:
            raise BrokenInvariant(f"a run of job {job} ends at {end_s}, before it begins at {begin_s}")
        if how not in self._words:
            self._words.append(how)
        self.job.append(job)
        self.begin_s.append(begin_s)
        self.end_s.append(end_s)
        self._how.append(self._words.index(how))
        self._first.append(self._place_of(placement))

    def how(self, run: int) -> str:
        """How a run ended."""
        return self._words[self._how[run]]

    def booking(self, run: int, uid: int = 0) -> Booking:
        """What a run held; further nodes of a gang are its `others`."""
        booked, at = self._booked, self._first[run]
        count = booked[at]
        at += 1
        pieces = []
        for _ in range(count):
            node, millicpus, mem_mib, cards = booked[at : at + 4]
            at += 4
            parts = []
            for place in range(at, at + 3 * cards, 3):
                card, vram_mib, micros = booked[place : place + 3]
                parts.append(Part(card, not (vram_mib or micros), vram_mib, micros))
            at += 3 * cards
            pieces.append(Booking(node, uid, millicpus, mem_mib, tuple(parts)))
        first = pieces[0]
        if count == 1:
            return first
        return Booking(first.node, uid, first.millicpus, first.mem_mib, first.parts, others=tuple(pieces[1:]))

    def moments(self, jobs: Sequence[TraceJob]) -> Iterator[Moment]:
        """The instants of the schedule in order; at each first what ends, then what arrives, then what begins.

        A run that takes no time ends in a second moment of its instant.
        """
        begins = sorted(range(len(self)), key=self.begin_s.__getitem__)
        ends = sorted(range(len(self)), key=lambda run: (self.end_s[run], self.begin_s[run]))
        arrivals = sorted(range(len(jobs)), key=lambda number: jobs[number].submit_s)
        has_begun = bytearray(len(self))
        ending = coming = beginning = 0
        while ending < len(ends):
            at = self.end_s[ends[ending]]
            if coming < len(arrivals):
                at = min(at, jobs[arrivals[coming]].submit_s)
            if beginning < len(begins):
                at = min(at, self.begin_s[begins[beginning]])
            first = ending
            while ending < len(ends) and self.end_s[ends[ending]] == at and has_begun[ends[ending]]:
                ending += 1
            ended, first = ends[first:ending], coming
            while coming < len(arrivals) and jobs[arrivals[coming]].submit_s == at:
                coming += 1
            arrived, first = arrivals[first:coming], beginning
            while beginning < len(begins) and self.begin_s[begins[beginning]] == at:
                has_begun[begins[beginning]] = 1
                beginning += 1
            yield Moment(at, ended, arrived, begins[first:beginning])

    def _place_of(self, placement: Placement) -> int:
        made = [1 + len(placement.others)]
        for place in (placement, *placement.others):
            node = self._nodes.get(place.node)
            if node is None:
                raise BrokenInvariant(f"a run was placed on {place.node}, which is no node of the simulation")
            made += (node, round(place.cpus * 1000), place.mem_mib, len(place.gpus))
            for share in place.gpus:
                micros = 0 if share.fraction is None else max(1, round(share.fraction * WHOLE_CARD))
                made += (self._cards[node, share.uuid], share.vram_mib or 0, micros)
        booked = array("q", made)
        mark = booked.tobytes()
        at = self._known.get(mark)
        if at is None:
            at = self._known[mark] = len(self._booked)
            self._booked += booked
        return at
