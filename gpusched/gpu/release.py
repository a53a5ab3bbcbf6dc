"""Whether a card is clean after a run: its processes gone and its memory released. Pure.

The process disappears first and the memory later; a child in the driver or a defunct parent can hold
it forever. So a card returns to the pool only on a reading taken after the end that shows it
clean. A card that stays dirty is suspect until a reading shows otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpusched.gpu.usage import Bookings, GpuUsage, explained_mib
from gpusched.model.cluster import GpuProcess, GpuSample
from gpusched.model.units import format_size_mib

CLEAN, WAITING, DIRTY = "clean", "waiting", "dirty"
_NAMED = 3


@dataclass(slots=True)
class GpuRelease:
    """An ended run on one GPU whose release is not yet proven."""

    run: str
    began_at: float
    former: dict[int, float | None] = field(default_factory=dict)
    """Known pids of the run, with start times to detect pid reuse."""
    is_dirty: bool = False
    why: str = "no reading since the run ended"

    def state(self, now: float, wait_s: float) -> str:
        """`waiting`, or `dirty` once the wait is over."""
        if now < self.began_at:
            self.began_at = now  # the clock was set back
        if now - self.began_at >= wait_s:
            self.is_dirty = True
        return DIRTY if self.is_dirty else WAITING


def remains(
    release: GpuRelease, sample: GpuSample, usage: GpuUsage, others: Bookings, before_mib: int, baseline_mib: int
) -> str | None:
    """What the run still holds, as a sentence; None when the GPU is clean of it.

    Args: others: bookings of runs that have not ended; before_mib: unexplained memory before the run.
    """
    holder = _holder(release, sample, usage)
    if holder is not None:
        held = "an unknown amount" if holder.vram_mib is None else format_size_mib(holder.vram_mib)
        return f"process {named(holder)} of run {release.run} still holds {held}"
    if sample.is_declared:
        return None
    if sample.vram_used_mib is None:
        return "its memory in use cannot be read"
    if sample.unified_memory:
        # Host memory is in use by everything; only a list of processes says anything here.
        return None
    other_runs = {run for run, _ in others}
    ours = {run: held for run, held in usage.ours.items() if run in other_runs}
    # A server of MPS stays when its last client has gone.
    explained = usage.visible_mib + usage.server_mib + explained_mib(sample, ours, others) + before_mib
    held_mib = sample.vram_used_mib - explained
    if held_mib <= baseline_mib:
        return None
    held = format_size_mib(held_mib)
    text = f"{held} of its memory was not released after run {release.run}; no visible process holds it"
    return text + (f", but open: {openers}" if (openers := named_openers(sample)) else "")


def named(process: GpuProcess) -> str:
    """Format `4711 (python, of eva)`, as far as known."""
    facts = [process.name or "", f"of {process.user}" if process.user else ""]
    known = ", ".join(fact for fact in facts if fact)
    return f"{process.pid} ({known})" if known else str(process.pid)


def named_openers(sample: GpuSample) -> str:
    """Name processes that have the card open without being listed by the driver; empty when none are known."""
    texts = [named(process) for process in sample.openers[:_NAMED]]
    more = len(sample.openers) - _NAMED
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def _holder(release: GpuRelease, sample: GpuSample, usage: GpuUsage) -> GpuProcess | None:
    for process in usage.pids.get(release.run, ()):
        return process
    return next((process for process in sample.processes or () if is_same(process, release.former)), None)


def is_same(process: GpuProcess, known: Mapping[int, float | None]) -> bool:
    """Whether this is one of the known processes (start times by pid), not a later one with a reused pid."""
    if process.pid not in known:
        return False
    started_at = known[process.pid]
    return started_at is None or process.started_at is None or started_at == process.started_at
