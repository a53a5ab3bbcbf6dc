"""Whose fault a failure is: the program's, or the GPU's.

The driver reports faults by number (XID). [fault] says which of them are the hardware's: a run that failed while its
card had one of those is a victim, to be run again without using up a retry; so is one that lost its card. All other
faults, a program's illegal access among them, stay the run's own. A run that found the card's memory taken by processes
that are no jobs, or by what an earlier run left behind, is a victim too.

But a fault can also be what the program does to cards: a job whose repetitions meet the same fault is held, before it
has taken out every card of the machine.

Where the driver tells nothing, runs that fail in their first seconds speak of the card as well: those of several users
in a row, while nobody else's run survives there. One user's mistake, however often repeated, never does.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpusched.model.cluster import Clearance
from gpusched.model.job import Job, Run
from gpusched.model.settings import FaultSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.units import format_size_mib, gpu_label, plural
from gpusched.model.value import Value, replace

MEANINGS = {
    13: "engine exception",
    31: "page fault",
    43: "stopped processing",
    45: "cleaned up after another error",
    48: "memory error that cannot be corrected",
    63: "memory row marked for repair",
    64: "memory row that cannot be repaired",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "many corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timed out",
    119: "GPU system processor timed out",
}
"""Source: NVIDIA's catalog of XID errors."""

WAS_LOST = "was lost"
"""What is said of a card that the driver lost, whether it gave a number for it or not."""

_TOLD_LATE_S = 5.0
"""A fault may be told of so long after the run that it ended."""
_COUNTERPART_S = 5.0
"""Between the event and the line in the log at most."""
_SAME_S = 1.0
"""Lines of the log about one fault are not further apart."""
_MOST_FAULTS = 1000
_BLAMED = (JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.TIMEOUT)
_OWN_CODES = frozenset({2, 126, 127})
"""Wrong usage, a program that cannot be executed, one that is not there: nothing that a card could cause."""


class GpuFault(Value):
    """What the driver told of one card. `at` is when it happened, of a lost card when that was first seen."""

    uuid: str
    index: int
    xid: int | None
    """None: the driver lost the card, whether it gave a reason or not."""
    at: float
    sequence: int | None = None
    """Of its first record in the kernel's log; None while only the event was heard."""
    is_event: bool = True
    """It was heard as an event of the driver."""

    @property
    def text(self) -> str:
        """`XID 79 (fallen off the bus)`."""
        if self.xid is None:
            return WAS_LOST
        return f"XID {self.xid}" + (f" ({self.meaning})" if self.meaning else "")

    @property
    def meaning(self) -> str | None:
        """What the number says, where it is known."""
        return None if self.xid is None else MEANINGS.get(self.xid)


def add_fault(known: Sequence[GpuFault], heard: GpuFault) -> tuple[tuple[GpuFault, ...], bool]:
    """What is known after a fault was heard of, and whether it is a new one.

    Every fault is told of twice where both ways are open, as an event and in the kernel's log, in either order; one
    fault may fill several lines of the log; and the log is read again whenever its reader is started again.
    """
    like = [other for other in known if other.uuid == heard.uuid and other.xid == heard.xid]
    if heard.sequence is not None and any(other.sequence == heard.sequence for other in like):
        return tuple(known), False
    nearest = min(
        (other for other in like if _is_counterpart(other, heard)),
        key=lambda other: abs(other.at - heard.at),
        default=None,
    )
    if nearest is None and any(abs(other.at - heard.at) <= _SAME_S for other in like):
        return tuple(known), False
    if nearest is None:
        return (*known, heard)[-_MOST_FAULTS:], True
    both = replace(nearest, is_event=True, sequence=heard.sequence if nearest.sequence is None else nearest.sequence)
    return tuple(both if other is nearest else other for other in known), False


def _is_counterpart(known: GpuFault, heard: GpuFault) -> bool:
    """Whether the other way of hearing of a fault may now tell of one that is known from one way alone."""
    is_missing = known.sequence is None if heard.sequence is not None else not known.is_event
    return is_missing and abs(known.at - heard.at) <= _COUNTERPART_S


def is_hardware(fault: GpuFault, settings: FaultSettings) -> bool:
    """Whether it is the card's and not the program's."""
    return fault.xid is None or fault.xid in settings.xid_victim or fault.xid in settings.xid_drain


