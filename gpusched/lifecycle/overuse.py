"""Runs on shared cards that use more VRAM than they booked: when they are told, when one is ended, who is a victim.

A booking of VRAM binds nobody unless the hardware or MPS holds it. What is left is to watch: each reading sets what a
run holds on its cards against what it booked. Only an unbroken row of readings counts; what cannot be read, or cannot
be told apart, breaks the row: unknown is never over. A run that has its cards to itself is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from gpusched.lifecycle.transitions import completing
from gpusched.model.cluster import ShareUse
from gpusched.model.job import Job, JobEvent, Run
from gpusched.model.settings import GpuSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.units import format_size_mib, gpu_label
from gpusched.model.value import Value, replace

BEFORE_S, AFTER_S = 10.0, 2.0
"""Readings from so long before the end of a run until so long after it speak of what its memory ran out of."""


@dataclass(frozen=True, slots=True)
class Look:
    """All runs that share one card, in one reading."""

    at: float
    uses: tuple[ShareUse, ...]


class Watch(Value):
    """What is remembered of one run between two readings."""

    at: float
    worst: ShareUse | None = None
    """In the last reading, the card of which it holds most beyond its booking; None while it keeps to that."""
    since: float | None = None
    """When the row of readings began that all show it over its booking."""
    readings: int = 0


class Step(Enum):
    """What is due about a run over its booking."""

    TOLD = "told"
    ENDED = "ended"


def is_over(use: ShareUse, settings: GpuSettings) -> bool:
    """Whether this is more than contexts and the like."""
    return use.over_mib > settings.vram_over_mib


def in_words(use: ShareUse) -> str:
    """`12G of GPU 0, of which it booked 8G`."""
    used, booked = format_size_mib(use.used_mib), format_size_mib(use.booked_mib)
    return f"{used} of GPU {gpu_label(use.index)}, of which it booked {booked}"


def watch(before: Watch | None, at: float, uses: Sequence[ShareUse], settings: GpuSettings, gap_s: float) -> Watch:
    """Take in one reading of a run's shared cards; after a pause longer than `gap_s` the row begins anew."""
    over = [use for use in uses if is_over(use, settings)]
    if not over:
        return Watch(at)
    worst = max(over, key=lambda use: (use.over_mib, -use.index))
    if before is None or before.since is None or not 0 <= at - before.at <= gap_s:
        return Watch(at, worst, at, 1)
    return Watch(at, worst, before.since, before.readings + 1)


def due(seen: Watch | None, told_at: float | None, now: float, settings: GpuSettings, gap_s: float) -> Step | None:
    """What is due about a run whose owner was told at `told_at`, if ever. Nobody is ended untold or too soon."""
    if seen is None or seen.since is None or settings.vram_over == "ignore":
        return None
    if seen.readings < settings.vram_over_polls or not 0 <= now - seen.at <= gap_s:
        return None
    if told_at is None:
        return Step.TOLD
    grace_s = settings.vram_over_grace_s
    is_due = now - seen.since >= grace_s and now - told_at >= grace_s
    return Step.ENDED if settings.vram_over == "kill" and is_due else None


def end(job: Job, use: ShareUse, now: float) -> tuple[Job, tuple[JobEvent, ...]]:
    """Have the run ended; the job is COMPLETING until it has. One that is being ended already is left alone."""
    if job.state is JobState.COMPLETING:
        return job, ()
    text = f"held {in_words(use)}"
    job = replace(completing(job), reason=ReasonCode.GPU_MEMORY_OVER, reason_text=text)
    return job, (JobEvent(job.id, now, "stopping", f"is being ended: it {text}", job.run),)


def endangered(look: Look, settings: GpuSettings) -> list[tuple[ShareUse, ShareUse]]:
    """Runs that keep to their booking and may fail all the same, each with the run that holds most beyond its own."""
    over = [use for use in look.uses if is_over(use, settings)]
    if not over:
        return []
    worst = max(over, key=lambda use: (use.over_mib, use.run))
    return [(use, worst) for use in look.uses if use.is_crowded and not is_over(use, settings)]


def crowded(run: Run, looks: Sequence[Look], settings: GpuSettings, name_of: Callable[[str], str]) -> Run:
    """The ended run, as a victim of a neighbour if that held memory that this one had booked; else as it is.

    Args: looks: of the run's cards, around its end. name_of: of a run's handle, the job as people know it.
    """
    if run.outcome is not JobState.OUT_OF_MEMORY or run.reason is not ReasonCode.OUT_OF_MEMORY or run.end_at is None:
        return run
    for look in looks:
        if not run.end_at - BEFORE_S <= look.at <= run.end_at + AFTER_S:
            continue
        for victim, other in endangered(look, settings):
            if victim.run == run.id:
                text = f"job {name_of(other.run)} held {in_words(other)}; it had ended as {run.outcome}"
                return replace(run, outcome=JobState.NODE_FAIL, reason=ReasonCode.GPU_CROWDED, reason_text=text)
    return run
