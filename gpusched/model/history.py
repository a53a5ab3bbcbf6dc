"""What the record of runs sums up to, for accounting: exact, and not decayed like the usage of fair share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import GpuShare, Job, JobEvent, Launch, Run
from gpusched.model.settings import Settings
from gpusched.model.value import Value, replace

GROUPS = ("user", "account", "queue")
"""What sums may be made by."""


@dataclass(slots=True)
class UsageSum:
    """What the runs of one user, account or queue held in a span of time. Amounts times seconds."""

    name: str
    jobs: int = 0
    runs: int = 0
    gpu_s: float = 0.0
    """Whole cards count 1, slices the part of the card that they book."""
    cpu_s: float = 0.0
    mem_mib_s: float = 0.0
    wait_s: float = 0.0
    """From being queued to the first start, of all jobs that started in the span."""
    started: int = 0
    """How many those are."""


def group_of(job: Job, by: str) -> str:
    """The user, account or queue of a job. Raises: KeyError for any other word."""
    return {"user": job.user, "account": job.spec.account, "queue": job.spec.queue}[by]


def seconds_in(run: Run, since: float, now: float, stands_still_since: float | None = None) -> float:
    """How long a run moved within a span, in seconds; of an open run up to now.

    Of a run that began before the span the time it stood still counts evenly over its whole life, so
    that the sums of two spans that meet are the sum of both together.
    """
    if run.start_at is None:
        return 0.0
    end_at = now if run.end_at is None else run.end_at
    whole_s = end_at - run.start_at
    if whole_s <= 0:
        return 0.0
    still_s = run.suspended_s
    if run.end_at is None and stands_still_since is not None:
        still_s += max(0.0, now - stands_still_since)
    inside_s = max(0.0, min(end_at, now) - max(run.start_at, since))
    return inside_s * max(0.0, 1.0 - still_s / whole_s)


def cards_in(shares: Iterable[GpuShare], vram_total_mib: Mapping[str, int]) -> float:
    """GPUs that a run holds, a slice counting as its part; by memory of a card whose size is unknown as all of it."""
    return sum(part_of_card(share, vram_total_mib.get(share.uuid)) for share in shares)


def part_of_card(share: GpuShare, total_mib: int | None) -> float:
    """What a share is of its card, 0 to 1; a slice of a card of unknown size counts as all of it."""
    if share.fraction is not None:
        return share.fraction
    if share.vram_mib is None or not total_mib:
        return 1.0
    return min(1.0, share.vram_mib / total_mib)


class ReplayRequest(Value):
    """On which machine, and what is in force."""

    node: NodeView
    settings: Settings
    in_force: str
    """The preset."""
    most_jobs: int
    """Only the newest this many are replayed."""


class TrialLimits(Value):
    """What the process that replays may use."""

    parent: int
    """Pid of the daemon, with which it ends."""
    cpu_s: int
    memory_mib: int


class EndedJob(Value):
    """One job with all its runs, and when it was released if it was ever held."""

    job: Job
    runs: tuple[Run, ...] = ()
    events: tuple[JobEvent, ...] = ()


def without_texts(job: Job, program: str) -> Job:
    """The job without anything that its user has written. Args: program: what its family is called."""
    mark = sha256(program.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    spec = replace(
        job.spec,
        name=mark,
        launch=Launch((mark,), None, None, "", "/"),
        fallback=None,
        alerting=None,
        interactive=None,
        key=None,
        snapshot=None,
        pipeline=None,
        step=None,
        array=None,
    )
    return replace(job, spec=spec, reason_text=None)


def without_paths(run: Run) -> Run:
    """The run without its files and processes."""
    return replace(
        run,
        reason_text=None,
        stdout_path=None,
        stderr_path=None,
        pid=None,
        supervisor_pid=None,
        supervisor_start_ticks=None,
    )


def at_rest(node: NodeView) -> NodeView:
    """The machine as it is when all is well and nobody is on it."""
    gpus = tuple(
        GpuView(
            gpu.uuid,
            gpu.index,
            gpu.name,
            gpu.vram_total_mib,
            has_host_memory=gpu.has_host_memory,
            can_share=gpu.can_share,
            is_present=gpu.is_present,
            link_group=gpu.link_group,
            numa=gpu.numa,
            is_divided=gpu.is_divided,
            mig_profile=gpu.mig_profile,
            mig_parent=gpu.mig_parent,
        )
        for gpu in node.gpus
    )
    return replace(node, gpus=gpus, why_not=None, gpu_error=None, load=None)
