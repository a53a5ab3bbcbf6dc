"""Fills a cluster with jobs that never end: the fraction of GPUs that each placement strategy can allocate.

The daemon's own placement places one job after the other, and drops those that do not fit. The jobs are those of a
list, plus random copies until they request DEMAND times the available GPUs, in random order. The result is the
fraction of all GPUs allocated.

Source: Weng et al., Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
Descent (USENIX ATC 2023), section 6.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path

from gpusched.addons.simulate.cluster import read_nodes
from gpusched.addons.simulate.trace import TraceJob, read_pods
from gpusched.model.cluster import NodeView
from gpusched.model.job import Request
from gpusched.model.planner_settings import SPARING_STRATEGIES, STRATEGIES, PlacementSettings
from gpusched.model.settings import GpuSettings, Settings
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout, ClusterState
from gpusched.scheduler.filters import NodeCandidates, pool
from gpusched.scheduler.placement import SCARCE_AT, Candidate, NodeSearch, best_placement
from gpusched.scheduler.request_units import GpuDemand, RequestUnits, constraint_strength, micros_asked
from gpusched.scheduler.strategies.fragmentation import COVERED, Fragmentation, Typical
from gpusched.scheduler.strategies.scarce_gpus import Scarce, scarce_of, scarcity_of

RANDOM = "random"
RULES = (RANDOM, *STRATEGIES)
"""A random node with room, as the baseline, and the strategies of [placement]."""

FIRST_SEED = 42
DEMAND = 1.3
"""Total GPUs requested, as a multiple of the available ones."""

USER = 1000
_VRAM_MIB = 100_000
"""VRAM of every card. Its value is irrelevant, as a fraction of a card books the same fraction of its VRAM."""

_TOLD_EVERY = 256

Progress = Callable[[int, int], None]
"""Called occasionally with the number of arrived jobs and the total."""


# --- the jobs -----------------------------------------------------------------------------------------


def cluster_of(path: Path) -> tuple[NodeView, ...]:
    """Read nodes from a file, with card models as labels for constraints of jobs. Raises: see `read_nodes`."""
    return tuple(
        replace(
            node,
            gpus=tuple(replace(card, vram_total_mib=_VRAM_MIB) for card in node.gpus),
            labels=tuple(sorted({card.name for card in node.gpus if card.name})),
        )
        for node in read_nodes(path)
    )


def jobs_of(path: Path) -> list[Request]:
    """Requests of the tasks in a list. Raises: see `read_pods`."""
    return [request_of(job) for job in read_pods(path).jobs]


def request_of(job: TraceJob) -> Request:
    """Request of one task; all of its acceptable models are equivalent."""
    return Request(
        gpus=job.gpus,
        gpu_fraction=job.gpu_fraction or None,
        cpus=job.cpus,
        mem_mib=job.mem_mib,
        constraint="|".join(job.gpu_types) or None,
    )


def gpus_asked(request: Request) -> float:
    """GPUs requested, possibly fractional."""
    return request.gpus if request.gpu_fraction is None else request.gpu_fraction


def arrivals(jobs: Sequence[Request], most_gpus: float, seed: int) -> list[Request]:
    """Shuffle the list, extended with copies or cut to the given number of requested GPUs."""
    chance = random.Random(seed)
    made = list(jobs)
    asked = sum(map(gpus_asked, made))
    while asked < most_gpus:
        one = chance.choice(jobs)
        made.append(one)
        asked += gpus_asked(one)
    chance.shuffle(made)
    asked = 0.0
    for count, one in enumerate(made):
        if asked >= most_gpus:
            return made[:count]
        asked += gpus_asked(one)
    return made


def usual(jobs: Sequence[Request]) -> Typical:
    """The most frequent kinds of job that make up nearly all of a list, with their frequencies."""
    counts: Counter[RequestUnits] = Counter(RequestUnits.of(request, USER) for request in jobs)
    wanted = COVERED * counts.total()
    found = []
    for need, count in counts.most_common():
        if wanted <= 0:
            break
        found.append((need, count))
        wanted -= count
    total = sum(count for _, count in found)
    return tuple((need, count / total) for need, count in found)


def wanted_of(jobs: Sequence[Request]) -> GpuDemand:
    """GPUs that a list requests and requires."""
    wanted = GpuDemand()
    for request in jobs:
        if request.gpus:
            wanted.add(constraint_strength(request), micros_asked(request))
    return wanted


# --- filling ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filled:
    """Result for one order of arrival."""

    at_full: float
    """Fraction of all GPUs allocated when the requests reach the number of GPUs."""
    at_end: float
    """Fraction of all GPUs allocated after the last arrival."""
    fragments: float
    """Fraction of all GPUs that are free but useless for typical jobs at the end; see `strategies.fragmentation`."""
    placed: int
    dropped: int
    seconds: float


def fill(
    nodes: Sequence[NodeView],
    jobs: Sequence[Request],
    rule: str,
    typical: Typical,
    *,
    wanted: GpuDemand | None = None,
    seed: int = FIRST_SEED,
    progress: Progress | None = None,
) -> Filled:
    """Place one job after the other by this rule.

    Args:
        typical: typical jobs, for rules that depend on them.
        wanted: demand, for rules that spare scarce cards for jobs that require them; None: spare none.
        seed: random seed of the rule "random".
    """
    strategy = "first" if rule == RANDOM else rule
    # Fractions are of the whole card, as in the lists.
    no_headroom = replace(GpuSettings(), share_headroom_mib=0)
    layout = ClusterLayout(nodes, Settings(placement=PlacementSettings(strategy), gpu=no_headroom))
    layout.typical = typical
    if strategy in SPARING_STRATEGIES:
        layout.wanted = wanted
    finder = Finder(ClusterState(layout))
    chance = random.Random(seed)
    capacity = len(layout.cards)
    asked = given = at_full = 0.0
    placed = dropped = 0
    # Nothing is released, so a need that failed once always fails.
    hopeless: set[Request] = set()
    needs: dict[Request, RequestUnits] = {}
    began = time.perf_counter()
    for count, request in enumerate(jobs):
        gpus = gpus_asked(request)
        asked += gpus
        booking: AllocationUnits | None = None
        if request not in hopeless:
            need = needs.get(request) or needs.setdefault(request, RequestUnits.of(request, USER))
            if rule == RANDOM:
                places = finder.places(need)
                booking = chance.choice(places) if places else None
            else:
                booking = finder.find(need)
        if booking is None:
            hopeless.add(request)
            dropped += 1
        else:
            finder.book(booking)
            given += gpus
            placed += 1
        if asked <= capacity:
            at_full = given
        if progress is not None and count % _TOLD_EVERY == 0:
            progress(count, len(jobs))
    seconds = time.perf_counter() - began
    measure = Fragmentation(layout, typical)
    lost = sum(measure.amount(finder.draft, node) for node in range(len(layout.nodes)))
    return Filled(at_full / capacity, given / capacity, lost / capacity, placed, dropped, seconds)


# --- cached placement --------------------------------------------------------------------------------

# The result for a need on a node stays valid until a booking or release there. With a thousand nodes
# and a few hundred kinds of jobs, nearly every call recomputes only one or two nodes.

Classes = tuple[int, ...]
"""Classes of an option's cards; empty if no job requires a class."""

