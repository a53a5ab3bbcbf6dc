"""Energy of the cards of one node, and its division among the runs that hold them. Pure.

The driver's counter comes first: NVML's power is a mean over part of the time only (A100 and H100 sense a quarter of
it, arXiv 2312.02741). The counter counts since the driver was loaded, so it is compared only with one of the same card
in the same boot. A difference that is negative (reset, wrap) or more than the card can draw is dropped; the power of
both ends fills the gap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpusched.model.cluster import GpuSample
from gpusched.model.value import Value

COUNTER, POWER, SPLIT = "counter", "power", "split"
"""Where a figure comes from: the driver's counter, power times time, and a part of a card that others share."""

_MARGIN = 1.2
_SLACK_S = 0.5
"""The counter is updated in steps, which may fall to either side of a reading."""
_UNKNOWN_LIMIT_W = 1500.0
_LONGEST_GAP_S = 120.0
"""Power says nothing of a longer time without a reading, which may also be a step of the clock."""
_SLICES = re.compile(r"(?:\d+c\.)?(\d+)g\.")
_CARD_SLICES = {"A30": 4}
_USUAL_SLICES = 7


class CounterReading(Value):
    """The last reading of a card's counter, kept over restarts of the daemon."""

    uuid: str
    boot_id: str
    at: float
    energy_mj: int | None = None
    power_w: float | None = None
    idle_w: float | None = None
    """Lowest power seen."""


@dataclass(frozen=True, slots=True)
class CardEnergy:
    """What one card used between two readings."""

    joules: float
    source: str
    """`COUNTER` or `POWER`."""
    elapsed_s: float
    start_at: float
    idle_j: float = 0.0
    """The part that it would have used without work."""


class EnergyCounters:
    """Follows the counters of a node's cards."""

    def __init__(self, boot_id: str = "") -> None:
        self._boot_id = boot_id
        self._last: dict[str, CounterReading] = {}

    def restore(self, readings: Iterable[CounterReading], boot_id: str) -> None:
        """Go on from readings that were kept; those of another boot are of no use."""
        self._boot_id = boot_id
        for reading in readings:
            if reading.boot_id == boot_id:
                self._last.setdefault(reading.uuid, reading)

    def readings(self) -> tuple[CounterReading, ...]:
        return tuple(self._last.values())

    def take(self, at: float, samples: Iterable[GpuSample]) -> dict[str, CardEnergy]:
        """Fold a reading; returns the energy since the last one of each card of which it is known.

        A MIG instance has none of its own; see `instance_part`.
        """
        found = {}
        for sample in samples:
            if sample.mig_parent is not None or sample.is_lost or sample.error is not None:
                continue
            before = self._last.get(sample.uuid)
            if before is not None and (energy := _since(before, at, sample)) is not None:
                found[sample.uuid] = energy
            lowest_w = None if before is None else before.idle_w
            known_w = [power for power in (sample.power_w, lowest_w) if power is not None]
            self._last[sample.uuid] = CounterReading(
                uuid=sample.uuid,
                boot_id=self._boot_id,
                at=at,
                energy_mj=sample.energy_mj,
                power_w=sample.power_w,
                idle_w=min(known_w, default=None),
            )
        return found


def _since(before: CounterReading, at: float, sample: GpuSample) -> CardEnergy | None:
    elapsed_s = max(0.0, at - before.at)
    idle_w = before.idle_w or 0.0
    if sample.energy_mj is not None and before.energy_mj is not None:
        joules = (sample.energy_mj - before.energy_mj) / 1000
        most_w = max(sample.power_limit_w or _UNKNOWN_LIMIT_W, sample.power_w or 0.0)
        if 0 <= joules <= most_w * (elapsed_s + _SLACK_S) * _MARGIN:
            return CardEnergy(joules, COUNTER, elapsed_s, at - elapsed_s, min(joules, idle_w * elapsed_s))
    if sample.power_w is None or before.power_w is None or elapsed_s > _LONGEST_GAP_S:
        return None
    joules = (sample.power_w + before.power_w) / 2 * elapsed_s
    return CardEnergy(joules, POWER, elapsed_s, at - elapsed_s, min(joules, idle_w * elapsed_s))


@dataclass(frozen=True, slots=True)
class EnergyClaim:
    """One run on one card.

    booking: booked part of the card, 0 to 1. sm: part of the time in which its kernels ran; None when unknown.
    """

    run: str
    booking: float
    sm: float | None = None


def divide(energy: CardEnergy, claims: Sequence[EnergyClaim], foreign_sm: float = 0.0) -> dict[str, float]:
    """Joules of each run: idle power by booking, the rest by SM time if that is known of all, else by booking.

    Args: foreign_sm: SM time of processes of no run.
    Invariant: no part is negative, and they sum up to at most the card's; the rest is charged to no run.
    """
    if len(claims) == 1 and claims[0].booking == 1.0 and not foreign_sm:
        idle_j = min(max(0.0, energy.idle_j), energy.joules)
        return {claims[0].run: idle_j + (energy.joules - idle_j)}
    parts = dict.fromkeys((claim.run for claim in claims), 0.0)
    booked = sum(claim.booking for claim in claims)
    if not booked:
        return parts
    idle_j = min(max(0.0, energy.idle_j), energy.joules)
    active_j = energy.joules - idle_j
    sms = [claim.sm for claim in claims if claim.sm is not None]
    worked = sum(sms) + foreign_sm
    is_by_sm = len(sms) == len(claims) and worked > 0
    for claim in claims:
        parts[claim.run] += idle_j * claim.booking / max(1.0, booked)
        parts[claim.run] += active_j * ((claim.sm or 0.0) / worked if is_by_sm else claim.booking / booked)
    return parts


def instance_part(profile: str | None, card_name: str) -> float:
    """Part of its card's compute slices that a MIG instance has, 0 to 1; 0 for an unknown profile."""
    found = _SLICES.match(profile or "")
    if found is None:
        return 0.0
    slices = next((count for name, count in _CARD_SLICES.items() if name in card_name), _USUAL_SLICES)
    return min(1.0, int(found[1]) / slices)


def shared_by_instances(energy: CardEnergy, parts: Mapping[str, float]) -> dict[str, float]:
    """Joules of each MIG instance by its part of the slices; the part of no instance is charged to no run."""
    most = max(1.0, sum(parts.values()))
    return {uuid: energy.joules * part / most for uuid, part in parts.items()}
