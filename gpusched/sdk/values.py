"""The scheduler's answers as frozen values. Times are UTC epoch seconds; unknown values are None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from gpusched.model.states import JobState
from gpusched.model.value import convert


@dataclass(frozen=True)
class Gpu:
    """A run's booking on one card; the whole card if neither part is set."""

    uuid: str
    index: int
    vram_mib: int | None = None
    fraction: float | None = None
    vram_used_mib: int | None = None
    """In use at the last reading, on a card that an open run shares."""
    enforcement: str | None = None
    """How the run's share is enforced: `none`, `watched`, `MPS`, `MIG`."""
    enforcement_why: str | None = None


@dataclass(frozen=True)
class RunInfo:
    """One attempt of a job."""

    run: int
    """Counted from 1."""
    state: str
    """STARTING, RUNNING or ENDED."""
    node: str
    gpus: tuple[Gpu, ...] = ()
    start_at: float | None = None
    end_at: float | None = None
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    outcome: JobState | None = None
    """How it ended, as a job state."""
    reason: str | None = None
    reason_text: str | None = None
    cpu_s: float | None = None
    system_cpu_s: float | None = None
    """The part of `cpu_s` that the kernel spent."""
    peak_mem_mib: float | None = None
    peak_vram_mib: int | None = None
    mean_utilisation: float | None = None
    """Utilisation of its GPUs, 0 to 1."""
    energy_j: float | None = None
    power_cap_w: float | None = None
    is_filler: bool = False
    """Power limit of its cards under the cap of its queue."""
    measured: dict[str, Any] | None = None
    """What it used of each card, its idle time, and where its energy comes from, what it cost and emitted."""
    suspended_s: float = 0.0
    stdout_path: str | None = None
    stderr_path: str | None = None


@dataclass(frozen=True)
class Event:
    """One event in a job's history."""

    at: float
    kind: str
    text: str
    run: int | None = None


@dataclass(frozen=True)
class JobInfo:
    """A job at the time of the request; `client.job(job)` fetches the current state.

    The fields are the keys of a job in `gq --json`.
    """

    id: str
    """`42`; for a task of an array `42_7`."""
    name: str
    user: str
    state: JobState
    account: str = ""
    charged_account: str = ""
    """The account its use counts for: another than `account` where that is only a label."""
    queue: str = "default"
    qos: str | None = None
    reason: str | None = None
    """One word: why the job is pending, or why it ended as it did."""
    reason_text: str | None = None
    priority: float | None = None
    nice: int = 0
    hold: str | None = None
    dependency: str | None = None
    reservation: str | None = None
    key: str | None = None
    deadline_at: float | None = None
    submit_at: float = 0.0
    eligible_at: float = 0.0
    start_at: float | None = None
    end_at: float | None = None
    time_limit_s: int | None = None
    time_limit_source: str | None = None
    """`user`, `auto`, `default`, `maximum`, `unlimited`; None without a limit."""
    exit_code: int | None = None
    signal: int | None = None
    node: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_request: str = "0"
    cpus: float = 1.0
    mem_mib: int = 0
    nodes: int = 1
    work_dir: str = "/"
    stdout_path: str | None = None
    stderr_path: str | None = None
    command: str = ""
    run: int = 0
    """Number of the current or last run; 0 before the first."""
    restarts: int = 0
    retries: int = 0
    failures: int = 0
    progress: float | None = None
    """Fraction done, 0 to 1, while it runs and reports progress."""
    progress_text: str | None = None
    eta_at: float | None = None
    """Expected end at its current rate; None while unknown."""
    existing: bool = False
    """After a submission with a key: whether the job already existed."""

    @property
    def is_final(self) -> bool:
        """Whether the job has ended for good."""
        return self.state.is_final

    @property
    def result_code(self) -> int | None:
        """The exit code of `gsub --wait`: 0, the job's own, 128 + signal, else 1. None until it has ended."""
        if not self.is_final:
            return None
        if self.state is JobState.COMPLETED:
            return 0
        if self.signal:
            return 128 + self.signal
        if self.exit_code and self.state is not JobState.CANCELLED:
            return self.exit_code
        return 1


@dataclass(frozen=True)
class JobDetails(JobInfo):
    """Everything about one job."""

    runs: tuple[RunInfo, ...] = ()
    events: tuple[Event, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict)
    """The requested resources, as recorded."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """The rest of its submission, as recorded."""


_Job = TypeVar("_Job", bound=JobInfo)


@overload
def read_job(document: Mapping[str, Any], existing: bool = False) -> JobInfo: ...
@overload
def read_job(document: Mapping[str, Any], existing: bool, kind: type[_Job]) -> _Job: ...


def read_job(document: Mapping[str, Any], existing: bool = False, kind: type[JobInfo] = JobInfo) -> JobInfo:
    """A job from its JSON: a daemon of another release may send more keys, or fewer."""
    return convert({**document, "existing": existing}, kind)


def read_details(document: Mapping[str, Any]) -> JobDetails:
    """The details of a job from the JSON of `gshow --json`."""
    return convert(document, JobDetails)
