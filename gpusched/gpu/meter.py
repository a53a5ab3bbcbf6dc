"""What runs use of their cards: memory, load, energy and what that costs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpusched.gpu.energy import SPLIT, CardEnergy, EnergyClaim, divide, instance_part, shared_by_instances
from gpusched.gpu.usage import Bookings, GpuUsage
from gpusched.model.cluster import GpuSample
from gpusched.model.job import GpuShare, MeasuredCard, RunMeasures
from gpusched.model.tariff import Tariff
from gpusched.model.value import Value

IDLE_USE = 0.02
"""A card that is busy for less of the time counts as idle."""


@dataclass(frozen=True, slots=True)
class RunMeter:
    """Measured use of one run over all its cards; None means unknown."""

    peak_vram_mib: int | None
    """Largest sum over its cards at one instant."""
    mean_utilisation: float | None
    """Mean over its cards, 0 to 1; on a shared card that of the whole card."""
    energy_j: float | None
    measured: RunMeasures | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RunEnergy:
    """Energy of one run on one card between two readings."""

    joules: float
    source: str
    start_at: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class RunGpuUse:
    run: str
    share: GpuShare
    sample: GpuSample
    usage: GpuUsage
    before_mib: int
    """Unexplained memory before the run."""
    energy: RunEnergy | None = None

    def vram_mib(self) -> int | None:
        seen = self.usage.ours.get(self.run, 0)
        if self.run in self.usage.ours and seen is not None:
            return seen
        if not self.share.is_whole:
            return None if seen is None or self.sample.processes is None else seen
        if self.sample.vram_used_mib is None or self.sample.unified_memory:
            return None
        return max(0, self.sample.vram_used_mib - self.usage.visible_mib - self.before_mib)


class CardMeter(Value):
    """One card of a run so far."""

    uuid: str
    index: int
    vram_mib: int | None = None
    """Booked, or the whole card's."""
    busy_s: float = 0.0
    seen_s: float = 0.0
    peak_mib: int | None = None
    energy_j: float = 0.0
    energy_s: float = 0.0
    """Time over which `energy_j` is known."""
    limit_w: float | None = None


class MeterState(Value):
    """All that a meter has summed up; kept over restarts of the daemon."""

    peak_mib: int | None = None
    last_known: float | None = None
    busy_s: float = 0.0
    seen_s: float = 0.0
    idle_s: float = 0.0
    energy_j: float | None = None
    sources: tuple[str, ...] = ()
    cost: float | None = None
    grams: float | None = None
    cards: tuple[CardMeter, ...] = ()


