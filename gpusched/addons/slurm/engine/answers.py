"""What Slurm's commands and the records of handed-over jobs say, read with care; pure.

Slurm's words come from whatever version a site has: an unknown state is one that has not ended, and a line that cannot
be read is left out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpusched.addons.slurm.handover.job_script import comment_of
from gpusched.model.execution import RunEnded, RunLost
from gpusched.model.units import is_digits
from gpusched.model.value import replace

QUEUE_FORMAT = "%i|%T|%r|%S|%N|%k"
"""Job, state, reason, start, nodes; the comment comes last, since it may hold anything."""
ACCOUNTING_FORMAT = "JobIDRaw,State,ExitCode,Start,End,NodeList"

WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
"""States of a job that has not begun."""
ENDED = frozenset(
    {
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"),
        *("DEADLINE", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
    }
)
_NOT_SUBMITTED = (
    *("unable to contact", "socket timed out", "connection refused", "zero bytes", "communication", "try again"),
    *("temporarily", "job submit limit", "job submission limit", "submitjob", "in the process of", "timed out"),
)
"""In what sbatch says when the same submission may be accepted later."""


@dataclass(frozen=True, slots=True)
class NativeState:
    """One job as Slurm describes it."""

    id: str
    state: str
    """In capital letters, without what follows the first word."""
    reason: str = ""
    start_at: float | None = None
    end_at: float | None = None
    nodes: str | None = None
    comment: str = ""
    exit_code: int | None = None
    signal: int | None = None
    by: str | None = None
    """Who cancelled it, as Slurm writes it."""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def has_begun(self) -> bool:
        """Whether it runs, according to the state."""
        return not self.has_ended and self.state not in WAITING


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What the wrapper of a run has recorded."""

    claim: str | None = None
    """Job of Slurm that runs it."""
    start_at: float | None = None
    nodes: str | None = None
    end_at: float | None = None
    code: int | None = None
    """As a shell has it; None until it has ended."""
    is_told: bool = False
    """It had a signal to stop before it ended."""
    says_done: bool = False
    """It has said that nothing is left to do."""


def read_queue(text: str) -> list[NativeState]:
    """Jobs in what squeue printed with QUEUE_FORMAT."""
    found = []
    for line in text.splitlines():
        parts = line.split("|", 5)
        if len(parts) != 6 or not parts[0].strip().isdigit():
            continue
        number, state, reason, start, nodes, comment = (part.strip() for part in parts)
        found.append(
            NativeState(
                id=number,
                state=_word(state),
                reason="" if reason == "None" else reason,
                start_at=read_instant(start),
                nodes=_given(nodes),
                comment=comment,
            )
        )
    return found


def read_accounting(text: str) -> list[NativeState]:
    """Jobs in what `sacct -P -n -X` printed with ACCOUNTING_FORMAT."""
    found = []
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != 6 or not parts[0].isdigit():
            continue
        code, signal = _exit_of(parts[2])
        found.append(
            NativeState(
                id=parts[0],
                state=_word(parts[1]),
                start_at=read_instant(parts[3]),
                end_at=read_instant(parts[4]),
                nodes=_given(parts[5]),
                exit_code=code,
                signal=signal,
                by=parts[1].partition(" by ")[2].strip() or None,
            )
        )
    return found


def read_job(text: str) -> NativeState | None:
    """The job in what `scontrol show job --oneliner` printed; None for anything else."""
    facts = dict(re.findall(r"(?:^|\s)(JobId|JobState|Reason|ExitCode|StartTime|EndTime|NodeList)=(\S*)", text))
    if not facts.get("JobId", "").isdigit() or not facts.get("JobState"):
        return None
    code, signal = _exit_of(facts.get("ExitCode", ""))
    return NativeState(
        id=facts["JobId"],
        state=_word(facts["JobState"]),
        reason=facts.get("Reason", ""),
        start_at=read_instant(facts.get("StartTime", "")),
        end_at=read_instant(facts.get("EndTime", "")),
        nodes=_given(facts.get("NodeList", "")),
        exit_code=code,
        signal=signal,
    )


def read_record(claim: str, started: str, result: str) -> RunRecord:
    """The record of a run from its files; they are the user's, and whatever cannot be read is left out."""
    begun, ended = _facts(started), _facts(result)
    code = _number(ended.get("exit"))
    end_at = _number(ended.get("end"))
    start_at = _number(ended.get("start")) if "start" in ended else _number(begun.get("start"))
    owner = claim.strip() or begun.get("job", "")
    return RunRecord(
        claim=owner if is_digits(owner) else None,
        start_at=None if start_at is None else float(start_at),
        nodes=_given(begun.get("node", "")[:1000]),
        end_at=None if end_at is None else float(end_at),
        code=code if code is not None and code <= 255 else None,
        is_told=ended.get("told") == "1",
        says_done=ended.get("word") == "done",
    )


