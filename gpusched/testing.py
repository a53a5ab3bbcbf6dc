"""Builders and fakes for tests, ours and those of projects that build on gpusched.

Each builder has defaults for everything, so that a test shows only what it is about:
`job(7, request=request(gpus=2))`, `snapshot(node(gpus=4), waiting=[job(7)])`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gpusched.model.cluster import Allocation, GpuView, JobTerms, NodeView
from gpusched.model.job import GpuShare, Job, JobSpec, Launch, Request, RetryRule, Run
from gpusched.model.snapshot import ClassKey, PendingClass, PendingJob, Placement, Snapshot, Usage, Window
from gpusched.model.states import JobState, RunState
from gpusched.scheduler.priority import class_key

NOW = 1_000_000.0
"""Default instant of snapshots and jobs."""


class FakeClock:
    """A manually advanced clock."""

    def __init__(self, now: float = NOW) -> None:
        self.at = now

    def now(self) -> float:
        """UTC epoch seconds."""
        return self.at

    def advance(self, seconds: float) -> float:
        """Advance the clock and return the new time."""
        self.at += seconds
        return self.at


def request(gpus: int = 0, **parts: Any) -> Request:
    """Resources of a job, by the fields of Request."""
    return Request(gpus=gpus, **parts)


def launch(*argv: str, **parts: Any) -> Launch:
    """Start of a plain command, by default `true`, in `/tmp` with an empty environment."""
    fields: dict[str, Any] = {"script_sha": None, "script_name": None, "env_sha": "0" * 64, "work_dir": "/tmp"}
    return Launch(argv=argv or ("true",), **{**fields, **parts})


def spec(**parts: Any) -> JobSpec:
    """A submission, by the fields of JobSpec; `retry` may be given as a dict."""
    retry = parts.pop("retry", RetryRule())
    if isinstance(retry, dict):
        retry = RetryRule(**retry)
    fields: dict[str, Any] = {"name": "test", "request": Request(), "launch": launch(), "retry": retry}
    return JobSpec(**{**fields, **parts})


_JOB_FIELDS = frozenset(Job.__struct_fields__)


def job(job_id: int = 1, **parts: Any) -> Job:
    """A job by the fields of Job and, for those that Job does not have, of JobSpec."""
    own = {name: value for name, value in parts.items() if name in _JOB_FIELDS}
    rest = {name: value for name, value in parts.items() if name not in _JOB_FIELDS}
    submit_at = own.pop("submit_at", NOW)
    fields: dict[str, Any] = {
        "uid": 1000,
        "user": "ann",
        "state": JobState.PENDING,
        "submit_at": submit_at,
        "queued_at": submit_at,
        "eligible_at": submit_at,
    }
    if "spec" not in own:
        fields["spec"] = spec(**rest)
    elif rest:
        raise TypeError(f"a whole spec was given, so {sorted(rest)} would be ignored")
    return Job(id=job_id, **{**fields, **own})


def run(of: Job, **parts: Any) -> Run:
    """The current run of a job (the first if it has none), just recorded on node `n1`, by the fields of Run."""
    fields: dict[str, Any] = {
        "number": max(1, of.run),
        "state": RunState.STARTING,
        "node": "n1",
        "boot_id": "boot-1",
        "intent_at": of.submit_at,
        "cpus": of.spec.request.cpus,
        "mem_mib": of.spec.request.mem_mib,
    }
    return Run(job_id=of.id, **{**fields, **parts})


def gpu_view(index: int = 0, node_name: str = "n1", **parts: Any) -> GpuView:
    """A healthy, unused 24 GiB card, by the fields of GpuView."""
    fields: dict[str, Any] = {
        "uuid": gpu_uuid(node_name, index),
        "name": "NVIDIA A100",
        "vram_total_mib": 24 * 1024,
    }
    return GpuView(index=index, **{**fields, **parts})


def gpu_uuid(node_name: str, index: int) -> str:
    """UUID of a built card."""
    return f"GPU-{node_name}-{index}"


def node(name: str = "n1", gpus: int | Sequence[GpuView] = 0, **parts: Any) -> NodeView:
    """A node with 16 cores and 64 GiB; `gpus` is a number of identical cards, or the cards themselves."""
    cards = tuple(gpu_view(index, name) for index in range(gpus)) if isinstance(gpus, int) else tuple(gpus)
    return NodeView(name=name, gpus=cards, **{"cpus": 16.0, "mem_mib": 64 * 1024, **parts})


def share(index: int = 0, node_name: str = "n1", **parts: Any) -> GpuShare:
    """Booking on a built card: all of it, or `vram_mib`, or `fraction`."""
    return GpuShare(gpu_uuid(node_name, index), index, **parts)


def allocation(job_id: int, node_name: str = "n1", gpus: Iterable[int | GpuShare] = (), **parts: Any) -> Allocation:
    """Allocation on a built node: one core and these cards, started an hour ago, without a limit."""
    shares = tuple(card if isinstance(card, GpuShare) else share(card, node_name) for card in gpus)
    terms = {name: parts.pop(name) for name in JobTerms.__struct_fields__ if name in parts}
    fields: dict[str, Any] = {"cpus": 1.0, "mem_mib": 0, "start_at": NOW - 3600}
    return Allocation(job_id, JobTerms(**{"uid": 1000, **terms}), node_name, shares, **{**fields, **parts})


def window(
    name: str,
    where: Placement,
    *,
    begins_in: float,
    ends_in: float,
    users: Iterable[str] = (),
    accounts: Iterable[str] = (),
) -> Window:
    """One occurrence of a reservation, with start and end in seconds from NOW."""
    return Window(name, NOW + begins_in, NOW + ends_in, (where,), tuple(users), tuple(accounts))


def pending(jobs: Iterable[Job], front: int | None = None) -> tuple[PendingClass, ...]:
    """Pending jobs by class, in order; `front` truncates each class to this length."""
    classes: dict[ClassKey, list[PendingJob]] = {}
    for waiting in sorted(jobs, key=lambda one: (one.queued_at, one.id)):
        classes.setdefault(class_key(waiting), []).append(PendingJob(waiting.id, waiting.queued_at))
    return tuple(PendingClass(key, tuple(members[:front]), len(members)) for key, members in classes.items())


def snapshot(
    *nodes: NodeView,
    running: Iterable[Allocation] = (),
    waiting: Iterable[Job] = (),
    front: int | None = None,
    usage: Iterable[Usage] = (),
    windows: Iterable[Window] = (),
    now: float = NOW,
) -> Snapshot:
    """The policy's input, sorted as specified."""
    return Snapshot(
        now=now,
        nodes=tuple(sorted(nodes, key=lambda one: one.name)),
        allocations=tuple(sorted(running, key=lambda one: one.job_id)),
        pending=pending(waiting, front),
        usage=tuple(sorted(usage, key=lambda one: (one.account, one.user))),
        windows=tuple(sorted(windows, key=lambda one: (one.start_at, one.name))),
    )
