"""Attribution of failures to the program or the GPU.

The driver reports faults by number (XID). [fault] lists the hardware faults: a run that failed while its card had one
of those is a victim and is repeated without using up a retry, as is a run that lost its card. All other faults, such
as a program's illegal access, remain the run's own. A run that found the card's memory taken by processes without a
job, or by leftovers of an earlier run, is also a victim.

But programs can also cause hardware faults: a job with the same fault in each repetition is held before it has taken
out every card of the machine.

Without driver reports, runs that fail in their first seconds are evidence against the card, if several users in a row
are affected and no other user's run survives there. Failures of one user alone never are, however many.
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

_TOLD_LATE_S = 5.0
"""Maximum delay of a fault report after the end of the affected run."""
_COUNTERPART_S = 5.0
"""Maximum time between the event and the log line of one fault."""
_SAME_S = 1.0
"""Maximum time between log lines about one fault."""
_MOST_FAULTS = 1000
_BLAMED = (JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.TIMEOUT)
_OWN_CODES = frozenset({2, 126, 127})
"""Exit codes for wrong usage, a program that cannot be executed and a missing one: no card can cause these."""


class GpuFault(Value):
    """A reported fault of one card. `at` is its time; for a lost card, the time of detection."""

    uuid: str
    index: int
    xid: int | None
    """None: the driver lost the card, with or without a stated reason."""
    at: float
    sequence: int | None = None
    """Sequence number of its first kernel log record; None while only the event was received."""
    is_event: bool = True
    """Whether the driver's event was received."""

    @property
    def text(self) -> str:
        """`XID 79 (fallen off the bus)`."""
        if self.xid is None:
            return "was lost"
        return f"XID {self.xid}" + (f" ({self.meaning})" if self.meaning else "")

    @property
    def meaning(self) -> str | None:
        """Meaning of the number, if known."""
        return None if self.xid is None else MEANINGS.get(self.xid)


def add_fault(known: Sequence[GpuFault], heard: GpuFault) -> tuple[tuple[GpuFault, ...], bool]:
    """Record a report of a fault; also returns whether the fault is new.

    If both channels work, every fault is reported twice, as an event and in the kernel log, in either order; one fault
    may fill several lines of the log; and the log is reread whenever its reader restarts.
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
    """Whether this report is the second one, by the other channel, of a fault known from one channel."""
    is_missing = known.sequence is None if heard.sequence is not None else not known.is_event
    return is_missing and abs(known.at - heard.at) <= _COUNTERPART_S


def is_hardware(fault: GpuFault, settings: FaultSettings) -> bool:
    """Whether the fault is the hardware's, not the program's."""
    return fault.xid is None or fault.xid in settings.xid_victim or fault.xid in settings.xid_drain


def takes_out(fault: GpuFault, settings: FaultSettings, clearance: Clearance | None) -> bool:
    """Whether a fault makes its card suspect: not if the card was cleared since."""
    if clearance is not None and fault.at <= clearance.at:
        return False
    return settings.return_to_service != "auto" if fault.xid is None else fault.xid in settings.xid_drain


def awaits_faults(run: Run, faults_until: float | None, now: float, wait_s: float) -> bool:
    """Whether a fault that explains the run's failure may still be unread.

    Args: faults_until: faults before this instant have been read, None without a source of faults; wait_s: maximum
    wait after the end of the run.
    """
    if faults_until is None or run.outcome not in _BLAMED or run.end_at is None:
        return False
    return faults_until < run.end_at <= now < run.end_at + wait_s


def fault_of(run: Run, faults: Iterable[GpuFault], xids: Container[int]) -> GpuFault | None:
    """The run's first fault with one of these numbers, or the loss of a card up to now.

    For an open run: so far.
    """
    if run.start_at is None:
        return None
    until = float("inf") if run.end_at is None else run.end_at + _TOLD_LATE_S
    uuids = {share.uuid for share in run.gpus}
    for fault in sorted(faults, key=lambda fault: fault.at):
        if fault.uuid not in uuids or fault.at < run.start_at:
            continue
        # Runs are judged once their cards are clean or given up: a card lost by then was lost while in their use.
        if fault.xid is None or (fault.xid in xids and fault.at <= until):
            return fault
    return None


def attribute_to_gpu(run: Run, fault: GpuFault | None) -> Run:
    """Mark the ended run as a victim of this fault, unless it ended well or on purpose."""
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
    """Mark the ended run as a victim if unbooked use took memory it needed; otherwise return it unchanged.

    Args: foreign_mib: by GPU UUID, at its recent peak. early_s, least_mib: latest failure and least use that excuse it.
    """
    if run.outcome is not JobState.OUT_OF_MEMORY or run.start_at is None or run.end_at is None:
        return run
    if run.reason in (ReasonCode.GPU_MEMORY_OVER, ReasonCode.MEM_LIMIT, ReasonCode.HOST_OUT_OF_MEMORY):
        # It was ended for exceeding its VRAM booking, or ran out of another kind of memory.
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
    """Display name of the job."""


Evidence = dict[str, tuple[EarlyFailure, ...]]
"""By GPU UUID: consecutive early failures, oldest first. Immutable."""


def add_evidence(evidence: Evidence, job: Job, run: Run, settings: FaultSettings) -> Evidence:
    """Update the evidence about cards after the end of a run.

    A run that survives its first seconds clears all its cards. An early failure counts against its card if the run had
    only one; a job with early failures on two cards counts against none.
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
    """Why these failures make a card suspect; None if they do not."""
    users = {row.user: row.name for row in rows}
    if not settings.early_users or len(users) < settings.early_users:
        return None
    who = ", ".join(f"{user}'s {name}" for user, name in sorted(users.items())[:5])
    return f"jobs of {plural(len(users), 'user')} in a row failed here in their first {settings.early_s:g} s ({who})"


# --- jobs that take out cards ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a run, to match runs of the same job, array or program."""

    user: str
    program: str
    job_id: int
    array_id: int | None = None

    def is_like(self, other: Origin) -> bool:
        """Whether hardware faults of one are evidence about the other."""
        if self.user != other.user:
            return False
        return self.job_id == other.job_id or self.program == other.program or self._is_in_array_of(other)

    def _is_in_array_of(self, other: Origin) -> bool:
        return self.array_id is not None and self.array_id == other.array_id


@dataclass(frozen=True, slots=True)
class FaultyRun:
    """A run with the hardware fault that its card had at the time."""

    origin: Origin
    shown_id: str
    """Display id of the job."""
    number: int
    fault: GpuFault

    @property
    def xid(self) -> int:
        """Number that identifies equal faults; a lost card counts as fallen off the bus."""
        return _FALLEN if self.fault.xid is None else self.fault.xid


_FALLEN = 79
_LIKE_S = 86400.0
"""How long faults of other, similar jobs count."""


def repeated(last: FaultyRun, known: Iterable[FaultyRun], hold_after: int) -> tuple[FaultyRun, ...]:
    """Runs that show the last run's job to take out cards, oldest first; empty while too few.

    The job's own runs count on any card; runs of similar jobs only on other cards, since a broken card would fail
    them, too.
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
