"""Runs that exceed their VRAM bookings on shared cards: alerts, ends, and the attribution of victims.

A VRAM booking is not enforced without MIG or MPS, only monitored: each reading compares a run's use of its cards with
its bookings. Only an unbroken series of readings counts; an unreadable or ambiguous reading breaks it: unknown is
never over. Runs without neighbours on their cards are not monitored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from gpusched.lifecycle.foreign import is_of_the_system
from gpusched.lifecycle.transitions import completing
from gpusched.model.cluster import GpuProcess, ShareUse
from gpusched.model.job import GpuShare, Job, JobEvent, Run
from gpusched.model.mentions import mention_job
from gpusched.model.settings import GpuSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.units import format_duration, format_size_mib, gpu_label, gpu_list, printable
from gpusched.model.value import Value, replace

BEFORE_S, AFTER_S = 10.0, 2.0
"""Readings within this window around the end of a run can explain its out-of-memory error."""


@dataclass(frozen=True, slots=True)
class SharedGpuReading:
    """All runs that share one card, in one reading."""

    at: float
    uses: tuple[ShareUse, ...]


class OveruseStreak(Value):
    """State of one run on one node between two readings of it."""

    at: float
    worst: ShareUse | None = None
    """In the last reading, the card with the largest excess over the booking; None while within the bookings."""
    since: float | None = None
    """Start of the unbroken series of readings over the booking."""
    readings: int = 0


class OveruseStep(Enum):
    """Due action about a run that holds more than it booked."""

    TELL = "tell"
    END = "end"


def is_over(use: ShareUse, settings: GpuSettings) -> bool:
    """Whether the excess is more than CUDA contexts can explain."""
    return use.over_mib > settings.vram_over_mib


def overuse_text(use: ShareUse, node: str | None = None) -> str:
    """`12G of GPU 0, of which it booked 8G`. Args: node: named for a run on several."""
    used, booked = format_size_mib(use.used_mib), format_size_mib(use.booked_mib)
    where = "" if node is None else f" on {node}"
    return f"{used} of GPU {gpu_label(use.index)}{where}, of which it booked {booked}"


def add_reading(
    before: OveruseStreak | None, at: float, uses: Sequence[ShareUse], settings: GpuSettings, gap_s: float
) -> OveruseStreak:
    """Add one reading of a run's shared cards on one node; after a pause longer than `gap_s` the streak starts over.

    The same reading again adds nothing.
    """
    over = [use for use in uses if is_over(use, settings)]
    if not over:
        return OveruseStreak(at)
    worst = max(over, key=lambda use: (use.over_mib, -use.index))
    if before is None or before.since is None or not 0 <= at - before.at <= gap_s:
        return OveruseStreak(at, worst, at, 1)
    return OveruseStreak(at, worst, before.since, before.readings + (at > before.at))


def due_step(
    seen: OveruseStreak | None, told_at: float | None, now: float, settings: GpuSettings, gap_s: float
) -> OveruseStep | None:
    """Due action about a run over its booking; `told_at` is the alert to its owner, if any."""
    if seen is None or seen.since is None or settings.vram_over == "ignore":
        return None
    is_ended = settings.vram_over == "kill"
    return _due(seen.since, seen.at, seen.readings, told_at, now, settings, gap_s, is_ended=is_ended)


def _due(
    since_at: float,
    at: float,
    readings: int,
    told_at: float | None,
    now: float,
    settings: GpuSettings,
    gap_s: float,
    *,
    is_ended: bool,
) -> OveruseStep | None:
    """No run ends without notice or too soon. Args: since_at, at, readings: of an unbroken series of readings."""
    if readings < settings.vram_over_polls or not 0 <= now - at <= gap_s:
        return None
    if told_at is None:
        return OveruseStep.TELL
    # Of the time since the last reading nothing is known yet.
    is_due = at - max(since_at, told_at) >= settings.vram_over_grace_s
    return OveruseStep.END if is_ended and is_due else None


def end_overuse(
    job: Job, text: str, now: float, reason: ReasonCode = ReasonCode.GPU_MEMORY_OVER
) -> tuple[Job, tuple[JobEvent, ...]]:
    """Order the end of the run; the job is COMPLETING until then. No effect if it is already being ended.

    Args: text: what it did, as `held 12G of GPU 0, of which it booked 8G`.
    """
    if job.state is JobState.COMPLETING:
        return job, ()
    job = replace(completing(job), reason=reason, reason_text=text)
    return job, (JobEvent(job.id, now, "stopping", f"is being ended: it {text}", job.run),)


def endangered(look: SharedGpuReading, settings: GpuSettings) -> list[tuple[ShareUse, ShareUse]]:
    """Runs within their bookings that may still run out of memory, each with the run that exceeds its own most."""
    over = [use for use in look.uses if is_over(use, settings)]
    if not over:
        return []
    worst = max(over, key=lambda use: (use.over_mib, use.run))
    return [(use, worst) for use in look.uses if use.is_crowded and not is_over(use, settings)]


def crowded_victim(
    run: Run, looks: Sequence[SharedGpuReading], settings: GpuSettings, name_of: Callable[[str], str]
) -> Run:
    """Mark the ended run as a victim if a neighbour used memory it had booked; otherwise return it unchanged.

    Args: looks: readings of the run's cards around its end. name_of: display name of the job of a run's handle.
    """
    if run.outcome is not JobState.OUT_OF_MEMORY or run.reason is not ReasonCode.OUT_OF_MEMORY or run.end_at is None:
        return run
    for look in looks:
        if not run.end_at - BEFORE_S <= look.at <= run.end_at + AFTER_S:
            continue
        for victim, other in endangered(look, settings):
            if victim.run == run.id:
                text = f"{mention_job(name_of(other.run))} held {overuse_text(other)}; it had ended as {run.outcome}"
                return replace(run, outcome=JobState.NODE_FAIL, reason=ReasonCode.GPU_CROWDED, reason_text=text)
    return run


_NAME = 40


@dataclass(frozen=True, slots=True)
class Intruder:
    """Unbooked use of one GPU in one reading: a foreign process, or all processes of one run."""

    uuid: str
    index: int
    process: GpuProcess
    """The foreign process; for a run, its process with the most memory."""
    vram_mib: int | None
    """Total of its processes; None when the driver does not report one of them."""

    @property
    def run(self) -> str | None:
        """Handle of the run; None for a foreign process."""
        return self.process.run

    @property
    def key(self) -> tuple[str, str | int]:
        """Identity across readings."""
        return self.uuid, self.process.pid if self.run is None else self.run

    @property
    def mark(self) -> str:
        """The same as one text, for what is told of it."""
        return f"{self.uuid} {self.key[1]}"

    @property
    def held(self) -> str:
        """`20G`, or `memory` when the amount is unknown."""
        return "memory" if self.vram_mib is None else format_size_mib(self.vram_mib)


def intruders_of(uuid: str, index: int, processes: Iterable[GpuProcess]) -> list[Intruder]:
    """Intruders on one GPU, the processes of one run grouped."""
    found: dict[str | int, Intruder] = {}
    for process in processes:
        one = Intruder(uuid, index, process, process.vram_mib)
        key = one.key[1]
        before = found.get(key)
        if before is not None:
            known = before.vram_mib is not None and process.vram_mib is not None
            total_mib = (before.vram_mib or 0) + (process.vram_mib or 0) if known else None
            largest = max(before.process, process, key=lambda each: each.vram_mib or 0)
            one = Intruder(uuid, index, largest, total_mib)
        found[key] = one
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Sighting:
    """An unbroken series of readings with the same intruder on the same GPU."""

    intruder: Intruder
    """From the latest reading."""
    since_at: float
    at: float
    readings: int


def sighted(before: Sighting | None, intruder: Intruder, at: float, gap_s: float) -> Sighting:
    """Add one reading; after a pause longer than `gap_s` the series starts over.

    The same reading again adds nothing.
    """
    if before is None or not 0 <= at - before.at <= gap_s:
        return Sighting(intruder, at, at, 1)
    return Sighting(intruder, before.since_at, at, before.readings + (at > before.at))


def due_unbooked_step(
    seen: Sighting, told_at: float | None, now: float, settings: GpuSettings, gap_s: float
) -> OveruseStep | None:
    """Due action about a run on a GPU that it did not book; `told_at` is the alert to its owner, if any.

    Nothing is due once the last reading is older than `gap_s`, as of a node that does not answer.
    """
    is_ended = settings.astray == "end"
    return _due(seen.since_at, seen.at, seen.readings, told_at, now, settings, gap_s, is_ended=is_ended)


def is_worth_telling(seen: Sighting, settings: GpuSettings) -> bool:
    """Whether to alert a job's owner to an intruder on its GPU: not about trivial use, nor about a display."""
    one = seen.intruder
    is_large = one.vram_mib is None or one.vram_mib > settings.baseline_mib
    return seen.readings >= settings.vram_over_polls and is_large and not is_of_the_system(one.process.name)


