"""What the replay of presets gets of the history: jobs and runs without what users wrote, and the machine at rest."""

from __future__ import annotations

from hashlib import sha256

from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import Job, JobEvent, Launch, Run
from gpusched.model.settings import Settings
from gpusched.model.value import Value, replace


class ReplayRequest(Value):
    """Machine and preset in force for a replay."""

    node: NodeView
    settings: Settings
    in_force: str
    """Preset in force."""
    most_jobs: int
    """Replay at most this many jobs, the newest."""


class TrialLimits(Value):
    """Resource limits of the replay process."""

    parent: int
    """Pid of the daemon; the process ends with it."""
    cpu_s: int
    memory_mib: int


class EndedJob(Value):
    """One job with all its runs, and the time of its release if it was ever held."""

    job: Job
    runs: tuple[Run, ...] = ()
    events: tuple[JobEvent, ...] = ()


def without_texts(job: Job, program: str) -> Job:
    """Remove all text written by the user from a job. Args: program: pseudonym of its family."""
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
    """Remove files and processes from a run."""
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
    """Reset a node to healthy and empty."""
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
