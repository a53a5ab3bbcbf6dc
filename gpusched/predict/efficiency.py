"""What an ended job used of what it asked for, and what to ask for next time.

Advice is options to type, at most three, and never one that a known run of the job, or of jobs like it, would have
failed with: only the largest known use with a margin is advised, and nothing where the use is unknown. Memory of the
node is not advised on: its peak is that of a run's largest process, not of all of them. Busy is not occupancy: a card
may be 100 % busy with one thread, so power is shown beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from gpusched.model.job import Job, MeasuredCard, Request, Run
from gpusched.model.layout import states_tasks
from gpusched.model.snapshot import VramSeen
from gpusched.model.states import JobState
from gpusched.model.units import format_amount, format_duration, format_size_mib, gpu_label, plural
from gpusched.model.value import Value, replace
from gpusched.predict.limits import LimitAdvice, rounded_up

MOST_ADVICE = 3
LEAST_RUN_S = 300.0
"""Shorter runs show little of what a job needs."""
LOW_USE = 0.15
HALF = 0.5
LEAST_GPU_HOURS = 1.0
LONG_LIMIT = 5.0
"""Multiple of the run time from which on a limit is a waste, as others are planned behind it."""
_UNUSED_USE = 0.01
_UNUSED_MIB = 1024
"""Less than two contexts of CUDA: nothing was loaded."""
_VRAM_MARGIN = 1.25
_CPU_MARGIN = 1.5
_TIME_MARGIN = 1.5


class Advice(Value):
    """One option for the next submission."""

    option: str
    """As typed: `-c 4`."""
    why: str
    """`frees 12 cores`."""


class EndReport(Value):
    """Use of an ended job, of its last run that started unless said otherwise. None is unknown."""

    waited_s: float | None
    ran_s: float
    limit_s: int | None
    runs: int
    lost_s: float
    """Run time of the earlier runs, whose work may have been lost."""
    cards: tuple[MeasuredCard, ...]
    idle_s: float | None
    """Time in which all cards were idle."""
    cpus_used: float | None
    cpus: float
    peak_mem_mib: float | None
    """Of its largest process."""
    mem_mib: int
    energy_j: float | None
    """Of the cards in all its runs; None unless known of every run that held any."""
    energy_source: str | None
    cost: float | None
    currency: str
    grams: float | None
    pue: float
    advice: tuple[Advice, ...] = ()
    waste: str | None = None
    """What the alert `efficiency` says; None if there is nothing to say."""


def end_report(
    job: Job, runs: Sequence[Run], limit: LimitAdvice | None = None, vram_seen: VramSeen | None = None
) -> EndReport | None:
    """Report on an ended job; None if it never ran here.

    Args: runs: all of them, by number; limit: of jobs like it; vram_seen: by jobs like it.
    """
    started = [run for run in runs if run.start_at is not None and run.end_at is not None and run.native is None]
    if not job.state.is_final or job.is_array or not started:
        return None
    last = started[-1]
    measured = [run.measured for run in started if run.gpus]
    known = [one for one in measured if one is not None]
    is_whole = bool(measured) and len(known) == len(measured)
    energies = [run.energy_j for run in started if run.gpus]
    ran_s = _ran_s(last)
    found = EndReport(
        waited_s=max(0.0, (started[0].start_at or 0.0) - job.queued_at) if started[0].number == 1 else None,
        ran_s=ran_s,
        limit_s=job.spec.time_limit_s,
        runs=len(started),
        lost_s=sum(_ran_s(run) for run in started[:-1]),
        cards=() if last.measured is None else last.measured.cards,
        idle_s=None if last.measured is None else last.measured.idle_s,
        cpus_used=last.cpu_s / ran_s if last.cpu_s is not None and ran_s > 0 else None,
        cpus=last.cpus,
        peak_mem_mib=last.peak_mem_mib,
        mem_mib=last.mem_mib,
        energy_j=_sum(energies),
        energy_source="+".join(sorted({word for one in known for word in (one.energy_source or "").split("+") if word}))
        or None,
        cost=_sum([one.cost for one in known]) if is_whole else None,
        currency=known[-1].currency if known else "",
        grams=_sum([one.grams for one in known]) if is_whole else None,
        pue=known[-1].pue if known else 1.0,
    )
    advice = tuple(_advice(job, started, found, limit, vram_seen))[:MOST_ADVICE]
    return replace(found, advice=advice, waste=waste_of(job, found))


def _ran_s(run: Run) -> float:
    if run.start_at is None or run.end_at is None:
        return 0.0
    return max(0.0, run.end_at - run.start_at - run.suspended_s)


def _sum(amounts: Sequence[float | None]) -> float | None:
    """Sum of known amounts; None if one is unknown, or there are none."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known and len(known) == len(amounts) else None


