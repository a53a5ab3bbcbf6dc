"""How much VRAM jobs like this one have used, and what could be asked for instead. Never used to end anything.

Like means the same as for run times, see `prediction`. What counts is the largest of the newest runs that ended well: a
mean would be too little for half of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpusched.model.cluster import GpuView
from gpusched.model.job import Request, Run
from gpusched.model.settings import GpuSettings
from gpusched.model.states import JobState
from gpusched.model.units import format_size_mib
from gpusched.policy.amounts import squeeze

RUNS = 5
"""Only the newest: code and data change."""

LEAST = 3
"""With fewer nothing is said."""

_SPARE = 1.25
_STEP_MIB = 1024


@dataclass(frozen=True, slots=True)
class VramSeen:
    """What the newest runs of a family used."""

    runs: int
    peak_mib: int
    """Of one card, in the run that used most."""


def peak_of(run: Run) -> int | None:
    """What a run used of each of its cards, in MiB; None for one that did not end well, or of which nobody knows."""
    if run.outcome is not JobState.COMPLETED or run.peak_vram_mib is None or not run.gpus:
        return None
    return -(-run.peak_vram_mib // len(run.gpus))


def seen(peaks_mib: Sequence[int]) -> VramSeen | None:
    """What the runs of a family (oldest first) say; None when they are too few."""
    newest = peaks_mib[-RUNS:]
    return VramSeen(len(newest), max(newest)) if len(newest) >= LEAST else None


def in_words(request: Request, found: VramSeen) -> str:
    """`its last 5 runs peaked at 6.1G`."""
    each = " on each GPU" if request.gpus > 1 else ""
    return f"its last {found.runs} runs peaked at {format_size_mib(found.peak_mib)} of VRAM{each}"


def proposal(request: Request, found: VramSeen, cards: Sequence[GpuView], settings: GpuSettings) -> str | None:
    """What could be asked for instead; None when the request is about right, or nobody can tell.

    Args: cards: of all nodes.
    """
    wanted_mib = max(_STEP_MIB, -(-int(found.peak_mib * _SPARE) // _STEP_MIB) * _STEP_MIB)
    wanted = f"--vram {format_size_mib(wanted_mib)}"
    if request.vram_mib is not None:
        if found.peak_mib > request.vram_mib + settings.vram_over_mib:
            return f"that is more than the {format_size_mib(request.vram_mib)} it books: ask for {wanted}"
        return f"{wanted} would do" if 2 * wanted_mib <= request.vram_mib else None
    if request.gpus != 1 or request.gpu_fraction is not None:
        return None
    model = squeeze(request.gpu_type or "")
    sizes_mib = [
        card.vram_total_mib
        for card in cards
        if card.is_present and card.can_share and card.vram_total_mib and model in squeeze(card.name)
    ]
    sizes_mib = [mib for mib in sizes_mib if mib >= (request.min_vram_mib or 0)]
    if sizes_mib and 2 * (wanted_mib + settings.share_headroom_mib) <= min(sizes_mib):
        return f"{wanted} would do, and shares a card with others of yours"
    return None
