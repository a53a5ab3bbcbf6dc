"""Result of a simulation: start and end of each job, and the place of each run in a few dozen bytes.

Measures over time (fragmentation, shares, balance, Gantt charts) are derived later, in one pass (`Walk`), so that
simulations that do not need them do not pay for them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from operator import attrgetter

from gpusched.addons.simulate.trace import TraceJob
from gpusched.errors import BrokenInvariant
from gpusched.model.cluster import NodeView
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement
from gpusched.scheduler.cluster_state import AllocationUnits, CardShare, ClusterLayout
from gpusched.scheduler.request_units import WHOLE_CARD

COMPLETED = "completed"

SHORT_S = 10
"""Minimum run time in slowdowns, as shorter jobs would distort them."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a job with several runs, due to retries or preemption."""

    job: int
    """Its index in `Outcome.jobs`."""
    start_s: int
    end_s: int
    how: str
    """A state in lower case: `completed`, `failed`, `timeout`, `preempted`, `cancelled`, `node_fail`."""


@dataclass(frozen=True)
class Outcome:
    """A schedule: first start of each job, in the order of the trace, and derived columns.

    A column has one number per job, in the same order.
    """

    jobs: Sequence[TraceJob]
    start_s: Sequence[int]
    cycles: int
    """Number of scheduling cycles."""
    ends_s: Sequence[int] | None = None
    """Final end of each job; None where each ran once, for the run time of the trace."""
    attempts: Sequence[Attempt] = ()
    """Every run of every job, by start; empty where each job ran once."""
    runs: RunLog | None = None
    """Places of all runs, if requested."""

    @cached_property
    def end_s(self) -> Sequence[int]:
        """Final end of each job."""
        if self.ends_s is not None:
            return self.ends_s
        return [start_s + job.run_s for job, start_s in zip(self.jobs, self.start_s, strict=True)]

    @cached_property
    def wait_s(self) -> Sequence[int]:
        """First start - submission."""
        return [start_s - job.submit_s for job, start_s in zip(self.jobs, self.start_s, strict=True)]

    @cached_property
    def completion_s(self) -> Sequence[int]:
        """End - submission."""
        return [end_s - job.submit_s for job, end_s in zip(self.jobs, self.end_s, strict=True)]

    @cached_property
    def slowdown(self) -> Sequence[float]:
        """Bounded slowdown: completion over run time, with run times of at least 10 s; at least 1.

        Source: Feitelson, Metrics for Parallel Job Scheduling and Their Convergence (JSSPP 2001).
        """
        return [
            max(1.0, completion_s / max(job.run_s, SHORT_S))
            for job, completion_s in zip(self.jobs, self.completion_s, strict=True)
        ]

    @property
    def starts_sha(self) -> str:
        """First 16 digits of the SHA-256 of all starts, one per line: equal for equal schedules."""
        return sha256("\n".join(map(str, self.start_s)).encode()).hexdigest()[:16]


class RunLog:
    """Runs of a schedule, in the order of `add`.

    A run is a job's index in the schedule, start and end in seconds, its outcome (a state in lower case) and its
    booking.
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
        self.layout = ClusterLayout(nodes, settings or Settings())
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
        """Record one run.

        Raises: BrokenInvariant if it ends before it starts, or is on an unknown node.
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
        return self._words[self._how[run]]

    def booking(self, run: int, uid: int = 0) -> AllocationUnits:
        """Booking of a run; further nodes of a gang are its `others`."""
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
                parts.append(CardShare(card, not (vram_mib or micros), vram_mib, micros))
            at += 3 * cards
            pieces.append(AllocationUnits(node, uid, millicpus, mem_mib, tuple(parts)))
        first = pieces[0]
        if count == 1:
            return first
        return AllocationUnits(first.node, uid, first.millicpus, first.mem_mib, first.parts, others=tuple(pieces[1:]))

    def _place_of(self, placement: Placement) -> int:
        made = [1 + len(placement.others)]
        for place in (placement, *placement.others):
            node = self._nodes.get(place.node)
            if node is None:
                raise BrokenInvariant(f"a run was placed on {place.node}, which is not a node of the simulation")
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


# --- statistics -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of one number over all jobs; percentiles by nearest rank."""

    mean: float
    median: float
    p95: float
    p99: float
    most: float


PARTS = ("mean", "median", "p95", "p99", "most")
"""Fields of `Spread`."""


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles of at least one value."""
    ordered = sorted(values)
    count = len(ordered)

    def at(percent: int) -> float:
        return float(ordered[max(0, -(-count * percent // 100) - 1)])

    return Spread(sum(ordered) / count, at(50), at(95), at(99), float(ordered[-1]))


def jain(values: Iterable[float]) -> float:
    """Jain's index of fairness: (sum of x)^2 / (n x sum of x^2); 1 without values.

    Source: Jain, Chiu and Hawe, A Quantitative Measure of Fairness (1984).
    """
    known = list(values)
    squares = sum(value * value for value in known)
    return sum(known) ** 2 / (len(known) * squares) if squares else 1.0


def width(job: TraceJob) -> float:
    """GPUs of a job, possibly fractional; its processors if it has none."""
    return (job.gpus if job.gpu_fraction is None else job.gpu_fraction) or job.procs


def size_of(nodes: Iterable[NodeView], jobs: Iterable[TraceJob]) -> float:
    """GPUs of the cluster; its cores if no job asks for a GPU."""
    if any(job.gpus for job in jobs):
        return sum(len(node.gpus) for node in nodes)
    return sum(node.cpus for node in nodes)


USER: Callable[[TraceJob], str] = attrgetter("user")
QUEUE: Callable[[TraceJob], str] = attrgetter("queue")


def grouping(jobs: Sequence[TraceJob], wanted: str | None = None) -> tuple[str, Callable[[TraceJob], str]]:
    """Key function for groups: `user` or `queue` as requested; else by user, or by queue if there is only one user."""
    if wanted == "user" or (wanted is None and len({job.user for job in jobs}) > 1):
        return "user", USER
    return "queue", QUEUE


@dataclass(frozen=True, slots=True)
class Group:
    """The jobs of one user or queue; both times are means."""

    jobs: int
    wait_s: float
    slowdown: float


def groups(outcome: Outcome, by: Callable[[TraceJob], str]) -> dict[str, Group]:
    """Group the jobs by user, queue or any other value of `by`, sorted by name."""
    sums: dict[str, list[float]] = {}
    for name, wait_s, slowdown in zip(map(by, outcome.jobs), outcome.wait_s, outcome.slowdown, strict=True):
        found = sums.get(name)
        if found is None:
            found = sums[name] = [0, 0, 0.0]
        found[0] += 1
        found[1] += wait_s
        found[2] += slowdown
    return {
        name: Group(int(count), waits_s / count, slowdowns / count)
        for name, (count, waits_s, slowdowns) in sorted(sums.items())
    }
