"""What a schedule is worth from moment to moment: fragments, balance, shares, and each job against a fair share.

Everything is worked out of a `RunLog` in one walk over its moments, from the first submission to the last end. "Room"
is that of GPUs, where no job asks for any that of cores. `docs/reference/simulation.md` has the formulas.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

from gpusched.errors import BrokenInvariant
from gpusched.model.cluster import NodeView
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits, CardShare, ClusterLayout, ClusterState
from gpusched.scheduler.request_units import WHOLE_CARD, RequestUnits
from gpusched.scheduler.strategies.fragmentation import Fragmentation, most_typical
from gpusched.simulate.event_loop import play
from gpusched.simulate.fragments import Fragments
from gpusched.simulate.metrics import Spread, jain, party, spread, width
from gpusched.simulate.outcome import Outcome, RunLog, Walk
from gpusched.simulate.rules import request_of
from gpusched.simulate.trace import TraceJob


@dataclass(frozen=True, slots=True)
class Share:
    """How much one user (or queue, where no users are known) held of what it held most of, 0 to 1."""

    mean: float
    """Over the time in which it had jobs waiting or running."""
    most: float


@dataclass(slots=True)
class Series:
    """What was so from each instant until the next, for plots."""

    at_s: array[int] = field(default_factory=lambda: array("q"))
    used: array[float] = field(default_factory=lambda: array("d"))
    """Room that was held, 0 to 1."""
    stranded: array[float] = field(default_factory=lambda: array("d"))
    """Idle room that nobody who waited could use, as a part of all room."""
    waiting: array[int] = field(default_factory=lambda: array("q"))
    """Jobs."""
    shares: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Dominant share of each user from each instant on at which it changed."""


@dataclass(frozen=True, slots=True)
class OverTime:
    """Measures that depend on who held what, when."""

    fragmentation: float
    """Of the idle room while somebody waited for room, the part that nobody who waited could use."""
    fgd_fragmentation: float | None
    """Of the idle GPUs, the part that the usual jobs of the trace could not use; None where nobody asks for any."""
    node_spread: float
    """Standard deviation over the nodes of how much each was used in all."""
    node_spread_now: float
    """The same at each instant, and then the mean over time."""
    finish_time_fairness: Spread
    """Per job, its completion time over that on a fair share of the cluster to itself; at most 1 is fair."""
    unfair: float
    """Part of the jobs that took longer than on a fair share."""
    dominant_share: dict[str, Share]
    dominant_fairness: float
    """Jain's index of the means."""


def over_time(outcome: Outcome, series: Series | None = None, by: str | None = None) -> OverTime:
    """The measures of a schedule that knows where its jobs ran (`planner_run.run(keeps_places=True)`).

    Args:
        series: to be filled, when that is wanted.
        by: whose shares, `user` or `queue`; None: as `metrics.party` has it.
    Raises: BrokenInvariant for a schedule that does not know.
    """
    if outcome.runs is None:
        raise BrokenInvariant("a schedule that does not know where its jobs ran")
    world = _World(outcome.runs, outcome.jobs, by, series)
    play([job.submit_s for job in outcome.jobs], world)
    return world.measures(outcome)


