"""States, reasons, times, memory and exit codes as Slurm prints them."""

from __future__ import annotations

import os
import time

from gpusched.model.state_names import COMPACT
from gpusched.model.units import MAX_SECONDS, is_digits, slurm_duration_s, split_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Any

INVALID_ID = "Invalid job id specified"
DENIED = "Access/permission denied"
NULL = "(null)"
NORMAL_QOS = "normal"
"""Slurm's name for the QOS of a job that has none."""
MIN_JOB_AGE_S = 300
"""How long squeue and scontrol know a job after its end; sacct knows it for good."""
KILL_WAIT_S = 30
_NO_LIMIT = ("0", "-1", "unlimited", "infinite")
MOST_TASKS_TEXT = 64
"""Characters of a list of tasks, `1-10,12`; more are cut unless SLURM_BITSTR_LEN says otherwise."""

VALID_STATES = (
    "PENDING RUNNING SUSPENDED COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE OUT_OF_MEMORY "
    "COMPLETING CONFIGURING RESIZING RESV_DEL_HOLD REQUEUED REQUEUE_FED REQUEUE_HOLD REVOKED SIGNALING SPECIAL_EXIT "
    "STAGE_OUT STOPPED"
).split()
_COMPACT_OF_OTHERS = {
    "BOOT_FAIL": "BF",
    "CONFIGURING": "CF",
    "RESIZING": "RS",
    "RESV_DEL_HOLD": "RD",
    "REQUEUED": "RQ",
    "REQUEUE_FED": "RF",
    "REQUEUE_HOLD": "RH",
    "REVOKED": "RV",
    "SIGNALING": "SI",
    "SPECIAL_EXIT": "SE",
    "STAGE_OUT": "SO",
    "STOPPED": "ST",
}
_LONG = {short: long for table in (COMPACT, _COMPACT_OF_OTHERS) for long, short in table.items()}

_REASONS = {
    "RetryDelay": "BeginTime",
    "CheapEnergy": "BeginTime",
    "NodeUnreachable": "None",
    "HandedOver": "None",
    "ImagePull": "Dependency",
    "ImagePullFailed": "JobLaunchFailure",
    "LoadCeiling": "Resources",
    "Preempting": "Resources",
    "JobHeldGpuFault": "JobHeldAdmin",
    "QueueMaxLimit": "QOSGrpGRES",
    "QueueMaxPerUserLimit": "QOSMaxGRESPerUser",
    "QueueMaxPerJobLimit": "QOSMaxGRESPerJob",
    "QueueGuarantee": "Resources",
    "BudgetSpent": "AssocGrpGRESMinutes",
    "UserLimit": "AssocMaxJobsLimit",
    "Plugin": "Resources",
    "ExitUnknown": "NonZeroExitCode",
    "RaisedSignal": "NonZeroExitCode",
    "LeaseExpired": "InactiveLimit",
    "OutOfMemory": "NonZeroExitCode",
    "MemoryLimit": "NonZeroExitCode",
    "HostOutOfMemory": "NonZeroExitCode",
    "CancelledByUser": "None",
    "ClientLost": "None",
    "SupervisorLost": "SystemFailure",
    "GpuFailed": "NodeDown",
    "GpuForeignUse": "SystemFailure",
    "GpuCrowded": "SystemFailure",
    "GpuMemoryOver": "NonZeroExitCode",
    "GpuUnbookedUse": "NonZeroExitCode",
    "Preempted": "None",
    "Requeued": "None",
    "GpuIdle": "InactiveLimit",
    "TaskFailed": "NonZeroExitCode",
    "MaxFails": "None",
}
"""Our reasons that Slurm does not have, as its nearest; all others have Slurm's names."""


def compact_state(state: str) -> str:
    """`PD` for PENDING."""
    return COMPACT.get(state) or _COMPACT_OF_OTHERS.get(state, state)


def long_state(word: str) -> str | None:
    """The state for its long or compact name in any case; None for any other word."""
    upper = word.upper()
    return upper if upper in VALID_STATES else _LONG.get(upper)


def slurm_reason(reason: str | None) -> str:
    """Slurm's word for a reason of ours, never with a blank; `None` without one."""
    return _REASONS.get(reason or "None", reason or "None")


