"""Whose memory it is: one card's reading set against the bookings of our runs. Pure.

The driver tells what is in use and, often, by which processes. Processes of our runs are known by pid;
the rest are foreign. Memory that no visible process explains counts as foreign too, except where our
own bookings may explain it: a container's pids are not ours to see, and a process may be between
its two entries in the driver's lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpusched.model.cluster import GpuProcess, GpuSample, ShareUse
from gpusched.model.job import GpuShare

_SERVER = "nvidia-cuda-mps"
"""Name of a server of MPS, as the kernel cuts it."""
_SERVER_MIB = 512
"""What a server holds for itself at most."""

Bookings = Sequence[tuple[str, GpuShare]]
"""Run handle and what it books on one card."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What is on one card, split by owner, in MiB."""

    ours: Mapping[str, int | None]
    """By visible processes of each run; None when the driver does not tell for one of them."""
    pids: Mapping[str, tuple[GpuProcess, ...]]
    """Visible processes of each run."""
    foreign: tuple[GpuProcess, ...]
    visible_mib: int
    """By foreign processes whose memory is told."""
    rest_mib: int
    """By nobody visible, beyond what our bookings may explain."""
    has_blind_spot: bool
    """There is no list of processes, or a foreign one's memory is not told."""
    server_mib: int = 0
    """By servers of MPS: their contexts, or all that their clients hold, which then cannot be told apart."""

    @property
    def is_blurred(self) -> bool:
        """Whether what runs hold is laid to the charge of a server of MPS."""
        return self.server_mib > _SERVER_MIB


def attribute(sample: GpuSample, owners: Mapping[int, str], booked: Bookings) -> Usage:
    """Split a reading whose memory in use is known.

    Args: owners: pid -> run handle; booked: open runs on this card, those being released included.
    """
    if sample.mig_instances:
        # Each process is told of its instance as well. The driver lists them all for the card, too.
        return Usage({}, {}, (), 0, 0, has_blind_spot=False)
    ours: dict[str, int | None] = {}
    pids: dict[str, tuple[GpuProcess, ...]] = {}
    foreign = []
    server_mib = 0
    for process in sample.processes or ():
        run = owners.get(process.pid)
        if run is None and sample.mps and process.name == _SERVER:
            server_mib += _SERVER_MIB + 1 if process.vram_mib is None else process.vram_mib
            continue
        if run is None:
            foreign.append(process)
            continue
        before = ours.get(run, 0)
        ours[run] = None if before is None or process.vram_mib is None else before + process.vram_mib
        pids[run] = (*pids.get(run, ()), process)
    visible_mib = sum(process.vram_mib or 0 for process in foreign)
    used_mib = sample.vram_used_mib or 0
    # What is more than a context is of its clients, whose bookings explain it.
    rest_mib = max(0, used_mib - visible_mib - min(server_mib, _SERVER_MIB) - explained_mib(sample, ours, booked))
    has_blind_spot = sample.processes is None or any(process.vram_mib is None for process in foreign)
    return Usage(ours, pids, tuple(foreign), visible_mib, rest_mib, has_blind_spot, server_mib)


def explained_mib(sample: GpuSample, ours: Mapping[str, int | None], booked: Bookings) -> int:
    """How much of the memory in use these bookings may explain: each its slice, or more if it is seen to use more."""
    total_mib = sample.vram_total_mib or sample.vram_used_mib or 0
    explained = 0
    for run, share in booked:
        explained += max(_slice_mib(share, total_mib), ours.get(run) or 0)
    known = {run for run, _ in booked}
    return explained + sum(held or 0 for run, held in ours.items() if run not in known)


def _slice_mib(share: GpuShare, total_mib: int) -> int:
    if share.vram_mib is not None:
        return share.vram_mib
    return total_mib if share.fraction is None else int(total_mib * share.fraction)


def share_uses(sample: GpuSample, usage: Usage, booked: Bookings, total_mib: int | None) -> tuple[ShareUse, ...]:
    """What each run that shares the card holds of it; a run with a whole card is left out.

    Memory that nobody visible holds is laid to nobody's charge: it may be what an ended run has not given back yet.
    Args: total_mib: bookable memory of the card.
    """
    found = []
    is_dark = sample.processes is None or usage.is_blurred
    seen: dict[str, int | None] = {run: None if is_dark else 0 for run, _ in booked}
    if not usage.is_blurred:
        seen.update(usage.ours)
    for run, share in booked:
        if share.is_whole or total_mib is None:
            continue
        others = [mib for other, mib in seen.items() if other != run]
        left_mib = None
        if not sample.unified_memory and not usage.has_blind_spot and None not in others:
            left_mib = max(0, total_mib - usage.visible_mib - sum(mib or 0 for mib in others))
        found.append(ShareUse(run, sample.uuid, sample.index, _slice_mib(share, total_mib), seen[run], left_mib))
    return tuple(found)


def foreign_mib(usage: Usage, baseline_mib: int) -> int:
    """Memory of no job. What nobody visible holds counts above the baseline that any card shows."""
    if usage.rest_mib > baseline_mib or usage.has_blind_spot:
        return usage.visible_mib + usage.rest_mib
    return usage.visible_mib