class UsageMeter:
    __slots__ = (
        *("_at", "_busy_s", "_cards", "_cost", "_energy_j", "_grams", "_idle_s", "_last_known"),
        *("_had_card", "_peak_mib", "_seen_s", "_sources", "_utilisation"),
    )

    def __init__(self, state: MeterState | None = None) -> None:
        self._had_card = state is not None
        """Whether the run held its cards at the last reading, so that all energy since is its own."""
        state = MeterState() if state is None else state
        self._at: float | None = None
        self._utilisation: float | None = None
        self._peak_mib = state.peak_mib
        self._last_known = state.last_known
        self._busy_s = state.busy_s
        self._seen_s = state.seen_s
        self._idle_s = state.idle_s
        self._energy_j = state.energy_j
        self._sources = set(state.sources)
        self._cost = state.cost
        self._grams = state.grams
        self._cards = {card.uuid: _CardSums(card) for card in state.cards}

    def state(self) -> MeterState:
        return MeterState(
            peak_mib=self._peak_mib,
            last_known=self._last_known,
            busy_s=self._busy_s,
            seen_s=self._seen_s,
            idle_s=self._idle_s,
            energy_j=self._energy_j,
            sources=tuple(sorted(self._sources)),
            cost=self._cost,
            grams=self._grams,
            cards=tuple(card.state() for card in self._cards.values()),
        )

    def add(self, at: float, uses: Sequence[RunGpuUse], tariff: Tariff | None = None) -> None:
        amounts = [amount for use in uses if (amount := use.vram_mib()) is not None]
        if amounts:
            self._peak_mib = max(self._peak_mib or 0, sum(amounts))
        loads = [use.sample.utilisation for use in uses if use.sample.utilisation is not None]
        utilisation = sum(loads) / len(loads) if loads else None
        elapsed_s = 0.0 if self._at is None else max(0.0, at - self._at)
        if utilisation is not None and self._utilisation is not None:
            self._busy_s += (utilisation + self._utilisation) / 2 * elapsed_s
            self._seen_s += elapsed_s
            if len(loads) == len(uses) and max(loads) < IDLE_USE:
                self._idle_s += elapsed_s
        self._utilisation = utilisation
        if utilisation is not None:
            self._last_known = utilisation
        for use in uses:
            card = self._cards.get(use.share.uuid)
            if card is None:
                card = self._cards[use.share.uuid] = _CardSums(CardMeter(use.share.uuid, use.share.index))
            card.add(at, use, use.energy if self._had_card else None)
        if self._had_card:
            self._charge([use.energy for use in uses if use.energy is not None], tariff)
        self._had_card, self._at = True, at

    def _charge(self, energies: Sequence[RunEnergy], tariff: Tariff | None) -> None:
        is_first = self._energy_j is None
        for energy in energies:
            self._energy_j = (self._energy_j or 0.0) + energy.joules
            self._sources.update(energy.source.split("+"))
            if tariff is None:
                continue
            cost, grams = tariff.charge(energy.start_at, energy.start_at + energy.elapsed_s, energy.joules)
            # A sum that lacks a part is not a sum: it stays unknown from then on.
            if is_first or self._cost is not None:
                self._cost = None if cost is None else (self._cost or 0.0) + cost
            if is_first or self._grams is not None:
                self._grams = None if grams is None else (self._grams or 0.0) + grams
            is_first = False

    def result(self, tariff: Tariff | None = None) -> RunMeter:
        mean = self._busy_s / self._seen_s if self._seen_s > 0 else self._last_known
        measured = RunMeasures(
            cards=tuple(card.measured() for card in self._cards.values()),
            idle_s=self._idle_s if self._seen_s > 0 else None,
            energy_source="+".join(sorted(self._sources)) or None,
            cost=self._cost,
            currency=tariff.currency if tariff is not None and self._cost is not None else "",
            grams=self._grams,
            pue=1.0 if tariff is None else tariff.pue,
        )
        return RunMeter(self._peak_mib, mean, self._energy_j, measured)


class _CardSums:
    """The changing form of a `CardMeter`."""

    def __init__(self, card: CardMeter) -> None:
        self._card = card
        self._at: float | None = None
        self._use: float | None = None
        self._vram = card.vram_mib
        self._busy_s, self._seen_s = card.busy_s, card.seen_s
        self._energy_j, self._energy_s = card.energy_j, card.energy_s
        self._peak_mib, self._limit_w = card.peak_mib, card.limit_w

    def add(self, at: float, use: RunGpuUse, energy: RunEnergy | None) -> None:
        elapsed_s = 0.0 if self._at is None else max(0.0, at - self._at)
        load = use.sample.utilisation
        if load is not None and self._use is not None:
            self._busy_s += (load + self._use) / 2 * elapsed_s
            self._seen_s += elapsed_s
        if energy is not None:
            self._energy_j += energy.joules
            self._energy_s += energy.elapsed_s
        amount = use.vram_mib()
        if amount is not None:
            self._peak_mib = max(self._peak_mib or 0, amount)
        self._vram = booked_mib(use.share, use.sample)
        self._limit_w = use.sample.power_limit_w
        self._use, self._at = load, at

    def state(self) -> CardMeter:
        return CardMeter(
            uuid=self._card.uuid,
            index=self._card.index,
            vram_mib=self._vram,
            busy_s=self._busy_s,
            seen_s=self._seen_s,
            peak_mib=self._peak_mib,
            energy_j=self._energy_j,
            energy_s=self._energy_s,
            limit_w=self._limit_w,
        )

    def measured(self) -> MeasuredCard:
        return MeasuredCard(
            uuid=self._card.uuid,
            index=self._card.index,
            utilisation=self._busy_s / self._seen_s if self._seen_s > 0 else self._use,
            peak_vram_mib=self._peak_mib,
            vram_mib=self._vram,
            mean_power_w=self._energy_j / self._energy_s if self._energy_s > 0 else None,
            power_limit_w=self._limit_w,
        )