def instant(at: float | None, none: str = "N/A") -> str:
    """Local time, `2026-11-21T04:34:35`."""
    return none if at is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))


def short_duration(seconds: float | None) -> str:
    """As squeue and sinfo print it: `0:09`, `1:00:00`, `1-00:00:00`; UNLIMITED for None."""
    if seconds is None:
        return "UNLIMITED"
    days, hours, minutes, rest = _parts(seconds)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def long_duration(seconds: float | None) -> str:
    """As scontrol and sacct print it: `00:00:09`, `1-00:00:00`; UNLIMITED for None."""
    if seconds is None:
        return "UNLIMITED"
    days, hours, minutes, rest = _parts(seconds)
    return f"{f'{days}-' if days else ''}{hours:02}:{minutes:02}:{rest:02}"


def _parts(seconds: float) -> tuple[int, int, int, int]:
    whole = max(0, int(seconds))
    return whole // 86400, whole % 86400 // 3600, whole % 3600 // 60, whole % 60


def parse_limit_s(text: str) -> int | None:
    """A time limit in seconds, rounded up to whole minutes; None for no limit.

    Accepts `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`, `0` and `UNLIMITED`. Raises: ValueError.
    """
    if text.lower() in _NO_LIMIT:
        return None
    seconds = slurm_duration_s(text)
    if seconds is None:
        raise ValueError(text)
    return min(-(-seconds // 60) * 60, MAX_SECONDS) or None


def memory(mib: float, convert: bool = True) -> str:
    """`1500M`, `2G`: the largest unit that shows the amount exactly; without `convert` always `M`."""
    amount, unit = int(mib), "M"
    if convert and amount:
        for larger in "GT":
            if amount % 1024:
                break
            amount, unit = amount // 1024, larger
    return f"{amount}{unit}"


def first_node(nodes: str | None) -> str:
    """The first name of a folded list, where a batch script runs; empty without any."""
    from gpusched.model.hostlist import expand  # most jobs are on one node

    return (expand(nodes)[0] if "[" in nodes or "," in nodes else nodes) if nodes else ""


def is_on(job: dict[str, Any], nodes: Container[str]) -> bool:
    """Whether a job has or had one of these nodes."""
    from gpusched.model.hostlist import expand  # only filters need it

    return bool(job["node"]) and any(name in nodes for name in expand(job["node"]))


def bare_tasks(ranges: str) -> str:
    """Numbers of tasks as Slurm lists them: without steps, `1,3,5` for `1-5:2`, and cut if they are many."""
    try:
        most = int(os.environ.get("SLURM_BITSTR_LEN") or MOST_TASKS_TEXT)
    except ValueError:
        most = MOST_TASKS_TEXT
    text = ranges
    if ":" in ranges:
        words: list[str] = []
        length = 0
        for word in ranges.split(","):
            span, _, step = word.partition(":")
            if not step:
                words.append(word)
                continue
            first, _, last = span.partition("-")
            for number in range(int(first), int(last) + 1, int(step)):
                words.append(str(number))
                length += len(words[-1]) + 1
                if 0 < most < length:
                    break
        text = ",".join(words)
    if 0 < most < len(text) + 1:
        text = text[: max(0, most - 4)] + "..."
    return text


def state_of_row(job: dict[str, Any]) -> str:
    """State of a row. That of an array with tasks left that are never started, as others still run: how they ended."""
    if job["state"] == "COMPLETING" and job["tasks_left"]:
        return {"DeadLine": "DEADLINE", "MaxFails": "FAILED"}.get(job["reason"], "CANCELLED")
    return str(job["state"])


def job_words(texts: list[str]) -> list[str]:
    """The ids in arguments such as `41,42_[1-3] 43`, also as `JobId=41`."""
    words = []
    for text in texts:
        key, equals, value = text.partition("=")
        if equals and key.lower() in ("job", "jobid", "jobids"):
            text = value
        words += split_ids(text)
    return words


def is_job_id(word: str) -> bool:
    """Whether a word is `42`, `42_7` or `42_[1-3]`."""
    number, bar, task = word.partition("_")
    if not is_digits(number):
        return False
    if not bar:
        return True
    inner = task[1:-1].partition("%")[0] if task[:1] == "[" and task[-1:] == "]" else task
    return bool(inner) and all(char in "0123456789,-:" for char in inner) and inner[0].isdigit()