class _World(Walk):
    """The cluster at one instant of the walk, and what has been summed up until then."""

    def __init__(self, runs: RunLog, jobs: Sequence[TraceJob], by: str | None, series: Series | None) -> None:
        super().__init__(runs)
        self.jobs = jobs
        self.series = series
        self.layout = layout = runs.layout
        self.draft = ClusterState(layout)
        users = {user: 1000 + number for number, user in enumerate(dict.fromkeys(job.user for job in jobs))}
        self.uids = [users[job.user] for job in jobs]
        self.kinds, needs, counts = _kinds(jobs, self.uids, layout.nodes)
        self.idle = Fragments(self.draft, needs)
        self.is_of_cards = any(need.request.gpus for need in needs)
        """Whether room is GPUs rather than cores."""
        self.fgd = _Gradient(layout, self.draft, needs, counts) if self.is_of_cards else None
        self.balance = _Balance(layout, self.is_of_cards)
        self.shares = _Shares(layout, jobs, by)
        self.present = 0
        """Jobs that wait or run."""
        self.waiting = 0
        self.crowd_s = 0
        """Sum over time of `present`."""
        self.crowd_before_s = [0] * len(jobs)
        """Per job, `crowd_s` when it came; from its end on, how much of it there was while it was there."""
        self.at: int | None = None
        self.idle_s = 0
        """Sum over time of idle room while somebody waited for some."""
        self.stranded_s = 0
        self.stranded = 0
        self._touched: set[int] = set()
        self._running: dict[int, AllocationUnits] = {}
        self._last = _last_runs(runs, len(jobs))

    # --- what happens ---------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Nothing has changed until now."""
        at = int(now)
        if self.at is not None:
            for_s = at - self.at
            self.crowd_s += self.present * for_s
            if self.idle.is_wanted:
                self.idle_s += self.idle.idle * for_s
                self.stranded_s += self.stranded * for_s
            if self.fgd is not None:
                self.fgd.pass_for(for_s)
            self.balance.pass_for(for_s)
        self.at = self.shares.at = at
        super().advance(now)

    def arrive(self, job: int) -> None:
        self.present += 1
        self.crowd_before_s[job] = self.crowd_s
        self._wait(job, 1)
        self.shares.come(job)

    def begin(self, run: int) -> None:
        number = self.runs.job[run]
        booking = self._running[run] = self.runs.booking(run, self.uids[number])
        self._wait(number, -1)
        self.draft.take(booking)
        self._hold(number, booking, 1)

    def end(self, run: int) -> None:
        number, booking = self.runs.job[run], self._running.pop(run)
        self.draft.give_back(booking)
        self._hold(number, booking, -1)
        if self._last[number] == run:
            self.present -= 1
            self.crowd_before_s[number] = self.crowd_s - self.crowd_before_s[number]
            self.shares.go(number)
        else:
            self._wait(number, 1)

    def settle(self, now: float) -> None:
        """Begin what begins now; all of this instant has happened."""
        super().settle(now)
        for node in self._touched:
            self.idle.changed(node)
            if self.fgd is not None:
                self.fgd.changed(node)
        self._touched.clear()
        self.stranded = self.idle.idle - self.idle.usable() if self.idle.is_wanted else 0
        if self.series is not None:
            self._note(self.series)

    def _wait(self, number: int, count: int) -> None:
        self.waiting += count
        self.idle.waits(self.kinds[number], count)

    def _hold(self, number: int, booking: AllocationUnits, sign: int) -> None:
        for piece in booking.pieces():
            self._touched.add(piece.node)
            cards = sum(_micros(self.layout, part) for part in piece.parts)
            self.balance.hold(piece.node, sign * (cards if self.is_of_cards else piece.millicpus))
            self.shares.hold(number, sign * cards, sign * piece.millicpus, sign * piece.mem_mib)

    # --- what it comes to -----------------------------------------------------------------------

    def _note(self, series: Series) -> None:
        series.at_s.append(self.at or 0)
        series.used.append(self.balance.used / self.balance.room)
        series.stranded.append(self.stranded / self.balance.room)
        series.waiting.append(self.waiting)
        self.shares.note(series.shares)

    def measures(self, outcome: Outcome) -> OverTime:
        rhos = list(self._rhos(outcome))
        shares = self.shares.measures()
        return OverTime(
            fragmentation=self.stranded_s / self.idle_s if self.idle_s else 0.0,
            fgd_fragmentation=None if self.fgd is None else self.fgd.measure(),
            node_spread=self.balance.spread_of_all(),
            node_spread_now=self.balance.spread_now_s / max(1, self.balance.passed_s),
            finish_time_fairness=spread(rhos),
            unfair=sum(rho > 1 for rho in rhos) / len(rhos),
            dominant_share=shares,
            dominant_fairness=jain(share.mean for share in shares.values()),
        )

    def _rhos(self, outcome: Outcome) -> list[float]:
        """Per job, completion time over that on one n-th of the cluster, n jobs there at a time while it was there.

        A job that is wider than its share runs longer there, in proportion. Source: Mahajan et al., Themis: Fair and
        Efficient GPU Cluster Scheduling (NSDI 2020), section 3: rho = T_shared / T_ideal.
        """
        size = self.balance.room / (WHOLE_CARD if self.is_of_cards else 1000)
        rhos = []
        for number, job in enumerate(self.jobs):
            took_s = outcome.completion_s[number]
            rivals = self.crowd_before_s[number] / took_s if took_s else 1.0
            ideal_s = job.run_s * max(1.0, width(job) * rivals / size)
            rhos.append(took_s / ideal_s)
        return rhos


