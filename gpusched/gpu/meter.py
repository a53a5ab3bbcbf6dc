"""What each run was seen to use: peak VRAM, mean utilisation, energy. Pure.

Between two readings a quantity counts as the mean of both (trapezoid rule). A shared card's power
cannot be split, so energy is known for whole cards only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpusched.gpu.usage import Usage
from gpusched.model.cluster import GpuSample
from gpusched.model.job import GpuShare


@dataclass(frozen=True, slots=True)
class RunMeter:
    """Measured use of one run over all its cards; None is unknown."""

    peak_vram_mib: int | None
    """Largest sum over its cards at one instant."""
    mean_utilisation: float | None
    """Of its cards, 0 to 1; on a shared card that of the whole card."""
    energy_j: float | None


@dataclass(frozen=True, slots=True)
class CardUse:
    """One run on one card at one instant."""

    run: str
    share: GpuShare
    sample: GpuSample
    usage: Usage
    before_mib: int
    """Unexplained memory before the run."""

    def vram_mib(self) -> int | None:
        """Memory of the run on this card."""
        seen = self.usage.ours.get(self.run, 0)
        if self.run in self.usage.ours and seen is not None:
            return seen
        if not self.share.is_whole:
            return None if seen is None or self.sample.processes is None else seen
        if self.sample.vram_used_mib is None or self.sample.unified_memory:
            return None
        return max(0, self.sample.vram_used_mib - self.usage.visible_mib - self.before_mib)


class Meter:
    """Adds up one run."""

    __slots__ = ("_at", "_busy_s", "_energy_j", "_last_known", "_peak_mib", "_power_w", "_seen_s", "_utilisation")

    def __init__(self) -> None:
        self._at: float | None = None
        self._peak_mib: int | None = None
        self._utilisation: float | None = None
        self._last_known: float | None = None
        self._busy_s = 0.0
        self._seen_s = 0.0
        self._power_w: float | None = None
        self._energy_j: float | None = None

    def add(self, at: float, uses: Sequence[CardUse]) -> None:
        """One reading of all the run's cards."""
        amounts = [amount for use in uses if (amount := use.vram_mib()) is not None]
        if amounts:
            self._peak_mib = max(self._peak_mib or 0, sum(amounts))
        loads = [use.sample.utilisation for use in uses if use.sample.utilisation is not None]
        utilisation = sum(loads) / len(loads) if loads else None
        powers = [use.sample.power_w for use in uses if use.share.is_whole]
        known = [power for power in powers if power is not None]
        power_w = sum(known) if known and len(known) == len(uses) else None
        elapsed_s = 0.0 if self._at is None else max(0.0, at - self._at)
        if utilisation is not None and self._utilisation is not None:
            self._busy_s += (utilisation + self._utilisation) / 2 * elapsed_s
            self._seen_s += elapsed_s
        if power_w is not None and self._power_w is not None:
            self._energy_j = (self._energy_j or 0.0) + (power_w + self._power_w) / 2 * elapsed_s
        self._utilisation = utilisation
        if utilisation is not None:
            self._last_known = utilisation
        self._power_w = power_w
        self._at = at

    def result(self) -> RunMeter:
        """The sums so far."""
        mean = self._busy_s / self._seen_s if self._seen_s > 0 else self._last_known
        return RunMeter(self._peak_mib, mean, self._energy_j)
