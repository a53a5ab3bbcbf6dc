"""Attribution of memory: one card's reading compared with the bookings of our runs. Pure.

The driver reports the memory in use and, often, the processes. Processes of our runs are known by pid; the rest are
foreign. A booking explains use of the booked card only: on any other card a run's process is an intruder, like a
foreign one (unbooked use, as by a script that sets CUDA_VISIBLE_DEVICES itself). Memory that no visible process
explains counts as foreign too, except where our own bookings may explain it: pids in a container are invisible to us,
and a process may be between its two entries in the driver's lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpusched.model.cluster import Enforcement, GpuProcess, GpuSample, ShareUse
from gpusched.model.job import GpuShare
from gpusched.model.settings import GpuSettings
from gpusched.model.units import format_duration
from gpusched.model.value import replace

_SERVER = "nvidia-cuda-mps"
"""Name of an MPS server, as truncated by the kernel."""
_SERVER_MIB = 512
"""Maximum memory of a server's own."""

Bookings = Sequence[tuple[str, GpuShare]]
"""Run handle, and its booking of one card."""


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Memory use of one GPU, split by owner, in MiB."""

    ours: Mapping[str, int | None]
    """Held by visible processes of each run that booked the card; None when unknown for any of them."""
    pids: Mapping[str, tuple[GpuProcess, ...]]
    """Visible processes of each run that booked the card."""
    intruders: tuple[GpuProcess, ...]
    """Processes that no booking of the card explains: foreign ones, and those of runs that did not book it."""
    visible_mib: int
    """Held by intruders with known memory."""
    rest_mib: int
    """Held by no visible process, beyond what bookings may explain; 0 where that is the host's memory, used by all."""
    has_blind_spot: bool
    """There is no list of processes, or an intruder's memory is unknown."""
    server_mib: int = 0
    """Held by MPS servers: their contexts, or all memory of their clients, which is then indistinguishable."""
    unbooked: Mapping[str, int] = field(default_factory=dict)
    """The part of `visible_mib` that is unbooked use, by run."""

    @property
    def is_blurred(self) -> bool:
        """Whether an MPS server holds the memory of the runs, which thus cannot be attributed."""
        return self.server_mib > _SERVER_MIB


def attribute(sample: GpuSample, owners: Mapping[int, str], booked: Bookings) -> GpuUsage:
    """Split a reading with known memory in use.

    Args: owners: pid -> run handle; booked: open runs on this card, including those being released.
    """
    if sample.mig_instances:
        # Each process is listed for its instance as well. The driver lists them all for the card, too.
        return GpuUsage({}, {}, (), 0, 0, has_blind_spot=False)
    if not sample.processes and sample.processes is not None and not sample.vram_used_mib:
        # Nothing is on it.
        return GpuUsage({}, {}, (), 0, 0, has_blind_spot=False)
    ours: dict[str, int | None] = {}
    pids: dict[str, tuple[GpuProcess, ...]] = {}
    intruders: list[GpuProcess] = []
    unbooked: dict[str, int] = {}
    bookers = {run for run, _ in booked}
    server_mib = 0
    for process in sample.processes or ():
        run = owners.get(process.pid)
        if run is None and sample.mps and process.name == _SERVER:
            server_mib += _SERVER_MIB + 1 if process.vram_mib is None else process.vram_mib
            continue
        if run not in bookers:
            intruders.append(process if run is None else replace(process, run=run))
            if run is not None:
                unbooked[run] = unbooked.get(run, 0) + (process.vram_mib or 0)
            continue
        before = ours.get(run, 0)
        ours[run] = None if before is None or process.vram_mib is None else before + process.vram_mib
        pids[run] = (*pids.get(run, ()), process)
    visible_mib = sum(process.vram_mib or 0 for process in intruders)
    used_mib = sample.vram_used_mib or 0
    # Memory beyond a context belongs to its clients, whose bookings explain it.
    rest_mib = max(0, used_mib - visible_mib - min(server_mib, _SERVER_MIB) - explained_mib(sample, ours, booked))
    untold = [process for process in intruders if process.vram_mib is None]
    if untold and all(process.run is not None for process in untold):
        # Nothing else can hold unexplained memory.
        unbooked[min(process.run or "" for process in untold)] += rest_mib
        visible_mib, rest_mib = visible_mib + rest_mib, 0
    if sample.unified_memory:
        # Jobs book host memory on their node.
        rest_mib = 0
    has_blind_spot = sample.processes is None or bool(untold)
    return GpuUsage(ours, pids, tuple(intruders), visible_mib, rest_mib, has_blind_spot, server_mib, unbooked)


def explained_mib(sample: GpuSample, ours: Mapping[str, int | None], booked: Bookings) -> int:
    """Memory in use that these bookings may explain: each its slice, or more if measured."""
    total_mib = sample.vram_total_mib or sample.vram_used_mib or 0
    explained = 0
    for run, share in booked:
        explained += max(_slice_mib(share, total_mib), ours.get(run) or 0)
    return explained


def _slice_mib(share: GpuShare, total_mib: int) -> int:
    if share.vram_mib is not None:
        return share.vram_mib
    return total_mib if share.fraction is None else int(total_mib * share.fraction)


def share_uses(sample: GpuSample, usage: GpuUsage, booked: Bookings, total_mib: int | None) -> tuple[ShareUse, ...]:
    """Memory held by each run that shares the GPU; runs with a whole GPU are left out.

    Memory that no visible process holds is charged to no run: an ended run may not have released it yet.
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


def foreign_mib(usage: GpuUsage, baseline_mib: int) -> int:
    """Memory that belongs to no job. Memory without a visible process counts above the usual baseline."""
    foreign_mib = usage.visible_mib - sum(usage.unbooked.values())
    if usage.rest_mib > baseline_mib or usage.has_blind_spot:
        return foreign_mib + usage.rest_mib
    return foreign_mib


def enforcement(sample: GpuSample | None, settings: GpuSettings, limit: str | None) -> tuple[str, str]:
    """Enforcement of a slice on this card, or of a MIG instance: a word of `Enforcement`, and its meaning here.

    Args: limit: the run's own at its start; for a card, that of the next run.
    """
    if sample is not None and sample.mig_profile is not None:
        return Enforcement.MIG, f"the hardware gives it no more: a MIG instance {sample.mig_profile}"
    if limit == Enforcement.MPS and sample is not None and sample.mps:
        return Enforcement.MPS, "CUDA gives it no more, as long as it leaves the variables of MPS alone"
    word, why = _watched(sample, settings)
    return word, f"its MPS control daemon is gone; {why}" if limit == Enforcement.MPS else why


def _watched(sample: GpuSample | None, settings: GpuSettings) -> tuple[str, str]:
    if settings.vram_over == "ignore":
        return Enforcement.NONE, "[gpu] vram_over is ignore"
    if sample is None or sample.processes is None:
        return Enforcement.NONE, "the driver does not report how much each process holds"
    if any(process.vram_mib is None for process in sample.processes):
        return Enforcement.NONE, "the driver does not report how much some process holds"
    if settings.vram_over == "warn":
        return Enforcement.WATCHED, "jobs that hold more are warned and keep running"
    return (
        Enforcement.WATCHED,
        f"jobs that hold more are warned, and ended {format_duration(settings.vram_over_grace_s)} later",
    )
