"""What the scheduler answers with, as frozen values. Instants are UTC epoch seconds; unknown is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from gpusched.model.states import JobState


@dataclass(frozen=True)
class Gpu:
    """What a run books on one card; whole when neither part is set."""

    uuid: str
    index: int
    vram_mib: int | None = None
    fraction: float | None = None
    vram_used_mib: int | None = None
    """Held at the last reading, of a card that an open run shares."""
    enforcement: str | None = None
    """What holds the run to its share: `none`, `watched`, `MPS`, `MIG`."""
    enforcement_why: str | None = None


@dataclass(frozen=True)
class RunInfo:
    """One attempt at a job."""

    run: int
    """Its number, from 1."""
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
    """How it ended, in the words of job states."""
    reason: str | None = None
    reason_text: str | None = None
    cpu_s: float | None = None
    peak_mem_mib: float | None = None
    peak_vram_mib: int | None = None
    mean_utilisation: float | None = None
    """Of its GPUs, 0 to 1."""
    energy_j: float | None = None
    suspended_s: float = 0.0
    stdout_path: str | None = None
    stderr_path: str | None = None


@dataclass(frozen=True)
class Event:
    """One line of a job's story."""

    at: float
    kind: str
    text: str
    run: int | None = None


@dataclass(frozen=True)
class JobInfo:
    """A job as it stood when it was asked for; `client.job(job)` asks anew.

    The fields are the keys of a job in `gq --json`.
    """

    id: str
    """`42`; of a task of an array `42_7`."""
    name: str
    user: str
    state: JobState
    account: str = ""
    queue: str = "default"
    qos: str | None = None
    reason: str | None = None
    """One word: why it waits, or why it ended as it did."""
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
    """`user`, `auto`, `default`, `maximum`, `unlimited`; None where there is no limit."""
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
    """How far it is, 0 to 1, while it runs and says so."""
    progress_text: str | None = None
    eta_at: float | None = None
    """When it is done at its pace; None while nobody knows."""
    existing: bool = False
    """Of a submission with a key: whether the job was there before."""

    @property
    def is_final(self) -> bool:
        """Whether it has ended for good."""
        return self.state.is_final

    @property
    def result_code(self) -> int | None:
        """What `gsub --wait` would exit with: 0, the job's own code, 128 + signal, else 1. None until it has ended."""
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
    """The resources it asks for, as recorded."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """The rest of its submission, as recorded."""


_T = TypeVar("_T")


def _made(kind: type[_T], document: Mapping[str, Any], **parts: Any) -> _T:
    """A value of the keys that it knows: a daemon of another release may say more, or less."""
    known = {part.name for part in fields(kind)}  # type: ignore[arg-type]  # _T is a dataclass
    return kind(**{name: value for name, value in document.items() if name in known}, **parts)


def _without(document: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name not in names}


def _gpus(document: Mapping[str, Any]) -> tuple[Gpu, ...]:
    return tuple(_made(Gpu, gpu) for gpu in document.get("gpus", ()))


def read_run(document: Mapping[str, Any]) -> RunInfo:
    """A run of its JSON."""
    outcome = document.get("outcome")
    parts = {"gpus": _gpus(document), "outcome": None if outcome is None else JobState(outcome)}
    return _made(RunInfo, _without(document, *parts), **parts)


def read_job(document: Mapping[str, Any], existing: bool = False) -> JobInfo:
    """A job of its JSON."""
    parts = {"gpus": _gpus(document), "state": JobState(document["state"]), "existing": existing}
    return _made(JobInfo, _without(document, *parts), **parts)


def read_details(document: Mapping[str, Any]) -> JobDetails:
    """A job of what `gshow --json` prints about it."""
    parts = {
        "gpus": _gpus(document),
        "state": JobState(document["state"]),
        "runs": tuple(map(read_run, document.get("runs", ()))),
        "events": tuple(_made(Event, event) for event in document.get("events", ())),
    }
    return _made(JobDetails, _without(document, *parts), **parts)