# --- advice -------------------------------------------------------------------------------------


def _advice(
    job: Job, runs: Sequence[Run], found: EndReport, limit: LimitAdvice | None, vram_seen: VramSeen | None
) -> list[Advice]:
    """By what frees most: GPUs, then parts of them, cores, time."""
    if job.state is not JobState.COMPLETED or found.ran_s < LEAST_RUN_S:
        # What a failed job used says little of what it needs.
        return []
    advice = [
        _fewer_gpus(job, found),
        _slice(job.spec.request, runs, found, vram_seen),
        _fewer_cores(job, runs, found),
        _shorter(job, runs, found, limit),
    ]
    return [one for one in advice if one is not None]


def _is_unused(card: MeasuredCard) -> bool:
    if card.utilisation is None or card.peak_vram_mib is None:
        return False
    return card.utilisation <= _UNUSED_USE and card.peak_vram_mib < _UNUSED_MIB


def _fewer_gpus(job: Job, found: EndReport) -> Advice | None:
    request = job.spec.request
    if request.nodes > 1 or request.gpus < 2 or len(found.cards) != request.gpus:
        return None
    if states_tasks(job.spec.layout, request):
        # Its tasks count on their GPUs.
        return None
    unused = sum(map(_is_unused, found.cards))
    if not unused or unused == len(found.cards):
        return None
    return Advice(f"-g {request.gpus - unused}", f"{plural(unused, 'GPU')} of {request.gpus} did nothing")


def _slice(request: Request, runs: Sequence[Run], found: EndReport, vram_seen: VramSeen | None) -> Advice | None:
    """A part of the card for a job that leaves most of one idle and most of its memory empty."""
    if request.gpus != 1 or request.nodes > 1 or len(found.cards) != 1 or vram_seen is None:
        return None
    (card,) = found.cards
    peaks = [one.peak_vram_mib for run in runs if run.measured is not None for one in run.measured.cards]
    if card.utilisation is None or card.utilisation >= HALF or card.vram_mib is None or None in peaks or not peaks:
        return None
    peak_mib = max(vram_seen.peak_mib, *(peak for peak in peaks if peak is not None))
    wanted_gib = max(1, ceil(peak_mib * _VRAM_MARGIN / 1024))
    if wanted_gib * 1024 > card.vram_mib * HALF or request.card_fraction is not None:
        return None
    freed = format_size_mib(card.vram_mib - wanted_gib * 1024)
    return Advice(f"--vram {wanted_gib}G", f"leaves {freed} of the card to others; it used {format_size_mib(peak_mib)}")


def _fewer_cores(job: Job, runs: Sequence[Run], found: EndReport) -> Advice | None:
    request = job.spec.request
    if found.cpus_used is None or request.nodes > 1 or found.cpus < 2 or states_tasks(job.spec.layout, request):
        return None
    used = [run.cpu_s / _ran_s(run) for run in runs if run.cpu_s is not None and _ran_s(run) >= LEAST_RUN_S]
    wanted = max(1, ceil(max(used, default=found.cpus) * _CPU_MARGIN))
    if wanted > found.cpus * HALF:
        return None
    return Advice(f"-c {wanted}", f"frees {plural(int(found.cpus - wanted), 'core')}")