def booked_mib(share: GpuShare, sample: GpuSample) -> int | None:
    """VRAM that a share books; for a whole card all of it."""
    if share.vram_mib is not None:
        return share.vram_mib
    total_mib = sample.vram_total_mib
    if total_mib is None or share.fraction is None:
        return total_mib
    return int(total_mib * share.fraction)


def run_energies(
    energies: Mapping[str, CardEnergy],
    samples: Mapping[str, GpuSample],
    usages: Mapping[str, GpuUsage | None],
    booked: Mapping[str, Bookings],
) -> dict[tuple[str, str], RunEnergy]:
    """Energy since the last reading, by run and by UUID of the card or instance that it booked.

    Idle cards, foreign processes and slices without an instance are charged to no run.
    Args: energies, samples, usages: by UUID; booked: by UUID, runs with their shares.
    """
    found: dict[tuple[str, str], RunEnergy] = {}
    instances: dict[str, dict[str, float]] = {}
    for uuid, sample in samples.items():
        card = sample.mig_parent
        if card is not None and card in energies:
            parent = samples.get(card)
            part = instance_part(sample.mig_profile, "" if parent is None else parent.name)
            instances.setdefault(card, {})[uuid] = part
    for card, energy in energies.items():
        parts = shared_by_instances(energy, instances[card]) if card in instances else {card: energy.joules}
        for uuid, joules in parts.items():
            claimed = booked.get(uuid)
            if not claimed:
                continue
            is_split = uuid != card or len(claimed) > 1 or not claimed[0][1].is_whole
            source = f"{energy.source}+{SPLIT}" if is_split else energy.source
            idle_j = energy.idle_j * joules / energy.joules if energy.joules else 0.0
            mine = CardEnergy(joules, energy.source, energy.elapsed_s, energy.start_at, idle_j)
            claims, foreign_sm = claims_on(samples[uuid], usages.get(uuid), claimed)
            for run, amount in divide(mine, claims, foreign_sm).items():
                found[run, uuid] = RunEnergy(amount, source, energy.start_at, energy.elapsed_s)
    return found


def claims_on(sample: GpuSample, usage: GpuUsage | None, booked: Bookings) -> tuple[list[EnergyClaim], float]:
    """Each run's claim on a card, and the SM time of processes of no run."""
    sms, foreign_sm = _sm_times(sample, usage, [run for run, _ in booked])
    claims = [EnergyClaim(run, booking_part(share, sample), sms.get(run)) for run, share in booked]
    return claims, foreign_sm


def booking_part(share: GpuShare, sample: GpuSample) -> float:
    """Booked part of a card, 0 to 1."""
    if share.is_whole:
        return 1.0
    if share.fraction is not None:
        return min(1.0, share.fraction)
    total_mib = sample.vram_total_mib
    return min(1.0, (share.vram_mib or 0) / total_mib) if total_mib else 1.0


def _sm_times(sample: GpuSample, usage: GpuUsage | None, runs: Iterable[str]) -> tuple[dict[str, float], float]:
    """SM time of each run and of foreign processes; nothing where it is not known of every process."""
    processes = sample.processes
    if not processes or usage is None or usage.is_blurred:
        return {}, 0.0
    # The driver is not asked about a process that has the card to itself.
    known = {one.pid: 1.0 if len(processes) == 1 else one.sm for one in processes}
    if None in known.values():
        return {}, 0.0
    found = {run: sum(known.get(one.pid) or 0.0 for one in usage.pids.get(run, ())) for run in runs}
    return found, max(0.0, sum(filter(None, known.values())) - sum(found.values()))