def takes_out(fault: GpuFault, settings: FaultSettings, clearance: Clearance | None) -> bool:
    """Whether a fault makes its card suspect: not when somebody has cleared the card since."""
    if clearance is not None and fault.at <= clearance.at:
        return False
    return settings.return_to_service != "auto" if fault.xid is None else fault.xid in settings.xid_drain


def awaits_faults(run: Run, faults_until: float | None, now: float, wait_s: float) -> bool:
    """Whether a fault that explains the run's failure may still be unread.

    Args: faults_until: faults from before this instant have been read, None where nothing tells of them; wait_s:
        longest wait after the end of the run.
    """
    if faults_until is None or run.outcome not in _BLAMED or run.end_at is None:
        return False
    return faults_until < run.end_at <= now < run.end_at + wait_s


def fault_of(run: Run, faults: Iterable[GpuFault], xids: Container[int]) -> GpuFault | None:
    """The first fault of these numbers that a card of the run had while it ran, or the loss of one until now.

    Of a run that has not ended: so far.
    """
    if run.start_at is None:
        return None
    until = float("inf") if run.end_at is None else run.end_at + _TOLD_LATE_S
    uuids = {share.uuid for share in run.gpus}
    for fault in sorted(faults, key=lambda fault: fault.at):
        if fault.uuid not in uuids or fault.at < run.start_at:
            continue
        # A run is judged when its cards are clean or given up: one that was lost by then was lost on its hands.
        if fault.xid is None or (fault.xid in xids and fault.at <= until):
            return fault
    return None


def attribute_to_gpu(run: Run, fault: GpuFault | None) -> Run:
    """The ended run as a victim of this fault, when it had one and did not end well or on purpose; else as it is."""
    if fault is None:
        return run
    gpu = f"GPU {gpu_label(fault.index)}"
    text = f"lost {gpu}" if fault.xid is None else f"hardware fault of {gpu}: {fault.text}"
    if run.reason is ReasonCode.GPU_FAILED:
        return replace(run, reason_text=text)
    if run.outcome not in _BLAMED:
        return run
    text += f"; it had ended as {run.outcome}"
    return replace(run, outcome=JobState.NODE_FAIL, reason=ReasonCode.GPU_FAILED, reason_text=text)


def attribute_to_foreign_use(run: Run, foreign_mib: Mapping[str, int], early_s: float, least_mib: int) -> Run:
    """The ended run, as a victim if memory that it needed was held without a booking; else as it is.

    Args: foreign_mib: by GPU UUID, at its recent peak. early_s, least_mib: how soon, and how much, excuses it.
    """
    if run.outcome is not JobState.OUT_OF_MEMORY or run.start_at is None or run.end_at is None:
        return run
    if run.reason in (ReasonCode.GPU_MEMORY_OVER, ReasonCode.MEM_LIMIT, ReasonCode.HOST_OUT_OF_MEMORY):
        # It was ended for having too much of it, or lacked memory of another kind.
        return run
    if run.end_at - run.start_at - run.suspended_s > early_s:
        return run
    for share in run.gpus:
        mib = foreign_mib.get(share.uuid, 0)
        if mib > least_mib:
            what = f"{format_size_mib(mib)} of GPU {gpu_label(share.index)} was held without a booking"
            text = f"{what}; it had ended as {run.outcome}"
            return replace(run, outcome=JobState.NODE_FAIL, reason=ReasonCode.GPU_FOREIGN_USE, reason_text=text)
    return run


@dataclass(frozen=True, slots=True)
class EarlyFailure:
    """A run that failed in its first seconds on one card."""

    at: float
    user: str
    job_id: int
    name: str
    """Of the job, as people know it."""


Evidence = dict[str, tuple[EarlyFailure, ...]]
"""By GPU UUID: early failures in a row, oldest first. Never changed, only replaced."""