# --- sentences ----------------------------------------------------------------------------------------


def unbooked_text(intruder: Intruder, job: Job, booked: Sequence[GpuShare], settings: GpuSettings) -> str:
    """Alert to the owner of a job on a GPU that it did not book."""
    process, label = _named(intruder.process), gpu_label(intruder.index)
    text = f"unbooked use of GPU {label}: process {process} holds {intruder.held}, and the job booked "
    if job.spec.adopted is not None:
        text += f"GPU {gpu_list(share.index for share in booked)} when it was adopted"
    elif booked:
        text += f"GPU {gpu_list(share.index for share in booked)}; leave CUDA_VISIBLE_DEVICES as the job is given it, "
        text += "or ask for more GPUs with -g"
    else:
        text += "no GPU; ask for one with -g 1"
    if settings.astray == "end":
        text += f"; its run will be ended if this continues for {format_duration(settings.vram_over_grace_s)}"
    return text


def unbooked_use_text(intruder: Intruder, verb: str = "uses") -> str:
    """Current unbooked use: `uses GPU 2 (20G), which it did not book`."""
    return f"{verb} GPU {gpu_label(intruder.index)} ({intruder.held}), which it did not book"


def intruder_text(intruder: Intruder, name_of: Callable[[str], str]) -> str:
    """Alert to the owner of a job about an intruder on its GPU."""
    label = gpu_label(intruder.index)
    if intruder.run is None:
        known = printable(intruder.process.name or "?", _NAME)
        user = printable(intruder.process.user or "unknown user")
        what = f"foreign process {intruder.process.pid} on GPU {label} ({known}, of {user})"
        return f"{what} holds {intruder.held} of what this job booked"
    what = f"{mention_job(name_of(intruder.run))}, which did not book GPU {label},"
    return f"{what} holds {intruder.held} of it; its owner is notified"


