"""A plain planner of whole GPUs and cores, written from docs/explanation/scheduling.md alone, to compare plans with.

It knows nodes of like cards, first come first served or the shortest limit first, maxima of queues and users, and
reservations for the first so many blocked jobs: one is EASY backfill, one for every job is conservative backfill. It
builds everything from scratch, looks at each job by itself and imports nothing of what it is compared with.

    line          jobs in order; ties by the instant they wait from, then by id
    limits        the first job below a limit is promised what the limit leaves; a later one passes if it is over by
                  then, or leaves enough
    place         the best node with room now, away from cards that are reserved where there are others
    reservation   the earliest instant with room for all of the job's length; at its instant it may move to other cards
                  for a later job, but never to a later instant
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

Instant = tuple[float, int]
"""Seconds, and the number of a run of unknown length: these end last, in the order of their starts."""


Node = tuple[int, int]
"""Of so many like cards and cores."""


@dataclass(frozen=True)
class Asked:
    """A job of one node. `limit_s` is infinite without a time limit."""

    id: int
    submit_s: float
    cards: int
    cores: int
    limit_s: float = inf
    user: str = ""
    queue: str = ""


@dataclass(frozen=True)
class Place:
    """A node by number, the numbers of its cards, and cores."""

    node: int
    cards: frozenset[int]
    cores: int


@dataclass(frozen=True)
class Held:
    """A running job."""

    job: Asked
    place: Place
    start_s: float

    @property
    def end_s(self) -> float:
        """When it has ended at the latest."""
        return self.start_s + self.job.limit_s


@dataclass(frozen=True)
class Rules:
    """What is configured. `maxima` are of a queue: cards of all, cards of a user, jobs of a user."""

    order: str = "fcfs"
    depth: int = 1
    backfill: bool = True
    strategy: str = "first"
    maxima: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)


class Free:
    """What is free at one instant: of each card by how many it is held, and the cores of each node."""

    def __init__(self, holders: Iterable[Iterable[int]], cores: Iterable[int]) -> None:
        self.holders = [list(node) for node in holders]
        self.cores = list(cores)

    def take(self, place: Place, times: int = 1) -> None:
        """A place is held once more, or less."""
        self.cores[place.node] -= times * place.cores
        for card in place.cards:
            self.holders[place.node][card] += times

    def has(self, place: Place) -> bool:
        """Whether all of a place is free."""
        holders = self.holders[place.node]
        return place.cores <= self.cores[place.node] and not any(holders[card] for card in place.cards)

    def places(self, job: Asked, strategy: str, avoid: frozenset[tuple[int, int]] = frozenset()) -> list[Place]:
        """One place on each node that has room, the best first; cards to avoid only where there are no others."""
        found = []
        for node, holders in enumerate(self.holders):
            free = [card for card, count in enumerate(holders) if not count]
            if len(free) < job.cards or self.cores[node] < job.cores:
                continue
            chosen = sorted(free, key=lambda card: ((node, card) in avoid, card))[: job.cards]
            avoided = sum((node, card) in avoid for card in chosen)
            score = {
                "first": (),
                "pack": (len(free),) if job.cards else (len(free), len(holders), self.cores[node]),
                "spread": (-len(free),) if job.cards else (len(holders), -self.cores[node]),
            }[strategy]
            found.append(((avoided, *score, node), Place(node, frozenset(chosen), job.cores)))
        return [place for _, place in sorted(found, key=lambda one: one[0])]


def free_at_all(states: Sequence[Free]) -> Free:
    """What is free at all of several instants."""
    holders = [map(max, zip(*node, strict=True)) for node in zip(*(state.holders for state in states), strict=True)]
    return Free(holders, map(min, zip(*(state.cores for state in states), strict=True)))


@dataclass
class Kept:
    """What is reserved for a blocked job from one instant to another, and what is free at its beginning."""

    job: Asked
    place: Place
    start: Instant
    end: Instant
    state: Free
    pass_until_s: float
    """Those over by then are not in its way."""


@dataclass
class Turn:
    """What the first job below a limit leaves of it, and by when those that pass must be over."""

    pass_until_s: float
    spare: float


Limit = tuple[str, str, str, float]
"""Queue, user or nobody, `cards` or `jobs`, and the most."""


class ReferencePlanner:
    """One cycle what starts where, and what is reserved."""

    def __init__(
        self, now: float, nodes: Sequence[Node], running: Sequence[Held], waiting: Sequence[Asked], rules: Rules
    ) -> None:
        self.now, self.rules = now, rules
        self.running = sorted(running, key=lambda one: one.job.id)
        self.free = Free([[0] * cards for cards, _ in nodes], [cores for _, cores in nodes])
        for one in running:
            self.free.take(one.place)
        self.starts: list[tuple[Asked, Place]] = []
        self.kept: list[Kept] = []
        self.turns: dict[Limit, Turn] = {}
        by_length = rules.order == "sjf"
        for job in sorted(waiting, key=lambda one: (one.limit_s if by_length else 0, one.submit_s, one.id)):
            self.deal_with(job)

    def deal_with(self, job: Asked) -> None:
        """Start it, reserve room for it, or pass it over."""
        denied = next((limit for limit in self.limits(job) if self.is_over(limit, job)), None)
        if denied is not None:
            self.wait_below(denied, job)
            return
        end_s = self.now + job.limit_s
        for limit in self.limits(job):
            tick = self.turns.get(limit)
            if tick is not None and end_s > tick.pass_until_s and share(limit, job) > tick.spare:
                return
        if self.kept and not self.rules.backfill:
            return
        concerned = [kept for kept in self.kept if end_s > kept.pass_until_s]
        avoid = frozenset((kept.place.node, card) for kept in concerned for card in kept.place.cards)
        for place in self.free.places(job, self.rules.strategy, avoid):
            if self.leaves_alone(concerned, place):
                self.start(job, place, concerned)
                return
        if len(self.kept) < self.rules.depth:
            self.reserve(job)

    def start(self, job: Asked, place: Place, concerned: Sequence[Kept]) -> None:
        """It runs from now on."""
        self.free.take(place)
        for kept in concerned:
            kept.state.take(place)
        for limit in self.limits(job):
            tick = self.turns.get(limit)
            if tick is not None and self.now + job.limit_s > tick.pass_until_s:
                tick.spare -= share(limit, job)
        self.running.append(Held(job, place, self.now))
        self.starts.append((job, place))

    # --- limits ---------------------------------------------------------------------------------

    def limits(self, job: Asked) -> Iterator[Limit]:
        """Those that the job counts against, in the order in which they are looked at."""
        if job.queue in self.rules.maxima:
            of_all, of_user, jobs = self.rules.maxima[job.queue]
            yield job.queue, job.user, "cards", of_user
            yield job.queue, job.user, "jobs", jobs
            yield job.queue, "", "cards", of_all

    def counted(self, limit: Limit) -> list[Held]:
        """Those that run and count against a limit."""
        return [one for one in self.running if one.job.queue == limit[0] and limit[1] in ("", one.job.user)]

    def is_over(self, limit: Limit, job: Asked) -> bool:
        """Whether the job is too much for the limit now."""
        needed = share(limit, job)
        return needed > 0 and sum(share(limit, one.job) for one in self.counted(limit)) + needed > limit[3]

    def wait_below(self, limit: Limit, job: Asked, start_s: float = inf) -> None:
        """It is promised what the limit leaves once enough have ended, unless an earlier job is."""
        if limit in self.turns:
            return
        order = sorted(self.counted(limit), key=lambda one: (max(one.end_s, self.now), one.start_s))
        held = sum(share(limit, one.job) for one in order)
        needed, ended = share(limit, job), []
        while order and (held + needed > limit[3] or order[0].end_s <= start_s < inf):
            ended.append(order.pop(0))
            held -= share(limit, ended[-1].job)
        until_s = max((max(one.end_s, self.now) for one in ended), default=self.now)
        if until_s == inf:
            until_s = self.as_short_as_youngest(ended)
        if start_s < inf:
            until_s = max(until_s, start_s)
        self.turns[limit] = Turn(until_s, limit[3] - held - needed)

    def as_short_as_youngest(self, ended: Sequence[Held]) -> float:
        """When a job ends that is as short as the youngest run of unknown length is now."""
        return self.now + max(0.0, self.now - max(one.start_s for one in ended if one.end_s == inf))

    # --- reservations ---------------------------------------------------------------------------

    def ends(self) -> list[tuple[Instant, Held]]:
        """Runs by the instants of their ends; one that is overdue ends now."""
        found, endless = [], 0
        for one in sorted(self.running, key=lambda one: (max(one.end_s, self.now), one.start_s, one.job.id)):
            endless += one.end_s == inf
            found.append(((max(one.end_s, self.now), endless), one))
        return found

    def reserve(self, job: Asked) -> None:
        """Keep room for it from the earliest instant on at which it fits for all of its length."""
        ends = self.ends()
        instants = {(self.now, 0), *(instant for instant, _ in ends), *(kept.end for kept in self.kept)}
        for start in sorted(instant for instant in instants if instant != (inf, inf)):
            ended = [one for instant, one in ends if instant <= start]
            state = Free(self.free.holders, self.free.cores)
            for one in ended:
                state.take(one.place, -1)
            for kept in self.kept:
                if kept.start <= start < kept.end:
                    state.take(kept.place)
            end: Instant = (start[0] + job.limit_s, 0) if start[0] + job.limit_s < inf else (inf, inf)
            later = [kept.state for kept in self.kept if start < kept.start < end]
            places = free_at_all([state, *later]).places(job, self.rules.strategy)
            if not places:
                continue
            for met in (state, *later):
                met.take(places[0])
            until_s = start[0] if start[0] < inf else self.as_short_as_youngest(ended)
            self.kept.append(Kept(job, places[0], start, end, state, until_s))
            for limit in self.limits(job):
                self.wait_below(limit, job, start[0])
            return

    def leaves_alone(self, concerned: Sequence[Kept], place: Place) -> bool:
        """Whether all that is reserved still fits at its instant with this taken; what is in its way moves."""
        tight = [kept for kept in concerned if not kept.state.has(place)]
        if not tight:
            return True
        before = [(kept, kept.place, Free(kept.state.holders, kept.state.cores)) for kept in self.kept]
        for kept in concerned:
            kept.state.take(place)
        is_possible = all(self.moves(kept) for kept in tight)
        for kept in concerned:
            kept.state.take(place, -1)
        is_possible = is_possible and all(kept.state.has(place) for kept in concerned)
        for kept, there, state in () if is_possible else before:
            kept.place, kept.state = there, state
        return is_possible

    def moves(self, kept: Kept) -> bool:
        """Whether other cards are found for a reservation at its instant; it has them from then on."""
        met = [other.state for other in self.kept if kept.start <= other.start < kept.end]
        for state in met:
            state.take(kept.place, -1)
        places = free_at_all(met).places(kept.job, self.rules.strategy)
        kept.place = places[0] if places else kept.place
        for state in met:
            state.take(kept.place)
        return bool(places)


def share(limit: Limit, job: Asked) -> int:
    """What a job takes of a limit."""
    return 1 if limit[2] == "jobs" else job.cards
