"""How much VRAM jobs like this one have used. Never used to end anything.

Like means the same as for run times, see `families`. What counts is the largest of the newest runs that ended well: a
mean would be too little for half of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpusched.model.job import Run
from gpusched.model.snapshot import VramSeen
from gpusched.model.states import JobState

RUNS = 5
"""Only the newest: code and data change."""

LEAST = 3
"""With fewer nothing is said."""


def peak_of(run: Run) -> int | None:
    """What a run used of each of its cards, in MiB; None for one that did not end well, or of which nobody knows."""
    if run.outcome is not JobState.COMPLETED or run.peak_vram_mib is None or not run.gpus:
        return None
    return -(-run.peak_vram_mib // len(run.gpus))


def seen(peaks_mib: Sequence[int]) -> VramSeen | None:
    """What the runs of a family (oldest first) say; None when they are too few."""
    newest = peaks_mib[-RUNS:]
    return VramSeen(len(newest), max(newest)) if len(newest) >= LEAST else None
