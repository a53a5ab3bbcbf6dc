"""Decides which users of GPUs without a job are alerted, and which processes are killed.

No process is killed without notice, or for a GPU that no job is pending for. System processes are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpusched.model.alerts import Alert
from gpusched.model.settings import ForeignSettings
from gpusched.model.units import format_duration, format_size_mib, gpu_label, gpu_list, plural, printable
from gpusched.model.value import Value, replace

FIRST_PERSON_UID = 1000
"""Lowest uid of a person; system accounts are below."""

_SYSTEM = frozenset(
    {
        *(
            "Xorg",
            "X",
            "Xwayland",
            "gnome-shell",
            "gdm",
            "gdm3",
            "gdm-x-session",
            "sddm",
            "lightdm",
            "lightdm-gtk-greeter",
        ),
        *("kwin_x11", "kwin_wayland", "plasmashell", "cinnamon", "mutter", "xfwm4", "weston", "sway", "mate-session"),
        *("nvidia-persistenced", "nvidia-persiste", "nvidia-powerd", "nvidia-smi", "nv-hostengine", "dcgm-exporter"),
    }
)
_SYSTEM_BEGINS = ("nvidia-cuda-mps", "systemd")


class ForeignGpuUse(Value):
    """A GPU blocked by foreign processes, and one process's use of it."""

    uuid: str
    index: int
    vram_mib: int | None
    idle_s: float | None
    """How long the whole GPU has been idle; None while it is busy."""
    bookers: frozenset[int] = frozenset()
    """Uids of the users whose running jobs booked it."""


class ForeignProcess(Value):
    """A process without a job, on cards that foreign use blocks for jobs."""

    pid: int
    start_ticks: int
    uid: int
    user: str
    name: str
    program: str | None
    """File name of its executable if root owns that file; otherwise untrusted and None."""
    cards: tuple[ForeignGpuUse, ...]
    since_at: float
    """Time of its first sighting there."""
    waiting: tuple[str, ...] = ()
    """Queues of the jobs that would start on its cards now without foreign processes, one entry per job."""
    first_told_at: float | None = None
    told_at: float | None = None
    ending_at: float | None = None
    """Time of its TERM."""

    @property
    def disturbed(self) -> tuple[ForeignGpuUse, ...]:
        """Its cards that are booked by jobs of other users."""
        return tuple(card for card in self.cards if card.bookers - {self.uid})


@dataclass(frozen=True, slots=True)
class ForeignNotice:
    """An alert to its owner; `jobs` counts the pending jobs that it blocks."""

    foreign: ForeignProcess
    jobs: int
    ends_after_s: float | None = None
    """Minimum time from now until the process is killed; None if it will not be."""


@dataclass(frozen=True, slots=True)
class ForeignEnd:
    """The process is to be ended: with TERM first, later with KILL if it survives."""

    foreign: ForeignProcess
    jobs: int
    is_kill: bool = False


def is_of_the_system(program: str | None) -> bool:
    """Whether a program of this name serves the display or the GPUs themselves."""
    return program is not None and (program in _SYSTEM or program.startswith(_SYSTEM_BEGINS))


def steps(
    foreign_processes: Iterable[ForeignProcess], settings: ForeignSettings, now: float
) -> tuple[ForeignNotice | ForeignEnd, ...]:
    """Due steps, in the order of the processes."""
    found = []
    for foreign in foreign_processes:
        step = None if is_exempt(foreign, settings) else _step(foreign, settings, now)
        if step is not None:
            found.append(step)
    return tuple(found)


def is_exempt(foreign: ForeignProcess, settings: ForeignSettings) -> bool:
    """Whether its program or owner exempts it."""
    return (
        foreign.uid < FIRST_PERSON_UID
        or foreign.user in settings.exempt_users
        or is_of_the_system(foreign.program)
        or (foreign.program is not None and foreign.program in settings.exempt_commands)
    )


