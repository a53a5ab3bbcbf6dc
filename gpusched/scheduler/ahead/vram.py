"""What could be asked for in place of more VRAM than jobs like this one have used (`predict.vram`)."""

from __future__ import annotations

from collections.abc import Sequence

from gpusched.model.cluster import GpuView
from gpusched.model.job import Request
from gpusched.model.settings import GpuSettings
from gpusched.model.snapshot import VramSeen
from gpusched.model.units import format_size_mib
from gpusched.scheduler.amounts import squeeze

_SPARE = 1.25
_STEP_MIB = 1024


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