def accepted_id(text: str) -> str | None:
    """Id of the job in what `sbatch --parsable` printed, `ID` or `ID;CLUSTER`; None if there is none."""
    for line in reversed(text.splitlines()):
        number = line.strip().partition(";")[0]
        if is_digits(number):
            return number
    return None


def may_be_accepted_later(error: str) -> bool:
    """Whether sbatch failed for want of an answer, or of room, rather than because of what it was asked."""
    said = error.lower()
    return any(words in said for words in _NOT_SUBMITTED)


def last_words(text: str, most: int = 300) -> str:
    """The last line of an error output that says something, without the name of the command."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    line = (errors or lines or ["it said nothing"])[0 if errors else -1]
    line = re.sub(r"^\w+: (?:fatal: |error: )?(?:Batch job submission failed: )?", "", line)
    return "".join(char if char.isprintable() else "?" for char in line)[:most]


def by_mark(jobs: Iterable[NativeState], marks: Iterable[str]) -> Mapping[str, NativeState]:
    """The jobs of these runs, by mark; of several the first that Slurm gave an id, which alone may run."""
    wanted = {comment_of(mark): mark for mark in marks}
    found: dict[str, NativeState] = {}
    for job in sorted(jobs, key=lambda one: int(one.id), reverse=True):
        if job.comment in wanted:
            found[wanted[job.comment]] = job
    return found


def read_instant(text: str) -> float | None:
    """An instant in epoch seconds or as Slurm writes it; None for N/A and Unknown."""
    if is_digits(text):
        return float(text) if len(text) <= 12 else None
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def outcome(
    run: str, native_id: str, state: NativeState | None, record: RunRecord, stopped_by: str | None, now: float
) -> RunEnded | RunLost:
    """What became of a run that has ended.

    Args: state: the last that Slurm said of it; None: it knows nothing any more. stopped_by: why this scheduler stopped
    it, if it did.
    """
    word = "" if state is None else state.state
    known_end_at = record.end_at or (None if state is None else state.end_at)
    end_at = min(known_end_at, now) if known_end_at is not None else now
    start_at = record.start_at
    if start_at is None and state is not None and (state.nodes is not None or word in ("COMPLETED", "FAILED")):
        start_at = state.start_at
    if start_at is not None:
        start_at = min(start_at, end_at)
    said = f"Slurm's job {native_id} is {word}"
    if state is not None and state.nodes:
        said += f" on {state.nodes}"
    if word in ("NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED") and record.code != 0:
        # Where the node still lives, Slurm ends what runs there, and the wrapper records that.
        return RunLost(run, end_at, said)
    code, signal = _code_of(state, record)
    ended = RunEnded(run, start_at, end_at, exit_code=code, signal=signal, is_done=code == 0 and record.says_done)
    if word == "PREEMPTED":
        return replace(ended, stopped_by=stopped_by or "preempt", detail=said)
    # Its handler may have saved its work before Slurm was asked to cancel it.
    has_obeyed = record.is_told and stopped_by in ("preempt", "requeue")
    if stopped_by is not None and (code != 0 or word == "CANCELLED" or has_obeyed):
        return replace(ended, stopped_by=stopped_by)
    if word in ("TIMEOUT", "DEADLINE"):
        return replace(ended, stopped_by="timeout", detail=said)
    if word == "OUT_OF_MEMORY":
        return replace(ended, oom_kills=1, at_mem_limit=True, detail=said)
    if word == "CANCELLED":
        why = "cancelled in Slurm" + (f" by uid {state.by}" if state is not None and state.by else "")
        why += f" ({state.reason})" if state is not None and state.reason not in ("", "None") else ""
        return replace(ended, stopped_by="cancel", detail=why)
    if code is None and signal is None:
        return RunLost(run, end_at, f"Slurm's job {native_id} has ended, and no record has its exit code")
    return ended


def _code_of(state: NativeState | None, record: RunRecord) -> tuple[int | None, int | None]:
    """Exit code and signal: the wrapper's record, else what Slurm knows."""
    if record.code is not None:
        # As a shell says of a command that a signal ended.
        return (None, record.code - 128) if 128 < record.code <= 192 else (record.code, None)
    if state is None:
        return None, None
    if state.state == "COMPLETED":
        return 0, None
    if state.signal:
        return None, state.signal
    return state.exit_code, None


def _word(state: str) -> str:
    """The state in `CANCELLED by 1001`, `CANCELLED+` and the like."""
    return (state.split() or [""])[0].rstrip("+").upper()


def _given(text: str) -> str | None:
    text = text.strip()
    return None if text in ("", "(null)", "None assigned", "N/A", "Unknown") or not text.isprintable() else text


def _exit_of(text: str) -> tuple[int | None, int | None]:
    """Exit code and signal in `3:0` and `0:9`."""
    found = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
    if found is None:
        return None, None
    code, signal = int(found[1]), int(found[2])
    return (None, signal) if signal else (code, None)


def _facts(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and is_digits(text) and len(text) <= 12 else None