Mark = tuple[float, ...]
"""A score, or a score without the term for scarcity."""

_MOST_KEPT = 2_000_000
"""Number of cached options, beyond which all are evicted."""


class Finder:
    """A cached `best_placement` for frequent calls, without guards and ceilings.

    Bookings go through `book` and `release`; announce any other change of the draft with `touch`.
    """

    def __init__(self, draft: ClusterState) -> None:
        self.draft = draft
        self._changed: list[int] = []
        """Nodes, in the order in which they changed."""
        self._kept: dict[object, _Kept] = {}
        self._scarce: Scarce | None = None
        """What was scarce when a place was last looked for."""

    def book(self, booking: AllocationUnits) -> None:
        self.draft.book(booking)
        self.touch(piece.node for piece in booking.pieces())

    def release(self, booking: AllocationUnits) -> None:
        self.draft.release(booking)
        self.touch(piece.node for piece in booking.pieces())

    def touch(self, nodes: Iterable[int]) -> None:
        """Invalidate the cache for these nodes."""
        self._changed.extend(nodes)

    def find(self, need: RequestUnits) -> AllocationUnits | None:
        """The best place for this need now, or None; same result as `best_placement`."""
        request = need.request
        if request.nodes > 1 or request.tail_gpus or request.licenses or request.bundles is not None:
            return best_placement(self.draft, need)
        self._see_what_is_scarce()
        best = self._of(need).best(self._scarce)
        return None if best is None else best.booking

    def places(self, need: RequestUnits) -> list[AllocationUnits]:
        """One place on every node with room, in the order of the nodes."""
        self._see_what_is_scarce()
        return [option.booking for _, option in sorted(self._of(need).options.items())]

    def _see_what_is_scarce(self) -> None:
        """Update scarcity, which affects the choice among nodes, and among cards on nodes with several classes."""
        before, self._scarce = self._scarce, scarce_of(self.draft)
        if before == self._scarce:
            return
        if before is None or self._scarce is None or before.class_of is not self._scarce.class_of:
            self._kept.clear()
            return
        known = scarcity_of(self.draft.layout)
        self.touch(() if known is None else known.mixed)

    def _of(self, need: RequestUnits) -> _Kept:
        # A booking names the user, also for whole cards.
        mark = need.request, need.uid
        kept = self._kept.get(mark)
        if kept is None:
            if len(self._kept) * len(self.draft.layout.nodes) > _MOST_KEPT:
                self._kept.clear()
                self._changed.clear()
            kept = self._kept[mark] = _Kept(self.draft, need, len(self._changed))
        elif kept.seen < len(self._changed):
            kept.refresh(set(self._changed[kept.seen :]))
            kept.seen = len(self._changed)
        return kept