def _step(foreign: ForeignProcess, settings: ForeignSettings, now: float) -> ForeignNotice | ForeignEnd | None:
    jobs = sum(1 for queue in foreign.waiting if queue not in settings.exempt_queues)
    if foreign.ending_at is not None:
        if now - foreign.ending_at >= settings.kill_grace_s:
            return ForeignEnd(foreign, jobs, is_kill=True)
        return None
    ends_at = _ends_at(foreign, settings, now)
    if jobs and foreign.first_told_at is not None and ends_at is not None and now >= ends_at:
        return ForeignEnd(foreign, jobs)
    if not settings.message or (settings.only_when_wanted and not jobs and not foreign.disturbed):
        return None
    is_old_enough = now - foreign.since_at >= settings.message_after_s
    is_told = foreign.told_at is not None and now - foreign.told_at < settings.message_every_s
    if not is_old_enough or is_told:
        return None
    return ForeignNotice(foreign, jobs, None if ends_at is None else ends_at - now)


def _ends_at(foreign: ForeignProcess, settings: ForeignSettings, now: float) -> float | None:
    if settings.kill_after_s is None:
        return None
    return (now if foreign.first_told_at is None else foreign.first_told_at) + settings.kill_after_s


def messages(step: ForeignNotice, ways: Sequence[str], others: frozenset[int], node: str, now: float) -> list[Alert]:
    """Alerts to the owner and, with `wall`, to the `others`."""
    foreign = step.foreign
    direct = tuple(f"@{way}" for way in ways if way in ("write", "mail"))
    text = _text(step, node, now, "your process", "Make it a job, while it runs, with")
    base = Alert(
        key=f"gpu_foreign {foreign.pid}.{foreign.start_ticks} @{now:.3f}",
        event="gpu_foreign",
        counts_as=("gpu_foreign",),
        uid=foreign.uid,
        at=now,
        facts=(
            ("event", "gpu_foreign"),
            ("message", text),
            ("at", now),
            ("node", node),
            ("user", foreign.user),
            ("gpus", gpu_list(card.index for card in foreign.cards)),
        ),
    )
    found = [replace(base, targets=direct)] if direct else []
    if "notify" in ways:
        found.append(replace(base, key=f"{base.key} notify"))
    if "wall" in ways:
        words = _text(step, node, now, f"{foreign.user}'s process", "Its owner makes it a job with")
        facts = tuple((name, words if name == "message" else value) for name, value in base.facts)
        found += [
            replace(base, key=f"{base.key} {uid}", uid=uid, targets=("@write",), facts=facts)
            for uid in sorted(others)
            if uid >= FIRST_PERSON_UID and (uid != foreign.uid or "write" not in ways)
        ]
    return found


def _text(step: ForeignNotice, node: str, now: float, whose: str, how: str) -> str:
    """Process, card, start, pending jobs, and advice: one sentence per line."""
    foreign = step.foreign
    idle = [card.idle_s for card in foreign.cards]
    idles = [one for one in idle if one is not None]
    rest = f", idle for {format_duration(min(idles))}" if idles and len(idles) == len(idle) else ""
    lines = [
        f"gpusched on {node}: {whose} {foreign.pid} ({printable(foreign.name, 40)}) has been on {held_by(foreign)} "
        f"for {format_duration(now - foreign.since_at)} without a job{rest}.",
    ]
    if step.jobs:
        lines.append(f"{plural(step.jobs, 'job')} wait{'s' * (step.jobs == 1)} for it.")
    if foreign.disturbed:
        gpus = gpu_list(card.index for card in foreign.disturbed)
        lines.append(f"Another user's job has booked GPU {gpus}: please end the process, or have it use another GPU.")
    else:
        lines.append(f"{how}: gpusched adopt {foreign.pid}")
    lines.append(f"Next time: gsub -g {len(foreign.cards)} -- COMMAND, or grun -g {len(foreign.cards)} for a shell.")
    if step.ends_after_s is not None:
        lines.append(
            f"Otherwise it is ended after {format_duration(max(0.0, step.ends_after_s))} if jobs wait for it then."
        )
    return "\n".join(lines)


def held_by(foreign: ForeignProcess) -> str:
    """Its cards, and its memory on each."""
    return "GPU " + ", ".join(
        gpu_label(card.index) + ("" if card.vram_mib is None else f" ({format_size_mib(card.vram_mib)})")
        for card in foreign.cards
    )


@dataclass(slots=True)
class OwnerNotes:
    """Notification state of one process."""

    since_at: float
    uid: int
    user: str
    program: str | None
    first_told_at: float | None = None
    told_at: float | None = None
    told_by: list[str] = field(default_factory=list)
    """Channels that delivered the last message: write, mail, names of the owner's targets."""
    untold: str | None = None
    """Why a channel failed."""
    ending_at: float | None = None
