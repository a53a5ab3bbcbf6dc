"""Measures of a schedule over time: fragmentation, balance, shares, and each job against a fair share.

All come from one pass over a `RunLog`, from the first submission to the last end. "Room" means GPUs or, if no job
requests any, cores. `docs/reference/simulation.md` has the formulas.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt

from gpusched.addons.simulate.event_loop import Walk, play
from gpusched.addons.simulate.outcome import Outcome, RunLog, grouping, width
from gpusched.addons.simulate.trace import TraceJob, request_of
from gpusched.errors import BrokenInvariant
from gpusched.model.bundles import part_of
from gpusched.model.cluster import NodeView
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits, CardShare, ClusterLayout, ClusterState, LayoutGpu
from gpusched.scheduler.filters import pool
from gpusched.scheduler.request_units import WHOLE_CARD, RequestUnits
from gpusched.scheduler.strategies.fragmentation import Fragmentation, most_typical


@dataclass(frozen=True, slots=True)
class Share:
    """Dominant share of one user (or queue, without known users), 0 to 1."""

    mean: float
    """Over the time with its jobs pending or running."""
    most: float


@dataclass(slots=True)
class Series:
    """Values from each instant until the next, for plots."""

    at_s: array[int] = field(default_factory=lambda: array("q"))
    used: array[float] = field(default_factory=lambda: array("d"))
    """Fraction of the room in use, 0 to 1."""
    stranded: array[float] = field(default_factory=lambda: array("d"))
    """Idle room that no pending job could use, as a fraction of all room."""
    waiting: array[int] = field(default_factory=lambda: array("q"))
    """Number of pending jobs."""
    shares: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Dominant share of each user, from each instant of a change on."""


def over_time(outcome: Outcome, series: Series | None = None, by: str | None = None) -> OverTime:
    """Compute the measures of a schedule with places (`planner_run.run(keeps_places=True)`).

    Args:
        series: filled with values over time if given.
        by: grouping of shares, `user` or `queue`; None: see `outcome.grouping`.
    Raises: BrokenInvariant for a schedule without places.
    """
    if outcome.runs is None:
        raise BrokenInvariant("a schedule that does not know where its jobs ran")
    walk = OverTime(outcome, outcome.runs, by, series)
    play([job.submit_s for job in outcome.jobs], walk)
    return walk


class OverTime(Walk):
    """State of the cluster at one instant of the pass, and sums so far; measures of the schedule after the end."""

    def __init__(self, outcome: Outcome, runs: RunLog, by: str | None, series: Series | None) -> None:
        super().__init__(runs)
        self.outcome = outcome
        self.jobs = jobs = outcome.jobs
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
        """Sum over time of idle room while jobs waited for some."""
        self.stranded_s = 0
        self.stranded = 0
        self._touched: set[int] = set()
        self._running: dict[int, AllocationUnits] = {}
        self._last = _last_runs(runs, len(jobs))

    # --- events ---------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Accumulate up to now, during which nothing changed."""
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
        """Start the runs due now, after all other events of this instant."""
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

    # --- results --------------------------------------------------------------------------------

    def _note(self, series: Series) -> None:
        series.at_s.append(self.at or 0)
        series.used.append(self.balance.used / self.balance.room)
        series.stranded.append(self.stranded / self.balance.room)
        series.waiting.append(self.waiting)
        self.shares.note(series.shares)

    @property
    def fragmentation(self) -> float:
        """Fraction of the idle room that no pending job could use, over the time with jobs waiting for room."""
        return self.stranded_s / self.idle_s if self.idle_s else 0.0

    @property
    def fgd_fragmentation(self) -> float | None:
        """Fraction of the idle GPUs that typical jobs could not use; None if no job requests GPUs."""
        return None if self.fgd is None else self.fgd.measure()

    @property
    def node_spread(self) -> float:
        """Standard deviation across nodes of their mean use."""
        return self.balance.spread_of_all()

    @property
    def node_spread_now(self) -> float:
        """Mean over time of the standard deviation across nodes of their use."""
        return self.balance.spread_now_s / max(1, self.balance.passed_s)

    @property
    def dominant_share(self) -> dict[str, Share]:
        return self.shares.measures()

    @cached_property
    def rhos(self) -> list[float]:
        """Per job, completion time relative to 1/n of the cluster, with n the mean number of jobs during its stay.

        A job wider than this share would run proportionally longer. Source: Mahajan et al., Themis: Fair and
        Efficient GPU Cluster Scheduling (NSDI 2020), section 3: rho = T_shared / T_ideal.
        """
        size = self.balance.room / (WHOLE_CARD if self.is_of_cards else 1000)
        rhos = []
        for number, job in enumerate(self.jobs):
            took_s = self.outcome.completion_s[number]
            rivals = self.crowd_before_s[number] / took_s if took_s else 1.0
            ideal_s = job.run_s * max(1.0, width(job) * rivals / size)
            rhos.append(took_s / ideal_s)
        return rhos