def _shorter(job: Job, runs: Sequence[Run], found: EndReport, limit: LimitAdvice | None) -> Advice | None:
    if found.limit_s is None or job.spec.time_limit_source:
        # No user typed it.
        return None
    longest_s = max(_ran_s(run) for run in runs)
    wanted_s = rounded_up(longest_s * _TIME_MARGIN)
    if limit is not None:
        # What jobs like it needed counts too.
        wanted_s = max(wanted_s, limit.limit_s)
    if wanted_s > found.limit_s * HALF:
        return None
    hours, minutes = divmod(wanted_s // 60, 60)
    typed = (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "")
    known = f"it took {format_duration(longest_s)}" if limit is None else limit.known
    return Advice(f"-t {typed}", f"starts sooner ({known})")


def waste_of(job: Job, found: EndReport) -> str | None:
    """A sentence on GPUs that were held for little, or on a limit far too long; None for neither.

    Jobs that fill the memory of their cards are not flagged: nothing smaller would have held them.
    """
    gpu_hours = len(found.cards) * found.ran_s / 3600
    uses = [card.utilisation for card in found.cards]
    fills = [
        card.peak_vram_mib / card.vram_mib for card in found.cards if card.peak_vram_mib is not None and card.vram_mib
    ]
    known = [use for use in uses if use is not None]
    if known and len(known) == len(uses) == len(fills) and gpu_hours >= LEAST_GPU_HOURS:
        mean = sum(known) / len(known)
        if mean < LOW_USE and max(fills) < HALF:
            return (
                f"its {plural(len(known), 'GPU')} {'was' if len(known) == 1 else 'were'} busy for {mean:.0%} of "
                f"{format_duration(found.ran_s)} and at most {max(fills):.0%} full"
            )
    is_long = job.state is JobState.COMPLETED and found.ran_s >= LEAST_RUN_S and not job.spec.time_limit_source
    if is_long and found.cards and found.limit_s is not None and found.limit_s > LONG_LIMIT * found.ran_s:
        return f"it ran for {format_duration(found.ran_s)} of a time limit of {format_duration(found.limit_s)}"
    return None


# --- text ---------------------------------------------------------------------------------------


def report_lines(found: EndReport) -> list[str]:
    """The report in three lines or more, without the job's name."""
    waited = "" if found.waited_s is None else f"waited {format_duration(found.waited_s)}  "
    part = ""
    if found.limit_s:
        part = f" of {format_duration(found.limit_s)} ({found.ran_s / found.limit_s:.0%})"
    runs = f"  runs {found.runs}, lost {format_duration(found.lost_s)}" if found.runs > 1 else ""
    lines = [f"{waited}ran {format_duration(found.ran_s)}{part}{runs}"]
    cards = [_card_text(card) for card in found.cards]
    if cards:
        idle = "" if found.idle_s is None else f"   idle {round(found.idle_s / 60)} min"
        lines += ["   ".join(cards[at : at + 2]) for at in range(0, len(cards), 2)]
        lines[-1] += idle
    cpus = "n/a" if found.cpus_used is None else f"{found.cpus_used:.1f}"
    memory = "n/a" if found.peak_mem_mib is None else format_size_mib(found.peak_mem_mib)
    asked = f" of {format_size_mib(found.mem_mib)}" if found.mem_mib else ""
    host = f"CPU {cpus} of {format_amount(found.cpus)}  memory {memory}{asked}"
    lines.append(f"{host}   {energy_text(found)}" if found.cards else host)
    if found.advice:
        lines.append("next time: " + "; ".join(f"{one.option} {one.why}" for one in found.advice))
    return lines


def _card_text(card: MeasuredCard) -> str:
    busy = "n/a" if card.utilisation is None else f"{card.utilisation:.0%}"
    peak = "n/a" if card.peak_vram_mib is None else format_size_mib(card.peak_vram_mib)
    power = "n/a" if card.mean_power_w is None else f"{card.mean_power_w:.0f}"
    limit = "" if card.power_limit_w is None else f" of {card.power_limit_w:.0f}"
    booked = format_size_mib(card.vram_mib) if card.vram_mib is not None else "n/a"
    return f"GPU {gpu_label(card.index)} busy {busy}  {peak} of {booked}  {power}{limit} W"


def energy_text(found: EndReport) -> str:
    if found.energy_j is None:
        return "energy n/a"
    kwh = found.energy_j / 3.6e6
    parts = [f"{kwh:.2f} kWh" if kwh >= 0.1 else f"{kwh * 1000:.1f} Wh"]
    if found.grams is not None:
        parts.append(f"{found.grams / 1000:.2f} kg CO2" if found.grams >= 100 else f"{found.grams:.1f} g CO2")
    if found.cost is not None:
        parts.append(f"{found.cost:.2f} {found.currency}".rstrip())
    pue = f", PUE {found.pue:g}" if len(parts) > 1 and found.pue != 1 else ""
    return "  ".join(parts) + (f" ({found.energy_source}{pue})" if found.energy_source else "")
