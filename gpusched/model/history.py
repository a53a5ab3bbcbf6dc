"""Sums over the run history for accounting: exact, without the decay of fair-share usage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpusched.model.job import GpuShare, Run

GROUPS = ("user", "account", "queue")
"""Possible groupings of the sums."""


@dataclass(slots=True)
class UsageSum:
    """Resources held by the runs of one user, account or queue in a period. Amounts times seconds."""

    name: str
    jobs: int = 0
    runs: int = 0
    gpu_s: float = 0.0
    """A whole card counts 1, a slice the booked fraction of its card."""
    cpu_s: float = 0.0
    mem_mib_s: float = 0.0
    wait_s: float = 0.0
    """Sum of the waits from queueing to first start, over all jobs that started in the period."""
    started: int = 0
    """Number of those jobs."""
    energy_j: float | None = None
    """Of the cards of ended runs, spread evenly over their time; None if it is known of none."""
    cost: float | None = None
    grams: float | None = None

    def add_energy(self, joules: float | None, cost: float | None, grams: float | None) -> None:
        """Add what is known."""
        for name, amount in (("energy_j", joules), ("cost", cost), ("grams", grams)):
            if amount is not None:
                setattr(self, name, (getattr(self, name) or 0.0) + amount)


@dataclass(slots=True)
class AccountUse:
    """What the runs of one user in one account did within a period. Amounts times seconds."""

    account: str
    user: str
    jobs: int = 0
    runs: int = 0
    open_runs: int = 0
    """Runs that have not ended: their energy and what they used is not known yet."""
    gpu_s: dict[str, float] = field(default_factory=dict)
    """Held, by model of card; empty text for a card that is not known any more."""
    charged_gpu_s: dict[str, float] = field(default_factory=dict)
    """The part that counts for budgets."""
    filler_gpu_s: float = 0.0
    """The part that was held on spent budgets."""
    busy_gpu_s: float | None = None
    """Held times the mean utilisation of each run; None if it is known of none."""
    cpu_s: float = 0.0
    """Held."""
    busy_cpu_s: float | None = None
    energy_j: float | None = None
    cost: float | None = None
    grams: float | None = None

    def add_cards(self, amounts: Mapping[str, float], *, is_free: bool, is_filler: bool) -> None:
        if is_filler:
            self.filler_gpu_s += sum(amounts.values())
        for model, amount in amounts.items():
            self.gpu_s[model] = self.gpu_s.get(model, 0.0) + amount
            if not is_free:
                self.charged_gpu_s[model] = self.charged_gpu_s.get(model, 0.0) + amount

    def add_known(self, **amounts: float | None) -> None:
        """Add to these sums what is known."""
        for name, amount in amounts.items():
            if amount is not None:
                setattr(self, name, (getattr(self, name) or 0.0) + amount)

    def add(self, other: AccountUse) -> None:
        """Add all of another sum."""
        self.jobs += other.jobs
        self.runs += other.runs
        self.open_runs += other.open_runs
        self.cpu_s += other.cpu_s
        self.filler_gpu_s += other.filler_gpu_s
        for mine, its in ((self.gpu_s, other.gpu_s), (self.charged_gpu_s, other.charged_gpu_s)):
            for model, amount in its.items():
                mine[model] = mine.get(model, 0.0) + amount
        self.add_known(**{name: getattr(other, name) for name in KNOWN_LATER})


KNOWN_LATER = ("busy_gpu_s", "busy_cpu_s", "energy_j", "cost", "grams")
"""Sums of `AccountUse` that are None while nothing is known."""


def models_in(shares: Iterable[GpuShare], cards: Mapping[str, tuple[str, int | None]]) -> dict[str, float]:
    """GPUs that a run holds by model, as `cards_in`. Args: cards: model and VRAM of each card, by UUID."""
    found: dict[str, float] = {}
    for share in shares:
        model, total_mib = cards.get(share.uuid, ("", None))
        found[model] = found.get(model, 0.0) + part_of_card(share, total_mib)
    return found


def seconds_in(run: Run, since: float, now: float, stands_still_since: float | None = None) -> float:
    """Time that a run was active within a period, in seconds; for an open run, up to now.

    For a run that began before the period, its suspended time is spread evenly over its whole life, so that
    the results of two adjacent periods add up to that of both together.
    """
    if run.start_at is None:
        return 0.0
    end_at = now if run.end_at is None else run.end_at
    whole_s = end_at - run.start_at
    if whole_s <= 0:
        return 0.0
    still_s = run.suspended_s
    if run.end_at is None and stands_still_since is not None:
        still_s += max(0.0, now - stands_still_since)
    inside_s = max(0.0, min(end_at, now) - max(run.start_at, since))
    return inside_s * max(0.0, 1.0 - still_s / whole_s)


def cards_in(shares: Iterable[GpuShare], vram_total_mib: Mapping[str, int]) -> float:
    """GPUs that a run holds; a slice counts its fraction, or 1 if booked by memory on a card of unknown size."""
    return sum(part_of_card(share, vram_total_mib.get(share.uuid)) for share in shares)


def part_of_card(share: GpuShare, total_mib: int | None) -> float:
    """Fraction of its card that a share books, 0 to 1; 1 for a slice by memory on a card of unknown size."""
    if share.fraction is not None:
        return share.fraction
    if share.vram_mib is None or not total_mib:
        return 1.0
    return min(1.0, share.vram_mib / total_mib)