class _Gradient:
    """Fragmentation as FGD has it, for the jobs of the trace."""

    def __init__(
        self, layout: ClusterLayout, draft: ClusterState, needs: Sequence[RequestUnits], counts: Sequence[int]
    ) -> None:
        kinds: dict[RequestUnits, float] = {}
        for need, count in zip(needs, counts, strict=True):
            request = need.request
            bare = replace(request, nodes=1, tail_gpus=0, licenses=(), prefer=None, is_exclusive=False)
            pieces = [(RequestUnits.of(bare, need.uid if need.is_slice else -1), request.nodes)]
            if request.tail_gpus:
                pieces.append((need.of_tail(), 1))
            for piece, times in pieces:
                kinds[piece] = kinds.get(piece, 0.0) + count * times
        self._of = Fragmentation(layout, most_typical(kinds))
        self._draft = draft
        self._amounts = [self._of.amount(draft, node) for node in range(len(layout.nodes))]
        self._idle = [_idle_on(draft, node) for node in range(len(layout.nodes))]
        self.amount, self.idle = sum(self._amounts), sum(self._idle)
        self._amount_s = self._idle_s = 0.0

    def changed(self, node: int) -> None:
        amount, idle = self._of.amount(self._draft, node), _idle_on(self._draft, node)
        self.amount += amount - self._amounts[node]
        self.idle += idle - self._idle[node]
        self._amounts[node], self._idle[node] = amount, idle

    def pass_for(self, for_s: int) -> None:
        self._amount_s += self.amount * for_s
        self._idle_s += self.idle * for_s / WHOLE_CARD

    def measure(self) -> float:
        return max(0.0, self._amount_s / self._idle_s) if self._idle_s else 0.0


class _Balance:
    """How much of each node is held, and how unequal that is."""

    def __init__(self, layout: ClusterLayout, is_of_cards: bool) -> None:
        self._rooms = [len(cards) * WHOLE_CARD for cards in layout.cards_of] if is_of_cards else layout.millicpus
        self.room = sum(self._rooms)
        self.used = 0
        self._held = [0] * len(self._rooms)
        self._since_s = [0] * len(self._rooms)
        self._held_s = [0] * len(self._rooms)
        self._count = sum(room > 0 for room in self._rooms)
        """Nodes that have any of it."""
        self._parts = self._squares = 0.0
        self.passed_s = 0
        self.spread_now_s = 0.0

    def hold(self, node: int, amount: int) -> None:
        room = self._rooms[node]
        if not amount or not room:
            return
        self.used += amount
        before = self._held[node]
        self._held_s[node] += before * (self.passed_s - self._since_s[node])
        self._since_s[node] = self.passed_s
        after = self._held[node] = before + amount
        self._parts += amount / room
        self._squares += (after * after - before * before) / (room * room)

    def pass_for(self, for_s: int) -> None:
        self.passed_s += for_s
        if self._count > 1:
            mean = self._parts / self._count
            self.spread_now_s += for_s * sqrt(max(0.0, self._squares / self._count - mean * mean))

    def spread_of_all(self) -> float:
        if not self.passed_s or not self._count:
            return 0.0
        parts = [
            (held_s + held * (self.passed_s - since_s)) / (room * self.passed_s)
            for room, held_s, held, since_s in zip(self._rooms, self._held_s, self._held, self._since_s, strict=True)
            if room
        ]
        mean = sum(parts) / len(parts)
        return sqrt(sum((part - mean) ** 2 for part in parts) / len(parts))