def _named(process: GpuProcess) -> str:
    return str(process.pid) if process.name is None else f"{process.pid} ({printable(process.name, _NAME)})"


# --- ends ---------------------------------------------------------------------------------------------


def end_unbooked_use(job: Job, intruder: Intruder, now: float) -> tuple[Job, tuple[JobEvent, ...]]:
    return end_overuse(job, unbooked_use_text(intruder, "used"), now, ReasonCode.GPU_UNBOOKED_USE)


@dataclass(frozen=True, slots=True)
class UnbookedReading:
    """Jobs on one GPU without a booking in one reading, and the shares of the jobs that booked it."""

    at: float
    uuid: str
    unbooked: tuple[Intruder, ...]
    shares: tuple[ShareUse, ...]


def unbooked_victim(
    run: Run, looks: Sequence[UnbookedReading], settings: GpuSettings, name_of: Callable[[str], str]
) -> Run:
    """Mark the ended run as a victim if a job without a booking used its GPU's memory; otherwise return it unchanged.

    Args: looks: readings around its end; name_of: display name of the job of a run's handle.
    """
    if run.outcome is not JobState.OUT_OF_MEMORY or run.reason is not ReasonCode.OUT_OF_MEMORY or run.end_at is None:
        return run
    own = {share.uuid: share for share in run.gpus}
    for look in looks:
        share = own.get(look.uuid)
        if share is None or not look.unbooked or not run.end_at - BEFORE_S <= look.at <= run.end_at + AFTER_S:
            continue
        # The others left this slice its full booking, so it ran out of memory by itself.
        uses = [use for use in look.shares if use.run == run.id]
        if not share.is_whole and any(_is_own_fault(use, settings) for use in uses):
            continue
        worst = max(look.unbooked, key=lambda one: one.vram_mib or 0)
        if worst.vram_mib is None or worst.vram_mib > settings.vram_over_mib:
            job, label = mention_job(name_of(worst.run or "")), gpu_label(worst.index)
            text = f"{job}, which did not book GPU {label}, held {worst.held} of it; it had ended as {run.outcome}"
            return replace(run, outcome=JobState.NODE_FAIL, reason=ReasonCode.GPU_CROWDED, reason_text=text)
    return run


def _is_own_fault(use: ShareUse, settings: GpuSettings) -> bool:
    return use.over_mib > settings.vram_over_mib or (use.left_mib is not None and not use.is_crowded)