class _Gradient:
    """FGD's fragmentation for the jobs of the trace."""

    def __init__(
        self, layout: ClusterLayout, draft: ClusterState, needs: Sequence[RequestUnits], counts: Sequence[int]
    ) -> None:
        kinds: dict[RequestUnits, float] = {}
        for need, count in zip(needs, counts, strict=True):
            request = need.request
            bare = replace(request, nodes=1, tail_gpus=0, licenses=(), prefer=None, is_exclusive=False)
            times = request.nodes
            if request.bundles is not None:
                bare, times = part_of(bare, 1), request.bundles.count
            pieces = [(RequestUnits.of(bare, need.uid if need.is_slice else -1), times)]
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
    """Use of each node, and its inequality."""

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
    """Dominant share of each user: the largest fraction of cards, cores and memory.

    Source: Ghodsi et al., Dominant Resource Fairness (NSDI 2011).
    """

    def __init__(self, layout: ClusterLayout, jobs: Sequence[TraceJob], by: str | None) -> None:
        self._totals = (len(layout.cards) * WHOLE_CARD, sum(layout.millicpus), sum(layout.mem_mib))
        _, name_of = grouping(jobs, by)
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
    """The final run of each job."""
    last = [-1] * jobs
    for run, number in enumerate(runs.job):
        before = last[number]
        if before < 0 or runs.begin_s[run] >= runs.begin_s[before]:
            last[number] = run
    return last


def _kinds(
    jobs: Sequence[TraceJob], uids: Sequence[int], nodes: Sequence[NodeView]
) -> tuple[list[int], list[RequestUnits], list[int]]:
    """Kind number of each job; request and number of jobs of each kind."""
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
    """Free room on the cards of a node, in millionths of a card."""
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


_CardState = tuple[int, int, int]
"""Kind of the card, room in millionths, user of the slices on it (-1: none)."""

_MOST_KNOWN = 50_000
"""Number of cached states, beyond which those without a node are evicted."""


@dataclass(slots=True)
class _Shape:
    """Request of one kind of job: a number of nodes with equal pieces, and optionally one with a smaller piece."""

    nodes: int
    piece: int
    tail: int | None
    waiting: int = 0

    @property
    def is_gang(self) -> bool:
        return self.nodes > 1 or self.tail is not None


class _State:
    """One state of a node: its idle room, the pieces that fit, and the room usable by each combination of them."""

    __slots__ = ("cards", "fits", "idle", "nodes", "usable")

    def __init__(self, cards: tuple[_CardState, ...], idle: int, fits: int) -> None:
        self.cards = cards
        self.idle = idle
        self.fits = fits
        """A bit for each piece."""
        self.nodes = 0
        """How many are in this state."""
        self.usable: dict[int, int] = {0: 0}
        """By the bits of those pieces that jobs want and that fit."""


