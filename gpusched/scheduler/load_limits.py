"""Measured load against the ceilings of the settings: no job starts on a node that is too busy.

A sample lags behind: it does not include jobs started after it was taken. They count with their requests, or
the same idle sample would admit a whole burst of starts.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpusched.model.cluster import Allocation, HostSample, NodeView
from gpusched.model.planner_settings import CeilingSettings
from gpusched.model.settings import Settings
from gpusched.model.units import gpu_label
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import AllocationUnits, ClusterLayout, LayoutGpu

BUSY = 0.9
"""Ceiling of a load that the settings leave unset although one is required."""


def ceilings_of(settings: Settings) -> CeilingSettings:
    """The ceilings in force: those in the settings, and defaults required by the order or oversubscription."""
    ceiling, over = settings.ceiling, settings.oversubscribe
    by_load = settings.priority.order == "utilisation"
    return replace(
        ceiling,
        cpu_fraction=_or_busy(ceiling.cpu_fraction, by_load or over.cpus > 1),
        mem_fraction=_or_busy(ceiling.mem_fraction, by_load or over.mem > 1),
        gpu_fraction=_or_busy(ceiling.gpu_fraction, by_load or over.vram > 1),
    )


def _or_busy(ceiling: float | None, is_needed: bool) -> float | None:
    return BUSY if ceiling is None and is_needed else ceiling


def _since(ceiling: float | None, factor: float, what: str) -> str:
    """Explanation of a ceiling that is not in the settings."""
    return f", since {factor:g} times the {what} may be booked" if ceiling is None and factor > 1 else ""


class LoadLimits:
    """Load of every node as compared with the ceilings, during one cycle."""

    def __init__(self, layout: ClusterLayout, settings: Settings, running: Iterable[Allocation] = ()) -> None:
        self._nodes = layout.nodes
        set_by_hand, over = settings.ceiling, settings.oversubscribe
        self._since_cpus = _since(set_by_hand.cpu_fraction, over.cpus, "cores")
        self._since_mem = _since(set_by_hand.mem_fraction, over.mem, "memory")
        self._since_vram = _since(set_by_hand.gpu_fraction, over.vram, "VRAM")
        self._settings = ceilings_of(settings)
        self._new_millicpus = [0] * len(layout.nodes)
        self._new_mem_mib = [0] * len(layout.nodes)
        self.is_active = any(
            ceiling is not None
            for ceiling in (
                self._settings.cpu_fraction,
                self._settings.mem_fraction,
                self._settings.disk_mib_s,
                self._settings.net_mib_s,
            )
        )
        self.closed_cards = frozenset(card.number for card in layout.cards if self.why_not_join(card) is not None)
        """Cards too busy for another slice."""
        if self.is_active:
            self._count_unmeasured(layout, running)

    def _count_unmeasured(self, layout: ClusterLayout, running: Iterable[Allocation]) -> None:
        for held in running:
            booking = layout.booking(held.terms.uid, held)
            if booking is None:
                continue
            load = self._nodes[booking.node].load
            if load is not None and held.start_at >= load.at:
                self.add(booking)

    def add(self, booking: AllocationUnits) -> None:
        """Count a job that starts now, on each of its nodes."""
        for piece in booking.pieces():
            self._new_millicpus[piece.node] += piece.millicpus
            self._new_mem_mib[piece.node] += piece.mem_mib

    def why_not(self, node: int, mem_mib: int) -> str | None:
        """Sentence if a job with this memory request may not start on the node now."""
        if not self.is_active:
            return None
        view = self._nodes[node]
        load = view.load
        if load is None:
            return f"the load of node {view.name} is not known"
        return (
            self._cpu(view, load, node)
            or self._mem(view, load, node, mem_mib)
            or _rate(view, "disk", load.disk_mib_s, self._settings.disk_mib_s)
            or _rate(view, "network", load.net_mib_s, self._settings.net_mib_s)
        )

    def why_not_join(self, card: LayoutGpu) -> str | None:
        """Sentence if a slice may not share this card now; an empty card always accepts the first slice."""
        ceiling = self._settings.gpu_fraction
        if ceiling is None:
            return None
        measured = card.view.utilisation
        if measured is None:
            return f"the load of GPU {gpu_label(card.view.index)} is not known"
        if measured <= ceiling:
            return None
        return (
            f"GPU {gpu_label(card.view.index)} is shared and busy {measured:.0%} of the time, "
            f"the ceiling is {ceiling:.0%}{self._since_vram}"
        )

    def _cpu(self, view: NodeView, load: HostSample, node: int) -> str | None:
        ceiling = self._settings.cpu_fraction
        if ceiling is None:
            return None
        if load.cpu_fraction is None:
            return f"the CPU load of node {view.name} is not known yet"
        expected = load.cpu_fraction
        if view.cpus > 0:
            expected += self._new_millicpus[node] / 1000 / view.cpus
        if expected <= ceiling:
            return None
        return f"the CPU load of node {view.name} is {expected:.0%}, the ceiling is {ceiling:.0%}{self._since_cpus}"

    def _mem(self, view: NodeView, load: HostSample, node: int, mem_mib: int) -> str | None:
        ceiling = self._settings.mem_fraction
        if ceiling is None:
            return None
        used_mib = load.mem_total_mib - load.mem_available_mib + self._new_mem_mib[node]
        expected = (used_mib + mem_mib) / max(1, load.mem_total_mib)
        if expected <= ceiling:
            return None
        return (
            f"memory in use on node {view.name} would be {expected:.0%} with this job, the ceiling is {ceiling:.0%}"
            f"{self._since_mem}"
        )


def _rate(view: NodeView, name: str, measured: float | None, ceiling: float | None) -> str | None:
    if ceiling is None:
        return None
    if measured is None:
        return f"the {name} traffic of node {view.name} is not known yet"
    if measured <= ceiling:
        return None
    return f"{name} traffic of node {view.name} is {measured:.0f} MiB/s, the ceiling is {ceiling:.0f} MiB/s"