def add_evidence(evidence: Evidence, job: Job, run: Run, settings: FaultSettings) -> Evidence:
    """What is known of the cards after a run has ended.

    A run that survived its first seconds clears all its cards. One that failed in them speaks against its card if it
    had one alone; a job that fails so on two cards speaks against none.
    """
    if run.outcome is None or run.start_at is None or run.end_at is None or not run.gpus:
        return evidence
    uuids = [share.uuid for share in run.gpus]
    lasted_s = run.end_at - run.start_at - run.suspended_s
    if run.outcome is JobState.COMPLETED or lasted_s > settings.early_s:
        return {uuid: rows for uuid, rows in evidence.items() if uuid not in uuids}
    if run.outcome is not JobState.FAILED or run.exit_code in _OWN_CODES or len(uuids) > 1:
        return evidence
    if run.reason is ReasonCode.JOB_LAUNCH_FAILURE:
        return evidence
    (uuid,) = uuids
    since = run.end_at - settings.early_window_s
    fails_elsewhere = any(row.job_id == job.id for other, rows in evidence.items() if other != uuid for row in rows)
    kept = {
        other: tuple(row for row in rows if row.at >= since and (other == uuid or row.job_id != job.id))
        for other, rows in evidence.items()
    }
    if not fails_elsewhere:
        kept[uuid] = (*kept.get(uuid, ()), EarlyFailure(run.end_at, job.user, job.id, job.shown_id))[-_MOST_ROWS:]
    return {other: rows for other, rows in kept.items() if rows}


_MOST_ROWS = 100


def suspicion(rows: tuple[EarlyFailure, ...], settings: FaultSettings) -> str | None:
    """Why a card is suspect by these failures; None when it is not."""
    users = {row.user: row.name for row in rows}
    if not settings.early_users or len(users) < settings.early_users:
        return None
    who = ", ".join(f"{user}'s {name}" for user, name in sorted(users.items())[:5])
    return f"jobs of {plural(len(users), 'user')} in a row failed here in their first {settings.early_s:g} s ({who})"


# --- jobs that take out cards ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run comes from, to recognise others of the same job, array or program."""

    user: str
    program: str
    job_id: int
    array_id: int | None = None

    def is_like(self, other: Origin) -> bool:
        """Whether what one does to cards says something of the other."""
        if self.user != other.user:
            return False
        return self.job_id == other.job_id or self.program == other.program or self._is_in_array_of(other)

    def _is_in_array_of(self, other: Origin) -> bool:
        return self.array_id is not None and self.array_id == other.array_id


@dataclass(frozen=True, slots=True)
class FaultyRun:
    """A run with the fault of the hardware that its card had meanwhile."""

    origin: Origin
    shown_id: str
    """Of the job, as people know it."""
    number: int
    fault: GpuFault

    @property
    def xid(self) -> int:
        """By which faults are the same; a lost card has fallen off the bus."""
        return _FALLEN if self.fault.xid is None else self.fault.xid


_FALLEN = 79
_LIKE_S = 86400.0
"""Faults of other jobs like it count for so long."""


def repeated(last: FaultyRun, known: Iterable[FaultyRun], hold_after: int) -> tuple[FaultyRun, ...]:
    """The runs that show the job of the last one to take out cards, oldest first; none while they are too few.

    A job's own runs count on whichever card; those of others like it only on other cards, since a broken card would
    fail them too.
    """
    same = [one for one in known if one.xid == last.xid and one.origin.is_like(last.origin)]
    own = [one for one in same if one.origin.job_id == last.origin.job_id]
    found = {(one.origin.job_id, one.number): one for one in own}
    cards = {one.fault.uuid for one in own}
    for one in same:
        if one.fault.uuid not in cards and one.fault.at > last.fault.at - _LIKE_S:
            cards.add(one.fault.uuid)
            found[one.origin.job_id, one.number] = one
    if not hold_after or len(found) < hold_after:
        return ()
    return tuple(sorted(found.values(), key=lambda one: (one.fault.at, one.fault.index)))


def fault_runs_text(runs: Sequence[FaultyRun]) -> str:
    """`XID 79 (fallen off the bus) on GPU 0 (job 41, run 1) and GPU 1 (job 41, run 2)`."""
    numbered = next((one.fault for one in runs if one.fault.xid is not None), None)
    head = "lost" if numbered is None else f"{numbered.text} on"
    shown = runs[-_MOST_TOLD:]
    parts = [f"GPU {gpu_label(one.fault.index)} (job {one.shown_id}, run {one.number})" for one in shown]
    more = f"{len(runs) - len(shown)} more, " if len(runs) > len(shown) else ""
    return f"{head} {more}" + " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


_MOST_TOLD = 4
