"""What a replay needs to know of jobs that have ended, for a process that is to know no more.

One line of JSON each: first a `ReplayRequest`, then an `EndedJob` for each job. Commands, names, paths and texts are
not in it; jobs that run the same program still do.
"""

from __future__ import annotations

from hashlib import sha256

from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import Job, JobEvent, Launch, Run
from gpusched.model.settings import Settings
from gpusched.model.value import Value, replace


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