class _Kept:
    """Cached options of one need, in a heap per combination of card classes."""

    __slots__ = ("_draft", "_heaps", "_need", "_places", "options", "seen")

    def __init__(self, draft: ClusterState, need: RequestUnits, seen: int) -> None:
        self._draft = draft
        self._need = need
        self._places: dict[int, NodeCandidates] = {place.node: place for place in pool(draft.layout, need).places}
        self.options: dict[int, Candidate] = {}
        self._heaps: dict[Classes, list[tuple[Mark, int]]] = {}
        """What is scarce changes with every booking, and with it which class comes first, but nothing within one."""
        self.seen = seen
        search = NodeSearch(draft, need, None, frozenset(), None)
        for node, place in self._places.items():
            tried = search.look(place)
            if isinstance(tried, Candidate):
                self.options[node] = tried
                classes, mark = _mark(tried, search.scarce)
                self._heaps.setdefault(classes, []).append((mark, node))
        for heap in self._heaps.values():
            heapify(heap)

    def refresh(self, nodes: Iterable[int]) -> None:
        """Recompute the options of these nodes."""
        search = NodeSearch(self._draft, self._need, None, frozenset(), None)
        for node in nodes:
            place = self._places.get(node)
            if place is None:
                continue
            before = self.options.pop(node, None)
            tried = search.look(place)
            if isinstance(tried, Candidate):
                self.options[node] = tried
                classes, mark = _mark(tried, search.scarce)
                if before is None or _mark(before, search.scarce) != (classes, mark):
                    heappush(self._heaps.setdefault(classes, []), (mark, node))

    def best(self, scarce: Scarce | None) -> Candidate | None:
        """The smallest option that is still valid; drops invalid ones."""
        found: tuple[Mark, Candidate] | None = None
        for classes, heap in self._heaps.items():
            option = self._top(classes, heap, scarce)
            if option is None:
                continue
            score = option.score
            if scarce is not None:
                score = *score[:SCARCE_AT], sum(one in scarce.classes for one in classes), *score[SCARCE_AT + 1 :]
            if found is None or score < found[0]:
                found = score, option
        return None if found is None else found[1]

    def _top(self, classes: Classes, heap: list[tuple[Mark, int]], scarce: Scarce | None) -> Candidate | None:
        while heap:
            mark, node = heap[0]
            option = self.options.get(node)
            if option is not None and _mark(option, scarce) == (classes, mark):
                return option
            heappop(heap)
        return None


def _mark(option: Candidate, scarce: Scarce | None) -> tuple[Classes, Mark]:
    """Classes of its cards, and its score without the number of scarce ones."""
    if scarce is None:
        return (), option.score
    classes = tuple(scarce.class_of[part.card] for part in option.booking.parts)
    return classes, (*option.score[:SCARCE_AT], *option.score[SCARCE_AT + 1 :])