class Fragments:
    """Idle and stranded room of a cluster as jobs come and go.

    Args:
        draft: current bookings; `changed` must be called after each change on a node.
        needs: request of each kind of job, which is identified by its index here.
    """

    def __init__(self, draft: ClusterState, needs: Sequence[RequestUnits]) -> None:
        self._draft, self._layout = draft, draft.layout
        self._is_of_cards = any(need.request.gpus for need in needs)
        self._pieces: list[RequestUnits] = []
        numbers: dict[object, int] = {}
        self._shapes = [self._shape(need, numbers) for need in needs]
        self._gang_bits = 0
        self._able: dict[int, int] = {}
        """For each piece of a gang, on how many nodes it fits now."""
        for shape in self._shapes:
            if shape.is_gang:
                for piece in filter(None, (1 << shape.piece, 0 if shape.tail is None else 1 << shape.tail)):
                    self._gang_bits |= piece
                    self._able[piece] = 0
        self._gangs: dict[int, _Shape] = {}
        """Kinds of gangs with pending jobs."""
        self._singles: dict[int, int] = {}
        """Bits of the pieces that other pending jobs need, and how many need them."""
        self._mask, self._usable, self.idle = 0, 0, 0
        """`idle` is what no job holds, in millionths of a card, or thousandths of a core."""
        self._takes, self._kind_of = _kinds_of_cards(self._layout, self._pieces)
        self._admits, self._host_of = _kinds_of_nodes(self._layout, self._pieces)
        self._alike = [self._kind_of_all(node) for node in range(len(self._layout.nodes))]
        """Per node, of which kind all its cards are; None where they are of several, or there are none."""
        self._states: dict[object, _State] = {}
        self._state_of: list[_State] = []
        for node in range(len(self._layout.nodes)):
            state = self._state(node)
            self._state_of.append(state)
            self._count(state, 1)

    def _shape(self, need: RequestUnits, numbers: dict[object, int]) -> _Shape:
        request = need.request
        if request.bundles is not None:
            # As if it were laid out evenly over the fewest nodes.
            need = need.of_bundles(-(-request.bundles.count // request.nodes), request.nodes)
        tail = self._number(need.of_tail(), numbers) if request.tail_gpus else None
        return _Shape(request.nodes, self._number(need, numbers), tail)

    def _number(self, need: RequestUnits, numbers: dict[object, int]) -> int:
        request = need.request
        mark = (request.gpus, need.micros, request.vram_mib, need.millicpus, request.mem_mib, need.kind, need.where)
        mark_of_user = (*mark, need.uid if need.is_slice else -1)
        if mark_of_user not in numbers:
            numbers[mark_of_user] = len(self._pieces)
            self._pieces.append(need)
        return numbers[mark_of_user]

    # --- changes --------------------------------------------------------------------------------

    def waits(self, kind: int, count: int) -> None:
        """Change the number of pending jobs of a kind by `count`."""
        shape = self._shapes[kind]
        need = self._pieces[shape.piece]
        if not (need.request.gpus if self._is_of_cards else need.millicpus):
            return
        shape.waiting += count
        if shape.is_gang:
            if shape.waiting:
                self._gangs[kind] = shape
            else:
                self._gangs.pop(kind, None)
            return
        bit = 1 << shape.piece
        left = self._singles.get(bit, 0) + count
        if left:
            self._singles[bit] = left
        else:
            self._singles.pop(bit, None)

    def changed(self, node: int) -> None:
        """Update a node after a change of its bookings."""
        before, after = self._state_of[node], self._state(node)
        if before is not after:
            self._count(before, -1)
            self._count(after, 1)
            self._state_of[node] = after

    def _count(self, state: _State, sign: int) -> None:
        state.nodes += sign
        self.idle += sign * state.idle
        self._usable += sign * self._usable_in(state)
        gangs = state.fits & self._gang_bits
        while gangs:
            bit = gangs & -gangs
            self._able[bit] += sign
            gangs ^= bit

    # --- results --------------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Whether a pending job requests any room."""
        return bool(self._singles or self._gangs)

    def usable(self) -> int:
        """Idle room that some pending job could take now, in the unit of `idle`."""
        mask = 0
        for bit in self._singles:
            mask |= bit
        for shape in self._gangs.values():
            piece = 1 << shape.piece
            if self._able[piece] < shape.nodes:
                continue
            if shape.tail is None:
                mask |= piece
            elif self._able[1 << shape.tail] > shape.nodes:
                # A node with room for a piece also fits the smaller one, so that one more node is needed.
                mask |= piece | 1 << shape.tail
        if mask != self._mask:
            self._mask = mask
            self._usable = sum(state.nodes * self._usable_in(state) for state in self._states.values() if state.nodes)
        return self._usable

    def _usable_in(self, state: _State) -> int:
        chosen = self._mask & state.fits
        usable = state.usable.get(chosen)
        if usable is None:
            numbers = [number for number in range(len(self._pieces)) if chosen >> number & 1]
            usable = state.usable[chosen] = (
                sum(card[1] for card in state.cards if any(self._takes_of(number, card) for number in numbers))
                if self._is_of_cards
                else state.idle
            )
        return usable

    def _takes_of(self, piece: int, card: _CardState) -> bool:
        kind, room, owner = card
        wanted = self._takes[kind][piece]
        return bool(wanted) and wanted <= room and owner in (-1, self._pieces[piece].uid)

    # --- states ---------------------------------------------------------------------------------

    def _state(self, node: int) -> _State:
        draft = self._draft
        millicpus, mem_mib = draft.free_millicpus[node], draft.free_mem_mib[node]
        alike = self._alike[node]
        if alike is None or draft.shared_cards[node]:
            cards = tuple(sorted(self._card_state(card) for card in self._layout.cards_of[node]))
            mark: object = (self._host_of[node], millicpus, mem_mib, cards)
        else:
            cards = ()
            mark = (self._host_of[node], millicpus, mem_mib, alike, draft.free_cards[node])
        state = self._states.get(mark)
        if state is None:
            if len(self._states) >= _MOST_KNOWN:
                self._states = {mark: one for mark, one in self._states.items() if one.nodes}
            cards = cards or tuple(sorted(self._card_state(card) for card in self._layout.cards_of[node]))
            idle = sum(room for _, room, _ in cards) if self._is_of_cards else millicpus
            fits = self._fits(self._host_of[node], millicpus, mem_mib, cards)
            state = self._states[mark] = _State(cards, idle, fits)
        return state

    def _kind_of_all(self, node: int) -> int | None:
        kinds = {self._kind_of[card.number] for card in self._layout.cards_of[node]}
        return kinds.pop() if len(kinds) == 1 else None

    def _card_state(self, card: LayoutGpu) -> _CardState:
        draft, number = self._draft, card.number
        if draft.wholes[number]:
            return self._kind_of[number], 0, -1
        if not draft.slices[number]:
            return self._kind_of[number], WHOLE_CARD, -1
        room = WHOLE_CARD - draft.micros[number]
        if card.slice_total_mib:
            left_mib = self._layout.slice_limits[number] - draft.vram_mib[number]
            room = min(room, left_mib * WHOLE_CARD // card.slice_total_mib)
        return self._kind_of[number], max(0, room), draft.owner[number]

    def _fits(self, host: int, millicpus: int, mem_mib: int, cards: tuple[_CardState, ...]) -> int:
        fits = 0
        for number, need in enumerate(self._pieces):
            if (
                self._admits[host][number]
                and need.millicpus <= millicpus
                and need.request.mem_mib <= mem_mib
                and sum(self._takes_of(number, card) for card in cards) >= need.request.gpus
            ):
                fits |= 1 << number
        return fits


def _kinds_of_cards(layout: ClusterLayout, pieces: Sequence[RequestUnits]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Per kind of card, room taken by each piece in millionths, 0 if incompatible; the kind of each card."""
    may = [{card.number for cards in pool(layout, need).cards_of for card in cards} for need in pieces]
    kinds: dict[tuple[int, ...], int] = {}
    kind_of = []
    for card in layout.cards:
        takes = tuple(
            _takes(need, card) if need.request.gpus and card.number in cards else 0
            for need, cards in zip(pieces, may, strict=True)
        )
        kind_of.append(kinds.setdefault(takes, len(kinds)))
    return list(kinds), kind_of


def _kinds_of_nodes(layout: ClusterLayout, pieces: Sequence[RequestUnits]) -> tuple[list[tuple[bool, ...]], list[int]]:
    """Per kind of node, whether each piece can be placed on it; the kind of each node."""
    may = [{place.node for place in pool(layout, need).places} for need in pieces]
    kinds: dict[tuple[bool, ...], int] = {}
    kind_of = []
    for node in range(len(layout.nodes)):
        admits = tuple(node in nodes for nodes in may)
        kind_of.append(kinds.setdefault(admits, len(kinds)))
    return list(kinds), kind_of


def _takes(need: RequestUnits, card: LayoutGpu) -> int:
    if not need.is_slice:
        return WHOLE_CARD
    of_vram = 0
    if need.request.vram_mib is not None:
        of_vram = -(-need.request.vram_mib * WHOLE_CARD // max(1, card.slice_total_mib or 1))
    return max(1, need.micros, of_vram)