class _Shares:
    """What each user holds of the cluster: the largest of its parts of cards, cores and memory.

    Source: Ghodsi et al., Dominant Resource Fairness (NSDI 2011).
    """

    def __init__(self, layout: ClusterLayout, jobs: Sequence[TraceJob], by: str | None) -> None:
        self._totals = (len(layout.cards) * WHOLE_CARD, sum(layout.millicpus), sum(layout.mem_mib))
        _, name_of = party(jobs, by)
        self._name_of = [name_of(job) for job in jobs]
        names = sorted(set(self._name_of))
        self._held = {name: [0, 0, 0] for name in names}
        self._share = dict.fromkeys(names, 0.0)
        self._most = dict.fromkeys(names, 0.0)
        self._jobs = dict.fromkeys(names, 0)
        self._since = dict.fromkeys(names, 0)
        self._share_s = dict.fromkeys(names, 0.0)
        self._there_s = dict.fromkeys(names, 0)
        self._new: dict[str, None] = {}
        self.at = 0

    def come(self, number: int) -> None:
        name = self._name_of[number]
        self._pass(name)
        self._jobs[name] += 1

    def go(self, number: int) -> None:
        name = self._name_of[number]
        self._pass(name)
        self._jobs[name] -= 1

    def hold(self, number: int, cards: int, millicpus: int, mem_mib: int) -> None:
        name = self._name_of[number]
        self._pass(name)
        held = self._held[name]
        held[0] += cards
        held[1] += millicpus
        held[2] += mem_mib
        self._share[name] = max(
            (part / total for part, total in zip(held, self._totals, strict=True) if total), default=0.0
        )
        self._new[name] = None

    def _pass(self, name: str) -> None:
        for_s = self.at - self._since[name]
        if for_s:
            self._since[name] = self.at
            if self._jobs[name]:
                share = self._share[name]
                self._there_s[name] += for_s
                self._share_s[name] += share * for_s
                self._most[name] = max(self._most[name], share)

    def note(self, shares: dict[str, list[tuple[int, float]]]) -> None:
        for name in self._new:
            shares.setdefault(name, []).append((self.at, self._share[name]))
        self._new.clear()

    def measures(self) -> dict[str, Share]:
        return {
            name: Share(self._share_s[name] / self._there_s[name] if self._there_s[name] else 0.0, most)
            for name, most in self._most.items()
        }


def _last_runs(runs: RunLog, jobs: int) -> list[int]:
    """Per job the run after which it was over."""
    last = [-1] * jobs
    for run, number in enumerate(runs.job):
        before = last[number]
        if before < 0 or runs.begin_s[run] >= runs.begin_s[before]:
            last[number] = run
    return last


def _kinds(
    jobs: Sequence[TraceJob], uids: Sequence[int], nodes: Sequence[NodeView]
) -> tuple[list[int], list[RequestUnits], list[int]]:
    """Per job the number of its kind; per kind what it asks for and how many jobs are of it."""
    known: dict[object, int] = {}
    kinds: list[int] = []
    needs: list[RequestUnits] = []
    counts: list[int] = []
    for job, uid in zip(jobs, uids, strict=True):
        mark = (job.gpus, job.procs, job.cpus, job.mem_mib, job.gpu_fraction, job.gpu_types)
        if job.gpu_fraction is not None:
            mark = (*mark, uid)  # type: ignore[assignment]
        kind = known.get(mark)
        if kind is None:
            kind = known[mark] = len(needs)
            needs.append(RequestUnits.of(request_of(job, nodes), uid))
            counts.append(0)
        counts[kind] += 1
        kinds.append(kind)
    return kinds, needs, counts


def _micros(layout: ClusterLayout, part: CardShare) -> int:
    if part.is_whole:
        return WHOLE_CARD
    total_mib = layout.cards[part.card].slice_total_mib
    of_vram = part.vram_mib * WHOLE_CARD // total_mib if total_mib else 0
    return min(WHOLE_CARD, max(part.micros, of_vram))


def _idle_on(draft: ClusterState, node: int) -> int:
    """Room that nobody holds on the cards of a node, in millionths of a card."""
    if not draft.shared_cards[node]:
        return draft.free_cards[node] * WHOLE_CARD
    room = 0
    for card in draft.layout.cards_of[node]:
        number = card.number
        if draft.slices[number]:
            part = CardShare(number, False, draft.vram_mib[number], draft.micros[number])
            room += WHOLE_CARD - _micros(draft.layout, part)
        elif not draft.wholes[number]:
            room += WHOLE_CARD
    return room
